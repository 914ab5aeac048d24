"""The state of compressive attention: the memory, the compressed memory and their projections."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CompressiveState(NamedTuple):
    """All slots right-aligned: ``hidden_states`` [batch, 1, past, dim] the last ``memory + segment - 1`` inputs,
    ``usage`` [batch, 1, past, 1 or 0] the probability with which queries looked at them, ``compressed`` [batch, 1,
    slots, dim]; ``k``, ``v`` and ``compressed_k``, ``compressed_v`` [batch, kv_heads, slots, head_dim] are their
    projections without gradients (with gradients no slots). ``aux`` [batch] compression's costs, ``seen`` [batch]."""

    hidden_states: Tensor
    k: Tensor
    v: Tensor
    usage: Tensor
    compressed: Tensor
    compressed_k: Tensor
    compressed_v: Tensor
    aux: Tensor
    seen: Tensor

    slots = ("hidden_states", "k", "v", "usage", "compressed", "compressed_k", "compressed_v")  # type: ignore[misc]
    derived = {  # type: ignore[misc]
        "k": "hidden_states",
        "v": "hidden_states",
        "compressed_k": "compressed",
        "compressed_v": "compressed",
    }
    aux_name = "compression"  # type: ignore[misc]
