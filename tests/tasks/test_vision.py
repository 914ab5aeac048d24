"""The task vision: images in, classes out, through train, evaluate and resume; the same rows whatever the processes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.core.config import override
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.lab.cli.main import main
from kinformer.lab.data import IGNORED, ImageData, Images
from kinformer.lab.tasks.options import AUGMENTATIONS, VisionOptions
from kinformer.lab.tasks.table import TASKS
from kinformer.lab.tasks.task import TrainingPlan
from kinformer.lab.tasks.vision import (
    ImageBatch,
    ImageClassification,
    ImageRows,
    calibration_error,
    chosen,
    fitted,
    moments,
)
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors

SMALL = {"recipe": "tiny", "batch_size": 16, "threads": 1, "device": "cpu", "quiet": True}
ALL = ",".join(AUGMENTATIONS)
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache):
    return kinformer.train("vit", out=tmp_path_factory.mktemp("vit") / "run", steps=60, lr=3e-3, **SMALL)


def test_it_learns_and_is_measured(run, tmp_path):
    found = kinformer.evaluate(run.folder)
    assert list(found.metrics) == ["accuracy", "bits_per_label", "calibration_error"]
    assert found.metrics["accuracy"] > 2 * found.baselines["guessing"]
    assert sum(each["images"] for each in found.facts["per_class"]) == 180 == found.facts["measured_images"]
    correct = sum(each["correct"] for each in found.facts["per_class"])
    assert found.metrics["accuracy"] == pytest.approx(correct / 180)
    table = tmp_path / "predictions.jsonl"
    assert kinformer.evaluate(run.folder, first=7, predictions=str(table)).facts["measured_images"] == 7
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert [row["item"] for row in rows] == list(range(1, 8)) and {"label", "class", "probability"} <= rows[0].keys()
    validated = kinformer.evaluate(run.folder, split="validation").metrics["accuracy"]
    assert validated == pytest.approx(run.metrics["accuracy"])


def test_the_model_is_fitted_to_the_images(run, digits):
    config = run.config
    assert (config.input.size, config.input.channels, config.input.patch, config.head.classes) == ((8, 8), 1, 2, 10)
    pixels = np.asarray(digits.train.pixels) / 255
    assert config.input.mean[0] == pytest.approx(pixels.mean(), abs=1e-5)
    assert config.input.std[0] == pytest.approx(pixels.std(), abs=1e-5)
    assert run.training["length"] == config.input.length == 17 and run.tokenizer is None


def test_from_the_command_line(tmp_path, capsys):
    flags = ["--recipe", "tiny", "--batch-size", "8", "--steps", "2", "--threads", "1"]
    assert main(["train", "vit", *flags, "--augment", ALL, "--out", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 2 and 0 <= told["validation_accuracy"] <= 1
    assert main(["evaluate", str(tmp_path / "run"), "--first", "20"]) == 0
    text = capsys.readouterr().out
    assert "calibration error" in text and "20 images" in text
    assert main(["train", "vit", "--help"]) == 0
    assert "--augment" in capsys.readouterr().out


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    options = SMALL | {"steps": 4, "checkpoint_every": 2, "keep": 3, "augment": ALL, "smoothing": 0.1}
    whole, cut = (kinformer.train("vit", out=tmp_path / name, **options) for name in ("whole", "cut"))
    newest = max((cut.folder / "checkpoints").iterdir())
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    again = kinformer.train("vit", out=tmp_path / "cut", resume=True, quiet=True)
    newest = [max((each.folder / "checkpoints").iterdir()) for each in (whole, again)]
    ends = [load_tensors(folder / "model.safetensors")[0] for folder in newest]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_an_encoder_of_text_reads_patches(tmp_path, digits):
    run = kinformer.train("longformer", task="vision", out=tmp_path / "run", steps=1, **SMALL)
    assert run.config.input.kind == "patches" and run.config.position.kind == "none"
    assert kinformer.load(run.folder)(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_training_goes_on_from_a_run(tmp_path, run):
    again = kinformer.train("vit", init=run.folder, out=tmp_path / "run", steps=1, lr=1e-12, **SMALL)
    assert again.config.input == run.config.input
    assert again.metrics["accuracy"] == pytest.approx(run.metrics["accuracy"])


def rows(data, **options):
    settings = Settings(batch_size=8, length=17, seed=3)
    return ImageRows(TrainingPlan(None, data, settings, VisionOptions(**options), None))


def test_processes_share_the_rows_of_a_step(digits):
    module = rows(digits, augment=ALL)
    for step in (0, 5):
        whole = module.batch(step, 0, 1)
        parts = [module.batch(step, rank, 2) for rank in range(2)]
        for name in ("images", "labels", "others", "shares"):
            assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))
        assert whole.size == 8 * 17 == sum(part.size for part in parts)
    images = torch.cat([each.images for each in module.validation(0, 1)])
    assert len(images) == module.held_out == len(digits.validation)
    labels = torch.cat([each.labels for rank in range(3) for each in module.validation(rank, 3)])
    assert (labels != IGNORED).sum() == module.held_out


def test_a_repeated_image_is_changed_anew_each_time(digits):
    plain, repeated = rows(digits, augment="crop"), rows(digits, augment="crop", repeats=2)
    batch = repeated.batch(3, 0, 1)
    count = len(batch.labels) // 2
    assert torch.equal(batch.labels[::2], batch.labels[1::2]) and not torch.equal(batch.images[::2], batch.images[1::2])
    order = torch.cat([plain.batch(step, 0, 1).labels for step in range(4)])
    assert torch.equal(batch.labels[::2], order[3 * count : 4 * count])
    with pytest.raises(KinformerError, match="where augment changes none"):
        VisionOptions(repeats=2)


def test_every_epoch_has_every_image_once(digits):
    module = rows(digits, label_share=0.02)
    count = len(module.chosen)
    assert 20 <= count < 40 and sorted(set(digits.train.labels[module.chosen])) == list(range(10))
    seen = [module.batch(step, 0, 1).images for step in range(count)]
    epochs = torch.cat(seen)[: 8 * count].flatten(1).reshape(8, count, -1)
    first = {tuple(image.tolist()) for image in epochs[0]}
    assert len(first) == count and all({tuple(image.tolist()) for image in epoch} == first for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    assert np.array_equal(chosen(digits.train, 0.02, 3), module.chosen)
    assert not np.array_equal(chosen(digits.train, 0.02, 4), module.chosen)


def test_mixed_images_have_both_labels():
    logits = torch.randn(4, 5, requires_grad=True)
    model = SimpleNamespace(training=True)
    labels, others, shares = torch.tensor([0, 1, 2, 3]), torch.tensor([4, 3, 2, 1]), torch.tensor([0.9, 0.2, 0.5, 0.6])
    batch = ImageBatch(torch.zeros(4, 1, 2, 2), labels, torch.ones(4, 1), others, shares)
    loss, metrics, _ = ImageClassification(0.1)(_calling(model, logits), batch, None, 0.0)
    target = shares[:, None] * functional.one_hot(labels, 5) + (1 - shares[:, None]) * functional.one_hot(others, 5)
    want = functional.cross_entropy(logits, 0.9 * target + 0.02)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    larger = torch.tensor([0, 3, 2, 3])
    assert metrics["correct"] == (logits.argmax(-1) == larger).sum() and metrics["predicted"] == 4


def _calling(model, logits):
    class Called:
        training = model.training

        def __call__(self, images):
            return logits

    return Called()


def test_calibration_error_is_the_gap_of_confidence_and_accuracy():
    sure, right = np.array([0.95, 0.95, 0.55, 1.0]), np.array([True, False, True, True])
    assert calibration_error(sure, right) == pytest.approx((2 * abs(0.95 - 0.5) + (1 - 0.55) + 0) / 4)
    assert calibration_error(np.ones(3), np.ones(3, bool)) == 0


def test_what_does_not_go_together(tmp_path, digits):
    for options, told in (
        ({"augment": "crop,turn"}, "augment: 'turn' is unknown"),
        ({"length": 20}, "length 20: rows of this data have 17 positions"),
        ({"tokenizer": "x.json"}, "tokenizer x.json: is for text, not for images"),
        ({"set": {"head.classes": 4}}, "does not tell the 10 classes"),
        ({"set": {"head": "masked_language"}}, "predicts token ids|does not tell the 10 classes"),
        ({"task": "mlm"}, "vit is an encoder that reads patches, whose tasks are vision"),
        ({"label_share": 0.0}, "label_share is 0"),
        ({"smoothing": 1.0}, "smoothing is 1"),
    ):
        with pytest.raises(KinformerError, match=told):
            kinformer.train("vit", out=tmp_path / "run", steps=1, **SMALL | options)
        assert not (tmp_path / "run").exists()
    unlabelled = tmp_path / "grey.npz"
    np.savez(unlabelled, images=np.zeros((30, 8, 8), np.uint8))
    with pytest.raises(KinformerError, match="has no classes to tell apart"):
        kinformer.train("vit", data=str(unlabelled), out=tmp_path / "run", steps=1, **SMALL)
    with pytest.raises(KinformerError, match="gpt is causal"):
        kinformer.train("gpt", task="vision", out=tmp_path / "run", steps=1, **SMALL)


def test_a_fitted_input_stays_as_it_is(digits):
    config = configure("vit", "tiny", set={"input.mean": (0.5,) * 3, "input.std": (0.5,) * 3})
    assert fitted(config, digits) == {"head.classes": 10}
    assert moments(digits)[1][0] > 0.3 and TASKS["vision"].length(digits, config) == 1 + 4


@pytest.mark.parametrize(
    ("side", "sides"), [(1000, (4, 16, 64)), (256, (4, 16, 64)), (128, (2, 8, 32)), (40, (2, 8, 32)), (8, (1, 4, 8))]
)
def test_a_pyramid_is_fitted_from_below(side, sides):
    """Patch, tile and region in pixels: as the recipe has them for 256 and more, in proportion for less."""
    images = Images(np.zeros((2, side, side + 3, 1), np.uint8), None, ("a", "b"), "train")
    data = ImageData("grey", "1", "1", {"train": images}, ())
    config = configure("hipt")
    config = override(config, fitted(config, data), kinds())
    lowest = config.input.encoder.input.encoder.input
    assert (lowest.patch, config.input.encoder.input.patch, config.input.patch) == sides
    assert config.input.size == (side, side + 3) and config.input.channels == 1 and config.head.classes == 2
    assert lowest.resize == "bicubic" and config.build()(torch.zeros(1, 1, 8, 8)).shape == (1, 2)


GRID = {"kind": "image_2d", "height": 4, "width": 4, "block_height": 2, "block_width": 2}
GRID |= {"flange_height": 1, "flange_width": 1, "masked": False, "by_rows": True}


def test_patches_see_the_blocks_around_theirs(tmp_path):
    """The pattern of an encoder of images is over its grid, or refused before anything is trained."""
    changes = {"input.class_token": False, "head.pooling": "mean", "layers.*.mixer.pattern": GRID}
    options = {"recipe": "tiny", "steps": 1, "batch_size": 2, "validation_tokens": 32, "threads": 1}
    run = kinformer.train("vit", out=tmp_path / "run", set=changes, **options)
    assert run.config.layers[0].mixer.pattern.by_rows
    for change in ({"input.class_token": True}, {"layers.*.mixer.pattern": GRID | {"height": 2}}):
        with pytest.raises(KinformerError, match="is not one of 4 x 4 patches"):
            kinformer.train("vit", out=tmp_path / "none", set=changes | change, **options)
    assert not (tmp_path / "none").exists()
