"""The t-test against published values, and Holm's correction."""

from math import inf

import pytest

from kinformer.lab.comparison.words import holm, two_sided, welch


@pytest.mark.parametrize(
    ("t", "degrees", "p"),
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (2.776, 4, 0.05), (3.169, 10, 0.01), (1.960, 1e6, 0.05), (0.0, 3, 1.0)],
)
def test_student_against_the_tables_of_text_books(t, degrees, p):
    assert two_sided(t, degrees) == pytest.approx(p, rel=2e-3)
    assert two_sided(-t, degrees) == two_sided(t, degrees)


def test_one_degree_of_freedom_is_cauchy():
    assert two_sided(1.0, 1) == pytest.approx(0.5)  # 1 - 2 atan(1) / pi


def test_welch_by_hand():
    # means 2 and 4, variances 1 and 4, of three each: t = -2 / sqrt(5/3), degrees = (5/3)^2 / ((1/9 + 16/9) / 2)
    found = welch([1, 2, 3], [2, 4, 6])
    assert (found.difference, found.t) == (-2, pytest.approx(-1.549193338))
    assert found.degrees == pytest.approx(25 / 9 / (17 / 18))
    assert 0.2 < found.p < 0.25


def test_no_spread_is_told_apart():
    assert welch([1.0], [2.0, 3.0]) is None
    assert welch([1.0, 1.0], [1.0, 1.0]).p == 1.0
    assert (welch([1.0, 1.0], [2.0, 2.0]).t, welch([1.0, 1.0], [2.0, 2.0]).p) == (inf, 0.0)


def test_holm_multiplies_and_never_falls():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
