"""Calls of a tape that the operators in C replace (``generation.native``): what stands around a product joins it, and
rotation, the cache's new slot and attention of one query become one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kinformer.generation import native

Call = Any
"""A call of ``generation.recording``, which imports this file."""

_X, _RESIDUAL, _NORM, _EPS, _GATED = 0, 5, 6, 7, 8
"""The places of arguments of ``native.product``."""
# A pattern is an operator's name and the patterns of its arguments ("" for a list), a variable's name, or a value.
_WAVES = ("sub", ("mul", "a", "cos"), ("mul", "b", "sin")), ("add", ("mul", "a", "sin"), ("mul", "b", "cos"))
_NEIGHBOURS = ("flatten", ("stack", ("", *_WAVES), -1), -2, -1)
_FAR = ("cat", ("", *_WAVES, "rest"), -1)


class Fusion:
    """The ``calls`` of a tape with the results ``outputs``; ``tensor``: the tensor of a reference; ``none``: the
    reference to one without elements."""

    def __init__(self, calls: Sequence[Call], outputs: Sequence[Any], tensor: Callable[[Any], Tensor], none: Any):
        self._old, self._tensor, self._none = calls, tensor, none
        self._made = {number: call for call in calls for number in call.results}
        self._uses = Counter([ref.number for ref in outputs])
        self._copies: dict[Any, Call] = {}
        for call in calls:
            for item in call.arguments:
                self._uses.update(part.number for part in (item if isinstance(item, list) else [item]) if _is_ref(part))
            if _name(call) == "copy_" and (slots := self._match(call.arguments[0], ("slice", "of", 2, -1))):
                self._copies[slots["of"]] = call

    def calls(self) -> list[Call]:
        """Return fewer calls with the same results to within rounding."""
        calls: list[Call] = []
        for call in self._old:
            if call.operator is native.product:
                call = self._with_inputs(call)
            elif _name(call) == "add":
                call = self._with_residual(call)
            elif _name(call) == "scaled_dot_product_attention":
                call, copies = self._attention(call)
                calls = [other for other in calls if not any(other is one for one in copies)]
            self._made |= dict.fromkeys(call.results, call)
            calls.append(call)
        return calls

    def _maker(self, ref: Any) -> Any:
        return self._made.get(getattr(ref, "number", -1))

    def _match(self, item: Any, pattern: Any, values: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the values of the variables with which ``item`` is ``pattern``, given some ``values``; empty if it is
        not."""
        values = {"": item} if values is None else values
        if isinstance(pattern, str):
            return values if values.setdefault(pattern, item) == item else {}
        if not isinstance(pattern, tuple):
            return values if item == pattern else {}
        call = self._maker(item) if pattern[0] else None
        parts = item if not pattern[0] and isinstance(item, list) else call.arguments if call else []
        if (call and _name(call) != pattern[0]) or len(parts) < len(pattern) - 1:
            return {}
        return values if all(self._match(*pair, values) for pair in zip(parts, pattern[1:], strict=False)) else {}

    def _with_inputs(self, call: Call) -> Call:
        """Return a product with the norm or the gate that its input comes from."""
        arguments: list[Any] = list(call.arguments)
        x = self._tensor(arguments[_X])
        norm = self._match(arguments[_X], ("rms_norm", "x", ("", "size"), "factor", "eps"))
        gate = self._match(arguments[_X], ("mul", ("silu", "a"), "b"))
        if norm and all(_is_ref(norm[name]) and self._is_plain(norm[name], x) for name in ("x", "factor")):
            eps = torch.finfo(x.dtype).eps if norm["eps"] is None else norm["eps"]
            arguments[_X], arguments[_NORM], arguments[_EPS] = norm["x"], norm["factor"], eps
        elif gate and (whole := self._halves(gate["a"], gate["b"])) and self._is_plain(whole, x):
            arguments[_X], arguments[_GATED] = whole, True
        return call._replace(arguments=tuple(arguments))

    def _is_plain(self, ref: Any, like: Tensor) -> bool:
        return self._tensor(ref).is_contiguous() and self._tensor(ref).dtype == like.dtype

    def _halves(self, a: Any, b: Any) -> Any:
        """Return the reference whose halves in the last axis are ``a`` and ``b``; None where they are not."""
        call, shapes = self._maker(a), [self._tensor(ref).shape for ref in (a, b) if _is_ref(ref)]
        if call is None or call is not self._maker(b) or _name(call) not in ("chunk", "split", "split_with_sizes"):
            return None
        last = call.arguments[2] in (-1, len(shapes[0]) - 1)
        return call.arguments[0] if last and call.results == (a.number, b.number) and len(set(shapes)) == 1 else None

    def _with_residual(self, call: Call) -> Call:
        """Return a product that adds what ``call`` adds to it, or ``call``."""
        first, second, alpha = call.arguments
        for y, residual in ((first, second), (second, first)):
            made = self._maker(y)
            if made is None or made.operator is not native.product or alpha != 1 or not _is_ref(residual):
                continue
            arguments = list(made.arguments)
            plain = self._is_plain(residual, self._tensor(y)) and self._tensor(residual).shape == self._tensor(y).shape
            if plain and self._uses[y.number] == 1 and not self._tensor(arguments[_RESIDUAL]).numel():
                arguments[_RESIDUAL] = residual
                return made._replace(arguments=tuple(arguments), results=call.results)
        return call

    def _attention(self, call: Call) -> tuple[Call, list[Call]]:
        """Return the attention of one query that fills the last slot itself, and the calls that filled it."""
        q, keys, vectors, mask, dropout, causal, scale, *_ = call.arguments
        copies = [self._copies[slots] for slots in (keys, vectors) if slots in self._copies]
        shared = any(self._uses[slots.number] > 2 for slots in (keys, vectors))  # other calls may read the new slot
        if len(copies) < 2 or shared or mask is not None or dropout or causal or scale is None:
            return call, []
        k, v = (copy.arguments[1] for copy in copies)
        q, k, cos, sin, pairs = self._unturned(q, k)
        taken = [self._tensor(ref) for ref in (q, k, v, keys, vectors)]
        few = all(x.shape[2] == 1 for x in taken[:3]) and all(x.stride(-1) == 1 for x in taken)
        if not few or {x.dtype for x in taken} not in ({torch.float32}, {torch.bfloat16}):
            return call, []
        return call._replace(operator=native.attend, arguments=(q, k, v, cos, sin, keys, vectors, scale, pairs)), copies

    def _unturned(self, q: Any, k: Any) -> tuple[Any, Any, Any, Any, bool]:
        """Return q and k before the rotation that turns both at once, if one does, its cosines and sines, and whether
        neighbours are pairs."""
        call, plain = self._maker(q), (q, k, self._none, self._none, False)
        if call is None or call is not self._maker(k) or _name(call) != "split_with_sizes":
            return plain
        near = self._match(call.arguments[0], _NEIGHBOURS)
        values = near or self._match(call.arguments[0], _FAR)
        if near:
            ends = [self._match(values[name], ("slice", "x", 3, at, "end", 2)) for at, name in enumerate("ab")]
            whole = ends[0]["x"] if all(ends) and ends[0]["x"] == ends[1]["x"] else None
        else:
            whole = self._halves(values.get("a"), values.get("b"))
            whole = self._match(whole, ("slice", "x", 3, 0)).get("x", whole)
        both = self._match(whole, ("cat", ("", "q", "k"), 1))
        same = bool(both) and self._tensor(whole).shape == self._tensor(call.arguments[0]).shape
        if not same or call.results != (q.number, k.number) or not self._is_plain(values["cos"], self._tensor(q)):
            return plain
        return both["q"], both["k"], values["cos"], values["sin"], bool(near)


def _name(call: Call) -> str:
    return call.operator._schema.name.removeprefix("aten::")


def _is_ref(item: object) -> bool:
    return hasattr(item, "number")
