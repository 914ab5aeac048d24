from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kinformer.lab.data import listops
from kinformer.lab.data.listops import SYMBOLS, examples, open_listops, spell
from kinformer.runtime.errors import KinformerError

NUMBER = 1500


@pytest.fixture(scope="module")
def drawn() -> tuple[list[np.ndarray], np.ndarray]:
    return examples(NUMBER, seed=3)


def value_of(text: str) -> tuple[int, int]:
    """What a tree computes and how deep it is, read from its text with a stack."""
    stack: list[list[object]] = [[]]
    deepest = 1
    for word in text.split():
        if word == "]":
            name, *values = stack.pop()
            assert 2 <= len(values) <= 10
            stack[-1].append(apply(str(name), [int(str(value)) for value in values]))
        elif word.isdigit():
            stack[-1].append(int(word))
        else:
            stack.append([word])
        deepest = max(deepest, len(stack) - 1)
    ((answer,),) = stack
    return int(str(answer)), deepest


def apply(name: str, values: list[int]) -> int:
    if name == "[MED":
        return int(np.median(values))
    return {"[MIN": min(values), "[MAX": max(values), "[SM": sum(values) % 10}[name]


def test_a_tree_that_one_can_check_by_hand() -> None:
    assert value_of("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]") == (5, 2)


def test_values_are_those_of_another_evaluator(drawn: tuple[list[np.ndarray], np.ndarray]) -> None:
    trees, values = drawn
    told = [value_of(spell(tree)) for tree in trees]
    assert [value for value, _ in told] == values.tolist()
    assert max(depth for _, depth in told) == 9, "what stands ten nodes deep is a digit"


def test_lengths_symbols_and_skew_are_those_of_the_arena(drawn: tuple[list[np.ndarray], np.ndarray]) -> None:
    trees, values = drawn
    lengths = np.array([len(tree) for tree in trees])
    assert lengths.min() > 500 and lengths.max() < 2000 and lengths.mean() == pytest.approx(1061, rel=0.05)
    assert set(np.concatenate(trees).tolist()) == set(range(len(SYMBOLS)))
    shares = np.bincount(values, minlength=10) / NUMBER
    assert shares[[0, 9]] == pytest.approx(0.17, abs=0.03) and shares[1:9].max() < 0.13
    assert len({tree.tobytes() for tree in trees}) == NUMBER


def test_an_eighth_of_all_roots_is_kept_less_a_third() -> None:
    levels = listops._grow(np.random.default_rng(0), 2000)
    sizes, _ = listops._fold(levels)
    kept = ((sizes[0] > 500) & (sizes[0] < 2000)).mean()
    assert 1 / kept == pytest.approx(12.1, rel=0.1)
    assert (levels[0].symbol >= 10).mean() == pytest.approx(0.25, abs=0.02)
    operators = levels[1].arity[levels[1].symbol >= 10]
    assert set(operators.tolist()) - {0} == set(range(2, 11))


def test_a_seed_gives_the_same_trees_and_more_begin_with_fewer(drawn: tuple[list[np.ndarray], np.ndarray]) -> None:
    fewer, values = examples(40, seed=3)
    assert all(np.array_equal(one, other) for one, other in zip(fewer, drawn[0], strict=False))
    assert np.array_equal(values, drawn[1][:40])
    other, _ = examples(40, seed=4)
    assert not any(np.array_equal(one, two) for one, two in zip(fewer, other, strict=True))


def test_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_listops(80, cache=tmp_path)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 80, "validation": 10, "test": 10}
    assert data.classes == tuple("0123456789") and data.vocab_size == 15
    everything = [split.tokens(index).tobytes() for split in data.splits.values() for index in range(len(split))]
    assert len(set(everything)) == 100
    with monkeypatch.context() as patched:
        patched.setattr(listops, "examples", None)
        again = open_listops(80, cache=tmp_path)
    assert isinstance(again.splits["train"].ids, np.memmap)
    assert np.array_equal(again.splits["test"].ids, data.splits["test"].ids)
    for index in (0, 9):
        assert value_of(spell(again.splits["test"].tokens(index)))[0] == again.splits["test"].labels[index]
    with pytest.raises(KinformerError, match="8 or more"):
        open_listops(7, cache=tmp_path)
    short = open_listops(40, (20, 200), cache=tmp_path)
    assert short.splits["train"].lengths.min() > 20 and short.splits["train"].lengths.max() < 200
    for bounds in ((100, 120), (-1, 500), (5000, 6000), (9, 3)):
        with pytest.raises(KinformerError, match="is not a range to draw from"):
            open_listops(40, bounds, cache=tmp_path)
