"""Classes of pictures by a trained run: the same probabilities as the model's, whatever the pictures' sizes."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import kinformer
from kinformer.lab.cli.main import main
from kinformer.lab.data import read_images
from kinformer.lab.data.images import decode
from kinformer.lab.tasks import evaluation, vision
from kinformer.runtime.errors import KinformerError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        options = {"recipe": "tiny", "steps": 1, "batch_size": 8, "threads": 1, "device": "cpu", "quiet": True}
        yield kinformer.train("vit", out=tmp_path_factory.mktemp("vit") / "run", **options).folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of unlike sizes and modes."""
    folder = tmp_path_factory.mktemp("pictures")
    noise = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
    Image.fromarray(noise).save(folder / "b.png")
    Image.fromarray(noise[:8, :8, 0]).save(folder / "a.png")
    (folder / "notes.txt").write_text("none of them")
    return folder


def told(capsys, run, *given):
    assert main(["generate", str(run), *map(str, given), "--threads", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["images"]


def expected(run, pixels):
    images = torch.from_numpy(np.stack(pixels).transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        return kinformer.load(run)(images).softmax(-1)


def test_pictures_of_a_folder(capsys, run, folder):
    found = told(capsys, run, "--image", folder, "--classes", 10)
    assert [each["image"] for each in found] == [str(folder / "a.png"), str(folder / "b.png")]
    want = expected(run, [decode(folder / name, (8, 8, 1)) for name in ("a.png", "b.png")])
    for each, row in zip(found, want, strict=True):
        shares = [one["probability"] for one in each["classes"]]
        assert shares == sorted(shares, reverse=True) and each["label"] is None
        assert shares == pytest.approx([row[int(one["class"])].item() for one in each["classes"]], rel=1e-4)
    (alone,) = told(capsys, run, "--image", folder / "b.png")
    assert [one["class"] for one in alone["classes"]] == [one["class"] for one in found[1]["classes"][:5]]


def test_test_images_of_data(capsys, run):
    found = told(capsys, run, "--image", "digits", "--samples", 2, "--classes", 1)
    test = read_images("digits").test
    assert [each["label"] for each in found] == [test.classes[label] for label in test.labels[:2]]
    want = expected(run, test.pixels[:2]).max(-1)
    assert [int(each["classes"][0]["class"]) for each in found] == want.indices.tolist()
    assert main(["generate", str(run), "--image", "digits", "--samples", "2", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].startswith("test image 2 of digits (")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "give --image FILE"),
        (["--image", "DAMAGED"], "is no PNG or JPEG that can be read"),
        (["--image", "missing.png"], "missing.png: the file does not exist"),
        (["--image", __file__], "test_vision_generate.py: is text; give a folder of PNG or JPEG pictures, "),
        (["--image", "digits", "--top-k", "3"], "--top-k 3: nothing is drawn"),
        (["--image", "digits", "--temperature", "0.5"], "--temperature 0.5: nothing is drawn"),
        (["--image", "FOLDER", "--samples", "2"], "--samples 2: says how many test images"),
        (["--image", "COLOURED"], "its images have 3 channels"),
        (["--image", "digits", "--classes", "0"], "--classes is 0"),
    ],
)
def test_what_cannot_be_classified(capsys, tmp_path, run, folder, given, sentence):
    (tmp_path / "damaged.png").write_bytes((folder / "b.png").read_bytes()[:200])
    np.savez(tmp_path / "coloured.npz", images=np.zeros((30, 8, 8, 3), np.uint8))
    places = {"FOLDER": folder, "DAMAGED": tmp_path / "damaged.png", "COLOURED": tmp_path / "coloured.npz"}
    assert main(["generate", str(run), *(str(places.get(each, each)) for each in given)]) == 2
    told = capsys.readouterr().err.strip()
    assert sentence in told and "\n" not in told


def test_a_bar_ends_before_an_error_is_told(run, folder, monkeypatch):
    events = []

    @contextmanager
    def bar(quiet, label):
        events.append("begins")
        try:
            yield None
        finally:
            events.append("ends")

    def broken(model, batch):
        raise KinformerError("the model's predictions are not finite numbers")

    monkeypatch.setattr(evaluation, "progressing", bar)
    monkeypatch.setattr(vision, "probabilities_of", broken)
    try:
        list(kinformer.predict(run, folder))
    except KinformerError:
        events.append("told")
    assert events == ["begins", "ends", "told"]
