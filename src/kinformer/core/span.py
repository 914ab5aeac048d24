"""The part ``span``: the learnt distance that a head of softmax attention looks back.

A span is a learnt bias of the scores by distance and head, with probability 0 beyond a distance. The mixer cuts its
pattern and its state to the windows that the weights allow now. Windows are numbers on the host; the mixer reads them
again when the weights change. A captured graph uses the windows of the trainer's last trim. The trainer adds the
penalty of spans to the loss and moves weights back into their bounds after each step (``core.learning``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.core.config import Config
from kinformer.core.parts import Position, Relative
from kinformer.core.pattern import Pattern
from kinformer.runtime.host import has_data

Cut = Callable[[tuple[int, ...]], Pattern]


class Span(nn.Module):
    """A span, which weighs keys by their distance (query position - key position) from 1 on; a query does not see
    itself.

    ``windows``: the distances 1 ... windows[h] are all that head h sees, as the weights are now: nothing else is
    computed or remembered. Numbers on the host, so that they may choose shapes. ``pattern`` is the mixer's, cut to
    them.
    """

    @property
    def windows(self) -> tuple[int, ...]:
        raise NotImplementedError

    def spans(self) -> list[float]:
        """Return the learnt span of every head, in tokens; all processes must call it together."""
        raise NotImplementedError

    @property
    def pattern(self) -> Pattern:
        raise NotImplementedError

    def bias(self, farthest: int) -> Tensor:
        """Return the biases of the scores at the distances 1 ... ``farthest``: [heads,
        farthest], -inf where a head does not look."""
        raise NotImplementedError

    def joined(self, relative: Relative | None, farthest: int) -> Relative | None:
        """Return a position's tables at its distances among 1 ... ``farthest``, with the span's bias added."""
        if farthest < 1:
            return relative
        bias = self.bias(farthest)
        if relative is None:
            return Relative(1, bias=bias)
        before = relative.lowest - 1
        tables = {name: getattr(relative, name) for name in ("bias", "keys", "values")}
        tables = {name: _widened(table, before, farthest) for name, table in tables.items() if table is not None}
        # m exp(s) = exp(s + log m): a soft mask m of the probabilities is a bias log m of the scores.
        tables["bias"] = bias + tables["bias"] if "bias" in tables else bias
        return relative._replace(lowest=1, **tables)


class TokenSpan(nn.Module):
    """A span of each token; ``windows`` and ``pattern`` belong to the longest possible span."""

    @property
    def windows(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def pattern(self) -> Pattern:
        raise NotImplementedError

    def of(self, x: Tensor) -> Tensor:
        """Return spans [batch, heads, time] in tokens, for the mixer's input x [batch, time, dim]."""
        raise NotImplementedError

    def reach(self, z: float) -> int:
        """Return the largest distance to a key that a query of the span ``z`` sees."""
        raise NotImplementedError

    def log_mask(self, z: Tensor, distance: Tensor) -> Tensor:
        """Return the logarithm of the soft mask of spans z at a ``distance`` of 1 or more (both broadcast): -inf where
        the mask is 0, and 0 where z > distance - 1."""
        raise NotImplementedError

    def cost(self, z: Tensor, valid: Tensor | None) -> Tensor:
        """Return the cost [batch] of the spans z of a chunk, a sum over valid tokens."""
        raise NotImplementedError


class Following(nn.Module):
    """A span whose ``windows`` and ``pattern`` follow the values of some parameters, which it reads again when they
    have changed; where the host cannot read them, the windows stay."""

    def follow(self, cut: Cut, names: tuple[str, ...], windows: tuple[int, ...]) -> None:
        """Begin with ``windows``, which follow the parameters ``names``, or stay where there are none."""
        self._cut, self._names = cut, names
        self._windows, self._pattern = windows, cut(windows)
        self._stamps: tuple[tuple[object, ...] | None, ...] = (None,) * len(names)

    def windows_of(self, *values: Tensor) -> tuple[int, ...]:
        """Return the windows for the ``values`` of the parameters."""
        raise NotImplementedError

    @property
    def windows(self) -> tuple[int, ...]:
        self._read()
        return self._windows

    @property
    def pattern(self) -> Pattern:
        self._read()
        return self._pattern

    @torch.no_grad()  # saves no tensor: a checkpoint counts the saved tensors, and its second pass does not trim
    def trim(self, *values: Tensor) -> None:
        """Cut the windows to the spans of ``values``, the full (unsharded) parameters."""
        windows = self.windows_of(*values)
        if windows != self._windows:
            self._windows, self._pattern = windows, self._cut(windows)
        self._stamps = tuple(map(stamp_of, self._parameters_followed()))

    def _parameters_followed(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self._names]

    def _read(self) -> None:
        parameters = self._parameters_followed()
        if not all(map(readable, parameters)):
            return
        stamps = tuple(map(stamp_of, parameters))
        if None in stamps or stamps != self._stamps:
            self.trim(*parameters)


class SpanConfig(Config):
    slot = "span"

    def build(self, dim: int, num_heads: int, cut: Cut) -> Span | TokenSpan:
        """Build a span; ``cut(windows)`` is the mixer's pattern where heads see so far."""
        raise NotImplementedError


def relative_of(position: Position, span: Span | TokenSpan | None, farthest: int) -> Relative | None:
    """Return the tables of a ``position`` up to the distance ``farthest``, with the bias of a ``span``."""
    if span is None:
        return position.relative(0, farthest)
    farthest = min(farthest, max(span.windows))
    if isinstance(span, TokenSpan):
        return position.relative(1, farthest) if farthest > 0 else None
    return span.joined(position.relative(1, farthest), farthest)


def _widened(table: Tensor, before: int, count: int) -> Tensor:
    """Return ``table`` [heads, n, ...] between zeros, ``count`` distances in all."""
    after = count - before - table.shape[1]
    if not (before or after):
        return table
    return pad(table, (0, 0) * (table.dim() - 2) + (before, after))


def stamp_of(parameter: Tensor) -> tuple[object, ...] | None:
    """Return a value that changes with a parameter's values, or None for tensors of inference mode and within
    transforms of ``torch.func``, which have none. Writes through ``.data`` are not noticed."""
    if parameter.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(parameter):
        return None
    return parameter.data_ptr(), parameter._version, parameter.dtype


def readable(parameter: Tensor) -> bool:
    """Return whether a parameter has values to look at now: not while a graph is captured or costs are counted."""
    return not torch.compiler.is_compiling() and has_data(parameter)


def host(values: Tensor) -> list[float]:
    """Return the numbers of a tensor; this waits for its device."""
    with torch.no_grad():
        return values.detach().double().tolist()
