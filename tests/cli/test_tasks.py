"""Encoders on the command line: masked tokens, classes of examples, ListOps."""

import json
import random
import shutil

import pytest
import torch

from kinformer.lab.runs.run import open_run
from kinformer.runtime.files import load_tensors

TINY = ["--recipe", "tiny", "--batch-size", "4", "--steps", "4", "--validation-tokens", "300", "--threads", "1"]
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """A folder of sixty texts in three classes."""
    folder = tmp_path_factory.mktemp("films")
    draw = random.Random(0)
    for index in range(60):
        label = ("bad", "fair", "good")[index % 3]
        path = folder / label / f"{index}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(draw.choices(["it", "was", label, "a", "film"], k=draw.randint(2, 12))))
    return folder


@pytest.fixture(scope="module")
def masked_run(tmp_path_factory, text_file):
    """A run of bert on masked bytes."""
    from kinformer.lab.cli.main import main

    out = tmp_path_factory.mktemp("runs") / "masked"
    assert main(["train", "bert", *TINY, "--length", "32", "--data", str(text_file), "--out", str(out)]) == 0
    return out


def weights(folder):
    return load_tensors(folder / "model.safetensors")[0]


def test_hidden_bytes(cli, text_file, tmp_path):
    out = tmp_path / "run"
    options = ["--length", "32", "--mask-share", "0.2", "--whole-words"]
    code, told, _ = cli("train", "bert", *TINY, *options, "--data", text_file, "--out", out, "--json")
    told = json.loads(told)
    assert code == 0 and told["validation_bits_per_masked_byte"] > 0 and 0 <= told["validation_accuracy"] <= 1
    run = open_run(out)
    assert run.task.name == "mlm" and run.training["objective"] == "masked-language"
    assert (run.config.input.vocab_size, run.config.input.mask_token, run.config.input.eos_token) == (259, 256, 258)
    code, told, _ = cli("evaluate", out, "--threads", "1", "--json")
    told = json.loads(told)
    assert code == 0 and (told["task"], told["mask_share"], told["whole_words"]) == ("mlm", 0.2, True)
    assert told["bits_per_masked_byte"] > 0 and told["data"]["same_as_run"]
    assert told["bigram_bits"] < told["unigram_bits"] < 8
    again = json.loads(cli("evaluate", out, "--threads", "1", "--json", "--chunk", "100")[1])
    assert again["masked"] == told["masked"] and again["unigram_bits"] == pytest.approx(told["unigram_bits"])
    assert again["bits_per_masked_byte"] == pytest.approx(told["bits_per_masked_byte"], rel=1e-6)
    code, told, _ = cli("evaluate", out, "--threads", "1", "--split", "validation", "--first", "200")
    assert code == 0 and "bits per masked byte" in told and "after the true byte before them" in told
    assert "whole words" in told and "validation split" in told


def test_resumed_with_the_same_bits(cli, text_file, films, tmp_path):
    for task in (["--data", text_file], ["--task", "classify", "--data", films]):
        whole, halved = (tmp_path / f"{name}-{len(task)}" for name in ("whole", "halved"))
        command = ["train", "bert", "--recipe", "tiny", "--length", "32", "--batch-size", "4", "--threads", "1"]
        every = ["--checkpoint-every", "3", "--set", "training.log_every=1", "--validate-every", "2", "--lr", "1e-3"]
        assert cli(*command, *every, *task, "--steps", "6", "--set", "training.keep=2", "--out", whole)[0] == 0
        shutil.copytree(whole, halved)
        newest = max((halved / "checkpoints").iterdir())
        for file in newest.iterdir():
            file.unlink()
        newest.rmdir()
        code, told, _ = cli("train", "bert", "--out", halved, "--resume", "--json")
        assert code == 0 and json.loads(told)["steps"] == 6
        ends = [
            load_tensors(max((each / "checkpoints").iterdir()) / "model.safetensors")[0] for each in (whole, halved)
        ]
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_classes_from_scratch_and_from_a_run(cli, films, masked_run, tmp_path):
    command = ["train", "bert", *TINY, "--task", "classify", "--data", films]
    code, told, _ = cli(*command, "--length", "64", "--out", tmp_path / "new", "--json", "--set", "head.pooling=mean")
    assert code == 0 and set(json.loads(told)) >= {"validation_bits_per_label", "validation_accuracy"}
    run = open_run(tmp_path / "new")
    assert run.config.head.classes == 3 and run.config.head.pooling == "mean"
    assert run.data["identity"]["classes"] == ["bad", "fair", "good"]
    code, told, _ = cli("evaluate", tmp_path / "new", "--threads", "1", "--json", "--split", "train")
    told = json.loads(told)
    assert code == 0 and [each["class"] for each in told["classes"]] == ["bad", "fair", "good"]
    assert sum(each["examples"] for each in told["classes"]) == told["examples"] == 54
    assert told["accuracy"] == pytest.approx(sum(each["correct"] for each in told["classes"]) / 54)
    assert told["guessing"] == pytest.approx(max(each["examples"] for each in told["classes"]) / 54)
    code, told, _ = cli("evaluate", tmp_path / "new", "--threads", "1")
    assert code == 0 and "of the most frequent class" in told and "bits per label" in told

    still = ["--lr", "1e-30", "--length", "32", "--init", masked_run]
    assert cli(*command, *still, "--out", tmp_path / "tuned")[0] == 0
    theirs, ours = weights(masked_run), weights(tmp_path / "tuned")
    body = [name for name in theirs if not name.startswith("head.")]
    assert body and all(torch.equal(ours[name], theirs[name]) for name in body)
    assert ours["head.output.weight"].shape[0] == 3
    again = ["--lr", "1e-30", "--length", "32", "--init", tmp_path / "tuned", "--out", tmp_path / "again"]
    assert cli(*command, *again)[0] == 0
    assert all(torch.allclose(weights(tmp_path / "again")[name], ours[name], atol=1e-20) for name in ours), (
        "its own head is kept"
    )
    assert cli("train", "bert", "--out", tmp_path / "again", "--resume", "--steps", "5")[0] == 0


def test_other_labelled_data(cli, films, masked_run, tmp_path):
    options = [*TINY, "--length", "32", "--task", "classify", "--data", films, "--init", masked_run]
    assert cli("train", "bert", *options, "--out", tmp_path / "run")[0] == 0
    lines = [f"{('good', 'bad')[index % 2]}\tit was text {index}" for index in range(20)]
    (tmp_path / "more.tsv").write_text("\n".join(lines))
    code, told, said = cli("evaluate", tmp_path / "run", "--data", tmp_path / "more.tsv", "--split", "train", "--json")
    told = json.loads(told)
    assert code == 0 and "is other data than the run was trained on" in said and not told["data"]["same_as_run"]
    assert [each["examples"] for each in told["classes"]] == [9, 0, 9]
    (tmp_path / "more.tsv").write_text("\n".join([*lines, "poor\ttext"]))
    code, _, said = cli("evaluate", tmp_path / "run", "--data", tmp_path / "more.tsv")
    assert code == 2 and "has the class 'poor'" in said


def test_classes_columns_and_cut_texts_are_told(cli, tmp_path):
    rows = [f"text number {row},{'ab'[row % 2]}\n" for row in range(40)]
    (tmp_path / "rows.csv").write_text("sentence,author\n" + "".join(rows))
    options = [*TINY, "--length", "14", "--task", "classify", "--data", tmp_path / "rows.csv"]
    code, _, said = cli("train", "bert", *options, "--out", tmp_path / "run")
    assert code == 0 and "note: rows.csv: 2 classes to train on, " in said
    assert "; the label is its column 'author', the text 'sentence'." in said
    assert "of the train examples of rows.csv have more than 12 tokens, 14 tokens at most, and are read" in said
    code, _, said = cli("evaluate", tmp_path / "run", "--threads", "1", "--split", "train")
    assert code == 0 and "of the train examples of rows.csv have more than 12 tokens" in said
    (tmp_path / "rows.csv").write_text("label,text\n" + "".join(f"{row},{'ab'[row % 2]}\n" for row in range(40)))
    code, _, said = cli("train", "bert", *options, "--out", tmp_path / "other")
    assert code == 2 and "rows.csv has 40 classes but only 36 examples to train on" in said


def test_listops(cli, tmp_path):
    options = ["--task", "listops", "--examples", "64", "--example-tokens", "20-200", "--length", "100"]
    options += ["--out", tmp_path / "run"]
    code, _, said = cli("train", "longformer", *TINY, *options)
    assert code == 0 and "of the train examples of listops have more than 98 tokens" in said
    run = open_run(tmp_path / "run")
    assert run.config.input.vocab_size == 18 and run.options.examples == 64 and run.data["spec"] == "listops"
    code, told, _ = cli("evaluate", tmp_path / "run", "--threads", "1", "--json")
    told = json.loads(told)
    assert code == 0 and told["examples"] == 8 and len(told["classes"]) == 10 and told["length"] == 100
    assert cli("train", "longformer", "--out", tmp_path / "run", "--resume", "--steps", "6")[0] == 0
    for wrong in (["--examples=65"], ["--example-tokens=20-300"], ["--task", "mlm"]):
        code, _, told = cli("train", "longformer", "--out", tmp_path / "run", "--resume", *wrong)
        assert code == 2 and "was started with another value" in told and " ".join(wrong) in told


def test_staged_by_one_run_after_another(cli, text_file, tmp_path):
    """Short windows and sequences first, then longer ones with a smaller learning rate (Longformer, section 4.2)."""
    window = "layers.*.mixer.pattern.window"
    first = ["--length", "32", "--lr", "3e-3", "--set", f"{window}=4", "--set", "position.max_length=64"]
    assert cli("train", "longformer", *TINY, *first, "--data", text_file, "--out", tmp_path / "1")[0] == 0
    second = ["--length", "64", "--lr", "1e-30", "--set", f"{window}=16", "--init", tmp_path / "1"]
    assert cli("train", "longformer", *TINY, *second, "--data", text_file, "--out", tmp_path / "2")[0] == 0
    before, after = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert open_run(tmp_path / "2").config.layers[0].mixer.pattern.window == 16
    longer = ["--length", "128", "--lr", "1e-30", "--set", "position.max_length=128", "--init", tmp_path / "2"]
    assert cli("train", "longformer", *TINY, *longer, "--data", text_file, "--out", tmp_path / "3")[0] == 0
    table, copied = after["position.table"], weights(tmp_path / "3")["position.table"]
    assert copied.shape[0] == 128 and torch.equal(copied, torch.cat([table, table]))


def test_a_longer_member_begins_with_a_shorter_one(cli, text_file, films, masked_run, tmp_path):
    options = [*TINY, "--length", "64", "--init", masked_run]
    code, told, _ = cli("train", "longformer", *options, "--data", text_file, "--out", tmp_path / "long", "--json")
    assert code == 0 and json.loads(told)["member"] == "longformer"
    assert open_run(tmp_path / "long").config.input.mask_token == 256
    labels = ["--task", "classify", "--data", films, "--out", tmp_path / "labels"]
    assert cli("train", "longformer", *options, *labels)[0] == 0
    assert cli("evaluate", tmp_path / "labels", "--threads", "1")[0] == 0


def test_pieces_of_a_tokenizer(cli, text_file, tmp_path):
    pytest.importorskip("tokenizers")
    options = ["--length", "32", "--train-tokenizer", "300", "--whole-words", "--data", text_file]
    code, told, _ = cli("train", "bert", *TINY, *options, "--out", tmp_path / "run", "--json")
    assert code == 0 and "validation_bits_per_masked_token" in json.loads(told)
    run = open_run(tmp_path / "run")
    assert run.config.input.vocab_size == run.tokenizer.vocab_size + 3 > 260
    told = json.loads(cli("evaluate", tmp_path / "run", "--threads", "1", "--json")[1])
    assert told["bits_per_masked_token"] > 0 and told["bigram_bits"] < told["unigram_bits"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bert", "--segments"], "--segments: is for the task next-token, not for mlm"),
        (["bert", "--task", "next-token"], "bert is an encoder, whose tasks are mlm, classify, listops"),
        (["gpt", "--task", "mlm"], "gpt is causal, whose tasks are next-token"),
        (["gpt", "--whole-words"], "--whole-words: is for the task mlm"),
        (["bert", "--objective", "deep-supervision"], "--objective deep-supervision: cannot be minimised"),
        (["bert", "--examples", "100"], "--examples 100: is for the task listops"),
        (["bert", "--task", "listops", "--holdout", "0.1"], "--holdout 0.1: ListOps brings its own data"),
        (["bert", "--task", "listops", "--examples", "3"], "--examples is 3 but must be 8 or more"),
        (["bert", "--task", "listops", "--example-tokens", "5"], "--example-tokens 5-5: is not a range"),
        (["bert", "--task", "classify"], "needs labelled examples"),
        (["bert", "--task", "classify", "--data", "/no/such"], "does not exist"),
        (["bert", "--length", "64", "--set", "input.mask_token=none"], "does not have a mask token"),
        (
            ["bert", "--length", "64", "--set", "input.mask_token=65"],
            "mask_token is 65, but the ids below 256 belong to the data",
        ),
        (["bert", "--length", "4096"], "positions end at 128"),
        (["bert", "--length", "2"], "--length 2: leaves no room"),
        (["bert", "--mask-share", "1.5"], "--mask-share is 1.5"),
    ],
)
def test_mistakes(cli, tmp_path, arguments, said):
    out = tmp_path / "run"
    code, _, told = cli("train", *arguments[:1], *TINY, *arguments[1:], "--out", out)
    assert code == 2 and told.startswith("kinformer: ") and told.count("\n") == 1 and said in told
    assert not out.exists()


def test_what_encoders_cannot_do(cli, gpt_run, masked_run, tmp_path):
    for arguments, said in (
        (("generate", masked_run, "--prompt", "a"), "it reads whole texts and continues none"),
        (("evaluate", masked_run, "--recl"), "--recl: is for models of the next token"),
        (("evaluate", masked_run, "--context", "16"), "--context: is for models of the next token"),
        (("evaluate", masked_run, gpt_run), "is a run of the task next-token, unlike"),
        (
            ("train", "gpt", "--init", masked_run, "--out", tmp_path / "run"),
            "is a run of 'bert', an encoder",
        ),
    ):
        code, _, told = cli(*arguments)
        assert code == 2 and told.count("\n") == 1 and said in told, told
