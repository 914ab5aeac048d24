"""The state of a model as a cache of the library transformers, for ``generate`` and beam search."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from kinformer.core.state import nbytes, repeat_rows, select_rows
from kinformer.runtime.errors import KinformerError


class StateCache(Cache):  # type: ignore[misc]
    """The ``state`` after ``length`` tokens, padding included; None before the first."""

    is_compileable = False
    is_croppable = False
    is_sliding = [False]
    is_linear = [False]
    """False, so that transformers gives tokens that the state has absorbed only once."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: Any = None
        self.length = 0

    @property
    def is_initialized(self) -> bool:
        """Return whether a token was absorbed."""
        return self.state is not None

    @property
    def nbytes(self) -> int:
        """Return the bytes that the state holds."""
        return 0 if self.state is None else nbytes(self.state)

    def advance(self, state: object, tokens: int) -> None:
        """Hold ``state``, which absorbed ``tokens`` more."""
        self.state, self.length = state, self.length + tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens were absorbed, padding included."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, as there is no limit."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of tokens that a mask covers, and their offset."""
        return self.length + (len(query_length) if isinstance(query_length, Tensor) else query_length), 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx``, for beam search."""
        if self.state is not None:
            self.state = select_rows(self.state, beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the rows ``indices``, in that order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        if self.state is not None:
            self.state = repeat_rows(self.state, repeats)

    def reset(self) -> None:
        """Forget all tokens, as if the cache were new."""
        self.state, self.length = None, 0

    def crop(self, *arguments: Any, **options: Any) -> None:
        """Refuse to take tokens back: a state does not hold them one by one."""
        raise KinformerError(
            "a state cannot be rewound, as it does not hold tokens one by one; copy the cache before them "
            "(copy.deepcopy), or generate without assistance."
        )
