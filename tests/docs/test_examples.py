"""The scripts of ``examples/`` that put a member into other people's training: they learn, in seconds."""

import importlib.util
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import kinformer
from tests.docs.written import ROOT

TEXT = b"It was a dark and stormy night; the rain fell in torrents.\n" * 100
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def example(name):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def learns(losses):
    return losses[-1] < 0.8 * losses[0]


def test_own_loop():
    assert learns(example("own_loop").train(TEXT, steps=20)[1])


def test_hugging_face_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    trainer, losses = example("hugging_face_trainer").train(TEXT, str(tmp_path), steps=18)
    assert learns(losses) and trainer.state.global_step == 18


def test_lightning_module(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    assert learns(example("lightning_module").train(TEXT, steps=18).losses)


def test_the_nearest_texts_are_the_same_ones(text_file, tmp_path):
    pytest.importorskip("faiss")
    kinformer.train("gpt", recipe="tiny", data=text_file, out=tmp_path / "run", steps=2, length=32, quiet=True)
    nearest = example("nearest_texts").nearest
    texts = ["wind", "river sings", "under the tree"]
    (first, text), *rest = nearest(tmp_path / "run", texts, "river sings")
    assert text == "river sings" and first == pytest.approx(1, abs=1e-5) and len(rest) == 2


def test_a_sweep_trains_every_run_once(text_file, tmp_path):
    settings = {
        "recipe": "tiny",
        "data": text_file,
        "steps": 2,
        "length": 32,
        "batch_size": 4,
        "validation_tokens": 100,
    }
    sweep = example("sweep").sweep
    results = sweep("gpt", tmp_path, rates=(1e-4, 1e-2), seeds=2, **settings)
    assert [len(bits) for bits in results.values()] == [2, 2] and results[1e-4] != results[1e-2]
    weights = tmp_path / "gpt-lr0.01-seed1" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert sweep("gpt", tmp_path, rates=(1e-4, 1e-2), seeds=2, **settings) == results
    assert weights.stat().st_mtime_ns == before


def test_a_search_goes_on_from_rung_to_rung(text_file, tmp_path):
    pytest.importorskip("optuna")
    settings = {"recipe": "tiny", "data": text_file, "length": 32, "batch_size": 4, "validation_tokens": 100}
    study = example("optuna_sweep").search("gpt", tmp_path, trials=3, steps=4, rungs=2, **settings)
    assert [sorted(trial.intermediate_values) for trial in study.trials[:2]] == [[2, 4], [2, 4]]
    assert study.best_value == min(trial.value for trial in study.trials if trial.value is not None)


def test_a_tracker_is_told_every_line_once(tmp_path):
    lines = ['{"step": 1, "loss": 2.5}', '{"step": 2, "loss": 2.25, "lr": 0.5}', '{"step": 2, "validation_loss": 3.0}']
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(lines[0] + "\n" + lines[1][:9])
    track, told = example("track"), []
    parts = iter([lines[1][9:] + "\n", lines[2] + "\n"])

    def again():
        part = next(parts, None)
        metrics.open("a").write(part or "")
        return part is not None

    assert track.follow(tmp_path, lambda step, values: told.append((step, values)), again, seconds=0.0) == 3
    assert told == [(1, {"loss": 2.5}), (2, {"loss": 2.25, "lr": 0.5}), (2, {"validation_loss": 3.0})]


def test_tensorboard_is_told(tmp_path):
    pytest.importorskip("tensorboard")
    log, close = example("track").tensorboard(tmp_path)
    log(1, {"loss": 2.5})
    close()
    assert any((tmp_path / "tracked").iterdir())


def test_weights_and_biases_is_told_offline(tmp_path):
    pytest.importorskip("wandb")
    (tmp_path / "config.json").write_text('{"training": {"lr": 0.01, "stages": null}}')
    log, close = example("track").wandb(tmp_path)
    log(1, {"loss": 2.5})
    close()
    assert [*(tmp_path / "wandb").glob("offline-run-*/*.wandb")]


@pytest.mark.parametrize(("name", "kept"), [("mlflow", "ml*/**"), ("trackio", "trackio/*.db")])
def test_mlflow_and_trackio_are_told_on_this_machine(name, kept, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip(name)
    (tmp_path / "config.json").write_text('{"training": {"lr": 0.01, "stages": null}}')
    log, close = example("track").TRACKERS[name](tmp_path)
    log(1, {"loss": 2.5})
    close()
    assert [*tmp_path.glob(kept)]


def test_lightning_shards_layers_over_two_processes(tmp_path):
    pytest.importorskip("lightning")
    words = [sys.executable, str(ROOT / "examples" / "lightning_module.py"), "--processes", "2", "--steps", "18"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Two processes may share a line.
    lines = [f"nats per byte{line}" for line in done.stdout.split("nats per byte")[1:]]
    assert len(lines) == 2 and all(learns([*map(float, re.findall(r"\d+\.\d+", line))]) for line in lines), lines


def test_torchtitan_trains_a_run_as_kinformer_does(tmp_path):
    """Two processes with FSDP2 under torchtitan, from a run's weights and on its rows, end with Kinformer's weights."""
    pytest.importorskip("torchtitan")
    (tmp_path / "text.txt").write_bytes(TEXT)
    options = {"data": tmp_path / "text.txt", "length": 16, "batch_size": 8, "device": "cpu", "validate_every": 0}
    kinformer.train("gpt", recipe="tiny", steps=1, out=tmp_path / "begun", **options)
    constant = {"steps": 4, "lr": 1e-3, "schedule": "constant", "warmup": 0.0}
    kinformer.train("gpt", init=tmp_path / "begun", out=tmp_path / "own", **constant, **options)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += [str(ROOT / "examples" / "torchtitan_trainer.py"), "begun", "trained", "--steps", "4", "--length", "16"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs = (kinformer.load(tmp_path / name).state_dict() for name in ("own", "trained"))
    assert all((theirs[name] - weight).abs().max() < 1e-5 for name, weight in ours.items())


def test_ray_trains_a_run_as_kinformer_does(tmp_path):
    """Two workers of a Ray cluster on this machine, which the script starts."""
    pytest.importorskip("ray")
    (tmp_path / "text.txt").write_bytes(TEXT)
    kinformer.train("gpt", recipe="tiny", data=tmp_path / "text.txt", out=tmp_path / "own", steps=3, length=32)
    words = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "gpt", "by-ray"]
    words += ["--data", str(tmp_path / "text.txt"), "--steps", "3", "--length", "32"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs = (kinformer.load(tmp_path / name).state_dict() for name in ("own", "by-ray"))
    assert all((theirs[name] - weight).abs().max() < 1e-5 for name, weight in ours.items())


def in_gguf(run, folder):
    """A run's exported folder, its tensors, and the fields and tensors of its GGUF file."""
    reader = pytest.importorskip("gguf").GGUFReader
    safetensors = pytest.importorskip("safetensors.numpy")
    exported = kinformer.export(run, folder / "exported").folder
    example("to_gguf").convert(exported, folder / "run.gguf")
    read = reader(folder / "run.gguf")
    fields = {name: field.contents() for name, field in read.fields.items()}
    return (
        exported,
        safetensors.load_file(exported / "model.safetensors"),
        fields,
        {t.name: t.data for t in read.tensors},
    )


def test_a_llama_goes_into_gguf(text_file, tmp_path):
    pytest.importorskip("tokenizers")
    changes = {"norm.kind": "rms_norm", "layers.*.norm.kind": "rms_norm", "layers.*.feed_forward.kind": "swiglu"}
    sizes = {"recipe": "tiny", "steps": 1, "length": 32, "train_tokenizer": 300, "quiet": True}
    run = kinformer.train("rope", data=text_file, out=tmp_path / "run", set=changes, **sizes).folder
    exported, ours, fields, theirs = in_gguf(run, tmp_path)
    assert len(ours) == len(theirs)
    config = json.loads((exported / "config.json").read_text())
    heads, half = config["num_attention_heads"], config["head_dim"] // 2
    for number in range(config["num_hidden_layers"]):
        for last in ("weight", "bias"):
            for name in "qk":
                rows = ours[f"model.layers.{number}.self_attn.{name}_proj.{last}"]
                pairs = theirs[f"blk.{number}.attn_{name}.{last}"]
                for row in range(heads * half):
                    first = row // half * 2 * half + row % half
                    assert (pairs[2 * row] == rows[first]).all() and (pairs[2 * row + 1] == rows[first + half]).all()
            assert (
                theirs[f"blk.{number}.ffn_down.{last}"] == ours[f"model.layers.{number}.mlp.down_proj.{last}"]
            ).all()
    assert (theirs["token_embd.weight"] == ours["model.embed_tokens.weight"]).all()
    numbers = ("block_count", "embedding_length", "context_length", "rope.dimension_count", "attention.head_count")
    assert [fields[f"llama.{name}"] for name in numbers] == [
        config["num_hidden_layers"],
        2 * half * heads,
        32,
        2 * half,
        heads,
    ]
    model = json.loads((exported / "tokenizer.json").read_text())["model"]
    tokens = fields["tokenizer.ggml.tokens"]
    assert {text: number for number, text in enumerate(tokens)} == model["vocab"] and len(tokens) == config[
        "vocab_size"
    ]
    assert fields["tokenizer.ggml.merges"] == [" ".join(merge) for merge in model["merges"]]
    assert fields["tokenizer.ggml.pre"] == "gpt-2" and tokens[fields["tokenizer.ggml.eos_token_id"]] == "\u0100"


def test_a_gpt2_of_bytes_goes_into_gguf(text_file, tmp_path):
    run = kinformer.train(
        "gpt", recipe="tiny", data=text_file, out=tmp_path / "run", steps=1, length=32, quiet=True
    ).folder
    exported, ours, fields, theirs = in_gguf(run, tmp_path)
    assert len(ours) == len(theirs)
    assert np.array_equal(theirs["blk.0.attn_qkv.weight"], ours["transformer.h.0.attn.c_attn.weight"].T)
    assert np.array_equal(theirs["position_embd.weight"], ours["transformer.wpe.weight"])
    assert fields["gpt2.context_length"] == len(ours["transformer.wpe.weight"])
    assert len(fields["tokenizer.ggml.tokens"]) == 256 and fields["tokenizer.ggml.eos_token_id"] == 0
