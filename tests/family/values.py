"""Random values of any input, such as token ids or trajectories."""

import torch

from kinformer.inputs.signals import Steps

from ..inputs.made import steps_like


def values_of(model, batch, time, seed=0):
    """Of ``batch`` rows and ``time`` positions, as ``model`` takes them: ids, steps, or numbers from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    example = model.input.example(batch, time)
    if isinstance(model.input, Steps):
        return steps_like(model.input, batch, time, seed, dtype=torch.float32)
    if example.is_floating_point():
        return torch.rand(example.shape, generator=generator)
    return torch.randint(model.vocab_size, example.shape, generator=generator)
