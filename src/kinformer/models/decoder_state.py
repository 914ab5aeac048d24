"""The state of a decoder: of its layers, of its counters, and what its stack reads of a source."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kinformer.core import state as states


class SourceMean(NamedTuple):
    """The mean vector of each row's source, ``mean`` [batch, dim]; n neighbouring rows of a chunk share one, as
    hypotheses of a beam do."""

    mean: Tensor

    outlives_reset = True  # type: ignore[misc]


class DecoderState(NamedTuple):
    """The state: ``layers``, one state per use of a layer, ``seen`` [batch] int64, the tokens of each row's sequence,
    and ``source``, what the stack itself reads of a source (``()``: nothing)."""

    layers: tuple[states.State, ...]
    seen: Tensor
    source: SourceMean | tuple[()] = ()

    def reserve(self, length: int) -> DecoderState:
        """Return a single-owner state with room for ``length`` more tokens (see ``core.state.reserve``)."""
        return self._replace(layers=states.reserve(self.layers, length))

    def fork(self) -> DecoderState:
        """Return an independent copy of the state."""
        return states.fork(self)


def source_means(state: DecoderState, rows: int) -> Tensor | None:
    """Return the mean of each row's source, [rows, dim]; None where the stack reads none."""
    if not isinstance(state.source, SourceMean):
        return None
    mean = state.source.mean
    count = mean.shape[0]
    return mean if count == rows else mean.repeat_interleave(rows // count, dim=0)
