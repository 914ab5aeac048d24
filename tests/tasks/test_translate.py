"""Translation from the command line and from Python: trained, measured, lines in and lines out, mistakes."""

import io
import json
import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

import kinformer
from kinformer.lab.data import IGNORED, BosEos, ByteTokenizer
from kinformer.lab.data.pairs import Languages, Pairs, Parallel
from kinformer.lab.runs.inference import generate
from kinformer.lab.runs.options import GenerateOptions
from kinformer.lab.tasks.evaluation import arriving
from kinformer.lab.tasks.translate import EncodedPairs, TranslationLoss, TranslationPairs, lines_of, scores
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError

TINY = {
    "recipe": "tiny", "steps": 4, "length": 40, "batch_size": 4, "validation_tokens": 200, "device": "cpu",
    "threads": 1, "tokenizer": "bytes", "set": {"dim": 16, "layers": 1, "encoder.layers": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    for name, word in (("en", "line"), ("de", "Zeile")):
        (folder / f"train.{name}").write_text("".join(f"{word} {index}\n" for index in range(60)))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, pairs):
    return kinformer.train("vanilla", data=pairs, out=tmp_path_factory.mktemp("runs") / "run", **TINY)


def test_a_run_is_trained_and_measured(run, tmp_path):
    assert (run.task.name, run.training["schedule"], run.training["average"]) == ("translate", "inverse-sqrt", 5)
    assert run.config.input.vocab_size == 258 and run.config.input.eos_token == 257
    assert list(run.metrics) == ["bits_per_byte", "accuracy"]
    measured = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert any("averaged_bits_per_byte" in each for each in measured)
    pytest.importorskip("sacrebleu")
    found = kinformer.evaluate(run.folder, beam=2, device="cpu")
    assert list(found.metrics) == ["bleu", "chrf", "bits_per_byte"] and not found.units[0].lower_is_better
    assert found.facts["pairs"] == 3 and found.baselines["copy_chrf"] > 0
    assert found.facts["signatures"][0].startswith("nrefs:1|case:mixed") and "version:" in found.facts["signatures"][1]
    table = tmp_path / "pairs.jsonl"
    first = kinformer.evaluate(run.folder, beam=1, first=1, device="cpu", predictions=str(table))
    assert [json.loads(line) for line in table.read_text().splitlines()] == [{"item": 1} | first.facts["examples"][0]]
    assert first.facts["pairs"] == 1 and "greedy" in first.text[1]


def test_figures_are_those_of_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    said, wanted = ["the cat sat on the mat there", "a dog"], ["the cat sat on a mat there", "the dog ran"]
    found = scores(said, wanted)
    assert found.bleu == sacrebleu.corpus_bleu(said, [wanted]).score > 10
    assert found.chrf == sacrebleu.corpus_chrf(said, [wanted]).score > 10


def test_without_sacrebleu_it_is_one_sentence(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(KinformerError, match=r"needs sacrebleu, .*pip install 'kinformer\[translate\]'"):
        kinformer.evaluate(run.folder, device="cpu")


def options(**own):
    return GenerateOptions(device="cpu", seed=0, task_options=own)


def test_lines_are_translated_in_order(run):
    written = []
    found = generate(run.folder, b"line 3\n\nline 14\n", options(beam=2), written.append)
    assert len(written) == 3 and written[1] == "\n" and all(each.count("\n") == 1 for each in written)
    assert [sample.text for sample in found.samples] == [each[:-1] for each in written]
    assert found.state_bytes > 0 and found.prompt_tokens == 13
    alone = generate(run.folder, "line 14", options(beam=2, batch_size=1))
    assert alone.samples[0].text == found.samples[2].text


def test_a_line_is_translated_before_the_next_comes(run):
    command = [
        sys.executable,
        "-m",
        "kinformer",
        "generate",
        str(run.folder),
        "--device",
        "cpu",
        "--beam",
        "1",
        "--quiet",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        for _ in range(2):
            process.stdin.write("line 3\n")
            process.stdin.flush()
            assert process.stdout.readline().endswith("\n")
        process.stdin.close()
        assert process.wait(60) == 0


def test_lines_that_are_there_are_taken_together():
    source, sink = os.pipe()
    os.write(sink, b"a\nb\nc\n")
    with os.fdopen(source, "rb") as file:
        found = arriving(lines_of(iter(file.readline, b"")), 2)
        assert next(found) == [b"a", b"b"] and next(found) == [b"c"]
        os.write(sink, b"d")
        os.close(sink)
        time.sleep(0.02)
        assert list(found) == [[b"d"]]
    with pytest.raises(KinformerError, match="line 2 of the input is not UTF-8 .byte 0xff"):
        list(arriving(lines_of(io.BytesIO(b"a\n\xff\n")), 2))


def test_rows_have_their_ends_and_padding():
    encoded = EncodedPairs(Pairs([b"ab", b"c"], [b"d", b"efg"]), ByteTokenizer())
    assert encoded.widths.tolist() == [3, 4]
    batch = encoded.batch([0, 1], BosEos(256, 257))
    assert batch.source.tolist() == [[97, 98, 257], [99, 257, 0]] and batch.source_valid.sum(1).tolist() == [3, 2]
    assert batch.target.tolist() == [[256, 100, 0, 0], [256, 101, 102, 103]]
    assert batch.labels.tolist() == [[100, 257, IGNORED, IGNORED], [101, 102, 103, 257]]
    assert batch.bytes.tolist() == [1, 3] and batch.size == 14


def test_the_loss_is_smoothed_in_training_alone():
    torch.manual_seed(0)
    model = kinformer.build("vanilla", recipe="tiny", vocab_size=258)
    batch = EncodedPairs(Pairs([b"ab", b"c"], [b"d", b"efg"]), ByteTokenizer()).batch([0, 1], BosEos(256, 257))
    logits = model(batch.target, model.begin(batch.source, batch.source_valid), valid=batch.target_valid)[0]
    logits, labels = logits.flatten(0, 1), batch.labels.flatten()
    loss, metrics, _ = TranslationLoss(0.1)(model, batch, None, 0.0)
    assert torch.allclose(loss, cross_entropy(logits, labels, label_smoothing=0.1))
    odds = logits.log_softmax(-1)[labels != IGNORED]
    smooth = -(0.9 * odds.gather(1, labels[labels != IGNORED][:, None])[:, 0] + 0.1 * odds.mean(1)).mean()
    assert torch.allclose(loss, smooth)
    plain, again, _ = TranslationLoss(0.1)(model.eval(), batch, None, 0.0)
    assert torch.allclose(plain, cross_entropy(logits, labels)) and plain != loss
    assert int(metrics["predicted"]) == 6 and int(metrics["bytes"]) == 4
    assert torch.allclose(again["nats"], metrics["nats"])


def test_parts_of_a_batch_and_a_resumed_run(pairs, tmp_path):
    for name, accumulate in (("whole", 1), ("parts", 2)):
        kinformer.train("vanilla", data=pairs, out=tmp_path / name, accumulate=accumulate, average=0, **TINY)
    metrics = [kinformer.open_run(tmp_path / name).metrics["bits_per_byte"] for name in ("whole", "parts")]
    assert abs(metrics[0] - metrics[1]) < 0.05
    again = kinformer.train("vanilla", out=tmp_path / "whole", resume=True, steps=6)
    assert again.training["steps"] == 6


def test_a_vocabulary_of_its_own_from_both_sides(tmp_path):
    pytest.importorskip("tokenizers")
    for name, word in (("en", "watermelon"), ("de", "Wassermelone")):
        (tmp_path / f"train.{name}").write_text(f"{word} {word}\n" * 4000)
    own = {name: value for name, value in TINY.items() if name != "tokenizer"} | {"steps": 1}
    run = kinformer.train("vanilla", data=tmp_path, out=tmp_path / "run", **own)
    assert run.vocabulary == "tokenizer.json" and len(run.tokenizer.encode("watermelon Wassermelone")) == 2
    assert run.config.input.vocab_size == run.tokenizer.vocab_size + 2 == run.config.input.eos_token + 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing is 1"),
        ({"length": 5}, "length 5: no pair of .* is so short, the shortest has 8 tokens"),
        ({"source": "fr"}, "source fr: .* does not have such files"),
        ({"set": {"input.eos_token": None}}, "the model has no eos_token"),
        ({"set": {"input.bos_token": 1, "input.eos_token": 2, "input.vocab_size": 100}}, '"input.vocab_size": 100'),
        ({"task": "next-token"}, "vanilla is an encoder-decoder, whose tasks are translate"),
        ({"segments": True}, "segments: is for the task next-token, not for translate"),
        ({"text_field": "x"}, "text_field x: is for running text; name the sides of JSON lines with source"),
        ({"average": -1}, "average is -1"),
        ({"schedule": "square"}, "schedule is 'square'"),
    ],
)
def test_mistakes_of_training(pairs, tmp_path, given, told):
    with pytest.raises(KinformerError, match=told):
        kinformer.train("vanilla", data=pairs, out=tmp_path / "run", **TINY | given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"source": "de", "target": "en"}, "source and target: number-words are numbers in English and German"),
        ({"holdout": 0.1}, "holdout 0.1: is for files, but number words are made; leave it out"),
    ],
)
def test_number_words_have_their_languages_and_their_split(tmp_path, given, told):
    with pytest.raises(KinformerError, match=told):
        kinformer.train("vanilla", out=tmp_path / "run", **TINY | given)
    assert not (tmp_path / "run").exists()


def test_other_mistakes(run, pairs, tmp_path):
    for given, told in (
        ({"beam": 0}, "beam is 0"),
        ({"split": "tests"}, "split"),
        ({"context": "8"}, "context: is for models of the next token"),
    ):
        with pytest.raises(KinformerError, match=told):
            kinformer.evaluate(run.folder, **given)
    with pytest.raises(KinformerError, match="samples 2: a line has one translation"):
        generate(run.folder, "a", GenerateOptions(samples=2, device="cpu", seed=0))
    with pytest.raises(KinformerError, match="beam: is for models of the translation"):
        text = kinformer.train("gpt", recipe="tiny", data=pairs / "train.en", out=tmp_path / "gpt", steps=1, length=8)
        generate(text.folder, "a", options(beam=2))
    with pytest.raises(KinformerError, match="gpt is causal, whose tasks are"):
        kinformer.train("gpt", task="translate", data=pairs, out=tmp_path / "no", steps=1)


def test_a_source_beyond_the_models_positions_is_told(run, pairs, tmp_path):
    position = {"kind": "learned", "max_length": 60}
    changes = TINY["set"] | {"encoder.position": position, "position": position}
    short = kinformer.train("vanilla", data=pairs, out=tmp_path / "run", **TINY | {"set": changes, "steps": 1})
    with pytest.raises(KinformerError, match="the line 'x*'... has 71 tokens, but the model reads sources of 60"):
        generate(short.folder, b"x" * 70, options())
    assert generate(short.folder, b"x" * 50, options(beam=1)).new_tokens <= 60


def test_the_schedule_and_the_mean_of_checkpoints(tmp_path):
    from kinformer.lab.training.optimisers import mean_weights, replaced
    from kinformer.lab.training.schedule import Schedule
    from kinformer.runtime.files import load_tensors, save_tensors

    schedule = Schedule(2.0, 0.1, 9, 100, "inverse-sqrt")
    assert schedule(8) < schedule(9) == 2.0 and abs(schedule(39) - 1.0) < 1e-12 and schedule(10**6) == 0.2
    model = torch.nn.BatchNorm1d(2)
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
        model.weight.data.fill_(step**2)
        save_tensors(tmp_path / str(step) / "model.safetensors", model.state_dict())
    model.weight.data.fill_(9)
    checkpoints = SimpleNamespace(weights=lambda step, _: load_tensors(tmp_path / str(step) / "model.safetensors")[0])
    mean = mean_weights(model, checkpoints, [2])
    assert mean["weight"].tolist() == [6.5, 6.5] and mean["weight"].dtype == torch.float32
    assert "num_batches_tracked" not in mean
    before = model.weight.clone()
    with replaced(model, mean):
        assert model.weight.tolist() == [6.5, 6.5]
    assert torch.equal(model.weight, before)


def test_tables_to_translate_name_the_side_that_is_read(run, tmp_path):
    """By the languages of the run in either order; without names the source stands first, as in pairs to learn from."""
    texts = {"named.csv": "de,en\nrot,red\nblau,blue\n", "plain.tsv": "red\trot\nblue\tblau\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        rows = kinformer.predict(run.folder, tmp_path / name, beam=1, device="cpu")
        assert [(row["text"], row["label"]) for row in rows] == [("red", "rot"), ("blue", "blau")]


def test_the_rule_to_beat_counts_the_translations_alone():
    """Equal translations cost next to nothing without their sources, and random letters what letters cost."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=20)).encode() for _ in range(400)]
    settings = Settings(length=64, batch_size=4, validation_tokens=4000)
    for targets, least, most in (([b"always the same text"] * 400, 0.0, 0.2), (words[::-1], 3.0, 4.5)):
        pairs = Pairs(words, targets)
        data = Parallel("", "1", "none", Languages(), ByteTokenizer(),
                        {"train": pairs.taken(range(200)), "validation": pairs.taken(range(200, 400))})  # fmt: skip
        rows = TranslationPairs(data, settings, BosEos(256, 257), smoothing=0.0)
        assert least <= rows.baselines()["targets_counted"] <= most
