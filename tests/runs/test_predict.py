"""Predictions and vectors of trained runs, from the command line and from Python: right, in order, and bad input."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.inputs.filterbank import Filterbank
from kinformer.lab.data.images import read_images
from kinformer.lab.data.sound import read_sound
from kinformer.lab.runs.inference import writing_vectors
from kinformer.lab.tasks.evaluation import Embedded
from kinformer.lab.tasks.speech import features_of
from kinformer.runtime.errors import KinformerError
from tests.cli.conftest import gpt_run, make_run  # noqa: F401 (fixtures)
from tests.data.test_sound import tone
from tests.data.test_sound import write as write_sound

TINY = {"recipe": "tiny", "length": 32, "batch_size": 16, "device": "cpu", "quiet": True, "validation_tokens": 200}


@pytest.fixture(scope="session")
def reviews(tmp_path_factory):
    path = tmp_path_factory.mktemp("reviews") / "reviews.csv"
    lines = [f'{"bad" if row % 2 else "good"},{row},"{"zzz," if row % 2 else "aaa,"} {row}"\n' for row in range(120)]
    path.write_text("verdict,number,review\n" + "".join(lines))
    return path


@pytest.fixture(scope="session")
def classes_run(reviews, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "classes"
    fields = {"text_field": "review", "label_field": "verdict"}
    kinformer.train("bert", task="classify", data=reviews, out=out, steps=40, lr=3e-3, **fields, **TINY)
    return out


@pytest.fixture(scope="session")
def masks_run(text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "masks"
    kinformer.train("bert", data=text_file, out=out, steps=2, **TINY)
    return out


def test_classes_of_a_table_by_its_columns(cli, classes_run, reviews, tmp_path):
    fields = ("--text-field", "review", "--label-field", "verdict")
    code, out, err = cli("predict", classes_run, reviews, *fields, "--json", "--top-k", 2)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(rows) == 120 and rows[1]["text"] == "zzz, 1", err
    assert all(row["classes"][0]["class"] == row["label"] for row in rows)
    assert sum(item["probability"] for item in rows[0]["classes"]) == pytest.approx(1, abs=1e-5)
    code, _, err = cli("predict", classes_run, reviews, *fields, "--top-k", 2, "--out", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        table = list(csv.DictReader(file))
    assert code == 0 and list(table[0]) == ["text", "label", "class", "probability", "class_2", "probability_2"], err
    assert [row["class"] for row in table] == [row["classes"][0]["class"] for row in rows]


def test_lines_of_standard_input_a_folder_and_a_list_are_predicted_alike(cli, classes_run, tmp_path):
    texts = ["zzz, 5", "aaa, 6", "a much longer text aaa, 7"]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text + "\n")
    expected = kinformer.predict(classes_run, texts)
    _, out, _ = cli("predict", classes_run, "-", "--json", stdin="\r\n".join(texts).encode())
    assert [json.loads(line)["text"] for line in out.splitlines()] == texts
    folder = kinformer.predict(classes_run, tmp_path / "texts")
    for rows in ([json.loads(line) for line in out.splitlines()], folder):
        assert [row["classes"][0]["class"] for row in rows] == [row["classes"][0]["class"] for row in expected]
    _, out, _ = cli("predict", classes_run, stdin=b"zzz, 5\n")
    assert out.startswith("bad ") and out.endswith("%\tzzz, 5\n")


def test_predictions_are_those_that_evaluation_counts(classes_run):
    measured = kinformer.evaluate(classes_run, split="validation", quiet=True)
    texts = kinformer.predict(classes_run, ["zzz, 1", "aaa, 2"])
    assert measured.metrics["accuracy"] == 1 and [row["classes"][0]["class"] for row in texts] == ["bad", "good"]


def test_a_stream_is_predicted_as_it_comes_and_in_order(classes_run):
    from kinformer.lab.tasks.evaluation import in_batches

    taken = []

    def items():
        for number in range(1000):
            taken.append(number)
            yield number

    results = in_batches(items(), 2, lambda number: -number, lambda some: [number * 2 for number in some])
    assert next(results) == 0 and len(taken) < 300
    assert list(results) == [2 * number for number in range(1, 1000)]


def test_masks_are_filled_in(cli, masks_run):
    code, out, err = cli("predict", masks_run, "--json", "--top-k", 3, stdin=b"wi[MASK]d si[MASK]gs\ntree\x5bMASK]")
    first, second = map(json.loads, out.splitlines())
    assert code == 0 and [len(mask) for mask in first["masks"]] == [3, 3] and len(second["masks"]) == 1, err
    assert first["filled"] == "wi{}d si{}gs".format(*(mask[0]["token"] for mask in first["masks"]))
    (row,) = kinformer.predict(masks_run, ["wi<m>d"], mask="<m>")
    assert "<m>" not in row["filled"] and len(row["filled"]) == 4


@pytest.mark.parametrize(
    ("name", "contents", "flags", "sentence"),
    [
        ("a.csv", b"text,label\nfine,good\npoor\n", (), "a.csv, line 3: has 1 column where"),
        ("a.csv", b"a,b,c\n1,2,3\n", (), "line 1: has 3 columns where a text"),
        ("a.csv", b"a,b\n1,2\n", ("--text-field", "c"), "names no column 'c'"),
        ("a.csv", b'text\n"fine', (), "is not a row of CSV"),
        ("a.tsv", b"good\tfine\nbad\t\n", (), "line 2: does not have text"),
        ("a.txt", b"fine\n\xff\n", (), "a.txt, line 2: is not UTF-8 (byte 0xff)"),
        ("a.txt", b"", (), "a.txt: is empty"),
        ("a.txt", b"fine\n\nfine\n", (), "line 2: does not have text"),
        ("a.txt", b"fine\n", ("--text-field", "text"), "holds lines without fields"),
        ("a.jsonl", b'{"text": "a"}\n{"words": "b"}\n', (), "line 2: lacks text"),
        ("a.jsonl", b'{"words": "b"}\n', ("--text-field", "word"), "did you mean 'words'?"),
        ("a.txt", b"fine\n", ("--out", "out.xls"), "ends in none of .jsonl, .csv, .tsv"),
        ("a.txt", b"fine\n", ("--out", "missing/out.csv"), "missing/out.csv: cannot be written"),
        ("a.csv", b"text\nfine\n", ("--out", "a.csv"), "is the input file"),
        ("a.txt", b"fine\n", ("--first", "0"), "--first is 0 but must be 1 or more"),
        ("a.txt", b"fine\n", ("--beam", "2"), "--beam: is for models of the translation"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_written(
    cli, classes_run, tmp_path, monkeypatch, name, contents, flags, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(contents)
    code, out, err = cli("predict", classes_run, name, *flags)
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_predicts_nothing_says_what_to_use(cli, gpt_run, masks_run):  # noqa: F811
    code, _, err = cli("predict", gpt_run, stdin=b"a\n")
    assert code == 2 and "it continues texts; use kinformer generate" in err
    code, _, err = cli("predict", masks_run, stdin=b"a\n")
    assert code == 2 and "line 1: does not hold a mask; write [MASK]" in err
    code, _, err = cli("predict", masks_run, "nowhere")
    assert code == 2 and "nowhere does not exist" in err


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("kind", ["causal", "encoder"])
def test_vectors_are_pooled_hidden_states_whatever_stands_beside(kind, pooling, gpt_run, masks_run):  # noqa: F811
    run, texts = {"causal": gpt_run, "encoder": masks_run}[kind], ["wind", "a", "river sings under the tree"]
    vectors = kinformer.embed(run, texts, pooling=pooling)
    alone = np.concatenate([kinformer.embed(run, [text], pooling=pooling) for text in texts])
    assert vectors.shape == (3, kinformer.open_run(run).config.dim) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, alone, rtol=1e-3, atol=1e-4)
    model, config = kinformer.load(run), kinformer.open_run(run).config.input
    ids = (
        [*b"wind"] if kind == "causal" else [i for i in (config.bos_token, *b"wind", config.eos_token) if i is not None]
    )
    with torch.inference_mode():
        hidden = model.hidden(torch.tensor([ids]))[0][0]
    expected = {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1]}[pooling]
    np.testing.assert_allclose(vectors[0], expected.numpy(), rtol=1e-3, atol=1e-4)


def test_vectors_of_files_have_their_names(tmp_path):
    for kind, named in (("image", True), ("audio", True), ("text", False)):
        with writing_vectors(tmp_path / "v.npz") as write:
            for name in ("b/é.png", "a.png"):
                write(Embedded(kind, name, np.full(3, len(name), np.float32)))
        found = np.load(tmp_path / "v.npz")
        assert found["vectors"].tolist() == [[7] * 3, [5] * 3]
        assert (found["names"].tolist() if named else found.files) == (["b/é.png", "a.png"] if named else ["vectors"])


def test_vectors_go_into_a_file(cli, masks_run, tmp_path):
    texts = [f"wind {number}" for number in range(40)]
    (tmp_path / "texts").write_text("\n".join(texts))
    code, _, err = cli("embed", masks_run, tmp_path / "texts", "--out", tmp_path / "v.npz", "--batch-size", 3)
    expected = kinformer.embed(masks_run, texts)
    assert code == 0, err
    written = np.load(tmp_path / "v.npz")
    np.testing.assert_allclose(written["vectors"], expected, rtol=1e-3, atol=1e-4)
    assert len(written["names"]) == len(expected) and "labels" not in written
    table = tmp_path / "t.csv"
    table.write_text("line,author\none two,tolstoy\nthree,austen\n")
    fields = ("--text-field", "line", "--label-field", "author")
    assert cli("embed", masks_run, table, *fields, "--out", tmp_path / "l.npz")[0] == 0
    written = np.load(tmp_path / "l.npz")
    assert written["names"].tolist() == ["one two", "three"] and written["labels"].tolist() == ["tolstoy", "austen"]
    rows = [json.loads(line) for line in cli("embed", masks_run, table, *fields)[1].splitlines()]
    assert [row["label"] for row in rows] == ["tolstoy", "austen"]
    code, out, err = cli("embed", masks_run, tmp_path / "texts", "--out", tmp_path / "v.jsonl", "--first", 2)
    rows = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert code == 0 and [row["text"] for row in rows] == texts[:2], err
    np.testing.assert_allclose([row["vector"] for row in rows], expected[:2], rtol=1e-3, atol=1e-4)
    code, _, err = cli("embed", masks_run, tmp_path / "texts", "--out", tmp_path / "v.txt")
    assert code == 2 and "ends in neither .npz nor .jsonl" in err
    with pytest.raises(KinformerError, match="text 2: does not have text"):
        kinformer.embed(masks_run, ["a", " "])


def test_evaluation_writes_a_table_of_its_predictions(cli, classes_run, tmp_path):
    table = tmp_path / "held_out.csv"
    code, out, err = cli("evaluate", classes_run, "--predictions", table, "--split", "train", "--json")
    assert code == 0, err
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["item", "text", "label", "class", "probability"]
    assert [row["item"] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
    accuracy = sum(row["label"] == row["class"] for row in rows) / len(rows)
    assert accuracy == pytest.approx(json.loads(out)["accuracy"])
    predicted = kinformer.predict(classes_run, [row["text"] for row in rows[:9]])
    for row, item in zip(rows, predicted, strict=False):
        assert row["class"] == item["classes"][0]["class"]
        assert float(row["probability"]) == pytest.approx(item["classes"][0]["probability"], abs=1e-5)
    assert cli("evaluate", classes_run, "--predictions", tmp_path / "a.txt")[0] == 2


def test_every_masked_token_is_a_row_of_the_table(masks_run, tmp_path):
    table = tmp_path / "masks.jsonl"
    settings = {"first": 600, "quiet": True, "device": "cpu"}
    measured = kinformer.evaluate(masks_run, predictions=str(table), **settings)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert len(rows) == measured.facts["masked"]
    assert sum(row["correct"] for row in rows) / len(rows) == pytest.approx(measured.figures["accuracy"])
    assert all(row["label"] == row["token"] for row in rows if row["correct"])
    assert measured.figures == kinformer.evaluate(masks_run, **settings).figures
    text = Path(kinformer.open_run(masks_run).data["spec"]).read_text(encoding="utf-8")
    assert all(row["text"].replace("[MASK]", row["label"]) in text for row in rows if "\ufffd" not in row["text"])


def test_vectors_of_pictures_are_pooled_hidden_states(cli, tmp_path):
    tiny = {"recipe": "tiny", "steps": 2, "batch_size": 8, "device": "cpu", "quiet": True}
    run = kinformer.train("vit", task="vision", data="digits", out=tmp_path / "vit", **tiny).folder
    from PIL import Image

    images = read_images("digits").test
    for number in range(3):
        Image.fromarray(np.asarray(images.pixels[number])[..., 0]).save(tmp_path / f"{number}.png")
    vectors = kinformer.embed(run, [tmp_path / f"{number}.png" for number in range(3)], batch_size=2)
    pixels = torch.from_numpy(np.stack([images.pixels[number] for number in range(3)])).permute(0, 3, 1, 2)
    with torch.inference_mode():
        expected = kinformer.load(run).hidden(pixels.contiguous()).long_input.mean(1)
    np.testing.assert_allclose(vectors, expected.numpy(), rtol=1e-3, atol=1e-4)
    code, out, err = cli("embed", run, tmp_path / "1.png")
    row = json.loads(out)
    assert code == 0 and row["image"].endswith("1.png"), err
    np.testing.assert_allclose(row["vector"], vectors[1], rtol=1e-3, atol=1e-4)
    code, _, err = cli("embed", run, tmp_path / "1.png", "--text-field", "title")
    assert code == 2 and "reads none; leave it out" in err


def test_files_that_cannot_be_read_are_left_out_where_one_asks_for_it(cli, classes_run, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in (("a", b"zzz, 1"), ("b", b" \n"), ("c", b"\xff"), ("d", b"aaa, 2\x1b[31m")):
        (folder / f"{name}.txt").write_bytes(content)
    assert cli("predict", classes_run, folder)[0] == 2
    code, out, err = cli("predict", classes_run, folder, "--skip-bad")
    assert code == 0 and out.count("\n") == 2 and out.endswith("aaa, 2\\x1b[31m\n")  # no escape sequence is printed
    assert [name for line in err.splitlines() for name in ("b.txt", "c.txt") if name in line] == ["b.txt", "c.txt"]
    assert cli("embed", classes_run, folder)[0] == 2
    code, out, err = cli("embed", classes_run, folder, "--skip-bad")
    assert code == 0 and "b.txt" in err
    assert [json.loads(line)["text"][:3] for line in out.splitlines()] == ["zzz", "aaa"]
    sounds, (good, bad) = tmp_path / "sounds", ("good.wav", "bad.wav")
    sounds.mkdir()
    write_sound(sounds / good, tone(0.3, 8000), 8000)
    (sounds / bad).write_bytes((sounds / good).read_bytes()[:30])
    tiny = {"recipe": "tiny", "steps": 1, "batch_size": 4, "device": "cpu", "quiet": True}
    run = kinformer.train("speech-softmax", data="dtmf", out=tmp_path / "run", **tiny).folder
    with pytest.raises(KinformerError, match=bad):
        kinformer.predict(run, sounds)
    assert [Path(row["audio"]).name for row in kinformer.predict(run, sounds, skip_bad=True)] == [good]
    assert len(kinformer.embed(run, sounds, skip_bad=True)) == 1


def test_pictures_that_cannot_be_read_are_left_out_where_one_asks_for_it(tmp_path):
    from PIL import Image

    tiny = {"recipe": "tiny", "steps": 1, "batch_size": 8, "device": "cpu", "quiet": True}
    run = kinformer.train("vit", task="vision", data="digits", out=tmp_path / "vit", **tiny).folder
    (tmp_path / "pictures").mkdir()
    for name in ("a", "b", "c"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "pictures" / f"{name}.png")
    (tmp_path / "pictures" / "a.png").write_bytes(b"no picture")
    whole = (tmp_path / "pictures" / "b.png").read_bytes()
    (tmp_path / "pictures" / "b.png").write_bytes(whole[:45])  # its head alone
    with pytest.raises(KinformerError, match=r"a\.png"):
        kinformer.predict(run, tmp_path / "pictures")
    rows = kinformer.predict(run, tmp_path / "pictures", skip_bad=True)
    assert [Path(row["image"]).name for row in rows] == ["c.png"]
    assert len(kinformer.embed(run, tmp_path / "pictures", skip_bad=True)) == 1


@pytest.mark.parametrize("member", ["speech-softmax", "speech-linear"])
def test_vectors_of_sounds_are_pooled_hidden_states(member, tmp_path):
    tiny = {"recipe": "tiny", "steps": 2, "batch_size": 4, "device": "cpu", "quiet": True}
    run = kinformer.train(member, data="dtmf", out=tmp_path / "run", **tiny)
    rate = run.data["identity"]["rate"]
    write_sound(tmp_path / "tone.wav", tone(1.0, rate), rate)
    (vector,) = kinformer.embed(run.folder, tmp_path / "tone.wav", pooling="last")
    samples, _ = read_sound(tmp_path / "tone.wav")
    frames = features_of(torch.from_numpy(samples), Filterbank(rate, run.config.input.mels), run.config)
    with torch.inference_mode():
        expected = kinformer.load(run.folder).hidden(frames[None])[0][0, -1]
    np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-3, atol=1e-4)
