"""Trained by transformers, an exported model minimises what its own training does, auxiliary losses included."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from kinformer.core.config import to_dict
from kinformer.family.build import configure
from kinformer.interop.auto import KinformerConfig, KinformerForCausalLM, KinformerForMaskedLM
from kinformer.lab.tasks.next_token import NextTokenLoss, TokenBatch
from kinformer.lab.training.data_module import ObjectiveModule
from tests.interop.decoders import assert_close

MEMBERS = ("mixtral", "routing", "adaptive-span")
"""With an auxiliary loss of experts, with one in the state, and with one there and a penalty."""


def theirs_of(member, use=KinformerForCausalLM, **changes):
    """The member in the class of transformers, in training."""
    torch.manual_seed(0)
    config = configure(member, "tiny", 64, changes)
    return use(KinformerConfig(composition=to_dict(config), member=member)).train()


def own_costs(model, ids):
    """What a run's trainer adds to the loss of predicting tokens."""
    loss, metrics, _ = ObjectiveModule(model, NextTokenLoss(), "fp32")(TokenBatch(ids), None, 0.0)
    return loss - metrics["nats"] / metrics["predicted"]


def task_loss(logits, ids):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("member", MEMBERS)
def test_a_loss_has_the_costs_of_the_models_own_training(member):
    theirs, ids = theirs_of(member), torch.randint(64, (3, 21))
    read = ids[:, :-1]
    output = theirs(read, labels=read)
    costs = output.loss - task_loss(output.logits, read)
    assert costs > 1e-5
    assert_close(costs, own_costs(theirs.model, ids), 1e-6)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in theirs.parameters() if parameter.requires_grad)
    evaluated = theirs.eval()(read, labels=read)
    assert_close(evaluated.loss, task_loss(evaluated.logits, read), 1e-6)


@pytest.mark.parametrize("member", MEMBERS)
def test_micro_batches_of_a_step_add_up_to_the_batch(member):
    theirs, ids = theirs_of(member), torch.randint(64, (4, 20))
    whole = theirs(ids, labels=ids).loss
    items = (4 * 20,)[0]
    parts = [theirs(part, labels=part, num_items_in_batch=torch.tensor(items)).loss for part in ids.split(2)]
    # transformers divides the sum over shifted labels by the number of all, of which each row's first is no target
    missing = task_loss(theirs(ids).logits, ids) / 20
    assert_close(sum(parts) + missing, whole, 1e-5)


def test_a_cache_that_was_read_before_counts_once():
    theirs, ids = theirs_of("routing"), torch.randint(64, (2, 24))
    before = theirs(ids[:, :12], use_cache=True)
    name = next(one for one in ("cache", "past_key_values") if one in before)
    costs = [
        output.loss - task_loss(output.logits, part)
        for part, output in ((ids, theirs(ids, labels=ids)), (ids[:, :12], theirs(ids[:, :12], labels=ids[:, :12])))
    ]
    behind = theirs(ids[:, 12:], labels=ids[:, 12:], use_cache=True, **{name: before[name]})
    costs.append(behind.loss - task_loss(behind.logits, ids[:, 12:]))
    assert_close(costs[0], (costs[1] + costs[2]) / 2, 1e-6)


def test_an_encoder_has_the_costs_of_its_experts():
    experts = {"kind": "experts", "num_experts": 4, "topk": 1, "balance": 0.5}
    theirs = theirs_of("bert", KinformerForMaskedLM, **{"layers.*.feed_forward": experts})
    ids = torch.randint(1, 64, (3, 20))
    output = theirs(ids, labels=ids)
    costs = output.loss - cross_entropy(output.logits.flatten(0, 1), ids.flatten())
    assert 0.5 < costs / len(theirs.model.config.layers) < 2.0  # half of one at least, where loads are alike
