"""Images on the command line: training, bits per dimension, grids, completions."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.config import override, to_dict
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.inputs.images import Pixels
from kinformer.lab.cli.main import main
from kinformer.lab.data.images import ImageData, Images, floors, read_images
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.image import Sequences, _labels, class_nats, grid, labelled, nats_of, shifted
from kinformer.lab.tasks.table import TASKS
from kinformer.lab.tasks.task import TrainingPlan
from kinformer.lab.training.settings import Settings
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError
from tests.members import CAUSAL

TINY = ["--task", "image", "--recipe", "tiny", "--steps", "3", "--batch-size", "4", "--threads", "1"]
SMALL = ["--validation-tokens", "300"]
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """An archive of 40 images of 4 x 6 pixels in three channels, whose second half of rows is the first again."""
    path = tmp_path_factory.mktemp("colours") / "colours.npz"
    upper = np.random.default_rng(0).integers(0, 4, (40, 2, 6, 3), dtype=np.uint8) * 80
    np.savez(path, images=np.concatenate([upper, upper], 1))
    return path


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "digits"
    assert main(["train", "linear-transformer", *TINY, *SMALL, "--out", str(out)]) == 0
    return out


def picture(path):
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image)


def test_training_says_bits_per_dimension(digits_run):
    run = open_run(digits_run)
    assert (run.task.name, run.training["length"], run.vocabulary) == ("image", 64, None)
    assert list(run.metrics) == ["bits_per_dim"] and 4 < run.metrics["bits_per_dim"] < 9
    input = run.config.input
    assert (input.kind, input.height, input.width, input.channels) == ("pixels", 8, 8, 1)
    assert run.config.position.kind == "none"
    assert run.data["identity"]["images"] == {"train": 1437, "validation": 180, "test": 180}


def test_every_value_is_scored_or_the_first_is_left_out(cli, digits_run):
    code, told, _ = cli("evaluate", digits_run, "--first", "6", "--json")
    told = json.loads(told)
    assert code == 0 and (told["images"], told["dimensions"], told["scored"]) == (6, 64, 64)
    model, images = kinformer.load(digits_run), read_images("digits").test.pixels[:6]
    values = torch.from_numpy(images.reshape(6, 64).astype(np.int64))
    with torch.no_grad():
        logits, _ = model(shifted(values))
    nats = -logits.log_softmax(-1).gather(-1, values[..., None])[..., 0]
    assert told["bits_per_dim"] == pytest.approx(float(nats.mean()) / np.log(2), abs=1e-5)
    code, found, _ = cli("evaluate", digits_run, "--first", "6", "--without-first", "--json")
    found = json.loads(found)
    assert code == 0 and found["scored"] == 63 and "bits_per_dim" not in found
    rest = float(nats[:, 1:].mean()) / np.log(2)
    assert found["bits_per_dim_without_first"] == pytest.approx(rest, abs=1e-5)
    code, text, _ = cli("evaluate", digits_run, "--first", "6", "--without-first")
    assert "bits per dimension without the first value of an image; 63 of 64 values" in text
    assert "histogram of every place" in text and "four neighbours, counted" in text


def test_a_grid_is_drawn_and_a_seed_decides_it(cli, digits_run, tmp_path):
    arguments = ("generate", digits_run, "--samples", "3", "--threads", "1", "--seed", "5")
    code, told, err = cli(*arguments, "--out", tmp_path / "a.png")
    assert code == 0, err
    assert told.strip() == str(tmp_path / "a.png") and "3 images in" in err and "bytes" in err and "seed 5" in err
    assert picture(tmp_path / "a.png").shape == (2 * 81 + 1, 2 * 81 + 1)
    _, told, _ = cli(*arguments, "--json")
    told = json.loads(told)
    assert told["out"] == str(digits_run / "samples.png") and told["state_bytes"] > 0 and told["drawn_values"] == 3 * 64
    assert np.array_equal(picture(told["out"]), picture(tmp_path / "a.png"))
    cli(*arguments[:-1], "6", "--out", tmp_path / "b.png")
    assert not np.array_equal(picture(tmp_path / "b.png"), picture(tmp_path / "a.png"))


def test_an_image_does_not_depend_on_those_beside_it(cli, digits_run, tmp_path):
    for count in (1, 4):
        cli("generate", digits_run, "--samples", count, "--seed", "2", "--out", tmp_path / f"{count}.png")
    one = picture(tmp_path / "1.png")
    assert np.array_equal(one[1:81, 1:81], picture(tmp_path / "4.png")[1:81, 1:81])


def test_completions_keep_the_first_rows(cli, digits_run, tmp_path):
    out = tmp_path / "c.png"
    code, _, err = cli(
        "generate", digits_run, "--complete", "digits", "--occluded", "2", "--rows", "3", "--samples", "2", "--out", out
    )
    assert code == 0, err
    assert picture(out).shape == (2 * 81 + 1, 4 * 81 + 1)
    cells = [
        [picture(out)[1 + 81 * line :: 10][:8, 1 + 81 * column :: 10][:, :8] for column in range(4)] for line in (0, 1)
    ]
    for line, whole in zip(cells, read_images("digits").test.pixels[:2, ..., 0]):
        veiled, first, second, last = line
        assert np.array_equal(last, whole)
        assert all(np.array_equal(each[:3], whole[:3]) for each in line)
        assert (veiled[3:] == 128).all() and not np.array_equal(first[3:], second[3:])


def test_one_picture_is_completed(cli, digits_run, tmp_path):
    from PIL import Image

    Image.fromarray(read_images("digits").test.pixels[0, ..., 0]).save(tmp_path / "one.png")
    code, told, _ = cli("generate", digits_run, "--complete", tmp_path / "one.png", "--samples", "2", "--json")
    assert code == 0 and json.loads(told)["images"] == 2 and json.loads(told)["drawn_values"] == 2 * 32
    Image.new("L", (9, 8)).save(tmp_path / "wide.png")
    code, _, err = cli("generate", digits_run, "--complete", tmp_path / "wide.png")
    assert code == 2 and "wide.png: has 9 x 8 pixels, but this model draws 8 x 8" in err


MISTAKES = {
    "prompt": (("--prompt", "x"), "--prompt: the task image continues no text"),
    "rows": (("--rows", "3"), "--rows 3: says how many rows of an image are kept"),
    "all rows": (("--complete", "digits", "--rows", "8"), "--rows 8: nothing is left to complete of 8 rows"),
    "tokens": (("--max-new-tokens", "3"), "--max-new-tokens 3: an image has a size"),
    "stop": (("--stop", "x"), "--stop x: an image has a size"),
    "no png": (("--out", "a.jpg"), "--out a.jpg: is not a name of a PNG"),
    "no file": (("--complete", "nothing.png"), "nothing.png"),
    "other data": (("--complete", "COLOURS"), "has images of 4 x 6 x 3, but this model draws 8 x 8 x 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_drawing_are_one_sentence(cli, digits_run, colours, name):
    given, message = MISTAKES[name]
    code, _, err = cli("generate", digits_run, *(str(colours) if each == "COLOURS" else each for each in given))
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--length", "100"), "--length 100: rows of this data have 64 positions"),
        (("--tokenizer", "t.json"), "is for text, not for images"),
        (("--data", "nothing"), "does not exist; give a folder"),
        (("--set", "input=tokens"), "vocab_size|needs the input pixels"),
        (("--set", "input.height=9"), "is for images of 9 x 8 x 1, but digits has 8 x 8 x 1"),
        (("--resize", "4"), "leave the size 4 out"),
        (("--resize", "0"), "--resize is 0"),
    ],
)
def test_mistakes_in_training_are_one_sentence(cli, tmp_path, given, message):
    code, _, err = cli("train", "gpt", *TINY, *given, "--out", tmp_path / "run")
    assert code == 2 and any(part in err for part in message.split("|")), err
    assert not (tmp_path / "run").exists()


def test_there_is_no_datastore_of_images(cli, digits_run, tmp_path):
    code, _, err = cli("index", digits_run, "--datastore", tmp_path / "store")
    assert code == 2 and "reads pixels, and a datastore is of text" in err


def test_options_of_images_are_not_for_text(cli, tmp_path):
    code, _, err = cli("train", "gpt", "--resize", "8", "--out", tmp_path / "run")
    assert code == 2 and "--resize 8: is for the task image, not for next-token" in err


@pytest.mark.parametrize(
    "more", [(), ("--set", "head=logistics"), ("--set", "head=logistics", "--set", "input.joint=true")]
)
def test_colours_with_every_head(cli, colours, tmp_path, more):
    out = tmp_path / "run"
    code, _, err = cli("train", "gpt", *TINY, *more, "--data", colours, "--out", out)
    assert code == 0, err
    positions = 24 if "input.joint=true" in more else 72
    assert open_run(out).training["length"] == positions
    code, told, _ = cli("evaluate", out, "--json")
    told = json.loads(told)
    assert code == 0 and told["dimensions"] == 72 and told["bits_per_dim"] > 0
    code, told, err = cli("generate", out, "--samples", "2", "--complete", colours, "--rows", "2", "--json")
    assert code == 0 and json.loads(told)["drawn_values"] == 4 * 2 * 36, err
    if more:
        code, _, err = cli("generate", out, "--top-k", "3")
        assert code == 2 and "--top-k 3: is for heads that give every value a probability" in err


def test_all_classes_are_drawn_in_turns_whatever_their_names():
    config = SimpleNamespace(input=Pixels.Config(classes=2))
    run = SimpleNamespace(config=config, data={"identity": {"classes": ["cat ", "a, b"]}})
    assert _labels(run, None, None, 3).tolist() == [0, 1, 0]
    with pytest.raises(KinformerError, match="class: 'dog' is unknown"):
        _labels(run, "dog", None, 3)


@pytest.fixture(scope="module")
def labelled_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "labelled"
    assert main(["train", "image-transformer", *TINY, *SMALL, "--conditional", "--out", str(out)]) == 0
    return out


def test_a_run_that_is_told_classes_is_measured_with_the_true_ones(cli, labelled_run):
    assert open_run(labelled_run).config.input.classes == 10
    code, told, _ = cli("evaluate", labelled_run, "--first", "6", "--json")
    model, test = kinformer.load(labelled_run), read_images("digits").test
    with torch.no_grad():
        model.input.classes.weight.normal_()
    values = torch.from_numpy(test.pixels[:6].reshape(6, 64).astype(np.int64))
    labels = torch.from_numpy(test.labels[:6].copy())
    read = torch.stack([shifted(values), labels[:, None].expand(-1, 64)], -1)
    assert torch.equal(labelled(shifted(values), labels), read)
    with torch.no_grad():
        nats = class_nats(kinformer.load(labelled_run)(read)[0], values)
        assert not torch.equal(model(read)[0], model(labelled(shifted(values), labels.flip(0)))[0])
    assert code == 0 and json.loads(told)["bits_per_dim"] == pytest.approx(float(nats.mean()) / np.log(2), abs=1e-5)


def test_images_of_a_class_are_drawn_and_completed(cli, labelled_run, tmp_path):
    code, told, err = cli("generate", labelled_run, "--label", "7,2", "--samples", "3", "--json")
    assert code == 0 and json.loads(told)["labels"] == ["7", "2", "7"], err
    _, told, _ = cli("generate", labelled_run, "--samples", "11", "--json")
    assert json.loads(told)["labels"] == [*map(str, range(10)), "0"]
    code, told, _ = cli("generate", labelled_run, "--complete", "digits", "--occluded", "2", "--samples", "2", "--json")
    true = [str(label) for label in read_images("digits").test.labels[:2]]
    assert code == 0 and json.loads(told)["labels"] == [true[0], true[0], true[1], true[1]]


def test_classes_that_are_missing_are_one_sentence(cli, labelled_run, digits_run, colours, tmp_path):
    from PIL import Image

    Image.fromarray(read_images("digits").test.pixels[0, ..., 0]).save(tmp_path / "one.png")
    new = ("train", "gpt", *TINY, "--out", tmp_path / "run")
    for command, message in (
        (("generate", labelled_run, "--label", "cat"), "--label cat: class: 'cat' is unknown"),
        (("generate", digits_run, "--label", "3"), "--label 3: this model draws images of no class"),
        (
            ("generate", labelled_run, "--complete", tmp_path / "one.png"),
            "does not have a class; give --label NAME too",
        ),
        ((*new, "--conditional", "--data", colours), "--conditional: colours.npz does not have classes"),
        ((*new, "--set", "input.classes=3"), "--set input.classes=3: but digits has 10 classes"),
    ):
        code, _, err = cli(*command)
        assert code == 2 and message in err and err.count("\n") == 1, err


def test_blocks_follow_the_sizes_of_the_data(cli, colours, tmp_path):
    out = tmp_path / "run"
    code, _, err = cli(
        "train", "image-transformer", *TINY[:2], "--recipe", "tiny-2d", *TINY[4:], "--data", colours, "--out", out
    )
    assert code == 0, err
    input, pattern = open_run(out).config.input, open_run(out).config.layers[0].mixer.pattern
    assert (pattern.height, pattern.width) == (4, 18)
    assert (input.block_height, input.block_width) == (pattern.block_height, pattern.block_width) == (2, 3)
    code, _, err = cli("generate", out, "--complete", colours, "--rows", "1")
    assert code == 2 and "this model draws blocks of 2 rows; keep a multiple of that" in err
    code, _, err = cli("generate", out, "--complete", colours, "--rows", "2", "--occluded", "1")
    assert code == 0, err
    code, _, err = cli("generate", out, "--occluded", "1")
    assert code == 2 and "--occluded 1: says how many are completed; give --complete DATA too" in err


def test_tables_that_a_head_cannot_share_are_one_sentence(cli, tmp_path):
    code, _, err = cli("train", "complex-order", *TINY, "--out", tmp_path / "run")
    assert code == 2 and "give the head a separate matrix" in err


@pytest.mark.parametrize(
    ("member", "shape"),
    [
        *((name, (4, 6, 3)) for name in CAUSAL if name != "complex-order"),
        *((name, (8, 8, 1)) for name in ("gpt", "image-transformer", "sparse-transformer")),
    ],
)
def test_every_causal_member_can_be_fitted(member, shape):
    pixels = np.zeros((4, *shape), np.uint8)
    data = ImageData("none", "", "", {name: Images(pixels, None, (), name) for name in ("train", "validation")}, ())
    config = override(configure(member, "tiny", 256), TASKS["image"].fit(configure(member, "tiny", 256), data), kinds())
    with unallocated():
        model = config.build()
    with torch.device("meta"):
        TASKS["image"].check(TrainingPlan(config, data, Settings(), None, None), model)
        logits, _ = model(torch.zeros(2, 8, dtype=torch.int64))
    assert TASKS["image"].length(data, config) == pixels[0].size and logits.shape == (2, 8, 256)
    assert (
        TASKS["image"].fits(config)
        and TASKS["image"].fit(config, data)["input"].items() <= to_dict(config.input).items()
    )


# Parts


def test_sequences_and_images_are_inverses():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 2, 3), dtype=np.uint8)
    for given in ({}, {"joint": True}, {"block_height": 2, "block_width": 3}):
        sequences = Sequences(Pixels.Config(height=4, width=2, channels=3, **given))
        values = sequences.of(pixels)
        assert values.shape == ((3, 8, 3) if given.get("joint") else (3, 24))
        np.testing.assert_array_equal(sequences.images(values), pixels)
    plain = Sequences(Pixels.Config(height=4, width=2, channels=3))
    np.testing.assert_array_equal(plain.of(pixels).numpy(), pixels.reshape(3, 24))
    assert (plain.prefix(3), sequences.prefix(2), sequences.prefix(1)) == (18, 12, None)


def test_floors_find_what_repeats():
    rng = np.random.default_rng(0)
    column = rng.integers(0, 256, (1, 1, 6, 1), dtype=np.uint8)
    same = np.broadcast_to(column, (3000, 5, 6, 1)).copy()
    assert floors(same, same[:50])["histogram"] < 0.1
    noise = rng.integers(0, 256, (3000, 5, 6, 1), dtype=np.uint8)
    assert 7.9 < floors(noise, noise[:50] ^ 1)["histogram"] < 8.4
    stripes = np.broadcast_to(rng.integers(0, 2, (3000, 1, 6, 1), dtype=np.uint8) * 200, (3000, 5, 6, 1))
    found = floors(stripes, stripes[:50])
    assert found["histogram"] == pytest.approx(1, abs=0.05) and found["neighbours"] == pytest.approx(0.2, abs=0.1)


def test_a_grid_has_white_between_images():
    sheet = grid(np.zeros((3, 60, 50, 1), np.uint8), 2)
    assert sheet.shape == (2 * 61 + 1, 2 * 51 + 1, 1)
    assert (sheet[0] == 255).all() and (sheet[:, 51] == 255).all() and not sheet[1:61, 1:51].any()


def test_classes_are_scored_where_the_head_has_no_likelihood_of_its_own():
    model = kinformer.build("gpt", recipe="tiny")
    assert nats_of(model) is class_nats
    logits, values = torch.randn(2, 3, 256), torch.randint(256, (2, 3))
    torch.testing.assert_close(
        class_nats(logits, values), -logits.log_softmax(-1).gather(-1, values[..., None])[..., 0]
    )


def test_data_of_another_shape_is_refused(cli, digits_run, colours):
    with pytest.raises(KinformerError, match="has images of 4 x 6 x 3, but this model draws 8 x 8 x 1"):
        kinformer.evaluate(digits_run, data=str(colours))
