"""The stack of some layers alone, each applied once, from which the cost of a whole stack is estimated."""

import pytest

from kinformer.core.stack import StackConfig
from kinformer.family.build import configure
from kinformer.lab.estimation.parts import distinct, layer_keys
from kinformer.stacks.reversible import Reversible
from kinformer.stacks.sequential import Stages, Universal


@pytest.mark.parametrize(
    ("stack", "layers", "want"),
    [
        (StackConfig(checkpoint=True), [0, 3], StackConfig(checkpoint=True)),
        (Universal.Config(steps=6), [0, 1], Universal.Config(steps=1)),
        (Reversible.Config(), [2], Reversible.Config()),
        (Stages.Config(depths=(2, 2, 6)), [0, 2, 3, 4], Stages.Config(depths=(1, 2, 1))),
    ],
)
def test_layers_that_are_selected_are_applied_once(stack, layers, want):
    assert stack.select(layers) == want
    assert want.uses(len(layers)) == tuple(range(len(layers)))


@pytest.mark.parametrize("name", ["swin", "universal", "reformer", "calm", "gpt"])
def test_the_model_of_distinct_layers_has_one_of_every_kind(name):
    config = configure(name, "tiny")
    single = distinct(config)
    assert layer_keys(single) == list(dict.fromkeys(layer_keys(config)))
    assert single.uses == single.layers
