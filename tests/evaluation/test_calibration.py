"""Learn then Test: closed forms, the order of the test, and how often the bound holds over many draws."""

from itertools import combinations
from math import comb, exp, log

import numpy as np
import pytest

from kinformer.lab.calibration.risk import (
    chosen,
    dissimilarity,
    fixed_sequence,
    grid,
    p_value,
    samples_needed,
)


def test_p_values_are_their_formulas():
    assert p_value(0.02, 600, 0.05, "hoeffding") == pytest.approx(exp(-2 * 600 * 0.03**2))
    tail = sum(comb(600, k) * 0.05**k * 0.95 ** (600 - k) for k in range(13))
    kl = 0.02 * log(0.02 / 0.05) + 0.98 * log(0.98 / 0.95)
    assert p_value(0.02, 600, 0.05, "bentkus") == pytest.approx(min(exp(-600 * kl), exp(1) * tail))
    assert p_value(0.0199, 600, 0.05, "bentkus") <= p_value(0.02, 600, 0.05, "bentkus")
    for bound in ("hoeffding", "bentkus"):
        assert p_value(0.05, 600, 0.05, bound) == p_value(0.9, 600, 0.05, bound) == 1.0
        needed = samples_needed(0.05, 0.05, bound)
        assert p_value(0.0, needed, 0.05, bound) <= 0.05 < p_value(0.0, needed - 1, 0.05, bound)
    assert samples_needed(0.05, 0.05, "hoeffding") == 600 and samples_needed(0.05, 0.05, "bentkus") == 59


def test_thresholds_fall_to_zero_and_are_closer_near_one():
    found = grid(24)
    assert found[0] == pytest.approx(0.999) and found[-1] == 0 and len(found) == 24
    gaps = -np.diff(found)
    assert (gaps > 0).all() and (np.diff(gaps) > 0).all()


def test_the_test_ends_with_the_first_failure_and_chooses_the_one_before():
    """Later thresholds are not looked at, even where they would pass."""
    risks = {0.9: 0.0, 0.8: 0.01, 0.7: 0.2, 0.6: 0.0}
    asked = []

    def risk(threshold):
        asked.append(threshold)
        return risks[threshold]

    tested = fixed_sequence(list(risks), risk, 2000, 0.05, 0.05)
    assert asked == [0.9, 0.8, 0.7] and chosen(tested, 0.05) == (0.8, 0.01, p_value(0.01, 2000, 0.05, "bentkus"))
    assert chosen(fixed_sequence([0.7, 0.9], risk, 2000, 0.05, 0.05), 0.05) is None
    assert chosen(fixed_sequence([0.9, 0.8], risk, 2000, 0.05, 0.05), 0.05)[0] == 0.8


@pytest.mark.parametrize("bound", ["bentkus", "hoeffding"])
def test_the_chosen_threshold_is_seldom_too_risky(bound):
    """Losses whose true mean grows as the threshold falls: a risk above delta is chosen in at most epsilon of draws."""
    draw, delta, epsilon, samples = np.random.default_rng(0), 0.1, 0.1, 300
    true = {threshold: 0.2 * (1 - threshold) for threshold in np.linspace(1, 0, 21)}
    wrong, found = 0, []
    for _ in range(200):
        tested = fixed_sequence(
            list(true), lambda t: float((draw.random(samples) < true[t]).mean()), samples, delta, epsilon, bound
        )
        found.append(true[chosen(tested, epsilon).threshold])
        wrong += found[-1] > delta
    assert wrong / 200 <= epsilon and np.mean(found) > 0.02


def test_dissimilarity_is_one_minus_the_longest_common_subsequence():
    draw = np.random.default_rng(0)
    left, right = draw.integers(3, size=(2, 20, 6))

    def common(a, b):
        parts = (
            size for size in range(6, 0, -1) for some in combinations(a, size) if some in set(combinations(b, size))
        )
        return next(parts, 0)

    want = [1 - common(tuple(a), tuple(b)) / 6 for a, b in zip(left, right, strict=True)]
    assert np.allclose(dissimilarity(left, right), want) and len(set(want)) > 2
    assert not dissimilarity(left, left).any() and (dissimilarity(left, left + 9) == 1).all()


def test_dissimilarity_of_sequences_of_unlike_length_is_by_the_f_measure():
    left, right = [[1, 2, 3], [], [4], []], [[2, 3, 4, 5], [7], [4], []]
    assert np.allclose(dissimilarity(left, right), [1 - 2 * 2 / 7, 1, 0, 0])
    assert np.allclose(dissimilarity(right, left), dissimilarity(left, right))
