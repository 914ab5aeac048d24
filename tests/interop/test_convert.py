"""A trained model converted to other mixers: outputs are learned before the model is, and the losses fall."""

import copy
import functools
import sys

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
    with pytest.raises(KinformerError, match="evaluation is empty"):
        convert(model, "gated-deltanet", batches(), evaluation=[])
    with pytest.raises(KinformerError, match="lr = 0 above 0"):
        Phase(3, 0)
    with pytest.raises(KinformerError, match="trains is 'all'.*LoraConfig"):
        Phase(3, 1e-3, "all")


@pytest.mark.parametrize("kind", MAIN)
def test_low_rank_updates_win_back_loss_and_are_all_that_changes(kind):
    pytest.importorskip("peft")
    done = []
    for steps in (0, 40):
        torch.manual_seed(0)
        options = {"evaluation": batches()[:3], "layers": [0, 1], "transfer": Phase(20, 1e-2)}
        phase = Phase(steps, 1e-2, trains="lora")
        done.append(
            convert(copy.deepcopy(trained(kind)), "linear-transformer", batches(), fine_tuning=phase, **options)
        )
    transferred, tuned = done
    losses = tuned.losses
    assert losses["transferred"] == transferred.losses["fine_tuned"]
    assert losses["fine_tuned"] < (losses["transferred"] + losses["before"]) / 2
    old, new = (dict(item.model.named_parameters()) for item in done)
    assert list(new) == list(old) and all(weight.requires_grad for weight in new.values())
    changes = {name: new[name] - old[name] for name in new if not torch.equal(new[name], old[name])}
    linear = [name for name in new if name.endswith(("inner.qkv.weight", "inner.out.weight"))]
    assert set(changes) == set(linear) and len(linear) == 4
    assert {int(torch.linalg.matrix_rank(change, rtol=1e-4)) for change in changes.values()} == {8}
    assert tuned.trained["fine_tuning"] == sum(8 * sum(old[name].shape) for name in linear)


def test_low_rank_updates_of_another_rank_and_place_are_a_config_of_peft():
    peft = pytest.importorskip("peft")
    model = trained("llama")
    done = convert(
        copy.deepcopy(model),
        "softmax",
        batches(),
        evaluation=batches()[:1],
        layers=[0],
        transfer=Phase(0, 1e-3),
        fine_tuning=Phase(5, 1e-2, trains=peft.LoraConfig(r=2, target_modules=["down_proj"])),
    )
    assert done.trained == {"transfer": 3 * 32 * 32, "fine_tuning": 3 * 2 * (32 + 48)}
    changed = {
        name
        for name, weight in done.model.named_parameters()
        if name in dict(model.named_parameters()) and not torch.equal(weight, model.get_parameter(name))
    }
    assert changed == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)}


def test_low_rank_updates_that_cannot_be_are_refused_before_the_transfer(monkeypatch):
    pytest.importorskip("peft")
    model = copy.deepcopy(trained("llama"))
    lora = {"evaluation": batches()[:1], "fine_tuning": Phase(1, 1e-3, trains="lora")}
    with pytest.raises(KinformerError, match="do not have linear layers that low-rank updates could adapt"):
        convert(model, "lstm", iter([]), **lora)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(KinformerError, match=r"LoRA needs peft .*pip install 'kinformer\[lora\]'"):
        convert(copy.deepcopy(trained("llama")), "linear-transformer", iter([]), **lora)
