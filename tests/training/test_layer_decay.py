"""Layer-wise decay of the learning rate: the factor of every parameter, by hand, and steps of every optimiser."""

from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from kinformer.family.build import build
from kinformer.lab.training.optimisers import Optimiser, rate_factors
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from tests.training.tiny import gap, rewound, train


def factors(member, **changes):
    model = build(member, "tiny", None if member in ("vit", "swin") else 23, set=changes)
    found = rate_factors(model, 0.5)
    return {name: found.get(parameter, 1.0) for name, parameter in model.named_parameters()}


def beginning(named, prefix):
    return {value for name, value in named.items() if name.startswith(prefix)}


def test_factors_fall_from_the_head_to_the_input_as_in_beit():
    named = factors("vit", layers=3)
    # BEiT's assigner: decay^(L + 1 - id), the embedding 0, block i (from 0) i + 1, the rest L + 1
    assert [beginning(named, f"stack.layers.{number}.") for number in range(3)] == [{0.125}, {0.25}, {0.5}]
    assert beginning(named, "input.") == {0.0625}
    assert beginning(named, "head.") == beginning(named, "norm.") == {1.0}


def test_merges_of_patches_belong_to_the_layer_before():
    named = factors("swin")
    assert [beginning(named, f"stack.layers.{number}.") for number in range(4)] == [{0.0625}, {0.125}, {0.25}, {0.5}]
    assert beginning(named, "stack.merges.0.") == {0.125}
    assert beginning(named, "embedding_norm.") == {0.03125}


def test_tied_tables_and_shared_parts_and_two_stacks():
    assert factors("gpt")["input.embedding.weight"] == 0.125
    named = factors("t5")
    assert beginning(named, "stack.shared.") == {1.0}
    named = factors("vanilla")
    for side in ("", "encoder."):
        assert [beginning(named, f"{side}stack.layers.{number}.") for number in range(2)] == [{0.25}, {0.5}]


def test_a_model_without_layers_is_refused():
    with pytest.raises(KinformerError, match="does not have a stack of layers"):
        rate_factors(nn.Linear(2, 2), 0.5)
    with pytest.raises(KinformerError, match="layer_decay"):
        Settings(layer_decay=1.5)


@pytest.mark.parametrize("kind", get_args(get_type_hints(Settings)["optimizer"]))
def test_every_optimiser_moves_layers_by_their_factor(kind):
    """A first step, whose length is the learning rate times something that no rate changes; without weight decay."""
    moved = []
    for decay in (1.0, 0.5):
        torch.manual_seed(0)
        model = build("pkm" if kind == "adamw" else "gpt", "tiny", 23, set={"layers": 2} if kind != "adamw" else {})
        optimiser = Optimiser(model, Settings(optimizer=kind, layer_decay=decay, weight_decay=0.0))
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        tokens = torch.randint(23, (2, 7), generator=torch.Generator().manual_seed(1))
        model(tokens)[0].square().sum().backward()
        optimiser.step(1e-3)
        moved.append({name: parameter.detach() - before[name] for name, parameter in model.named_parameters()})
    factor = rate_factors(model, 0.5)
    for name, parameter in model.named_parameters():
        want = factor.get(parameter, 1.0) * moved[0][name]
        torch.testing.assert_close(moved[1][name], want, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_resumed_run_ends_with_the_same_weights(kind, tmp_path, text_file):
    from kinformer.lab.data import open_corpus

    corpus, options = open_corpus(str(text_file)), {"optimizer": kind, "layer_decay": 0.7}
    train(corpus, tmp_path / "once", **options)
    rewound(tmp_path / "once", tmp_path / "twice")
    train(corpus, tmp_path / "twice", **options)
    assert gap(tmp_path / "once", tmp_path / "twice") == 0
