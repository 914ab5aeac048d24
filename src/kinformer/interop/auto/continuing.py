"""What models that generate share, causal ones and those of a source: logits behind a cache, which holds the state,
for ``generate`` and beam search of the library transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput

from kinformer.core.contract import select_valid
from kinformer.core.state import State, map_tensors, nbytes, repeat_rows, select_rows
from kinformer.interop.auto.base import KinformerModel
from kinformer.runtime.errors import KinformerError

CACHES = ("cache", "past_key_values")
CACHE = next(
    one for one in CACHES if one in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""What this version of transformers calls a cache: ``cache`` from 5.24 on."""


class StateCache(Cache):  # type: ignore[misc]
    """The ``state`` after ``length`` tokens, padding included; None before the first."""

    is_compileable = False
    is_croppable = False
    is_sliding = [False]
    is_linear = [False]
    """False, so that transformers gives tokens that the state has absorbed only once."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: State = None
        self.length = 0

    @property
    def is_initialized(self) -> bool:
        """Return whether a token was absorbed."""
        return self.state is not None

    @property
    def nbytes(self) -> int:
        """Return the bytes that the state holds."""
        return 0 if self.state is None else nbytes(self.state)

    def advance(self, state: State, tokens: int) -> None:
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

    def crop(self, *arguments: object, **options: object) -> None:
        """Refuse to take tokens back: a state does not hold them one by one."""
        raise KinformerError(
            "a state cannot be rewound, as it does not hold tokens one by one; copy the cache before them "
            "(copy.deepcopy), or generate without assistance."
        )


@dataclass
class ContinuedOutput(ModelOutput):  # type: ignore[misc]
    """The ``loss`` if there are labels, ``logits`` [batch, time, vocab], the cache as the version calls it, and of a
    model of a source the encoder's hidden states [batch, length, dim]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: StateCache | None = None
    past_key_values: StateCache | None = None
    encoder_last_hidden_state: Tensor | None = None


class ContinuingModel(KinformerModel, GenerationMixin):  # type: ignore[misc]
    """A model whose state is its cache."""

    main_input_name = "input_ids"
    _is_stateful = True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the first forward pass makes the cache."""
        return False

    def _continued(
        self,
        tokens: Tensor,
        valid: Tensor | None,
        cache: StateCache | None,
        state: State,
        logits_to_keep: int | Tensor = 0,
    ) -> tuple[Tensor, State]:
        """Return logits [batch, time, vocab] of ``tokens`` [batch, time] behind ``state``, zero where not ``valid``,
        and the state behind them, which ``cache``, if there is one, then holds."""
        inputs, state = self.model.head_inputs(tokens, state, valid=valid)
        if cache is not None:
            cache.advance(state, tokens.shape[1])
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(map_tensors(lambda leaf: leaf[:, rows], inputs))
        return select_valid(logits, None if valid is None else valid[:, rows]), state

    def _cache_to_fill(self, cache: StateCache | None, use_cache: bool | None) -> StateCache | None:
        """Return the cache that is to hold the state behind a chunk, None if none is wanted."""
        if not (use_cache if use_cache is not None else self.config.use_cache and not self.training):
            return None
        return StateCache() if cache is None else cache


def cache_in(options: Mapping[str, Any]) -> StateCache | None:
    """Return the cache that a call names, whatever the version of transformers calls it; None if there is none."""
    cache: Cache | None = options.get("cache")
    cache = options.get("past_key_values") if cache is None else cache
    if cache is None or isinstance(cache, StateCache):
        return cache
    if cache.get_seq_length():
        raise KinformerError(
            f"the cache is of the type {type(cache).__name__} and holds another model's tokens; leave it out."
        )
    return StateCache()


def as_output(output: ContinuedOutput, options: Mapping[str, object]) -> ContinuedOutput | tuple[object, ...]:
    """Return ``output``, as a tuple where a call asks for one."""
    return output.to_tuple() if options.get("return_dict") is False else output
