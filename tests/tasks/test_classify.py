"""Texts are classified by encoders and by causal members, beside simple rules; a model behind a rule is told."""

import random
import shlex

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.config import override
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.lab.data import IGNORED
from kinformer.lab.data.buckets import BosEos, lay
from kinformer.lab.data.labelled import open_labelled
from kinformer.lab.evaluation import character_ngrams
from kinformer.lab.tasks import classify
from kinformer.lab.tasks.table import TASKS
from kinformer.lab.tasks.task import Source
from kinformer.lab.training.logging import ACCURACY, BITS_PER_BYTE
from kinformer.testing import TASK_CHECKS, verify_task
from tests.members import CAUSAL

TASK = TASKS["classify"]
QUICK = {"recipe": "tiny", "batch_size": 4, "length": 32, "validation_tokens": 64, "threads": 1}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A table of two classes that differ in their letters."""
    draw = random.Random(0)
    path, lines = tmp_path_factory.mktemp("labelled") / "letters.tsv", []
    for row in range(240):
        text = "".join(draw.choices(("wx", "yz")[row % 2], k=draw.randint(3, 9)))
        lines.append(f"{'ab'[row % 2]}\t{text} {row}\n")
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_member_reads_the_class_at_its_last_token(name):
    """The logits of a text are the same alone and beside a longer text, and depend on its last token."""
    config = configure(name, "tiny", 259)
    assert TASK.takes(config)
    config = override(config, TASK.fit(config, None), kinds())
    torch.manual_seed(0)
    model = config.build().eval()
    texts = [np.frombuffer(text, np.uint8) for text in (b"short", b"a longer text", b"shorx")]
    tokens, valid = map(torch.from_numpy, lay(texts, BosEos(), 16))
    with torch.no_grad():
        logits = classify.class_logits(model, tokens, valid)
        alone = classify.class_logits(model, tokens[:1, :5], None)
    assert logits.shape == (3, 2) and torch.allclose(logits[:1], alone, atol=1e-5)
    assert not torch.allclose(logits[0], logits[2], atol=1e-7)


def test_the_label_of_a_causal_row_stands_at_its_last_token(labelled):
    data = open_labelled(str(labelled))
    settings = classify.Settings(batch_size=3, length=16, steps=1, validation_tokens=32)
    rows = classify.Labels(data, settings, BosEos(), at_last=True)
    batch = rows.batch(0, 0, 1)
    plain = classify.Labels(data, settings, BosEos()).batch(0, 0, 1)
    places = torch.arange(16).expand(3, -1)
    assert torch.equal(batch.labels[places == (batch.valid.sum(1) - 1)[:, None]], plain.labels)
    assert (batch.labels != IGNORED).sum() == 3


def test_a_causal_member_passes_the_battery_of_tasks(labelled):
    report = verify_task(
        lambda: TASK,
        member="linear-transformer",
        train={"validation_tokens": 64, "data": str(labelled)},
        predict={"inputs": ["xxxxx", "y", "yy xx yy xx yy xx yy xx"], "top_k": 2},
    )
    assert set(report.passed) | report.skipped.keys() == set(TASK_CHECKS)


def test_fine_tuning_begins_with_the_weights_of_a_language_model(labelled, tmp_path):
    text = tmp_path / "text"
    text.write_text("she sells sea shells by the sea shore\n" * 60)
    kinformer.train("gpt", data=text, steps=1, out=tmp_path / "base", **QUICK)
    run = kinformer.train("gpt", task="classify", init=tmp_path / "base", data=labelled, steps=1, out=tmp_path / "run",
                          **QUICK | {"recipe": None})  # fmt: skip
    assert run.data["inherited"]["member"] == "gpt" and run.config.head.kind == "token_classification"


def test_the_last_line_says_that_a_simple_rule_is_ahead(cli, labelled, tmp_path):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in QUICK.items()]
    run = tmp_path / "run"
    code, told, err = cli(
        "train", "gpt", "--task", "classify", "--data", labelled, "--steps", "1", *options, "--out", run
    )
    assert code == 0 and "2 classes to train on, " in err and "a: 1" in err
    assert "to beat in validation: the most frequent class (accuracy " in err
    assert "character n-grams with logistic regression (accuracy 100.0%)" in err
    last = told.splitlines()[-1]
    assert (
        "is not better than character n-grams with logistic regression (accuracy 100.0%); give more --minutes, --steps"
        in last
    )
    code, told, _ = cli("evaluate", run, "--threads", "1")
    lines = told.splitlines()
    assert code == 0 and lines[0].endswith("test split; character n-grams win with 100.0%")
    assert "is not better than character n-grams" in lines[-1]
    assert kinformer.evaluate(run).baselines["character_ngrams"] == 1.0


def test_enough_text_brings_a_vocabulary_of_its_own(labelled, tmp_path):
    """Examples of 200 kB are read as 2,000 tokens, few examples as bytes."""
    draw, path = random.Random(1), tmp_path / "words.csv"
    words = [["".join(draw.choices("abcdefghij", k=7)) for _ in range(1500)] for _ in range(2)]
    rows = [f"{' '.join(draw.choices(words[row % 2], k=12))},{'yz'[row % 2]}" for row in range(2400)]
    path.write_text("\n".join(["text,label", *rows]))
    run = kinformer.train("gpt", task="classify", data=path, steps=1, out=tmp_path / "words", **QUICK)
    assert run.tokenizer.vocab_size == 2000 and run.config.input.vocab_size == 2000 + 3
    assert len(run.tokenizer.encode(words[0][0])) < 7
    few = kinformer.train("gpt", task="classify", data=labelled, steps=1, out=tmp_path / "few", **QUICK)
    assert few.tokenizer.vocab_size == 256
    own = kinformer.train("gpt", task="classify", data=labelled, train_tokenizer=300, steps=1, out=tmp_path / "own",
                          **QUICK)  # fmt: skip
    assert 256 < own.tokenizer.vocab_size <= 300
    assert next(iter(kinformer.predict(own.folder, ["xyw"])))["classes"]


def test_character_ngrams_read_a_bounded_part(labelled, monkeypatch):
    data = open_labelled(str(labelled))
    train, test = data.splits["train"], data.splits["test"]
    decode = lambda ids: bytes(ids).decode()  # noqa: E731
    assert character_ngrams.accuracy(train, test, decode) == 1.0
    read = []
    monkeypatch.setattr(character_ngrams, "TRAIN_TOKENS", 300)
    character_ngrams.accuracy(train, test, lambda ids: read.append(len(ids)) or decode(ids))
    assert sum(read) < 300 + test.lengths.sum()


def test_without_scikit_learn_a_note_says_how_to_get_it(labelled, monkeypatch, caplog):
    monkeypatch.setattr(classify, "find_spec", lambda name: None)
    data = open_labelled(str(labelled))
    with caplog.at_level("INFO", "kinformer"):
        rules = classify.simple_rules(data.splits["train"], data.splits["test"], object())
    assert list(rules) == ["guessing"] and "pip install 'kinformer[classify]'" in caplog.text


def test_the_sentence_of_a_task():
    task = TASKS["recall"]
    assert task.verdict(ACCURACY, 0.3, {"guessing": 0.2}) is None
    assert task.verdict(ACCURACY, 1.0, {"guessing": 1.0}) is None
    assert task.verdict(ACCURACY, 0.1, {}) is None
    assert task.verdict(ACCURACY, 0.1, {"guessing": 0.2}).startswith(
        "accuracy 10.0% is not better than guessing a value of the row (accuracy 20.0%); keys are found only "
    )
    text = TASKS["next-token"]
    assert text.verdict(BITS_PER_BYTE, 2.0, {"ngram_bits_per_byte": 2.1}) is None
    assert "not better than a 5-gram model" in text.verdict(BITS_PER_BYTE, 2.1, {"ngram_bits_per_byte": 2.0})


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ("gpt --task recall --pairs 4 --symbols 32 --length 16", "guessing a value of the row (accuracy 25.0%)"),
        ("gpt --task algorithm --digits 1-2 --length 16", "the most frequent token (accuracy "),
        ("vit --task vision", "the most frequent class (accuracy "),
        ("decision --data shortest-path --trajectories 8 --length 12", "the most frequent action ("),
        ("gtrxl --task control --env t-maze:2 --environments 4 --length 6", "random actions ("),
        ("bert --task mlm --length 32", "the frequency of tokens ("),
        ("gpt --task image", "counting at every place ("),
        ("vanilla --task super-resolution --data digits", "counting by the small image ("),
        ("vanilla --length 32", "a 5-gram model of the translations, without their sources ("),
    ],
)
def test_a_task_announces_its_rule(cli, text_file, tmp_path, arguments, rule):
    few = () if "control" in arguments else ("--validation-tokens", "64")
    data = ("--data", text_file) if "mlm" in arguments else ()
    options = ("--recipe", "tiny", "--batch-size", "2", "--steps", "1", "--threads", "1", "--out", tmp_path / "run")
    code, _, err = cli("train", *arguments.split(), *options, *few, *data)
    assert code == 0 and f"to beat in validation: {rule}" in err


def test_a_text_run_is_told_where_counting_is_ahead(cli, text_file, tmp_path):
    options = ("--recipe", "tiny", "--steps", "1", "--length", "16", "--batch-size", "2", "--threads", "1")
    code, told, err = cli("train", "gpt", "--data", text_file, *options, "--out", tmp_path / "run")
    assert code == 0 and "to beat in validation: a 5-gram model (" in err
    last = told.splitlines()[-1]
    assert "is not better than a 5-gram model (" in last
    commands = last.partition("Next: ")[2].split(" or ")
    assert [command.split()[:2] for command in commands] == [["kinformer", "evaluate"], ["kinformer", "generate"]]
    for command in commands:
        assert cli(*shlex.split(command)[1:], "--threads", "1")[0] == 0


def test_the_command_for_a_trained_run_is_one_that_its_task_has():
    for task in TASKS.values():
        assert not task.use.startswith(("generate", "chat")) or task.generation.refusal is None
        assert not task.use.startswith("predict") or task.prediction.refusal is None


def test_a_table_that_is_read_as_running_text_is_told(tmp_path, caplog):
    table = tmp_path / "films.csv"
    table.write_text("label,text\n" + "good,a fine film\n" * 40)
    with caplog.at_level("INFO", "kinformer"):
        TASKS["next-token"].open(Source(str(table), None, None), None)
    assert "films.csv is read as running text; its columns are for task classify." in caplog.text
