"""What figures share: labels that do not overlap, formats by the ending, curves that leave the picture."""

from math import log2
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinformer.lab.drawing.plots import Curve, _exit, _range, check, plot_lengths, spread
from kinformer.runtime.errors import KinformerError


@given(heights=st.lists(st.floats(-5, 5), max_size=8), gap=st.floats(0.01, 1))
def test_labels_lie_apart_in_their_order(heights, gap):
    placed = spread(heights, gap)
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    for lower, upper in zip(order, order[1:], strict=False):
        assert placed[upper] - placed[lower] >= gap - 1e-9
    assert sum(placed) == pytest.approx(sum(heights), abs=1e-6)


def test_labels_that_are_apart_stay():
    assert spread([3.0, 1.0, 2.0], 0.5) == [3.0, 1.0, 2.0]


def test_where_a_curve_leaves_the_picture():
    assert _exit(((128, 2.0), (256, 2.5)), high=3.0) is None
    assert _exit(((128, 2.0), (256, 4.0)), high=3.0) == pytest.approx(7.5)
    assert _exit(((128, 5.0), (256, 6.0)), high=3.0) == log2(128)


def test_the_picture_ends_above_what_is_reached_at_the_training_length():
    points = (((128, 2.0), (256, 1.9)), ((128, 2.2), (256, 9.0)))
    curves = [Curve(name="", trained=128, lengths=each, positions=each) for each in points]
    low, high = _range(curves, points)
    assert 1.8 < low < 1.9 and 2.2 * 1.4 < high < 3.2
    assert _range(curves[:1], points[:1])[1] < 2.1


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    points = ((16, 2.0), (32, 2.5))
    for name in ("a.png", "deep/b.svg"):
        curves = [Curve(name=each, trained=16, lengths=points, positions=points) for each in ("one", "$x_1^{2 $")]
        plot_lengths(curves, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    for name, told in (("c.gif", "in '.gif'"), ("none", "ends in .png or .svg")):
        with pytest.raises(KinformerError, match=told):
            check(tmp_path / name)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(KinformerError, match="is a folder"):
        check(Path(tmp_path / "folder.png"))
