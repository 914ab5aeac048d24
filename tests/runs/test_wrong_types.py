"""Arguments of a wrong type or out of range are one sentence in Python, whichever function gets them."""

import sys

import numpy as np
import pytest
import torch

import kinformer
from kinformer.runtime.errors import KinformerError

PROMPT = [[1, 2, 3]]
LONG = torch.ones(1, 3, dtype=torch.int64)


@pytest.fixture(scope="module")
def model():
    return kinformer.build("linear-transformer", recipe="tiny", vocab_size=61).eval()


GENERATE = [
    ({"seed": "x"}, "seed is 'x' but must be a whole number or left out"),
    ({"seed": 1.5}, "seed is 1.5 but must be a whole number or left out"),
    ({"seed": True}, "seed is True but must be"),
    ({"seed": -1}, "seed is -1 but must be 0 or more"),
    ({"seed": 2**80}, "seed is 1.209e+24 but must be below 2^63"),
    ({"temperature": "1"}, "temperature is '1' but must be a number"),
    ({"temperature": None}, "temperature is None but must be a number"),
    ({"temperature": torch.tensor(1.0)}, "temperature is tensor"),
    ({"temperature": float("nan")}, "temperature is nan but must be 0 (greedy)"),
    ({"top_k": 1.5}, "top_k is 1.5 but must be a whole number or left out"),
    ({"top_p": "a"}, "top_p is 'a' but must be a number or left out"),
    ({"max_new_tokens": "2"}, "max_new_tokens is '2' but must be a whole number"),
    ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5 but must be a whole number"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0 but must be 1 or more"),
    ({"valid": [[True] * 3]}, "valid is of the type list but must be a tensor [batch, time] of torch.bool"),
    ({"valid": LONG}, "valid is of the type torch.int64 but must be a tensor"),
    ({"stop": [1]}, "stop holds 1 but must hold sequences of token ids"),
    ({"stop": 3}, "stop is 3 but must be a list of sequences of token ids, as in [[10]]."),
    ({"stop": ["a"]}, "stop holds 'a' but must hold sequences of token ids"),
    ({"stop": [[1.5]]}, "stop holds [1.5] but must hold sequences of token ids"),
    ({"temperature": 10**400}, "temperature is 1e+400 but must be below 2^63"),
    ({"temprature": 1.0}, "'temprature' is not an option of generation; did you mean 'temperature'"),
    ({"prompt_tokens": [[2**70]]}, "must hold ids, which are whole numbers"),
    ({"prompt_tokens": "hello"}, "must hold ids, which are whole numbers"),
    ({"prompt_tokens": None}, "must hold ids, which are whole numbers"),
    ({"prompt_tokens": np.array([["a"]])}, "must hold ids, which are whole numbers"),
    ({"prompt_tokens": LONG.bool()}, "tokens must be int64 ids, but are torch.bool"),
    ({"prompt_tokens": LONG + 90}, "the prompt holds token 91, but this model knows 0 to 60"),
]


@pytest.mark.parametrize(("options", "message"), GENERATE, ids=[message[:40] for _, message in GENERATE])
def test_generate(options, message, model):
    options = {"prompt_tokens": PROMPT, "max_new_tokens": 2} | options
    with pytest.raises(KinformerError) as error:
        kinformer.generate(model, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


# Python's words for a path with a null character.
NULL = "mkdir: embedded null character in path" if sys.version_info >= (3, 13) else "embedded null byte"

CALLS = [
    (lambda: kinformer.generate(None, PROMPT, max_new_tokens=2), "model is None but must be a model"),
    (lambda: kinformer.generate("runs/x", PROMPT, max_new_tokens=2), "kinformer.load gives the model of a run"),
    (lambda: kinformer.build(3), "member is 3 but must be text"),
    (lambda: kinformer.build("gpt", recipe=3), "recipe is 3 but must be text"),
    (lambda: kinformer.build("gpt", vocab_size="a"), "vocab_size is 'a' but must be a whole number or left out"),
    (lambda: kinformer.build("gpt", vocab_size=2.5), "vocab_size is 2.5 but must be a whole number or left out"),
    (lambda: kinformer.build("gpt", set=["dim=3"]), "set is ['dim=3'] but must be a mapping or left out"),
    (lambda: kinformer.build("gpt", set={3: 3}), "set holds the path 3, but paths must be text"),
    (lambda: kinformer.load(3), "run is 3 but must be text or a path"),
    (lambda: kinformer.open_run(None), "run is None but must be text or a path"),
    (lambda: kinformer.evaluate(None), "run is None but must be text or a path"),
    (lambda: kinformer.calibrate(None), "run is None but must be text or a path"),
    (lambda: kinformer.import_checkpoint(None, "out"), "folder is None but must be text or a path"),
    (lambda: kinformer.export(None, "out"), "run is None but must be text or a path"),
    (lambda: kinformer.show(None), "member is None but must be text or a path"),
    (lambda: kinformer.compare([3]), "members is [3] but must be a list of texts"),
    (lambda: kinformer.compare("gpt"), "members is 'gpt' but must be a list of texts"),
    (lambda: kinformer.bench(3), "members is 3 but must be a list of texts"),
    (lambda: kinformer.embed("runs/x", 3), "texts is 3 but must be a list of texts"),
    (lambda: kinformer.trace("runs/x", 3), "text is 3 but must be text"),
    (lambda: kinformer.train("gpt", out="out", set=3), "set is 3 but must be a mapping"),
    (lambda: kinformer.train(None, out="out"), "member is None but must be text"),
    (lambda: kinformer.train("gpt", out="out", seed=2**90), "but must be below 2^63"),
    (lambda: kinformer.train("gpt", out="out", lr=10**400), "lr is 1e+400 but must be below 2^63"),
    (lambda: kinformer.train("gpt", out="out", device="privateuseone"), "device privateuseone: cannot be used here"),
    (lambda: kinformer.train("gpt", out="out", device="meta"), "device meta: does not hold values"),
    (lambda: kinformer.train("gpt", out="out", device=3), "device is 3 but must be text"),
    (lambda: kinformer.train("gpt", out="o" * 300), "cannot be made (File name too long); choose a folder"),
    (lambda: kinformer.train("gpt", out="\0"), f"cannot be made ({NULL}); choose a folder"),
    (lambda: kinformer.open_run("o" * 300), "o: is not a run folder"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_other_functions(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KinformerError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)
