"""``kinformer verify``: what holds is said to hold, and what is broken is caught by its law, at its smallest case."""

import json
import sys

import pytest

import kinformer
from kinformer.interop.proof import LAWS, Plain, judge
from kinformer.lab.cli.main import main
from kinformer.runtime.errors import KinformerError
from tests.interop.peers import new_model
from tests.interop.test_export import saved_run

BESIDE = ["logits", "streaming", "padding left", "gradients", "greedy tokens"]
MODULE = """
import torch

class Model:
    vocab_size = 11
    breaks = ""

    def __call__(self, tokens, cache=None, valid=None):
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        total, count = (0.0, 0) if cache is None or self.breaks == "cache" else cache
        values = torch.sin(tokens.double()) * (1 if "padding" in self.breaks else valid)
        if self.breaks == "batch":
            values = values - values.mean(dim=0, keepdim=True)
        if self.breaks == "permutation":
            values = values + torch.arange(len(tokens))[:, None]
        sums = total + values.cumsum(dim=1)
        if self.breaks == "causality" and tokens.shape[1] > 5:
            sums = sums + values.sum(dim=1, keepdim=True)
        logits = torch.cos(sums[..., None] * torch.arange(1, 12))
        return logits, (sums[:, -1:], 0)

class Sizes:
    vocab_size = 11

sizes = Sizes()

class Causality(Model): breaks = "causality"
class Cache(Model): breaks = "cache"
class Padding(Model): breaks = "padding"
class Batch(Model): breaks = "batch"
class Permutation(Model): breaks = "permutation"

class Packing(Model):
    def __call__(self, tokens, cache=None, valid=None, reset=None):
        return super().__call__(tokens, cache, valid)

class Unpadded(Model):
    def __call__(self, tokens, cache=None):
        return super().__call__(tokens, cache)

def without_padding():
    return Unpadded()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A folder with a module of broken models, from which the command is called."""
    (tmp_path / "broken_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield "broken_models"
    sys.modules.pop("broken_models", None)


def broken(proof):
    return {one.law for one in (*proof.laws, *proof.beside) if one.holds is False}


@pytest.mark.parametrize("member", ["gpt", "rope", "gated-deltanet", "local"])
def test_a_run_and_its_export(member, tmp_path):
    proof = kinformer.verify(saved_run(member, tmp_path / "run"))
    assert proof.holds and not broken(proof)
    assert [one.law for one in proof.laws] == [*LAWS, "bfloat16"]
    assert [one.law for one in proof.beside] == BESIDE and all(one.holds for one in proof.beside)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "gpt_neox", "opt", "bloom", "mpt"])
def test_a_folder_and_its_import(kind, tmp_path):
    new_model(kind).save_pretrained(tmp_path / "theirs")
    proof = kinformer.verify(tmp_path / "theirs")
    assert [one.law for one in proof.beside] == BESIDE and all(one.holds for one in proof.beside), proof.beside
    # There transformers counts slots, padding among them: in distances of MPT, in windows of Gemma 3.
    leaks = {"padding right"} if kind in ("mpt", "gemma3_text") else set()
    assert broken(proof) == leaks, [one for one in proof.laws if one.holds is False]


def test_a_folder_that_is_not_imported_is_held_to_laws_alone(tmp_path):
    from transformers import GPTNeoXJapaneseConfig, GPTNeoXJapaneseForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    GPTNeoXJapaneseForCausalLM(GPTNeoXJapaneseConfig(**sizes)).save_pretrained(tmp_path / "theirs")
    proof = kinformer.verify(tmp_path / "theirs", length=9)
    assert proof.beside == () and "is not imported" in proof.notes[0] and len(proof.laws) == len(LAWS) + 1


def test_code_of_a_folder_runs_only_where_it_is_trusted(tmp_path, capsys):
    folder = tmp_path / "theirs"
    folder.mkdir()
    automap = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "of_nobody", "auto_map": automap}))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'run-code')!r}, 'w')")
    assert main(["verify", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "it needs its own code); add --trust-remote-code" in error and error.count("\n") == 1
    assert not (tmp_path / "run-code").exists()


def test_a_sound_module(module, capsys):
    assert main(["verify", f"{module}:Model"]) == 0
    assert "BREAKS" not in capsys.readouterr().out


BROKEN = {
    "Causality": ({"causality", "cache"}, "3 rows of 6 tokens, tokens from 1 on changed: logits differ by"),
    "Cache": ({"cache", "padding left", "padding right"}, "3 rows of 2 tokens, chunks of 2 x 1"),
    "Padding": ({"padding left", "padding right"}, "3 rows of 2 tokens, 1 token of padding on the left"),
    "Batch": ({"batch", "causality"}, "3 rows of 2 tokens, row 0 alone"),
    "Packing": ({"packing"}, "3 rows of 2 tokens, texts of 1 + 1"),
    "Permutation": ({"permutation", "batch"}, "3 rows of 2 tokens, rows in reverse order"),
}


@pytest.mark.parametrize(("name", "laws", "case"), [(name, *rest) for name, rest in BROKEN.items()])
def test_every_law_catches_what_breaks_it(name, laws, case, module, capsys):
    assert main(["verify", f"{module}:{name}", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    verdicts = {one["law"]: one for one in facts["laws"]}
    law = name.lower() if name.lower() in LAWS else "padding left"
    assert verdicts[law]["badge"] == "BREAKS" and verdicts[law]["case"].startswith(case), verdicts
    assert not facts["holds"]
    sound = {one for one, verdict in verdicts.items() if verdict["holds"]}
    assert sound.isdisjoint({law}) and {"causality", "cache", "batch", "permutation"} - laws - sound <= laws | {"batch"}


def test_a_module_without_padding_is_not_judged_on_it(module, capsys):
    assert main(["verify", f"{module}:without_padding"]) == 0
    assert capsys.readouterr().out.count("the model does not take a mask of padding") == 2


def test_the_table(tmp_path, capsys):
    assert main(["verify", str(saved_run("gpt", tmp_path / "run"))]) == 0
    printed = capsys.readouterr().out
    assert "exported as gpt2" in printed and "beside transformers" in printed
    assert "measured" in printed and "BREAKS" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/run"], "is not a run folder"),
        (["nowhere:Thing"], "nowhere:Thing: is neither a folder nor an object that can be imported"),
        (["broken_models:Nothing"], "has no attribute 'Nothing'"),
        (["broken_models:Model", "--length", "1"], "--length is 1 but must be 2 or more"),
        (["broken_models:sizes"], "the object is a Sizes, which cannot be called; give a causal model"),
        (["kinformer:__all__"], "the object does not have a vocab_size"),
        (["broken_models:MODULE"], "is neither a folder nor an object"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, module, capsys):
    assert main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_model_that_continues_nothing(tmp_path):
    with pytest.raises(KinformerError, match="does not continue tokens"):
        kinformer.verify(saved_run("bert", tmp_path / "run"))
    with pytest.raises(KinformerError, match="does not have a vocab_size"):
        judge(Plain(lambda tokens, cache=None: (tokens, cache)))
