"""The module in place of a transformers model's self-attention, and the hook that hands it the model's padding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from kinformer.interop.patching.cache import refuse_fixed_size, state_layer
from kinformer.nn.causal import CausalLayer
from kinformer.runtime.errors import KinformerError

CACHES = ("past_key_values", "cache", "layer_past")
"""The names under which models hand the cache to their attention."""
PADDING, RESET = "kinformer_padding", "kinformer_reset"


@dataclass(frozen=True)
class PatchedLayer:
    """What :func:`kinformer.interop.patch` did to one layer.

    ``layer`` is its index and ``mixer`` the kind of its mixer. ``copied`` are the projections whose weights are those
    of the model's attention, of "q", "k", "v", "o", "q_norm", "k_norm"; ``new`` the parameters that hold other weights;
    ``dropped`` the names of the attention's weights that nothing in the mixer holds.
    """

    layer: int
    mixer: str
    copied: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        copied, new, dropped = (", ".join(names) or "nothing" for names in (self.copied, self.new, self.dropped))
        return f"layer {self.layer}: {self.mixer}; copied: {copied}; new: {new}; dropped: {dropped}"


class PatchedAttention(nn.Module):
    """A causal layer with the interface of a transformers attention: hidden states -> (y, None).

    Without a cache it reads the full sequence; with one it streams, and its state stands in the cache.
    """

    def __init__(self, layer: CausalLayer, record: PatchedLayer, dropout: float) -> None:
        """Wrap ``layer``; ``dropout`` is that of its output, as in GPT-2."""
        super().__init__()
        self.layer, self.record = layer, record
        self.layer_idx = record.layer
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, *rest: object, **options: Any) -> tuple[Tensor, None]:
        """Return y [batch, time, dim] and, in place of attention weights, None."""
        padding, reset = options.get(PADDING), options.get(RESET)
        cache = _cache(options)
        if cache is None:
            y = self.layer(hidden_states, key_padding_mask=padding, reset=reset)
        else:
            y = state_layer(cache, self.layer_idx).absorb(self.layer, hidden_states, padding)
        return self.dropout(y), None


def share_padding(
    model: nn.Module, arguments: tuple[object, ...], options: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Hand the padding of a call of ``model`` to its layers, as a forward pre-hook.

    The model makes a mask of pairs from ``attention_mask`` [batch, past + time], from which padding cannot be read
    reliably; a checkpointed layer needs it again in the backward pass, so it travels with the arguments.
    """
    values: dict[str, Any] = dict(zip(_names(model), arguments, strict=False)) | options
    tokens = next(
        (values[name] for name in ("input_ids", "inputs_embeds") if values.get(name) is not None),
        None,
    )
    if tokens is None:
        return arguments, options  # the model itself raises
    mask, time = values.get("attention_mask"), tokens.shape[1]
    if mask is None:
        return arguments, options | {RESET: _packed(values, tokens)}
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        cache = _cache(values)
        for layer in getattr(cache, "layers", ()):  # for them generate() of transformers 5.0 makes a mask of pairs
            refuse_fixed_size(cache, layer)
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise KinformerError(
            f"attention_mask is {shape}, but a patched model takes the mask of padding, [batch, tokens] with 1 at real "
            "tokens; which pairs of tokens see each other is up to its mixers."
        )
    padding = mask[:, mask.shape[1] - time :] == 0
    return arguments, options | {PADDING: padding if bool(padding.any()) else None}


def _cache(options: Mapping[str, Any]) -> Cache | None:
    return next((options[name] for name in CACHES if options.get(name) is not None), None)


def _names(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def _packed(values: dict[str, Any], tokens: Tensor) -> Tensor | None:
    """Return where sequences begin [batch, time] that are packed in one row, told by their ``position_ids``."""
    positions = values.get("position_ids")
    if positions is None or _cache(values) is not None:
        return None
    begins = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
    return begins.expand(tokens.shape[0], -1) if bool(begins.any()) else None
