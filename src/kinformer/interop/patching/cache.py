"""A mixer's state as one layer of the cache of transformers, beside the keys and values of the layers that stay."""

from __future__ import annotations

import inspect
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from kinformer.core.reserved import KeysValues
from kinformer.core.state import State, map_tensors, nbytes, repeat_rows, select_rows, tensors
from kinformer.nn.layers import CausalLayer
from kinformer.runtime.errors import KinformerError

CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters
"""Whether ``crop`` of this version of transformers takes the length that remains, if it is not negative."""


class _Recorded(NamedTuple):
    """The last chunk and the state before it, from which the state within the chunk can be computed again."""

    layer: weakref.ref[CausalLayer]
    x: Tensor
    padding: Tensor | None
    before: State


class StateLayer(CacheLayerMixin):  # type: ignore[misc]
    """The state of a patched layer. The masks and positions of the model follow its ``length``."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.state: State = None
        self.length = 0
        self.unpadded = 0
        self.record_past = False
        self._recorded: _Recorded | None = None
        self._rewinds = False

    def absorb(self, layer: CausalLayer, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return y [batch, time, dim] of the next chunk x; ``padding`` [batch, time] is True where x is padding."""
        before = self.state
        y, self.state = layer(x, before, return_state=True, key_padding_mask=padding)
        self.length += x.shape[1]
        self.unpadded = self.unpadded + x.shape[1] if padding is None else _unpadded(padding, self.unpadded)
        self.is_initialized = True
        self._rewinds = isinstance(self.state, KeysValues) and layer.mixers[0].retained is None
        # Speculative generation asks for records before the cache has this layer; its chunks have several tokens.
        records = self.record_past or (x.shape[1] > 1 and not torch.is_grad_enabled())
        self._recorded = _Recorded(weakref.ref(layer), x.detach(), padding, before) if records else None
        return y

    @property
    def nbytes(self) -> int:
        """Return the bytes that the state holds."""
        return 0 if self.state is None else nbytes(self.state)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Return whether tokens can be taken back: all tokens of exact attention, or tokens of a recorded chunk."""
        return self._rewinds or self.state is None or self._recorded is not None

    def activate_past_recording(self) -> None:
        """Make :meth:`crop` able to return before a last chunk of one token too, whatever the mixer."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens: any of exact attention, else tokens of the last chunk."""
        if CROPS_TO_LENGTH and tokens_to_remove >= 0:
            tokens_to_remove = min(tokens_to_remove - self.length, 0)
        count, recorded, self._recorded = -tokens_to_remove, self._recorded, None
        if count < 0:
            raise KinformerError(f"crop: {tokens_to_remove} is positive; give minus the number of tokens to take back.")
        if not count or not self.length:
            return
        if count >= self.length:
            self.reset()
        elif self._rewinds and count <= self.unpadded:
            k, v, seen = self.state
            self.state = KeysValues(k[:, :, :-count], v[:, :, :-count], seen - count)  # type: ignore[call-arg]
            self._shorten(count)
        elif recorded is not None and count <= recorded.x.shape[1]:
            self._return_to(recorded, count)
        else:
            raise KinformerError(
                f"crop: the state of a patched layer cannot be rewound by {count} tokens, as it does not hold them one "
                "by one; copy the cache before them (copy.deepcopy), or begin with a new one."
            )

    def _return_to(self, recorded: _Recorded, count: int) -> None:
        """Take back ``count`` tokens of the last chunk: absorb the others of it again, after the state before it."""
        layer, rest = recorded.layer(), recorded.x.shape[1] - count
        assert layer is not None
        self.state = recorded.before
        self._shorten(count)
        if rest:
            padding = None if recorded.padding is None else recorded.padding[:, :rest]
            self.state = layer(recorded.x[:, :rest], recorded.before, return_state=True, key_padding_mask=padding)[1]

    def _shorten(self, count: int) -> None:
        self.length -= count
        self.unpadded = max(self.unpadded - count, 0)

    def reset(self) -> None:
        """Forget all tokens, as if the cache were new."""
        self.state, self.length, self.unpadded, self._recorded = None, 0, 0, None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx``, for beam search."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the rows ``indices``, in that order."""
        self._select(indices)

    def _select(self, rows: Tensor) -> None:
        self._recorded = None
        if self.state is not None:
            self.state = select_rows(self.state, rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._recorded = None
        if self.state is not None:
            self.state = repeat_rows(self.state, repeats)

    def get_seq_length(self) -> int:
        """Return how many tokens were absorbed, padding included."""
        return self.length

    def get_mask_sizes(self, queries: int | Tensor) -> tuple[int, int]:
        """Return the number of keys that the mask of the model's other layers has, and their offset.

        ``queries`` is their number; transformers before 5.4 gives their positions.
        """
        return self.length + (len(queries) if isinstance(queries, Tensor) else queries), 0

    def get_max_length(self) -> int:
        """Return -1, which means without a limit."""
        return -1

    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        """Move the state to the CPU until :meth:`prefetch`."""
        if self.state is not None:
            self.device = next(tensors(self.state)).device
            self.state = map_tensors(lambda leaf: leaf.to("cpu", non_blocking=True), self.state)

    def prefetch(self) -> None:
        """Move the state back to where it was before :meth:`offload`."""
        if self.state is not None and hasattr(self, "device"):
            self.state = map_tensors(lambda leaf: leaf.to(self.device, non_blocking=True), self.state)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse keys and values, which a state does not hold."""
        self.update(key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *rest: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        """Refuse keys and values, which a state does not hold."""
        raise KinformerError(
            "this cache was filled by a patched model and holds states, not keys and values; use it with that model."
        )


def _unpadded(padding: Tensor, before: int) -> int:
    """Return how many last columns of all tokens are without padding; ``before``: the number before ``padding``."""
    padded = padding.any(dim=0).nonzero()
    time = padding.shape[1]
    return time - 1 - int(padded[-1]) if padded.numel() else before + time


def state_layer(cache: Cache, index: int) -> StateLayer:
    """Return the layer ``index`` of ``cache`` as one that holds a state; put it there if the cache is new."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        raise KinformerError(
            f"the cache is of the type {type(cache).__name__}, which does not have layers; patched models stream "
            "through a DynamicCache, which generate() makes by itself."
        )
    while len(layers) <= index:
        layers.append((cache.layer_class_to_replicate or StateLayer)())
    old = layers[index]
    if isinstance(old, StateLayer):
        return old
    refuse_fixed_size(cache, old)
    if old.get_seq_length():
        raise KinformerError(
            f"layer {index} of the cache holds keys of the model before it was patched; begin with a new cache."
        )
    layers[index] = StateLayer()
    return layers[index]  # type: ignore[no-any-return]


def refuse_fixed_size(cache: object, layer: nn.Module) -> None:
    """Refuse ``layer`` of ``cache`` if it has a fixed size."""
    if getattr(layer, "is_compileable", False):
        raise KinformerError(
            f"the cache is of the type {type(cache).__name__}, whose layers have a fixed size; patched models stream "
            "through a DynamicCache: leave cache_implementation out."
        )
