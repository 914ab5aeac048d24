"""Runs of speech as ``AutoModelForCTC``: logits and losses are the run's, padded or not, and the folder comes back."""

import json

import pytest
import torch
import transformers

import kinformer
from kinformer.family.build import configure
from kinformer.inputs.signals import CHARACTERS
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.speech import CTC, Listener, SpeechBatch
from kinformer.runtime.errors import KinformerError
from tests.interop.decoders import assert_close
from tests.interop.test_export import assert_same_weights, save_run

SYMBOLS = list(" abcdefg'")
RATE = 8000
CHANGES = {"input": {"kind": "frames", "mels": 20}, "head": {"kind": "ctc", "classes": 1 + len(SYMBOLS)}}


@pytest.fixture(scope="module", params=["speech-lsh", "linear-transformer"])
def pair(request, tmp_path_factory):
    """The folder of an encoder's or a causal model's run, the run's model, and the exported one."""
    folder = tmp_path_factory.mktemp("speech")
    torch.manual_seed(0)
    config = configure(request.param, "tiny", None if request.param == "speech-lsh" else 64, CHANGES)
    identity = {"rate": RATE, "unit": CHARACTERS, "symbols": SYMBOLS}
    save_run(
        request.param,
        folder / "run",
        config,
        config.build(),
        data={"spec": "dtmf", "identity": identity},
        vocabulary=None,
    )
    done = kinformer.export(folder / "run", folder / "out")
    assert (done.auto_class, done.native) == ("AutoModelForCTC", False)
    theirs = transformers.AutoModelForCTC.from_pretrained(done.folder, trust_remote_code=True).eval()
    return folder, kinformer.load(folder / "run"), theirs


def sounds():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, generator=generator) / 3 for length in (4000, 2500)]


def prepared(folder):
    """The two sounds as transformers pads them."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder / "out")
    rows = [sound.numpy() for sound in sounds()]
    return extractor(rows, sampling_rate=RATE, padding=True, return_tensors="pt")


@torch.no_grad()
def test_logits_are_what_a_listener_hears(pair):
    folder, ours, theirs = pair
    logits = theirs(**prepared(folder)).logits
    for row, sound in zip(logits, sounds(), strict=True):
        want = Listener(ours, RATE, RATE).feed(sound.numpy(), last=True)
        assert_close(row[: len(want)], want)
        assert not row[len(want) :].any()


def test_the_loss_is_the_runs(pair):
    folder, ours, theirs = pair
    labels = torch.tensor([[2, 3, 3, 1], [5, 4, -100, -100]])
    inputs = prepared(folder)
    output = theirs(**inputs, labels=labels)
    frames, valid = theirs._positions(inputs["input_values"], inputs["attention_mask"])
    batch = SpeechBatch(frames, valid, labels.clamp_min(0), torch.tensor([4, 2]))
    assert_close(output.loss, CTC()(ours, batch, None, 0.0)[0], 1e-6)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in theirs.parameters())
    parts = [
        theirs(inputs["input_values"][row : row + 1], inputs["attention_mask"][row : row + 1], labels[row : row + 1],
               num_items_in_batch=6).loss
        for row in (0, 1)
    ]  # fmt: skip
    assert_close(sum(parts), output.loss, 1e-5)
    assert_close(theirs(**inputs, labels=labels, num_items_in_batch=None).loss, output.loss)
    assert theirs(**inputs, labels=torch.full((2, 2), -100)).loss.isfinite()  # without a symbol


def test_the_folder_says_how_sound_is_heard_and_comes_back(pair):
    folder, _, theirs = pair
    config = json.loads((folder / "out" / "config.json").read_text())
    assert (config["sampling_rate"], config["id2label"]["2"], config["pad_token_id"]) == (RATE, "a", 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "out")
    assert tokenizer.decode([2, 2, 0, 2, 1, 3]) == "aa b"
    assert tokenizer("ba d").input_ids == [3, 2, 1, 5]
    kinformer.import_checkpoint(folder / "out", folder / "again")
    assert_same_weights(folder / "run", folder / "again")
    assert open_run(folder / "again").member == open_run(folder / "run").member
    for inputs in ({}, {"input_values": torch.zeros(1, 4, 4)}):
        with pytest.raises(KinformerError, match="give sound as floats"):
            theirs(**inputs)
    with pytest.raises(KinformerError, match="must have the shape of the input"):
        theirs(torch.zeros(1, 800), torch.ones(1, 799))
    with pytest.raises(KinformerError, match="output_hidden_states: a model of sound returns logits and"):
        theirs(torch.zeros(1, 800), output_hidden_states=True)
