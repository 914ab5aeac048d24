"""The weights of a model's attention carried into a mixer, where their shapes fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kinformer.interop.patching.models import Attention


@torch.no_grad()
def carry(mixer: nn.Module, attention: Attention) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Copy what fits; return the names of the projections that were copied, of the parameters that are new, and of the
    projections that were dropped."""
    projection: Any = getattr(mixer, "projection", None)
    normalised: Any = projection if hasattr(projection, "q_norm") else None
    if normalised is not None:
        projection = projection.inner
    qkv, partly = (_softmax if projection is not None else _kernel)(mixer, projection, attention)
    copied = list(qkv)
    whole = set() if partly or not qkv else {"qkv"}
    out: Any = getattr(mixer, "out", None)
    if isinstance(out, nn.Linear) and out.weight.shape == attention.weights["o"].shape:
        _fill(out, attention.weights["o"], attention.biases.get("o"))
        copied.append("o")
        whole.add("out")
    for name, weight in attention.norms.items() if normalised is not None else ():
        target = getattr(normalised, name).weight
        weight = weight.repeat(len(target) // len(weight)) if normalised.by_head else weight
        if target.shape != weight.shape:
            continue
        target.copy_(weight)
        copied.append(name)
        whole.add(name)
    new = (name for name, _ in mixer.named_parameters() if name.split(".")[-2:][0] not in whole)
    dropped = (name for name in (*"qkvo", *attention.norms) if name not in copied)
    named_new = (f"{name} ({partly})" if partly and name.startswith("qkv.") else name for name in new)
    return tuple(copied), tuple(named_new), tuple(dropped)


def _softmax(mixer: nn.Module, projection: Any, attention: Attention) -> tuple[str, str]:
    """Fill ``projection.qkv``, whose rows are those of q, k and v; return what was copied and what of it is new."""
    qkv: Any = getattr(projection, "qkv", None)
    rows = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    fits = isinstance(qkv, nn.Linear) and tuple(qkv.weight.shape) == (rows, attention.dim)
    if not fits or projection.num_kv_heads != attention.num_kv_heads:
        return "", ""
    parts = [_rows(attention, name) for name in "qkv"]
    _fill(qkv, torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts]))
    return "qkv", ""


def _kernel(mixer: Any, projection: None, attention: Attention) -> tuple[str, str]:
    """Fill ``qkv`` of kernel attention, where the heads that share a key have one key each; with the delta rule its
    rows stand head by head, with those of beta."""
    qkv, widths = getattr(mixer, "qkv", None), getattr(mixer, "widths", None)
    heads, head_dim = attention.num_heads, attention.head_dim
    if not isinstance(qkv, nn.Linear) or widths is None or mixer.config.num_heads != heads:
        return "", ""
    copied, partly = "", ""
    delta = mixer.config.rule == "delta"
    fitting = [width == head_dim for width in widths]
    for part, (name, fits) in enumerate(zip("qkv", fitting, strict=True)):
        if not fits:
            continue
        weight, bias = (_repeated(item, attention) for item in _rows(attention, name))
        start = sum(widths[:part])
        for target, source in ((qkv.weight, weight), (qkv.bias, bias)):
            if target is None:
                continue
            if delta:
                target.unflatten(0, (heads, -1))[:, start : start + head_dim] = source.unflatten(0, (heads, -1))
            else:
                target[heads * start : heads * (start + head_dim)] = source
        copied += name
    if delta or len(copied) < 3:
        missing = [name for name, fits in zip("qkv", fitting, strict=True) if not fits]
        partly = ", ".join([*missing, *(["beta"] if delta else [])])
    return copied, partly


def _rows(attention: Attention, name: str) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias (0 where there is none) of q, k or v."""
    weight = attention.weights[name]
    bias = attention.biases.get(name, weight.new_zeros(weight.shape[0]))
    factor = attention.scale if name == "q" else 1.0
    return weight * factor, bias * factor


def _repeated(rows: Tensor, attention: Attention) -> Tensor:
    """Return ``rows`` of k or v with those of each key head repeated for the query heads that share it."""
    heads = rows.shape[0] // attention.head_dim
    blocks = rows.unflatten(0, (heads, attention.head_dim))
    return blocks.repeat_interleave(attention.num_heads // heads, dim=0).flatten(0, 1)


def _fill(target: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    target.weight.copy_(weight)
    if target.bias is not None:
        target.bias.copy_(weight.new_zeros(weight.shape[0]) if bias is None else bias)
