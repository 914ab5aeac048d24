"""Attention behind the interfaces of PyTorch: a function, and a stand-in for ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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
from kinformer.mixers.cross import CrossAttention
from kinformer.nn.modules import CausalLayer, layer, require_mask
from kinformer.runtime.compiling import checks_calls, has_data
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
    q, k, v, relative = _place(q, k, v, built, place)
    if isinstance(score, ScoreConfig):
        check_score(score, how, place)
    scoring = Scoring.of(how, relative, AttentionDropout.drawn(dropout_p, training=True) if dropout_p else None)
    if scale is not None:
        scoring = scoring._replace(scale=scale)
    visibility = Visibility(built, key_padding_mask=key_padding_mask)
    return softmax.attention(how.queries(q), k, v, visibility, scoring, impl=impl).out


def _place(
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


# The interface of torch.nn.MultiheadAttention.


HIDES = -1000.0
"""A number of a mask that hides a key as -inf does: its exponential is 0 beside the exponential of any usual score."""

_TORCH_NAMES = (
    "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "out_proj.weight",
    "out_proj.bias",
)  # fmt: skip


class _NoWeights:
    """The weights that PyTorch's modules read before they use their fused attention.

    ``torch.nn.TransformerEncoder`` does not fuse a layer whose weights override torch functions. Without this class it
    would replace a padded batch by a nested tensor, which mixers do not support.
    """

    weight = bias = None

    @classmethod
    def __torch_function__(cls, function: object, *arguments: object) -> object:
        return NotImplemented


class MultiheadAttention(nn.Module):
    """``torch.nn.MultiheadAttention`` with the mixer of a member in it, as ``mixer="longformer"``.

    It can stand in for that module, also inside ``torch.nn.TransformerEncoderLayer`` and ``TransformerDecoderLayer``.
    Self-attention runs the member's mixer. Attention to another sequence (``key`` is not ``query``) is exact: such a
    module is made with ``mixer="cross"``. ``from_torch`` takes over the weights of a ``torch.nn.MultiheadAttention``,
    and ``load_state_dict`` reads its weights by its names. Padded queries of self-attention give 0, where
    ``torch.nn.MultiheadAttention`` gives numbers.
    """

    in_proj_weight = out_proj = _NoWeights()
    in_proj_bias = None
    """None, so that ``torch.nn.TransformerEncoderLayer`` calls this module rather than its fused kernel."""
    _qkv_same_embed_dim = False
    bias_k = bias_v = None
    add_zero_attn = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mixer: str = "bidirectional",
        **settings: Any,
    ) -> None:
        """Build the mixer ``mixer`` (see ``kinformer.layers``) of width ``embed_dim`` with its ``settings``.

        dropout, bias: as in torch, for mixers with these settings. kdim, vdim: the width of the other sequence, for
        ``mixer="cross"``; both must be equal.

        Errors: ``KinformerError`` for settings that the mixer does not have, ``add_bias_kv`` and ``add_zero_attn``.
        """
        super().__init__()
        if add_bias_kv or add_zero_attn:
            raise KinformerError("add_bias_kv and add_zero_attn: no mixer here has an added key; leave them out.")
        if (kdim or vdim) and (mixer != "cross" or kdim != vdim):
            raise KinformerError(
                'kdim, vdim: keys and values are made of one sequence; give both alike, with mixer="cross".'
            )
        settings = {"num_heads": num_heads} | settings
        if dropout:
            settings = {"dropout": dropout} | settings
        if not bias:
            settings = {"bias": False} | settings
        if kdim:
            settings = {"source_dim": kdim} | settings
        self.layer = layer(mixer, embed_dim, device=device, dtype=dtype, **settings)
        self.embed_dim, self.num_heads, self.batch_first, self.mixer = embed_dim, num_heads, batch_first, mixer
        self.dropout, self.head_dim = dropout, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, mixer: str = "bidirectional", **settings: Any
    ) -> MultiheadAttention:
        """Return a module with the sizes, weights, device, dtype and mode (training or not) of ``module``, for mixers
        with its projections: softmax attention (``"gpt"``, ``"local"``, ``"longformer"``, ``"bert"`` and so on), and
        ``"cross"`` for attention to another sequence.

        Errors: ``KinformerError`` for a module with added keys, and for a mixer that the weights do not fit.
        """
        if module.bias_k is not None or module.add_zero_attn:
            raise KinformerError(
                "module: it adds a key (add_bias_kv, add_zero_attn), which no mixer here does; build a module without "
                "these."
            )
        widths: dict[str, Any] = {} if module.in_proj_weight is not None else {"kdim": module.kdim, "vdim": module.vdim}
        built = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            batch_first=module.batch_first,
            device=module.out_proj.weight.device,
            dtype=module.out_proj.weight.dtype,
            mixer=mixer,
            **widths,
            **settings,
        )
        with torch.enable_grad():  # a slice of a weight then requires a gradient as the weight does
            weights = built._translated(dict(module.named_parameters()))
        for name, values in weights.items():
            weight = built.get_parameter(name)
            weight.data.copy_(values.detach())
            weight.requires_grad_(values.requires_grad)
        return built.train(module.training)

    def _translated(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the ``weights`` of a ``torch.nn.MultiheadAttention`` under the names of this module's own weights."""
        inner, joint = self.layer.inner, weights.get("in_proj_weight")
        products = [weights[f"{name}_proj_weight"] for name in "qkv"] if joint is None else joint.chunk(3)
        bias = weights.get("in_proj_bias")
        if isinstance(inner, CrossAttention):
            parts = {"query": slice(0, 1), "key_value": slice(1, 3)}
        else:
            parts = {"projection.qkv": slice(0, 3)}
        ours: dict[str, tuple[Tensor, Tensor | None]] = {
            name: (torch.cat(list(products[part])), None if bias is None else torch.cat(bias.chunk(3)[part]))
            for name, part in parts.items()
        }
        ours["out"] = weights["out_proj.weight"], weights.get("out_proj.bias")
        translated = {}
        for name, (weight, bias) in ours.items():
            linear = dict(inner.named_modules()).get(name)
            if not isinstance(linear, nn.Linear) or linear.weight.shape != weight.shape:
                raise KinformerError(
                    f"mixer: {self.mixer!r} has other projections than torch.nn.MultiheadAttention, so that its "
                    "weights fit nowhere; build it again with kinformer.nn.MultiheadAttention(...)."
                )
            translated[f"layer.inner.{name}.weight"] = weight
            if linear.bias is not None:
                translated[f"layer.inner.{name}.bias"] = torch.zeros_like(linear.bias) if bias is None else bias
            elif bias is not None and bool(bias.any()):
                raise KinformerError(
                    f"mixer: {self.mixer!r} has projections without a bias, but the module has one; give another "
                    "mixer, such as 'gpt'."
                )
        return translated

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Load weights, also under the names of ``torch.nn.MultiheadAttention``."""
        names = [f"{prefix}{name}" for name in _TORCH_NAMES if f"{prefix}{name}" in state_dict]
        theirs = {name.removeprefix(prefix): state_dict[name] for name in names}
        if "out_proj.weight" in theirs and ("in_proj_weight" in theirs or "q_proj_weight" in theirs):
            for name in names:
                del state_dict[name]
            state_dict |= {f"{prefix}{name}": weight for name, weight in self._translated(theirs).items()}
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return (y, None), with y of the shape of ``query`` [time, batch, embed_dim], or [batch, time, embed_dim] with
        ``batch_first``, or [time, embed_dim].

        key, value: ``query`` itself, or an equal view of the same tensor, for self-attention; with ``mixer="cross"``
            the other sequence, one for both.
        key_padding_mask: [batch, time] bool, True where a key is padding. With self-attention the same tokens are
            padding as queries: y is 0 there, where ``torch.nn.MultiheadAttention`` gives numbers.
        attn_mask, is_causal: the mixer determines whether it is causal. A causal mixer accepts a causal mask or None;
            any other mixer accepts None or a mask that hides nothing.
        Either mask may be floating-point: 0 shows a key, and -inf or another number of -1,000 or less hides it. Mixers
            do not add other numbers to their scores.
        need_weights: must be False, because weights are not computed.

        Errors: ``KinformerError`` for masks and keys that the mixer cannot take.
        """
        if need_weights:
            raise KinformerError(
                "need_weights: the weights of attention are not computed; leave it out, or give False."
            )
        self._check_mask(attn_mask, is_causal, query.shape[0 if query.dim() == 2 or not self.batch_first else 1])
        x, context = (self._batch_first(tensor) for tensor in (query, key))
        if key_padding_mask is not None:
            key_padding_mask = _hidden("key_padding_mask", key_padding_mask)
            key_padding_mask = key_padding_mask[None] if query.dim() == 2 else key_padding_mask
        if isinstance(self.layer, CausalLayer) and self.layer.reads_context:
            if not _is_same(key, value) and not torch.equal(key, value):
                raise KinformerError(
                    "key, value: cross-attention makes both of one sequence; give the same tensor twice."
                )
            y = self.layer(x, context=context, context_key_padding_mask=key_padding_mask)
        elif not (_is_same(key, query) and _is_same(value, query)):
            raise KinformerError(
                f"key, value: the mixer {self.mixer!r} attends within one sequence; give the tensor of query three "
                'times, or take mixer="cross".'
            )
        else:
            y = self.layer(x, key_padding_mask=key_padding_mask)
        return (y[0] if query.dim() == 2 else y if self.batch_first else y.transpose(0, 1)), None

    def _batch_first(self, x: Tensor) -> Tensor:
        """Return ``x`` as [batch, time, embed_dim]."""
        return x[None] if x.dim() == 2 else x if self.batch_first else x.transpose(0, 1)

    def _check_mask(self, attn_mask: Tensor | None, is_causal: bool, time: int) -> None:
        """Raise for an ``attn_mask`` that differs from the mask of the mixer."""
        causal = isinstance(self.layer, CausalLayer) and not self.layer.reads_context
        if attn_mask is None:
            if causal or not is_causal:
                return
        elif causal and attn_mask.shape[-2:] == (time, time):
            hidden = _hidden("attn_mask", attn_mask)
            if is_causal and not _is_readable(attn_mask):
                return
            if bool((hidden == torch.ones(time, time, dtype=torch.bool, device=hidden.device).triu(1)).all()):
                return
        elif not causal and not is_causal and _is_readable(attn_mask) and not _hidden("attn_mask", attn_mask).any():
            return
        raise KinformerError(
            f"attn_mask, is_causal: the mixer {self.mixer!r} is {'' if causal else 'not '}causal and has its own "
            "pattern; "
            + ("give a causal mask or none." if causal else 'leave them out, or take a causal mixer, such as "gpt".')
        )


def _hidden(name: str, mask: Tensor) -> Tensor:
    """Return a mask where True hides a key, from a bool mask or from a mask that PyTorch adds to scores."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise KinformerError(
            f"{name} is {mask.dtype}, but must be torch.bool, where True hides a key, or a float, where -inf does."
        )
    hidden = mask <= HIDES
    others = mask[~hidden & (mask != 0)] if _is_readable(mask) else mask[:0]
    if others.numel():
        raise KinformerError(
            f"{name} holds {others[0].item():g}, but no mixer adds numbers to its scores; give 0 for a visible key "
            "and -inf for a hidden one, or take a position with a bias, such as alibi."
        )
    return hidden


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are one, or equal views of one: in storage, layout and gradient."""
    if one is other:
        return True
    if not (_is_readable(one) and _is_readable(other)):
        return False
    ours, theirs = ((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (one, other))
    if ours != theirs:
        return False
    # A detached tensor shares the storage, but gradients do not flow through it.
    return not (one.requires_grad or other.requires_grad) or (one._base is not None and one._base is other._base)


def _is_readable(mask: Tensor) -> bool:
    """Return whether the numbers of ``mask`` can be read: not while a graph is made, and not of shapes alone."""
    return checks_calls() and has_data(mask)
