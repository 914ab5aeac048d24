"""The estimate of a step with gradient checkpointing against the tensors that are alive in a real one."""

from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from kinformer.family.build import configure
from kinformer.kernels.attention import TABLE
from kinformer.lab.cli.studying import Estimate
from kinformer.lab.estimation.estimate import Live, estimate
from kinformer.lab.estimation.parts import outputs
from kinformer.runtime.compiling import unallocated

from .test_estimate import IN_TILES

WINDOW = '{"kind": "local", "window": 40}'
CONFIGS = {
    name: configure(name.split(",")[0], "tiny", 64, {"stack.checkpoint": True, **changes})
    for name, changes in {
        "gpt": {"layers": 5},
        "gpt, window": {"layers": 6, "layers.*.mixer.pattern": WINDOW},
        "gpt, dropout": {"layers": 5, "layers.*.dropout": 0.1},
        "rope, unlike": {"layers": 6, "layers.*.mixer.pattern": WINDOW, "layers.3.mixer.pattern": "causal"},
        "linear-transformer": {"layers": 6},
        "fast-weights": {"layers": 4},
        "post-ln": {"layers": 1},
        "macaron": {"layers": 5},
        "bert": {"layers": 5},
        "longformer": {"layers": 5},
    }.items()
}
estimated = cache(estimate)
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def alive(config, batch, length, autocast=False):
    """The most bytes that are alive in a step, weights and gradients apart, when the state is dropped in between; of
    attention in tiles, as an estimate leaves out the probabilities of short rows."""
    model, tokens = config.build(), torch.zeros(batch, length, dtype=torch.int64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weights = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), tokens]
    with patch.dict(TABLE, IN_TILES), Live(weights) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits, state = outputs(model, tokens)
            loss = cross_entropy(logits.flatten(0, 1), tokens.flatten())
        del logits, state
        loss.backward()
    return live.peak


def activations(config, **options):
    return estimated(config, **options).memory["train"]["activations"]


@pytest.mark.parametrize(
    ("name", "batch", "length"),
    [(name, 2, 100) for name in CONFIGS] + [(name, 3, 64) for name in ("gpt", "linear-transformer", "bert")],
)
def test_activations_are_the_most_that_is_alive(name, batch, length):
    config = CONFIGS[name]
    want = alive(config, batch, length)
    assert activations(config, length=length, batch=batch) == pytest.approx(want, rel=0.15)


@pytest.mark.parametrize("depth", [1, 5, 12])
def test_activations_under_autocast(depth):
    config = CONFIGS["gpt"].replace(layers=CONFIGS["gpt"].layers[:1] * depth)
    want = alive(config, 4, 100, autocast=True)
    assert activations(config, length=100, batch=4, precision="bf16-mixed") == pytest.approx(want, rel=0.15)


def test_live_counts_views_once_and_forgets_what_is_gone():
    with Live([]) as live:
        x = torch.zeros(100)
        y = x.view(10, 10)[2:]
        assert live.now == 400
        z = y + 1
        assert live.now == live.peak == 400 + 320
        del x, y
        assert live.now == 320
        z += 1
        assert live.now == 320 and live.peak == 720


@each_config
def test_flops_are_those_of_the_counter(config):
    result = estimated(config, length=100, batch=2)
    with unallocated():
        model, tokens = config.build(), torch.zeros(2, 100, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        outputs(model, tokens)[0].sum().backward()
    assert result.flops_step == counter.get_total_flops()
    assert (
        result.flops_step
        > estimate(config.replace(stack=config.stack.replace(checkpoint=False)), length=100, batch=2).flops_step
    )


def test_long_lengths_are_continued_exactly():
    config = CONFIGS["gpt, window"].replace(position=configure("rope", "tiny").position)
    assert activations(config, length=4096 + 128) == pytest.approx(
        activations(config, length=2048 + 128) * 4224 / 2176, rel=0.05
    )


def test_command_shows_the_row(capsys):
    assert Estimate(member="rope", recipe="tiny", set={"stack.checkpoint": True, "layers": 8}, batch_size=4).run() == 0
    assert "checkpoints" in capsys.readouterr().out
    fewer, more = (configure("rope", "tiny", set={"layers": 8, "stack.checkpoint": on}) for on in (True, False))
    assert activations(fewer, length=512) < activations(more, length=512) / 3
