"""Associative retrieval: the answers are those of a dictionary that is written step by step."""

import runpy
from pathlib import Path

import pytest
import torch

from kinformer.runtime.errors import KinformerError

TASK = Path(__file__).parents[2] / "benchmarks" / "associative.py"
AssociativeRetrieval = runpy.run_path(str(TASK))["AssociativeRetrieval"]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("num_keys", [1, 2, 17])
def test_targets_are_what_a_dictionary_holds(num_keys, replace):
    keys, values, queries, targets = AssociativeRetrieval(num_keys, replace, seed=3).batch(11, num_queries=5)
    for row in range(11):
        memory = dict(zip(keys[row].tolist(), values[row].tolist(), strict=True))
        assert [memory[query] for query in queries[row].tolist()] == targets[row].tolist()


def test_without_replacement_keys_and_values_are_permutations():
    keys, values, queries, targets = AssociativeRetrieval(9).batch(6)
    every = torch.arange(9).expand(6, 9)
    assert torch.equal(keys.sort(dim=1).values, every)
    assert torch.equal(values.sort(dim=1).values, every)
    assert queries.shape == targets.shape == (6, 1)


def test_with_replacement_older_values_are_wrong():
    keys, values, queries, targets = AssociativeRetrieval(8, replace=True).batch(200)
    assert keys.shape == values.shape == (200, 16)
    first = (keys == queries).to(torch.int8).argmax(dim=1, keepdim=True)
    assert (values.gather(1, first) != targets).float().mean() > 0.3
    assert len(keys.unique()) == len(values.unique()) == 8


def test_every_position_is_asked():
    task = AssociativeRetrieval(5, seed=1)
    keys, _, queries, _ = task.batch(400)
    counts = torch.bincount((keys == queries).to(torch.int8).argmax(dim=1), minlength=5)
    assert counts.min() > 40


def test_own_generator_decides_everything():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, second = AssociativeRetrieval(6, seed=7), AssociativeRetrieval(6, seed=7)
    for _ in range(2):
        for left, right in zip(first.batch(3, 2), second.batch(3, 2), strict=True):
            assert torch.equal(left, right)
    assert torch.equal(torch.random.get_rng_state(), before)
    other = AssociativeRetrieval(6, seed=8).batch(3, 2)
    assert not torch.equal(other.keys, AssociativeRetrieval(6, seed=7).batch(3, 2).keys)


def test_no_keys_is_an_error():
    with pytest.raises(KinformerError, match="num_keys is 0, expected 1 or more"):
        AssociativeRetrieval(0)
