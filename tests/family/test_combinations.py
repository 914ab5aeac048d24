"""A sample of the combinations of parts keeps its laws or is refused when built (benchmarks/combinations.py: all)."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

from kinformer.family.kinds import kinds

PATH = Path(__file__).parents[2] / "benchmarks" / "combinations.py"
SAMPLES, SEED = 40, 0


def loaded():
    spec = importlib.util.spec_from_file_location("benchmarks_combinations", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


combinations = loaded()
FOUND = list(itertools.islice(combinations.combinations(SEED), SAMPLES))
LATENT = list(itertools.islice(combinations.latent_combinations(SEED), 12))


@pytest.mark.parametrize("number", range(SAMPLES))
def test_a_sample_keeps_its_laws_or_is_refused(number):
    """Padding and resets take turns, as either costs as much as the other laws together."""
    skip = (("padding",), ("reset",), ("padding", "reset"))[number % 3]
    outcome, why = combinations.verdict(FOUND[number], skip)
    assert outcome != "failed", f"{FOUND[number]}: {why}"


@pytest.mark.parametrize("number", range(len(LATENT)))
def test_a_sample_of_latent_attention_keeps_its_laws_or_is_refused(number):
    outcome, why = combinations.verdict(LATENT[number], (("padding",), ("reset",))[number % 2])
    assert outcome != "failed", f"{LATENT[number]}: {why}"


def test_most_of_the_sample_is_built_and_all_kinds_are_in_the_product():
    built = 0
    for found in FOUND:
        try:
            built += found.config().build() is not None
        except combinations.KinformerError as error:
            assert str(error).endswith(".")
    assert built > SAMPLES / 2
    every = list(itertools.islice(combinations.combinations(SEED), 5000))
    for slot in combinations.SLOTS:
        assert {each.parts[slot].kind for each in every} == set(kinds()[slot])
