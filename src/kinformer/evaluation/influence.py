"""Who sees whom in a mixer that has no pattern: how strongly each output of a random input depends on each token."""

from __future__ import annotations

import torch

from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.encoder import EncoderMixer
from kinformer.evaluation.panels import HeatPanel

LENGTH = 48


def influence_panel(mixer: CausalMixer | EncoderMixer, name: str, place: str, dim: int, length: int) -> HeatPanel:
    """The length of the gradient of (a random direction of) every output with respect to every input, [query, key].

    Rows are divided by their largest value, so that the context length shows and not the size of the outputs.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, length, dim, generator=generator).requires_grad_()
    direction = torch.randn(dim, generator=generator)
    y = mixer(x) if isinstance(mixer, EncoderMixer) else mixer(Chunk(x), mixer.initial_state(1))[0]
    rows = [torch.autograd.grad(each, x, retain_graph=True)[0][0].norm(dim=-1) for each in y[0] @ direction]
    strength = torch.stack(rows).double()
    strength = strength / strength.amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return HeatPanel(
        place=place,
        name=f"{name}\ninfluence on the output",
        values=strength.numpy(),
        rows="query",
        columns="key",
        signed=False,
    )
