"""Softmax attention over queries, keys and values that a model has made already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from kinformer.core.config import Config, describe, find, from_dict
from kinformer.core.parts import (
    PatternConfig,
    Position,
    PositionConfig,
    Relative,
    Score,
    ScoreConfig,
    check_score,
    check_unpinned,
)
from kinformer.core.pattern import Pattern
from kinformer.kernels import AttentionImpl
from kinformer.kernels import attention as softmax
from kinformer.kernels.attention import AttentionDropout, Scoring, Visibility
from kinformer.nn.modules import require_mask
from kinformer.runtime.errors import KinformerError

C = TypeVar("C", bound=Config)
M = TypeVar("M", bound=nn.Module)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | PatternConfig | Mapping[str, object] | str | None = "causal",
    position: Position | PositionConfig | Mapping[str, object] | str = "none",
    score: Score | ScoreConfig | Mapping[str, object] | str = "scaled_dot",
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    impl: AttentionImpl = "auto",
) -> Tensor:
    """Return softmax(score(q, k)) v over the keys that ``pattern`` lets a query see (Vaswani et al. 2017, equation 1).

    q: [batch, heads, time, head_dim]. Query i stands at the position past + i, past = slots - time.
    k, v: [batch, kv_heads, slots, head_dim], slots >= time; heads is a multiple of kv_heads (grouped queries).
    pattern: the keys that a query sees, such as ``LocalPattern(window=256)``, ``{"kind": "local", "window": 256}`` or
        ``"causal"``; time and memory follow the number of pairs that it allows. None: every query sees every key, as in
        cross-attention, for any numbers of queries and keys.
    position: the positions of tokens, such as ``"rope"`` or ``AlibiBias()``; pass q and k before any rotation.
    score: the function of a query and a key. A position or score with weights must be a module, built once:
        ``T5Bias().build_heads(dim, heads, head_dim)``, ``BilinearScore().build(heads, head_dim)``.
    scale: the factor of the products q . k; None: the score's default, head_dim ** -0.5.
    key_padding_mask: [batch, slots] bool, True where a key is padding.
    dropout_p: the probability with which an attention weight is dropped.
    impl: "auto" chooses by device, dtype and shape; see ``kinformer.kernels.attention``.

    Returns [batch, heads, time, head_dim] in the dtype of q; a query that sees nothing gives 0. Softmax runs in float32
    or better.

    Errors: ``KinformerError`` for wrong shapes, unknown parts, and configs of parts with weights, which must be built.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise KinformerError(f"{name} is {shape}, but must be a tensor [batch, heads, time, head_dim].")
    if key_padding_mask is not None:
        require_mask("key_padding_mask", key_padding_mask, k.transpose(1, 2))
    if not 0 <= dropout_p < 1:
        raise KinformerError(f"dropout_p is {dropout_p}, but must be 0 or more and less than 1.")
    heads, head_dim = q.shape[1], q.shape[3]
    built = _pattern(pattern)
    place = _part(PositionConfig, Position, position, lambda part: part.build_heads(heads * head_dim, heads, head_dim))
    how = _part(ScoreConfig, Score, score, lambda part: part.build(heads, head_dim))
    q, k, v, relative = _placed(q, k, v, built, place)
    if isinstance(score, ScoreConfig):
        check_score(score, how, place)
    scoring = Scoring.of(how, relative, AttentionDropout.drawn(dropout_p, training=True) if dropout_p else None)
    if scale is not None:
        scoring = scoring._replace(scale=scale)
    visibility = Visibility(built, key_padding_mask=key_padding_mask)
    return softmax.attention(how.queries(q), k, v, visibility, scoring, impl=impl).out


def _placed(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | None, position: Position
) -> tuple[Tensor, Tensor, Tensor, Relative | None]:
    """Return q, k and v with their ``position``, and its tables by distance."""
    if pattern is None:
        if position.overrides("rotate", "values", "relative"):
            raise KinformerError(
                "position: with pattern=None queries and keys do not have an order; leave the position out."
            )
        return q, k, v, None
    time, slots = q.shape[2], k.shape[2]
    if slots < time:
        return q, k, v, None  # refused below
    positions = torch.arange(slots, device=q.device).expand(q.shape[0], -1)
    past = slots - time
    q = position.rotate(q, k[:, :, past:], positions[:, past:])[0]
    relative = position.relative(0 if pattern.ahead == 0 else 1 - slots, slots - 1)
    return q, position.rotate_keys(k, positions), position.values(v), relative


def _config(kind: type[C], part: object) -> C:
    """Return a config of the slot of ``kind``, from a config, from its data or from its name."""
    if not isinstance(part, kind | str | Mapping):
        raise KinformerError(
            f"{kind.slot}: {part!r} is of the type {type(part).__name__}; give a name, a mapping with its kind, or a "
            f"config, such as one of kinformer.nn."
        )
    return from_dict(kind, part, find(), kind.slot)


def _pattern(pattern: object) -> Pattern | None:
    """Return the built pattern of a config, a name or a mapping; a pattern is returned unchanged."""
    if pattern is None or isinstance(pattern, Pattern):
        return pattern
    config = _config(PatternConfig, pattern)
    built = config.build()
    check_unpinned(config, built)
    return built


def _part(config: type[C], module: type[M], part: object, build: Callable[[C], M]) -> M:
    """Return the module of ``part``; raise for a config that would be built with new weights at every call."""
    if isinstance(part, module):
        return part
    named = _config(config, part)
    built = build(named)
    if any(True for _ in built.parameters()):
        raise KinformerError(
            f"{describe(named)} has weights, which a function cannot hold; build it once, as part of your model, and "
            "give the module."
        )
    return built
