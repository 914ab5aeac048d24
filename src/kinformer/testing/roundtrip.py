"""The check that configs and weights survive a file: they come back as they were written, and compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, save

from kinformer.core.config import Config, Kinds, from_dict, to_dict
from kinformer.testing.errors import ContractError
from kinformer.testing.subject import MixerSubject, Subject


def verify_config(
    config: Config, kinds: Kinds, *, dim: int = 16, subject: Callable[[Any], Subject] | None = None
) -> None:
    """Check that ``config`` survives JSON, and the weights of its module survive safetensors into a fresh build,
    exactly.

    ``subject`` says how to build and run a config; by default it is that of a mixer, ``config.build(dim)``.
    Raises :class:`ContractError` with the check ``"config"`` or ``"weights"``.
    """
    text = json.dumps(to_dict(config))
    restored = from_dict(type(config), json.loads(text), kinds)
    if restored != config:
        raise ContractError("config", f"{text} is read back as {restored!r} instead of {config!r}.")

    describe = subject or (lambda item: MixerSubject(lambda: item.build(dim), dim=dim))
    here, there = describe(config), describe(restored)
    written = here.build()
    fresh = there.make().double().eval()
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in written.state_dict().items()}
    fresh.load_state_dict(load(save(weights)))
    inputs = here.inputs(here.batch, here.time, seed=81)
    with torch.no_grad():
        want, _ = here.run(written, inputs, here.start(written, here.batch))
        got, _ = there.run(fresh, inputs, there.start(fresh, here.batch))
    if not torch.equal(got, want):
        gap = float((got - want).abs().max())
        raise ContractError("weights", f"outputs of a fresh build with the same weights differ by {gap:.3g}, not by 0.")
