"""Small images enlarged: what the encoder reads, bits per dimension over it, grids, mistakes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import kinformer
from kinformer.lab.cli.main import main
from kinformer.lab.data.images import floors, read_images, reduced
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.image import class_nats, shifted
from kinformer.lab.tasks.super_resolution import EnlargingSequences

TRAIN = ("train", "image-transformer", "--recipe", "tiny-super-resolution", "--steps", "2", "--batch-size", "4")
TRAIN += ("--validation-tokens", "300", "--threads", "1")
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "enlarging"
    assert main([*TRAIN, "--out", str(out)]) == 0
    return out


def picture(path):
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image)


def test_small_images_are_means_of_blocks():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)
    found = reduced(pixels, 2)
    assert found.shape == (3, 2, 3, 3) and found.dtype == np.uint8
    assert found[1, 1, 2, 0] == round(float(pixels[1, 2:4, 4:6, 0].mean()))


def test_counting_knows_the_small_image():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 2, (2000, 2, 2, 1), dtype=np.uint8).repeat(2, 1).repeat(2, 2) * 200
    counted = floors(blocks, blocks[:50], 2)
    assert counted["source"] < 0.15 < 0.4 < counted["neighbours"]


def test_a_run_is_measured_over_the_small_images(cli, run):
    config = open_run(run).config
    assert open_run(run).task.name == "super-resolution"
    assert (config.input.height, config.encoder.input.height, config.encoder.input.shifted) == (8, 2, False)
    code, told, _ = cli("evaluate", run, "--first", "5", "--json")
    model, pixels = kinformer.load(run), read_images("digits").test.pixels[:5]
    values, source = EnlargingSequences(config).of(pixels)
    assert torch.equal(source, torch.from_numpy(reduced(np.asarray(pixels), 4).reshape(5, 4).astype(np.int64)))
    with torch.no_grad():
        nats = class_nats(model(shifted(values), model.begin(source))[0], values)
        others = class_nats(model(shifted(values), model.begin(source.flip(0)))[0], values)
    told = json.loads(told)
    assert code == 0 and told["bits_per_dim"] == pytest.approx(float(nats.mean()) / np.log(2), abs=1e-5)
    assert told["source_size"] == [2, 2] and not torch.equal(nats, others)


def test_pictures_are_enlarged_side_by_side(cli, run, tmp_path):
    out = tmp_path / "large.png"
    code, told, err = cli("generate", run, "--enlarged", "2", "--samples", "3", "--temperature", "0", "--out", out)
    assert code == 0 and told.strip() == str(out) and "6 images of 2 pictures" in err, err
    sheet, whole = picture(out), read_images("digits").test.pixels[:2, ..., 0]
    assert sheet.shape == (2 * 81 + 1, 5 * 81 + 1)
    cells = [[sheet[1 + 81 * row :: 10][:8, 1 + 81 * column :: 10][:, :8] for column in range(5)] for row in (0, 1)]
    for line, image in zip(cells, whole):
        assert np.array_equal(line[4], image) and np.array_equal(line[1], line[2])
        assert np.array_equal(line[0][::4, ::4], reduced(image[None, ..., None], 4)[0, ..., 0])
    model, sequences = kinformer.load(run), EnlargingSequences(open_run(run).config)
    drawn = sequences.large.of(np.stack([line[1] for line in cells])[..., None])
    source = sequences.of(np.asarray(read_images("digits").test.pixels[:2])).source
    with torch.no_grad():
        logits, _ = model(shifted(drawn), model.begin(source))
    assert torch.equal(logits[..., :256].argmax(-1), drawn)


def test_one_small_picture_is_enlarged(cli, run, tmp_path):
    from PIL import Image

    Image.fromarray(np.array([[0, 200], [90, 30]], np.uint8)).save(tmp_path / "small.png")
    code, told, err = cli("generate", run, "--image", tmp_path / "small.png", "--samples", "2", "--json")
    assert code == 0 and json.loads(told)["images"] == 2, err
    assert picture(json.loads(told)["out"]).shape == (82, 3 * 81 + 1)
    Image.new("L", (20, 12), 77).save(tmp_path / "other.png")
    code, told, err = cli("generate", run, "--image", tmp_path / "other.png", "--json")
    assert code == 0 and picture(json.loads(told)["out"])[5, 5] == 77, err


def test_any_encoder_decoder_enlarges(cli, tmp_path):
    new = ("train", "vanilla", "--task", "super-resolution", "--recipe", "tiny", "--factor", "2", *TRAIN[4:])
    code, _, err = cli(*new, "--out", tmp_path / "run")
    config = open_run(tmp_path / "run").config
    assert code == 0 and (config.encoder.input.width, config.encoder.position.kind) == (4, "none"), err


def test_mistakes_are_one_sentence(cli, run, tmp_path):
    new = (*TRAIN, "--out", tmp_path / "run")
    for command, message in (
        ((*new, "--factor", "3"), "--factor 3: the images of digits have 8 x 8 pixels"),
        ((*new, "--factor", "1"), "--factor is 1"),
        ((*new, "--set", "encoder.input.height=3"), "--set encoder.input: is for images of 3 x 2 x 1"),
        (
            (*new, "--set", "encoder.input.shifted=true"),
            "--set encoder.input: is for images of 2 x 2 x 1, shifted true",
        ),
        ((*new, "--set", "input.shifted=false"), "--set input.shifted=false"),
        (("train", "gpt", "--task", "super-resolution", "--out", tmp_path / "run"), "gpt is causal"),
        (("generate", run, "--image", tmp_path / "none.png"), "none.png"),
        (("generate", run, "--out", "a.jpg"), "--out a.jpg: is not a name of a PNG"),
        (("generate", run, "--enlarged", "0"), "--enlarged is 0"),
    ):
        code, _, err = cli(*command)
        assert code == 2 and message in err and err.count("\n") == 1, err
        assert not (tmp_path / "run").exists()
