"""The task mpp: colours by hand, what stands in place of a patch, how often, and fine-tuning."""

import numpy as np
import pytest
import torch

import kinformer
from kinformer.family.build import configure
from kinformer.family.table import MEMBERS
from kinformer.lab.data.images import read_images
from kinformer.lab.tasks.mae import (
    MASKED,
    MppBatch,
    PatchColours,
    colours_of,
    corrupted_patches,
    counted_colours,
    fitted_to_colours,
    predict_colours,
)
from kinformer.lab.tasks.table import TASKS
from kinformer.runtime.errors import KinformerError

QUICK = {"recipe": "tiny", "steps": 2, "batch_size": 4, "threads": 1, "device": "cpu", "quiet": True}
pytestmark = pytest.mark.usefixtures("cache")


def build(**changes):
    torch.manual_seed(0)
    changes = fitted_to_colours(configure("vit", "tiny"), None) | changes
    return kinformer.build("vit", recipe="tiny", set=changes).double().eval()


def batch_of(rows=3):
    images = torch.rand(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return MppBatch(images, *corrupted_patches(64, 0.5, np.arange(rows), 7))


def test_colours_by_hand():
    images = torch.zeros(1, 3, 4, 6, dtype=torch.uint8)
    images[0, 0, :2, :4] = 255  # red patches: the highest of eight levels
    images[0, 1, 2:, 4:] = 128  # 128 / 255 is above one half: level 4
    images[0, 2, 0, 0] = 255  # a sixteenth of a patch of 4 x 4, below an eighth
    assert colours_of(images[..., :4, :4], 4, 3).tolist() == [[4 - 1 + 1]]  # half of the patch is red: 0.5 is level 4
    assert colours_of(images, 2, 3).tolist() == [[7 + 64 * 2, 7, 0, 0, 0, 8 * 4]]
    assert colours_of(images, 4, 3).shape == (1, 2)  # the second patch has two columns inside
    assert colours_of(images.double() / 255, 4, 3).tolist() == colours_of(images, 4, 3).tolist()
    assert colours_of(images, 4, 3)[0, 1] == 8 * 2  # 128 / 255 of half of its pixels


def test_half_are_corrupted_eight_of_ten_of_them_masked():
    sources, corrupted = corrupted_patches(16, 0.5, np.arange(4000), 3)
    numbers = torch.arange(16)
    assert bool((corrupted.sum(1) == 8).all()) and bool((sources == numbers)[~corrupted].all())
    masked = (sources == MASKED)[corrupted].double().mean()
    kept = (sources == numbers)[corrupted].double().mean()
    assert abs(masked - 0.8) < 0.01 and abs(kept - 0.1) < 0.01  # 32,000 draws: four deviations are 0.009 and 0.007
    others = sources[corrupted & (sources >= 0) & (sources != numbers)].bincount(minlength=16)
    assert others.min() > 140 and others.max() < 260  # 200 of each
    again = corrupted_patches(16, 0.5, np.arange(7, 9), 3)
    assert torch.equal(again[0], sources[7:9]) and torch.equal(again[1], corrupted[7:9])


def test_what_stands_in_place_of_a_patch():
    """A masked patch is not seen; another patch is as if it stood in the image; without either it is the model."""
    model, batch = build(), batch_of(1)
    numbers = torch.arange(64)[None]
    plain = predict_colours(model, batch._replace(sources=numbers))
    torch.testing.assert_close(plain, model(batch.images), rtol=0, atol=1e-12)

    exchanged = numbers.clone()
    exchanged[0, 5] = 20
    images = batch.images.clone()
    images[:, :, 0:4, 20:24] = batch.images[:, :, 8:12, 16:20]  # patch 20 stands in row 2, column 4
    got = predict_colours(model, batch._replace(sources=exchanged))
    torch.testing.assert_close(got, model(images), rtol=0, atol=1e-12)
    assert (got - plain).abs().max() > 1e-6

    exchanged[0, 5] = MASKED
    want = predict_colours(model, batch._replace(sources=exchanged))
    images[:, :, 0:4, 20:24] = 0.3
    assert torch.equal(predict_colours(model, batch._replace(sources=exchanged, images=images)), want)


def test_the_loss_is_that_of_corrupted_patches():
    model, batch = build(), batch_of()
    loss, metrics, _ = PatchColours()(model, batch, None, 0.0)
    logits, colours = predict_colours(model, batch), colours_of(batch.images, 4, 3)
    want = torch.nn.functional.cross_entropy(logits[batch.corrupted], colours[batch.corrupted])
    torch.testing.assert_close(loss, want)
    assert metrics["predicted"] == 3 * 32 and metrics["right"] <= 96
    loss.backward()
    assert model.head.mask.grad.abs().max() > 0


def test_a_classifier_begins_with_a_run(tmp_path):
    run = kinformer.train("vit", task="mpp", out=tmp_path / "mpp", **QUICK)
    metrics = kinformer.evaluate(run.folder, first=40).metrics
    assert 0 < metrics["bits_per_colour"] < 8 and 0 <= metrics["accuracy"] <= 1
    costs = counted_colours(read_images("digits"), run.model())
    assert abs(np.exp2(-costs).sum() - 1) < 1e-9 and len(costs) == 8
    tuned = kinformer.train("vit", init=str(run.folder), out=tmp_path / "classes", **(QUICK | {"recipe": None}))
    assert tuned.data["inherited"]["new"] == ["head.output.weight", "head.output.bias"]


@pytest.mark.parametrize(
    ("member", "options", "words"),
    [
        ("swin", {}, "merges patches"),
        ("vit", {"corrupted": 0.0}, "above 0 and at most 1"),
        ("vit", {"augment": "mixup"}, "mixup"),
        ("vit", {"set": {"head": "pooled"}}, "predicts no colours"),
        ("vit", {"set": {"head": {"kind": "patch_colours", "bits": 9}}}, "bits must be 1 to 8"),
    ],
)
def test_what_cannot_be_is_refused(member, options, words, tmp_path):
    with pytest.raises(KinformerError, match=words):
        kinformer.train(member, task="mpp", out=tmp_path / "run", **QUICK, **options)


@pytest.mark.parametrize("task", ["mae", "mpp"])
def test_pages_list_the_members_that_the_task_accepts(task, tmp_path):
    """Of all members that read patches, those of which the lists say so can be trained, and the others are refused."""
    record, accepted = TASKS[task], []
    for name, member in MEMBERS.items():
        config = member.recipes["tiny"](None)
        if not record.takes(config):
            assert not record.suits(config)
            continue
        try:
            kinformer.train(name, task=task, out=tmp_path / name, **(QUICK | {"steps": 1}))
            accepted.append(name)
        except KinformerError:
            pass
        assert (name in accepted) == record.suits(config), name
    assert {"vit", "deit"} <= set(accepted) and "swin" not in accepted
