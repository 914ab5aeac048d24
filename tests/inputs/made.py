"""Random trajectories, and the contract's subject for models that read them."""

import torch

from kinformer.inputs.signals import ACTION, FIRST, RETURN, STATE, pack
from kinformer.testing import ModelSubject


def steps_like(input, batch, time, seed, dtype=torch.float64):
    """Positions of any kinds in any order, for ``input``."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(3, (batch, time), generator=generator)
    timestep = torch.randint(input.config.timesteps, (batch, time), generator=generator)
    values = torch.randn(batch, time, input.width - FIRST, generator=generator, dtype=dtype)
    for each, size in ((RETURN, 1), (STATE, input.config.state_dim), (ACTION, input.config.action_dim)):
        values[..., size:] = values[..., size:].masked_fill((kind == each)[..., None], 0)
    return pack(kind, timestep, values, input.width)


class StepsSubject(ModelSubject):
    """A model of trajectories; what stands at padding is no number at all."""

    def __init__(self, make, **sizes):
        super().__init__(make, 0, **sizes)
        self.input = make().input

    def inputs(self, batch, time, seed):
        return steps_like(self.input, batch, time, seed)

    def spoil(self, inputs, valid):
        return inputs.masked_fill(~valid[..., None], torch.nan)

    def disturb(self, inputs, since, factor):
        other = self.inputs(inputs.shape[0], inputs.shape[1], seed=int(17 + factor))
        other[..., FIRST:] *= factor
        return torch.cat([inputs[:, :since], other[:, since:]], dim=1)
