"""Every score, mixers of random weights, and inputs for them."""

import torch

from kinformer.parts.scores import Additive, Bilinear, Capped, Dot, Modulus, ScaledDot, SinkLogit

DIM = 16
SCORES = {
    "scaled_dot": ScaledDot.Config(),
    "dot": Dot.Config(),
    "bilinear": Bilinear.Config(),
    "additive": Additive.Config(),
    "capped": Capped.Config(cap=2.0),
    "modulus": Modulus.Config(),
    "sink_logit": SinkLogit.Config(),
}


def built(config, seed=0):
    torch.manual_seed(seed)
    mixer = config.build(DIM).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return mixer


def inputs(time, batch=2, seed=1):
    return torch.randn(batch, time, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
