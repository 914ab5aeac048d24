"""A trained model converted to other mixers: outputs are learned before the model is, and the losses fall."""

import copy
import functools

import pytest
import torch

from kinformer.interop import Phase, convert, patched_layers
from kinformer.runtime.errors import KinformerError
from tests.interop.peers import MAIN, assert_equal, logits, new_model, tokens


def batches():
    """Counting by ones, twos and threes modulo 11."""
    time = torch.arange(24)
    return [torch.stack([(time * (1 + row % 3) + start) % 11 for row in range(6)]) for start in range(11)]


@functools.cache
def trained(kind):
    model, data = new_model(kind).train(), batches()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        ids = data[step % 11]
        optimiser.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimiser.step()
    return model.eval()


@pytest.mark.parametrize("kind", MAIN)
def test_transfer_and_fine_tuning_win_back_what_the_change_cost(kind):
    torch.manual_seed(0)
    done = convert(
        copy.deepcopy(trained(kind)),
        "linear-transformer",
        batches(),
        evaluation=batches()[:3],
        transfer=Phase(60, 1e-2),
        fine_tuning=Phase(40, 2e-3),
    )
    losses = done.losses
    assert list(losses) == ["before", "patched", "transferred", "fine_tuned"]
    assert losses["before"] < losses["fine_tuned"] < losses["transferred"] < losses["patched"]
    assert losses["fine_tuned"] < (losses["patched"] + 3 * losses["before"]) / 4
    assert all(last < 0.7 * first for first, last in zip(*done.errors.values(), strict=True))
    assert done.layers == tuple(patched_layers(done.model)) and not done.model.training


def test_an_exact_mixer_has_nothing_to_learn():
    model = trained("llama")
    done = convert(
        copy.deepcopy(model),
        "softmax",
        batches(),
        evaluation=batches()[:1],
        layers=[1],
        transfer=Phase(1, 1e-9),
        fine_tuning=Phase(0, 1e-3),
    )
    assert done.losses["patched"] == pytest.approx(done.losses["before"], rel=1e-4)
    assert done.errors["first"][0] < 1e-8
    assert_equal(logits(done.model, tokens(20) % 11), logits(model, tokens(20) % 11))


def test_frozen_weights_stay_and_padding_counts_for_nothing():
    model = trained("llama")
    masked = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches()]
    for batch in masked:
        batch["attention_mask"][:, :5] = 0
        batch["input_ids"] = batch["input_ids"].clone()
    other = [dict(batch, input_ids=batch["input_ids"].clone()) for batch in masked]
    for batch in other:
        batch["input_ids"][:, :5] = 3
    losses = []
    for data in (masked, other):
        torch.manual_seed(0)
        phases = {"transfer": Phase(3, 1e-2), "fine_tuning": Phase(3, 1e-3, trains="mixers")}
        done = convert(copy.deepcopy(model), "gated-deltanet", iter(data), evaluation=data[:2], layers=[2], **phases)
        losses.append(done.losses)
        before = dict(model.named_parameters())
        frozen = [name for name, _ in done.model.named_parameters() if "layers.2.self_attn" not in name]
        assert all(torch.equal(before[name], done.model.get_parameter(name)) for name in frozen)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_too_few_batches_and_senseless_phases_are_one_sentence():
    model = copy.deepcopy(trained("llama"))
    with pytest.raises(KinformerError, match="batches ended before the steps"):
        convert(model, "gated-deltanet", iter(batches()[:2]), evaluation=batches(), transfer=Phase(5, 1e-3))
    with pytest.raises(KinformerError, match="evaluation has no batch"):
        convert(model, "gated-deltanet", batches(), evaluation=[])
    with pytest.raises(KinformerError, match="lr = 0 above 0"):
        Phase(3, 0)
    with pytest.raises(KinformerError, match="trains is 'all'"):
        Phase(3, 1e-3, "all")
