"""Speech from end to end: telephone tones and recordings are learnt, measured, and written down, also as they come."""

import json
import math
import sys

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.model import CausalModel
from kinformer.family.build import configure
from kinformer.lab.data.sound import COUNTS, RATE, Calls, SoundOptions, open_sound
from kinformer.lab.evaluation.transcripts import count_errors
from kinformer.lab.runs.inference import generate
from kinformer.lab.runs.options import GenerateOptions
from kinformer.lab.tasks.speech import CTC, IGNORED, Listener, Rows
from kinformer.runtime.errors import KinformerError
from tests.data.test_sound import tone, write

SMALL = {"steps": 2, "length": 64, "batch_size": 4, "threads": 1, "device": "cpu", "validation_tokens": 64}


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    for split, count in (("train", 40), ("validation", 8), ("test", 6)):
        monkeypatch.setitem(COUNTS, split, count)


def call(path, number=0):
    return write(path, Calls("test").samples(number).double().numpy(), RATE)


def test_from_the_command_line(cli, tmp_path):
    run = tmp_path / "run"
    few = ("--length", "64", "--batch-size", "4", "--threads", "1", "--validation-tokens", "64")
    code, told, err = cli(
        "train", "speech-softmax", "--recipe", "tiny", "--steps", "2", *few, "--join", "2-3", "--out", run, "--json"
    )
    assert code == 0, err
    told = json.loads(told)
    assert told["validation_error_rate"] > 0 and told["validation_bits_per_symbol"] > 0
    config = json.loads((run / "config.json").read_text())
    assert config["task"]["name"] == "speech" and config["model"]["head"]["classes"] == 17
    code, told, _ = cli("evaluate", run, "--prefixes", "3", "--json")
    measured = json.loads(told)
    assert code == 0 and measured["utterances"] == 6 and measured["baselines"]["empty"] == 1
    edits = sum(measured[name] for name in ("substitutions", "deletions", "insertions"))
    assert measured["error_rate"] == edits / measured["symbols"]
    code, told, err = cli("evaluate", run, "--predictions", tmp_path / "heard.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()]
    assert [row["item"] for row in rows] == [1, 2, 3, 4, 5, 6] and list(rows[0])[1:] == [
        "audio",
        "label",
        "text",
        "errors",
    ]
    assert sum(len(row["label"].split()) for row in rows) == measured["symbols"]
    assert f"{sum(row['errors'] for row in rows) / measured['symbols']:.2%}" in told
    assert code == 0 and "label error rate" in told and "writing nothing has an error rate of 100 %" in told
    code, told, _ = cli("generate", run, "--audio", call(tmp_path / "a.wav"), "--json")
    assert code == 0 and abs(json.loads(told)["sound_seconds"] - len(Calls("test").samples(0)) / RATE) < 1e-6
    code, told, _ = cli("train", "speech-softmax", "--out", run, "--resume", "--steps", "3", "--json")
    assert code == 0 and json.loads(told)["steps"] == 3


def test_a_language_model_beside_the_beam(tmp_path):
    run, reader = tmp_path / "run", tmp_path / "reader"
    kinformer.train("speech-softmax", recipe="tiny", out=run, **SMALL)
    (tmp_path / "lines.txt").write_text("1 2 3\n4 5 * 6\n" * 99)
    sizes = {"steps": 1, "length": 16, "batch_size": 2, "validation_tokens": 64}
    kinformer.train("linear-transformer", recipe="tiny", data=tmp_path / "lines.txt", out=reader, **sizes)
    plain = kinformer.evaluate(run, prefixes=3)
    beside = {"prefixes": 3, "language_model": str(reader)}
    unmoved = kinformer.evaluate(run, **beside, alpha=0.0)
    assert unmoved.metrics == plain.metrics and unmoved.facts["substitutions"] == plain.facts["substitutions"]
    guided = kinformer.evaluate(run, **beside, alpha=2.0, beta=9.0)
    assert guided.metrics["error_rate"] != plain.metrics["error_rate"]
    assert (guided.facts["language_model"], guided.facts["beta"]) == (str(reader), 9.0)
    path = call(tmp_path / "a.wav")
    (predicted,) = kinformer.predict(run, [str(path)], **beside, alpha=2.0, beta=9.0)
    generating = GenerateOptions(task_options={"audio": str(path), **beside, "alpha": 2.0, "beta": 9.0}, quiet=True)
    heard = generate(run, None, generating)
    assert predicted["text"] == heard.facts["text"]
    with pytest.raises(KinformerError, match="`?prefixes`? 1 searches nothing"):
        kinformer.evaluate(run, language_model=str(reader))
    with pytest.raises(KinformerError, match="predicts no text"):
        kinformer.evaluate(run, prefixes=3, language_model=str(run))


def test_a_causal_member_writes_while_sound_comes(cli, tmp_path):
    run = tmp_path / "run"
    kinformer.train("linear-transformer", task="speech", recipe="tiny", out=run, **SMALL)
    path = call(tmp_path / "a.wav", 1)
    code, told, err = cli("generate", run, "--audio", "-", stdin=path.read_bytes())
    assert code == 0 and "s of sound in" in err
    code, whole, _ = cli("generate", run, "--audio", path, "--json")
    assert told.strip() == json.loads(whole)["text"] and json.loads(whole)["state_bytes"] > 0


@pytest.mark.parametrize("member", ["linear-transformer", "speech-softmax"])
@pytest.mark.parametrize("rate", [RATE, 11025])
def test_pieces_of_sound_are_heard_as_the_whole(member, rate):
    symbols = {"input": {"kind": "frames"}, "head": {"kind": "ctc", "classes": 5}}
    model = kinformer.build(member, recipe="tiny", set=symbols).eval()
    sound = open_sound("dtmf", SoundOptions())
    samples = sound.splits["test"].samples(2)
    causal = model.config.protocol is CausalModel
    listener = Listener(model, rate, RATE)
    cuts = [0, 7, 7, 500, 3000, 3100, len(samples), len(samples)]
    with torch.inference_mode():
        pieces = [
            listener.feed(samples[a:b].numpy(), last=n == len(cuts) - 2)
            for n, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
        ]
        logits = torch.cat([each for each in pieces if len(each)])
        whole = Listener(model, rate, RATE).feed(samples.numpy(), last=True)
    assert logits.shape == whole.shape and (logits - whole).abs().max() < 1e-4
    assert (sum(len(each) > 0 for each in pieces) > 1) == causal
    if rate == RATE:
        values = Rows(sound, "test", model.config).features(2)
        with torch.inference_mode():
            found = model(values[None])
        assert ((found[0] if causal else found)[0] - whole).abs().max() < 1e-4


def rows_of(member="speech-linear", split="train", **options):
    return Rows(
        open_sound("dtmf", SoundOptions()), split, configure(member, "tiny", set={"head.classes": 17}), **options
    )


def test_padding_and_rows_that_do_not_count_change_nothing():
    rows, model = rows_of(), configure("speech-linear", "tiny", set={"head.classes": 17}).build().eval()
    both = rows.batch(np.array([0, 1]))
    losses = [CTC()(model, rows.batch(np.array([n])), None, 0.0)[1] for n in (0, 1)]
    together = CTC()(model, both, None, 0.0)[1]
    for name in ("nats", "predicted", "errors"):
        assert torch.allclose(together[name].float(), losses[0][name].float() + losses[1][name], rtol=1e-4)
    first = CTC()(model, rows.batch(np.array([0, 1]), np.array([True, False])), None, 0.0)[1]
    assert torch.allclose(first["nats"], losses[0]["nats"], rtol=1e-4) and first["predicted"] == losses[0]["predicted"]
    assert rows.batch(np.array([0]), np.array([False])).counts.tolist() == [IGNORED]


def test_utterances_that_cannot_be_learnt_are_left_out_and_told(tmp_path, caplog):
    caplog.set_level("INFO", "kinformer")
    for number in range(30):
        write(tmp_path / f"{number:02}.wav", tone(0.03 if number < 10 else 0.3 if number < 20 else 3.0))
    rows = [f"{number:02}.wav\tabba\tann\t{'dev' if number % 10 == 9 else 'train'}" for number in range(30)]
    rows += ["00.wav\tabba\tann\ttest"]
    (tmp_path / "transcripts.tsv").write_text("\n".join(rows))
    kinformer.train("speech-lstm", recipe="tiny", data=str(tmp_path), out=tmp_path / "run", **SMALL)
    assert "9 of 27 utterances of the train split (as 00.wav) are shorter than their transcripts at" in caplog.text
    assert "9 of 27 utterances of the train split (as 20.wav) are longer than length 64 positions of 40" in caplog.text
    found = kinformer.evaluate(tmp_path / "run")
    assert found.facts["symbols"] == 4 and found.facts["word_error_rate"] == 1.0
    assert found.metrics["bits_per_symbol"] == math.inf  # the only utterance is too short for its transcript
    held_out = kinformer.evaluate(tmp_path / "run", split="validation")
    assert "1 of 3 utterances of the validation split (as 09.wav) are shorter than their transcripts" in caplog.text
    (tmp_path / "transcripts.tsv").write_text("\n".join(row for row in rows if not row.startswith("09")))
    alone = kinformer.evaluate(tmp_path / "run", split="validation")
    assert held_out.metrics["bits_per_symbol"] == pytest.approx(alone.metrics["bits_per_symbol"], rel=1e-5)
    (tmp_path / "00.wav").unlink()
    with pytest.raises(KinformerError, match="00.wav is missing"):
        kinformer.evaluate(tmp_path / "run")


def test_other_recordings_are_measured_with_the_runs_symbols(tmp_path, caplog):
    caplog.set_level("INFO", "kinformer")
    for folder, rate in (("a", 8000), ("b", 16000)):
        for number in range(30):
            write(tmp_path / folder / f"{number % 2}_ann_{number}.wav", tone(0.3, rate), rate)
    kinformer.train("speech-lsh", recipe="tiny", data=str(tmp_path / "a"), out=tmp_path / "run", **SMALL)
    found = kinformer.evaluate(tmp_path / "run", data=str(tmp_path / "b"))
    assert "is other data than the run was trained on" in caplog.text
    assert "30 of 30 clips have 16,000 samples a second and are resampled to 8,000" in caplog.text
    assert found.facts["utterances"] == 2 and not found.data["same_as_run"]
    write(tmp_path / "b" / "7_ann_0.wav", tone(0.3))
    with pytest.raises(KinformerError, match="has the symbol '7'"):
        kinformer.evaluate(tmp_path / "run", data=str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("member", "options", "told"),
    [
        ("speech-linear", {"join": "7-3"}, "join 7-3: is not a range of clips"),
        ("speech-linear", {"tokenizer": "x.json"}, "tokenizer x.json: is for text; the symbols of speech"),
        ("speech-linear", {"data": "stdlib"}, "data stdlib: is text, not speech"),
        ("speech-linear", {"length": 2}, "are longer than length 2 positions .* and none is left"),
        ("speech-linear", {"set": {"input.mels": 300}}, "some filter does not contain a frequency"),
        ("speech-linear", {"set": {"head.classes": 9}}, '"head.classes": 9.: the data has 16 symbols'),
        (
            "speech-linear",
            {"task": "mlm"},
            "task mlm: speech-linear is an encoder that reads frames, whose tasks are speech",
        ),
        ("decision", {"task": "speech"}, "task speech: "),
    ],
)
def test_mistakes(tmp_path, member, options, told):
    with pytest.raises(KinformerError, match=told):
        kinformer.train(member, recipe="tiny", out=tmp_path / "run", **SMALL | options)
    assert not (tmp_path / "run").exists()


def test_mistakes_of_generating(cli, tmp_path):
    run = tmp_path / "run"
    kinformer.train("speech-softmax", recipe="tiny", out=run, **SMALL)
    silent = write(tmp_path / "silent.wav", np.zeros(0))
    for arguments, told in (
        ((), "there must be sound to write down; give --audio FILE"),
        (("--prompt", "x"), "--prompt: the task speech continues no text"),
        (("--audio", tmp_path / "none.wav"), "none.wav: the file does not exist"),
        (("--audio", __file__), "test_speech.py: is text, not sound; give WAV or FLAC."),
        (("--audio", silent), "silent.wav: holds 0 samples"),
        (("--audio", "-"), "standard input: holds 0 samples"),
    ):
        code, _, err = cli("generate", run, *arguments, stdin=silent.read_bytes())
        assert code == 2 and told in err and err.count("\n") == 1, err


def test_without_jiwer_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(KinformerError, match=r"pip install 'kinformer\[audio\]'"):
        count_errors([["a"]], [["b"]])


def test_errors_are_the_least_edits():
    found = count_errors([list("abc"), list("ab")], [list("axc"), list("abbb")])
    assert found == (1, 0, 2, 5) and found.rate == 0.6
    assert count_errors([["no", "go"]], [[]]) == (0, 2, 0, 2)


@pytest.mark.parametrize(("member", "task"), [("speech-softmax", None), ("linear-transformer", "speech")])
def test_silence_is_empty_and_transcripts_have_a_probability(cli, tmp_path, member, task):
    """A constant wave, and noise of the last bit, have no transcript; a call has one with its probability."""
    run = tmp_path / "run"
    kinformer.train(member, task=task, recipe="tiny", out=run, **SMALL)
    noise = np.random.default_rng(0).uniform(-3e-5, 3e-5, RATE)
    paths = [write(tmp_path / f"{number}.wav", wave) for number, wave in enumerate((np.full(RATE, 0.1), noise))]
    for path in paths:
        (row,) = kinformer.predict(run, [str(path)])
        assert (row["text"], row["probability"]) == ("", pytest.approx(1.0))
        assert cli("generate", run, "--audio", path)[1].strip() == ""
    (row,) = kinformer.predict(run, [str(call(tmp_path / "call.wav"))])
    assert 0 < row["probability"] < 1
