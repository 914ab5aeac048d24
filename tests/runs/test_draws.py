"""Random numbers: PyTorch's global generator is for the caller, and training has it alone."""

from threading import Thread

import pytest
import torch
from torch import nn

import kinformer
from kinformer.family.build import configure
from kinformer.runtime.draws import private_numbers
from tests.process_state import watched

DRAWING = [
    "gpt",
    "reformer",
    "performer",
    "rfa",
    "mamba2",
    "t5",
    "shaw",
    "mixtral",
    "tensorized",
    "complex-order",
    "vit",
]


SMALL = {"recipe": "tiny", "steps": 3, "length": 16, "batch_size": 2, "validate_every": 0, "quiet": True, "threads": 1}
SMALL |= {"device": "cpu", "set": {"layers.*.dropout": 0.2}}


@pytest.fixture(scope="module")
def run(tmp_path_factory, text_file):
    out = tmp_path_factory.mktemp("draws") / "run"
    return kinformer.train("gpt", out=out, data=text_file, **SMALL)


@pytest.mark.parametrize("name", DRAWING)
def test_numbers_of_a_seed_are_those_of_the_global_generator(name):
    config = configure(name, "tiny")
    state = torch.get_rng_state()
    with private_numbers(7):
        own = config.build().state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    for key, value in config.build().state_dict().items():
        assert torch.equal(own[key], value), key


def test_every_function_that_draws_takes_the_generator():
    def drawn():
        x = torch.empty(4, 3)
        yield from (torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9), torch.randperm(5))
        yield from (torch.bernoulli(torch.full((4,), 0.5)), torch.multinomial(torch.ones(9), 3), torch.normal(x * 0, 1))
        for name in ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "random_", "bernoulli_"):
            yield getattr(torch.empty(4), name)()
        for fill in (nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.xavier_normal_, nn.init.kaiming_normal_):
            yield fill(torch.empty(4, 4))

    state = torch.get_rng_state()
    with private_numbers(3) as generator:
        own = list(drawn())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    assert all(map(torch.equal, own, drawn()))
    assert torch.equal(generator.get_state(), torch.get_rng_state())


def test_a_run_is_read_without_a_change_of_the_global_generator(run, tmp_path, monkeypatch):
    monkeypatch.setattr("kinformer.lab.runs.describe.interpreter_bytes", lambda: 1 << 28)  # a process of two seconds
    state = torch.get_rng_state()
    with watched() as calls:
        kinformer.load(run.folder)
        kinformer.open_run(run.folder).model()
        kinformer.evaluate(run.folder, first=2000, quiet=True)
        kinformer.embed(run.folder, ["a text"])
        assert "".join(kinformer.stream(run.folder, "wind ", max_new_tokens=4))
        kinformer.trace(run.folder, "wind")
        kinformer.estimate("gpt", recipe="tiny", length=16)
        kinformer.show("gpt", recipe="tiny")
        kinformer.export(run.folder, tmp_path / "exported")
    assert calls == [] and torch.equal(torch.get_rng_state(), state)


def test_trainings_in_two_threads_are_those_of_one(run, tmp_path, text_file):
    train = kinformer.train.__wrapped__  # the law of the suite is about a caller with one thread
    folders = [tmp_path / "first", tmp_path / "second"]
    threads = [Thread(target=train, args=("gpt",), kwargs={"out": out, "data": text_file, **SMALL}) for out in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = run.model().state_dict()
    for out in folders:
        for name, weight in kinformer.load(out).state_dict().items():
            assert torch.equal(weight, expected[name]), name
