"""Random values of any input, such as token ids or images."""

import torch


def values_of(model, batch, time, seed=0):
    """Of ``batch`` rows and ``time`` positions, as ``model`` takes them: ids, or numbers from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    example = model.input.example(batch, time)
    if example.is_floating_point():
        return torch.rand(example.shape, generator=generator)
    return torch.randint(model.vocab_size, example.shape, generator=generator)


def ids(config, count):
    """``count``, as the vocab_size of a model of ``config``; None of one that reads no ids."""
    return count if hasattr(config.input, "vocab_size") else None
