"""The attention weights of a mixer, read off the mixer itself: what each token's value adds to each output.

The heads' outputs are linear in the values, y_i = sum_j w_ij v_j (+ what depends on no value). With the values of a
block of tokens replaced by the columns of an identity, the mixer's own kernels return the columns w_ij of these tokens,
whatever the mechanism computes and in whatever order. So the weights are those that the model used, and they exist for
every mechanism in which values enter so: of softmax attention they are its probabilities, of kernel attention the
*implied* weights (Katharopoulos et al. 2020, equation 4; Ali et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from kinformer.core.contract import PartialOutput
from kinformer.mixers.etc import EtcAttention
from kinformer.mixers.linear import LinearAttention
from kinformer.mixers.rwkv7 import RWKV7
from kinformer.mixers.single_head import SingleHead
from kinformer.runs.tracing.probe import Probe
from kinformer.runs.tracing.sites import Site, site_of


class Weights(NamedTuple):
    """The weights [heads, queries, keys] of one call, in float32 or better, with the ``values`` [heads, keys, width],
    the heads' ``outputs`` [heads, queries, width] and the ``constant`` of that shape that depends on none of the
    values: outputs = weights @ values + constant. It is 0 except for values by distance and compressed memories."""

    weights: Tensor
    values: Tensor
    outputs: Tensor
    constant: Tensor


@torch.no_grad()
def weights_of(mixer: nn.Module, inputs: Sequence[object], site: Site | None = None) -> Weights:
    """Return the weights of the call ``mixer(*inputs)`` of one sequence, by as many further calls as the tokens have
    values' widths in them.

    inputs: what the mixer was called with, a chunk and a state without a past or, of an encoder, x and its context.
    """
    where = site or site_of(mixer)
    assert isinstance(where, Site), where
    if isinstance(mixer, PartialOutput):
        inputs = inputs[:2]  # outputs of all tokens
    probe = Probe()
    outputs = _heads(mixer, inputs, probe, where)
    values, columns = probe.values, []
    probe.first = -1
    constant = _heads(mixer, inputs, probe, where)
    count, width = values.shape[2:]
    for probe.first in range(0, count, width):
        columns.append((_heads(mixer, inputs, probe, where) - constant)[..., : count - probe.first])
    weights = torch.cat(columns, -1)[0]
    values = values[0].to(outputs.dtype).repeat_interleave(len(weights) // values.shape[1], 0)
    return Weights(weights, values, outputs[0], constant[0])


def _heads(mixer: nn.Module, inputs: Sequence[object], probe: Probe, site: Site) -> Tensor:
    """Return the heads' outputs [1, heads, time, width] before they are joined and projected."""
    calls: list[Tensor] = []
    with _captured(mixer, probe, calls), site.install(mixer, probe):
        mixer(*inputs)
    parts = [part.float() if part.dtype.itemsize < 4 else part for part in calls]
    if isinstance(mixer, EtcAttention):
        parts.reverse()  # the long input's are computed first, but stand behind the global input's
    return torch.cat(parts, 2)


@contextmanager
def _captured(mixer: nn.Module, probe: Probe, calls: list[Tensor]) -> Iterator[None]:
    """Collect the heads' outputs of a call."""
    if isinstance(mixer, SingleHead):
        mix: Callable[..., Tensor] = mixer._mix

        def mixed(*call: object) -> Tensor:
            y = mix(*call)
            calls.append(y)
            return y

        with patch.object(mixer, "_mix", mixed):
            yield
        return
    if isinstance(mixer, LinearAttention | RWKV7):
        output: Callable[..., Tensor] = mixer._output

        def passed_on(y: Tensor, *rest: object) -> Tensor:
            calls.append(y)
            return output(y, *rest)

        with patch.object(mixer, "_output", passed_on):
            yield
        return

    def joined(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        calls.append(inputs[0].unflatten(-1, (-1, probe.values.shape[3])).transpose(1, 2))

    # Weights are those before a norm and a gate, which is a parameter of Memorizing's.
    behind = (getattr(mixer, name, None) for name in ("head_norm", "gate", "out"))
    first = next(module for module in behind if isinstance(module, nn.Module))
    outs = {first, getattr(mixer, "global_out", None) or first}
    handles = [out.register_forward_pre_hook(joined) for out in outs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
