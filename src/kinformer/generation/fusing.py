"""Calls of a tape that the operators in C replace (``generation.native``): what stands around a product joins it, and
rotation, the cache's new slot and attention of one query become one call. Calls in C that follow one another become a
chain, which is one call for PyTorch."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from kinformer.generation import native

Call = Any
"""A call of ``generation.recording``, which imports this file."""

# The arguments of a product with what stands around it are x, w, scales, bias, residual, the norm's factors and shifts,
# its eps, and the form: a norm (1, 2), an activation (4, 8, 12) and whether it gates (16), as in ``native.c``.
_BEFORE = (
    (1, ("rms_norm", "x", "size", "norm", "eps")),
    (2, ("layer_norm", "x", "size", "norm", "shift", "eps")),
    (20, ("mul", ("silu", "a"), "b")),
    (16, ("mul", ("gelu", "a", "how"), "b")),
    (4, ("silu", "x")),
    (0, ("gelu", "x", "how")),
)
_GELUS = {None: 0, "tanh": 8, "none": 12}
_PART = torch.ops.aten.as_strided.default
_DTYPES = {torch.int8: 1, torch.float32: 6, torch.bfloat16: 15}
# A pattern is an operator's name and the patterns of its arguments ("" for a list), a variable's name, or a value.
_WAVES = ("sub", ("mul", "a", "cos"), ("mul", "b", "sin")), ("add", ("mul", "a", "sin"), ("mul", "b", "cos"))
_NEIGHBOURS = ("flatten", ("stack", ("", *_WAVES), -1), -2, -1)
_FAR = ("cat", ("", *_WAVES, "rest"), -1)


class Fusion:
    """The ``calls`` of a tape with the results ``outputs``; ``results``: the tensors of references from 0 on;
    ``captured``: the tensors of all other references. Constants are added to ``captured``. ``grown``: the numbers of
    results whose shapes follow the number of past slots; calls with such results stay, as a chain has fixed shapes."""

    def __init__(
        self,
        calls: Sequence[Call],
        outputs: Sequence[Any],
        results: Sequence[Tensor],
        captured: list[Tensor],
        grown: set[int],
    ):
        self._old, self._results, self._captured, self._grown = calls, results, captured, grown
        self._ref, self._numbers = type(outputs[0]), count(len(results))
        self._none = self._constant(native.NONE)
        self._made = {number: call for call in calls for number in call.results}
        self._outputs = {ref.number for ref in outputs}
        self._uses = Counter([ref.number for ref in outputs])
        self._copies: dict[Any, Call] = {}
        for call in calls:
            self._uses.update(_read(call))
            if _name(call) == "copy_" and (slots := self._match(call.arguments[0], ("slice", "of", 2, -1))):
                self._copies[slots["of"]] = call

    def calls(self) -> list[Call]:
        """Return fewer calls with the same results to within rounding."""
        calls: list[Call] = []
        for call in self._old:
            if call.operator is native.product and self._in_c(call):
                call = self._with_inputs(call)
            elif _name(call) == "add":
                call = self._with_residual(call)
            elif _name(call) == "scaled_dot_product_attention":
                call, copies = self._attention(call)
                calls = [other for other in calls if not any(other is one for one in copies)]
            self._made |= dict.fromkeys(call.results, call)
            calls.append(call)
        return self._with_chains(without_unused(calls, self._outputs))

    def _tensor(self, ref: Any) -> Tensor:
        return self._results[ref.number] if ref.number >= 0 else self._captured[-1 - ref.number]

    def _constant(self, tensor: Tensor) -> Any:
        self._captured.append(tensor)
        return self._ref(-len(self._captured))

    def _with_chains(self, calls: list[Call]) -> list[Call]:
        """Return ``calls`` with each stretch of calls in C as one chain, and behind it the views of its results. Calls
        that need no result of it move before it."""
        made: list[Call] = []
        while calls:
            stretch: list[Call] = []
            views: list[Call] = []
            rest: list[Call] = []
            inside: dict[int, int] = {}  # the stretch's results and their views, by the result that they are part of
            for place, call in enumerate(calls):
                read = {inside[number] for number in _read(call) if number in inside}
                in_c = self._in_c(call)
                if in_c and (not stretch or self._result(call).dtype == self._result(stretch[0]).dtype):
                    stretch.append(call)
                    inside |= zip(call.results, call.results, strict=True)
                elif len(read) == 1 and self._is_view(call, *read):
                    views.append(call)
                    inside |= dict.fromkeys(call.results, *read)
                elif stretch and (read or in_c or call.operator._schema.is_mutable):
                    rest = calls[place:]
                    break
                else:
                    made.append(call)
            if stretch:
                made += [*self._chain(stretch, inside, self._outputs.union(*map(_read, rest))), *views]
            calls = rest
        return made

    def _in_c(self, call: Call) -> bool:
        return call.operator in (native.product, native.attend) and call.results[0] not in self._grown

    def _result(self, call: Call) -> Tensor:
        return self._results[call.results[0]]

    def _is_view(self, call: Call, base: int) -> bool:
        storages = {self._results[number].untyped_storage()._cdata for number in (base, *call.results)}
        return len(storages) == 1 and not call.operator._schema.is_mutable

    def _chain(self, stretch: list[Call], inside: dict[int, int], needed: set[int]) -> list[Call]:
        """Return one call for the calls ``stretch``, and the calls that take the ``needed`` results out of its result.
        ``native.c`` describes the program."""
        outer = {inside[number] for number in needed & inside.keys()}
        sizes = [-(-self._result(call).numel() // 32) * 32 for call in stretch]
        places = dict(zip((call.results[0] for call in stretch), accumulate(sizes, initial=0), strict=False))
        tensors = list(dict.fromkeys(ref for call in stretch for ref in call.arguments[:7] if ref.number not in inside))
        numbers = {ref.number: place for place, ref in enumerate(tensors)}
        rows: list[list[int]] = []
        for number in dict.fromkeys(number for call in stretch for number in (*_read(call), *call.results)):
            if number in inside:
                numbers[number] = len(tensors) + len(rows)
                part, whole = self._results[number], self._results[inside[number]]
                offset = places[inside[number]] + part.storage_offset() - whole.storage_offset()
                axes = [[*[fill] * 4, *axis][-4:] for fill, axis in ((1, part.shape), (0, part.stride()))]
                rows.append([offset, _DTYPES[part.dtype], part.numel(), *axes[0], *axes[1]])
        first = [len(rows), len(stretch), sum(sizes), _DTYPES[self._result(stretch[0]).dtype], *[0] * 7]
        for call in stretch:
            bits = struct.unpack("q", struct.pack("d", call.arguments[7]))
            views = [numbers[number] for number in (*(ref.number for ref in call.arguments[:7]), *call.results)]
            rows.append([int(call.operator is native.attend), int(call.arguments[8]), *bits, *views])
        made = self._ref(next(self._numbers))
        arguments = tensors, self._constant(torch.tensor([first, *rows]))
        calls = [stretch[0]._replace(operator=native.chain, arguments=arguments, results=(made.number,))]
        for number, result in ((number, self._results[number]) for number in outer):
            strided = made, list(result.shape), list(result.stride()), places[number]
            calls.append(calls[0]._replace(operator=_PART, arguments=strided, results=(number,)))
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
        """Return a product with the norm or the activation that its input comes from."""
        x, w, _, scales, bias = call.arguments
        y, none = self._tensor(x), self._none
        before = [none, none, 0.0, 0]
        for form, pattern in _BEFORE:
            if not (values := self._match(x, pattern)):
                continue
            whole = self._halves(values["a"], values["b"]) if "a" in values else values["x"]
            factors = [none if values.get(name) is None else values[name] for name in ("norm", "shift")]
            if whole is not None and all(ref == none or self._is_plain(ref, y) for ref in (whole, *factors)):
                eps = values.get("eps", 0.0)
                before = [*factors, torch.finfo(y.dtype).eps if eps is None else eps, form + _GELUS[values.get("how")]]
                x = whole
            break
        return call._replace(arguments=(x, w, scales, bias, none, *before))

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
            can_join = made is not None and made.operator is native.product and self._in_c(made)
            if not can_join or alpha != 1 or not _is_ref(residual):
                continue
            arguments = list(made.arguments)
            plain = self._is_plain(residual, self._tensor(y)) and self._tensor(residual).shape == self._tensor(y).shape
            if plain and self._uses[y.number] == 1 and arguments[4] == self._none:
                arguments[4] = residual
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
        few = few and self._result(call).is_contiguous()
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


def without_unused(calls: Sequence[Call], outputs: set[int]) -> list[Call]:
    """Return the calls that write to a tensor, or that have a result that ``outputs`` or another such call needs."""
    needed, used = set(outputs), []
    for call in reversed(calls):
        if not call.results or call.operator._schema.is_mutable or not needed.isdisjoint(call.results):
            needed.update(_read(call))
            used.append(call)
    return used[::-1]


def _name(call: Call) -> str:
    return call.operator._schema.name.removeprefix("aten::")


def _read(call: Call) -> Iterator[int]:
    """Yield the numbers of the references that ``call`` reads."""
    for item in call.arguments:
        yield from (part.number for part in (item if isinstance(item, list) else [item]) if _is_ref(part))


def _is_ref(item: object) -> bool:
    return hasattr(item, "number")
