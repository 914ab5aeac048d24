"""What belongs to a run is told from what was put in its place: config, settings, tokenizer, weights."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kinformer
from kinformer.lab.runs.inference import generate
from kinformer.lab.runs.options import GenerateOptions
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors, signed

SMALL = {"recipe": "tiny", "steps": 4, "length": 16, "batch_size": 4, "validation_tokens": 256, "device": "cpu"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file, cache):
    pytest.importorskip("tokenizers")
    out = tmp_path_factory.mktemp("runs") / "run"
    return kinformer.train("linear-transformer", data=text_file, out=out, train_tokenizer=300, **SMALL)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a trained run, to alter."""
    return kinformer.open_run(shutil.copytree(trained.folder, tmp_path / "run"))


def altered(run, resign=True, **changes):
    """The config with ``changes`` of its settings, signed or not."""
    place = run.folder / "config.json"
    data = json.loads(place.read_text())
    data["training"] |= changes
    del data["checksum"]
    place.write_text(json.dumps(signed(data) if resign else data | {"checksum": signed(data)["checksum"][::-1]}))
    return run.folder


def test_another_tokenizer_of_the_same_size_is_refused(run, text_file):
    place = run.folder / "tokenizer.json"
    place.write_text(place.read_text().replace('"a"', '"\u1234"'))
    uses = (
        lambda: kinformer.evaluate(run.folder),
        lambda: generate(run.folder, "a", GenerateOptions(max_new_tokens=1, device="cpu")),
        lambda: kinformer.train("linear-transformer", out=run.folder, resume=True, steps=5),
        lambda: kinformer.train("linear-transformer", out=run.folder / "new", init=run.folder, data=text_file, steps=1),
    )
    for use in uses:
        with pytest.raises(KinformerError, match="tokenizer.json: is not the tokenizer that the run was made with"):
            use()


def test_a_config_with_another_digit_is_refused(run):
    place = run.folder / "config.json"
    text = place.read_text()
    assert '"lr": 0.001' in text
    place.write_text(text.replace('"lr": 0.001', '"lr": 0.002'))
    with pytest.raises(KinformerError, match=r"config.json: has been altered .* remove its key 'checksum'"):
        kinformer.open_run(run.folder)
    data = json.loads(place.read_text())
    del data["checksum"]
    place.write_text(json.dumps(data))
    assert kinformer.open_run(run.folder).training["lr"] == 0.002


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optimizer": "adam"}, "optimizer is 'adam' but must be one of adamw"),
        ({"precision": "fp8"}, "precision is 'fp8' but must be one of fp32"),
        ({"objective": "chess"}, "objective chess: cannot be minimised for the task next-token"),
        ({"steps": 2.5}, "steps is 2.5 but must be a whole number or left out"),
        ({"seed": True}, "seed is True but must be a whole number"),
        ({"lr": "0.1"}, "lr is '0.1' but must be a number"),
        ({"batch_size": None}, "batch_size is None but must be a whole number"),
        ({"keep": 0}, "keep is 0 but must be 1 or more"),
        ({"speed": 1}, "unknown setting 'speed'"),
    ],
)
def test_settings_of_a_file_are_checked_like_options(run, change, told):
    with pytest.raises(KinformerError) as error:
        kinformer.open_run(altered(run, **change))
    assert told in str(error.value) and str(run.folder / "config.json") in str(error.value)
    if "unknown" not in told and "chess" not in told:
        with pytest.raises(KinformerError, match=told.split(" but")[0]):
            Settings(**change)


def test_figures_belong_to_the_weights_checksum(run):
    place = run.folder / "model.safetensors"
    assert run.metrics
    with safe_open(place, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for changes in ({"figures": '[["bits_per_byte", 0.001]]'}, {"kinformer.metadata.sha256": "0"}):
        save_file(tensors, place, metadata | changes)
        with pytest.raises(KinformerError, match="model.safetensors: is truncated or damaged"):
            load_tensors(place)
    metadata.pop("kinformer.metadata.sha256")
    save_file(tensors, place, metadata)
    with pytest.raises(KinformerError, match="metadata do not match"):
        _ = run.metrics
    save_file({"a": torch.zeros(1)}, place)
    assert load_tensors(place)[0]["a"] == 0


def test_evaluate_measures_at_most_what_is_asked(trained, cache):
    whole = kinformer.evaluate(trained.folder, split="train").facts
    assert whole["bytes"] > 9000
    for asked in (40, 300, 5000):
        found = kinformer.evaluate(trained.folder, split="train", first=asked).facts
        assert asked - 4 < found["bytes"] <= asked
        assert found["tokens"] < found["bytes"] and 0 < found["bits_per_byte"] < 20
    assert kinformer.evaluate(trained.folder, split="train", first=10**6).facts["bytes"] == whole["bytes"]
