"""``--set`` on a trained run: what leaves its weights as they are is done, anything else is one sentence."""

import json
import math

import pytest
import torch

import kinformer
from kinformer.lab.data import open_corpus
from kinformer.lab.evaluation.bits import Windows, measure
from kinformer.runtime.errors import KinformerError

PLACE = "layers.*.mixer.position"
YARN = {f"{PLACE}.scaling": "yarn", f"{PLACE}.factor": "4", f"{PLACE}.original_length": "32"}
FLAGS = [part for path, value in YARN.items() for part in ("--set", f"{path}={value}")]


@pytest.fixture(scope="module")
def rope_run(make_run):
    return make_run("rope")


def test_a_context_is_extended_at_evaluation(cli, rope_run, text_file):
    told = {}
    for name, flags in (("plain", []), ("yarn", FLAGS)):
        code, out, err = cli("evaluate", rope_run, "--context", 128, "--json", "--device", "cpu", *flags)
        assert code == 0, err
        told[name] = json.loads(out)
    assert told["plain"]["set"] == [] and told["yarn"]["set"] == FLAGS[1::2]
    model = kinformer.load(rope_run, set=YARN)
    assert model.stack.layers[0].mixer.position.magnitude == 1 + 0.1 * math.log(4)
    expected = measure(model, open_corpus(str(text_file)).splits["test"], Windows(context=128))
    assert told["yarn"]["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert abs(told["yarn"]["bits_per_byte"] - told["plain"]["bits_per_byte"]) > 1e-4
    text = cli("evaluate", rope_run, "--context", 64, "--device", "cpu", *FLAGS)[1]
    assert f"(rope, {', '.join(FLAGS[1::2])})" in text


def test_a_context_is_extended_in_generation(cli, rope_run):
    flags = ["--prompt", "the wind sings", "--max-new-tokens", 40, "--temperature", 0, "--json", "--device", "cpu"]
    texts = [json.loads(cli("generate", rope_run, *flags, *more)[1])["samples"][0]["tokens"] for more in ([], FLAGS)]
    model = kinformer.load(rope_run, set=YARN)
    prompt = torch.tensor([list(b"the wind sings")])
    assert texts[1] == kinformer.generate(model, prompt, max_new_tokens=40, temperature=0)[0].tolist()
    assert texts[0] != texts[1]


@pytest.mark.parametrize("command", [("evaluate",), ("generate", "--prompt", "the")])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["layers=3"], "--set layers: turns the weight stack.layers.2.feed_forward.down.bias from none to (32,)"),
        (["layers=1"], "feed_forward.down.bias from (32,) to none, but a trained model keeps the weights"),
        (["dim=16"], "turns the weight input.embedding.weight from (256, 32) to (256, 16)"),
        (["head.tied=false"], "turns the weight head.output.weight from none to (256, 32)"),
        ([f"{PLACE}.scaling=yarm"], "'yarm' is not one of 'none', 'linear', 'ntk', 'yarn', 'llama3', 'longrope'"),
        ([f"{PLACE}.scaling=ntk"], "scaling is 'ntk' with factor = 1; set both"),
        (
            [f"{PLACE}.scaling=yarn", f"{PLACE}.factor=2"],
            "needs original_length, the length that the model was trained",
        ),
        (["position"], "--set position: is not path=value"),
    ],
)
def test_what_is_not_possible_is_one_sentence(cli, rope_run, command, changes, told):
    name, *options = command
    flags = [part for change in changes for part in ("--set", change)]
    code, out, err = cli(name, rope_run, *options, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("kinformer: ") and told in err and err.count("\n") == 1


def test_positions_of_a_table_cannot_be_extended(gpt_run):
    with pytest.raises(KinformerError, match="turns the weight position.table"):
        kinformer.load(gpt_run, set={"position.max_length": 256})
