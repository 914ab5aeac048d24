"""What figures share: formats by the ending, and the range of the vertical axis."""

from pathlib import Path

import pytest

from kinformer.lab.drawing.plots import Curve, _range, check, plot_lengths
from kinformer.runtime.errors import KinformerError


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
