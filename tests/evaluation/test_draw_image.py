"""What a trained model looks at in an image: roll-out of its attention, and the windows of its stages."""

import pytest
import torch

import kinformer
from kinformer.lab.cli.main import main
from kinformer.lab.drawing.options import DrawOptions
from kinformer.lab.drawing.pictures import HeatOver, WindowsOver
from kinformer.lab.drawing.runs import looked_at, rollout
from kinformer.mixers.encoders import apart
from kinformer.runtime.errors import KinformerError

SMALL = {"recipe": "tiny", "steps": 1, "batch_size": 4, "threads": 1, "device": "cpu", "validation_tokens": 64}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for member in ("vit", "deit", "swin", "hipt", "convformer"):
        kinformer.train(member, out=folder / member, task="vision", quiet=True, **SMALL)
    return folder


def looked(run, **options):
    return looked_at(DrawOptions(subject=str(run), image="digits", **options))


def test_rollout_is_the_product_of_means_with_the_residual():
    layers = torch.rand(2, 3, 4, 4).softmax(-1)
    want = torch.eye(4, dtype=torch.float64)
    for layer in layers.double():
        want = (layer.mean(0) + torch.eye(4)) / 2 @ want
    assert torch.allclose(rollout(list(layers)), want, atol=1e-6)


@pytest.mark.parametrize(
    ("member", "names"), [("vit", ["class token"]), ("deit", ["class token", "distillation token"])]
)
def test_each_token_before_the_patches_has_its_heat(runs, member, names):
    panels = looked(runs / member).content.over
    assert [panel.name for panel in panels] == [f"roll-out, {name}" for name in names]
    for panel in panels:
        assert isinstance(panel, HeatOver) and panel.values.mean() == pytest.approx(1) and panel.values.min() > 0


def test_regions_of_a_pyramid_have_the_shares_that_the_head_gives_them(runs):
    (panel,) = looked(runs / "hipt").content.over
    assert panel.name == "roll-out, gated mean" and (panel.patch, panel.values.shape) == (4, (2, 2))
    assert panel.values.mean() == pytest.approx(1) and panel.values.min() > 0


def test_windows_of_swin_meet_where_the_mixer_cuts_them(runs):
    panels = looked(runs / "swin").content.over
    assert panels and all(isinstance(panel, WindowsOver) for panel in panels)
    panel = WindowsOver(name="", patch=2, side=4, shift=2)
    assert panel.lines(16) == [4, 12]
    mask = apart((8, 8), 4, 2, torch.device("cpu"))
    assert not mask[-1].all() and mask[0].all()  # the last window holds parts from both ends of the image


def test_from_the_command_line(runs, tmp_path, capsys):
    out = tmp_path / "seen.png"
    assert main(["draw", str(runs / "vit"), "--image", "digits", "--out", str(out)]) == 0
    assert "roll-out, class token" in capsys.readouterr().out and out.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("member", "options", "told"),
    [
        ("convformer", {}, "draws attention between all patches"),
        ("vit", {"exits": True}, "exits: is not for image"),
        ("vit", {"image": "missing.png"}, "missing.png"),
    ],
)
def test_what_cannot_be_drawn(runs, member, options, told):
    with pytest.raises(KinformerError) as error:
        looked_at(DrawOptions(**{"subject": str(runs / member), "image": "digits"} | options))
    assert told in str(error.value)
