"""Steps captured as graphs of a GPU draw what the model's own steps draw. Without a GPU, a tape repeats a step's
operators on the tensors that they had, as a graph does."""

import logging

import pytest
import torch

import kinformer
from kinformer.core.state import difference, nbytes, tensors
from kinformer.generation import recording
from kinformer.generation.recording import (
    GraphedStep,
    Tape,
    UnrecordableError,
    _WatchedReads,
    compile_calls,
    record,
    recordings_of,
)
from kinformer.generation.session import Session
from kinformer.lab.serving.engine import Engine
from kinformer.runtime import progress
from kinformer.runtime.compiling import trusted_arguments

from ..members import CAUSAL, TINY, one_layer
from ..serving.conftest import exhaust, request
from .conftest import tiny
from .test_recorded import CHANGES, IN_PYTHON, ready, session, stepped_beside


@pytest.fixture
def captures(monkeypatch):
    """Let a CPU capture steps; return the list of the captured functions."""
    functions = []

    def captured(function, device):
        functions.append(function)
        function()
        tape = Tape([])
        with tape, _WatchedReads():
            result = function()
        run = compile_calls(tape.calls, 0, len(tape.captured), [tape.ref(tensor) for tensor in result])
        return lambda: run(*tape.captured)

    monkeypatch.setattr(recording, "CAPTURES", {"cpu": captured})
    monkeypatch.setattr("kinformer.generation.session.CAPTURES", recording.CAPTURES)
    monkeypatch.setattr(progress, "_SHOWN", set())
    return functions


def running(made):
    return isinstance(made._stepping.running, GraphedStep)


@pytest.mark.parametrize("name", CAUSAL)
def test_captured_steps_are_the_models_own(name, captures):
    ours, expected = stepped_beside(name)
    assert running(ours) == (name not in IN_PYTHON)
    with torch.inference_mode():
        state = ours._stepping.settled(ours._state)
    assert difference(state, expected._state) < 1e-5


@pytest.mark.parametrize("member", ["gpt", "local", "t5", "forgetting", "gated-deltanet"])
def test_a_state_that_outgrows_its_slots_gets_more(member, captures, monkeypatch, prompt):
    monkeypatch.setattr(recording, "_LEAST_SLOTS", 4)
    model = tiny(member)
    ours, expected = session(model, prompt, room=4), session(model, prompt, recorded=False)
    sizes = set()
    for _ in range(70):
        assert torch.equal(ours.step(), expected.step())
        torch.testing.assert_close(ours._logits, expected._logits, atol=1e-12, rtol=1e-12)
        if running(ours):
            sizes.add(nbytes(ours._stepping.running.state))
            assert ours.state_bytes == nbytes(ours._stepping.running.state)
    assert running(ours)
    assert len(sizes) == {"gpt": 4, "t5": 4, "forgetting": 4, "local": 1, "gated-deltanet": 1}[member]


def test_sessions_of_one_model_do_not_share_a_state(captures, prompt):
    for member in ("gpt", "linear-transformer"):
        model = tiny(member)
        texts = [prompt, prompt.flip(1), prompt[:, :7]]
        ours = [session(model, text, room=64) for text in texts]
        expected = [session(model, text, recorded=False) for text in texts]
        del captures[:]
        for _ in range(20):
            for one, other in zip(ours, expected, strict=True):
                assert torch.equal(one.step(), other.step())
        running_now = [one._stepping.running for one in ours]
        assert all(map(running, ours)) and len(captures) == 3
        assert len({step.recording for step in running_now}) == 1
        places = [{tensor.data_ptr() for tensor in tensors(step.state) if tensor.numel()} for step in running_now]
        assert not (places[0] & places[1] or places[1] & places[2] or places[0] & places[2])


@pytest.mark.parametrize(("member", "frozen"), [("gpt", False), ("linear-transformer", True)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_captured_session_follows_changes_of_its_model(change, member, frozen, captures, prompt):
    models = [tiny(member).requires_grad_(not frozen) for _ in range(2)]
    ours, expected = session(models[0], prompt), session(models[1], prompt, recorded=False)
    for step in range(8):
        if step == 5:
            assert running(ours)
            for model in models:
                CHANGES[change](model)
        assert torch.equal(ours.step(), expected.step())
        torch.testing.assert_close(ours._logits, expected._logits, atol=1e-12, rtol=1e-12)
    assert not running(ours) and not recordings_of(models[0])


@pytest.mark.parametrize("member", ["gpt", "local", "gated-deltanet", "transformer-xl"])
def test_a_released_step_is_used_again_and_its_state_goes_on(member, captures, prompt):
    model = tiny(member)
    ours, expected = session(model, prompt, room=64), session(model, prompt, room=64, recorded=False)
    for step in range(40):
        if step in (7, 20):  # text in between, longer than the window
            for each in (ours, expected):
                each.feed(prompt.repeat(1, 3)[:, : step + 5])
        if step == 30:
            twins = ours.fork(2), expected.fork(2)
        if step >= 30:
            assert torch.equal(twins[0].step(), twins[1].step())
        assert torch.equal(ours.step(), expected.step())
        torch.testing.assert_close(ours._logits, expected._logits, atol=1e-12, rtol=1e-12)
    assert running(ours) and len(captures) <= 3
    step = ours._stepping.running
    with torch.inference_mode():
        state = ours._stepping.settled(ours._state)
        assert step.recording.idle == [step] and step.recording.begin(state) is step
        places = ({x.data_ptr() for x in tensors(each) if x.numel()} for each in (state, step.state))
        assert set.isdisjoint(*places)


def test_rows_of_unlike_length_are_captured(captures, gpt, prompt):
    valid = torch.arange(11) < torch.tensor([[11], [7], [2]])
    drawn = []
    for recorded in (True, False):
        made = Session(gpt, 3, temperature=0, room=8, recorded=recorded)
        made._stepping.record_at = 2
        made.feed(prompt, valid)
        drawn.append(torch.stack([made.step() for _ in range(30)]))
        assert running(made) == recorded
    assert torch.equal(*drawn)


@pytest.mark.parametrize("member", ["gpt", "local", "gated-deltanet"])
def test_a_captured_session_goes_back(member, captures, prompt):
    model = tiny(member)
    ours, expected = (Session(model, 3, seed=4, room=64, rewind=9, recorded=recorded) for recorded in (True, False))
    for each in (ours, expected):
        each._stepping.record_at = 2
        each.feed(prompt)
    for step in range(60):
        assert torch.equal(ours.step(), expected.step())
        if step % 7 == 6:
            for each in (ours, expected):
                each.rewind(step % 9)
    assert captures


@pytest.mark.parametrize("draft", ["ngram", None])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 5, "seed": 3}])
@pytest.mark.parametrize("member", ["gpt", "local", "gated-deltanet"])
def test_generate_draws_the_same_tokens(member, options, draft, captures, prompt):
    options = options | {"max_new_tokens": 80, "draft": draft}
    model = tiny(member)
    first = [kinformer.generate(model, prompt, **options) for _ in range(2)]
    assert captures and torch.equal(*first)
    stop = [first[0][0, 40:42].tolist()]
    stopped = kinformer.generate(model, prompt[:1], stop=stop, **options)
    recording.CAPTURES.clear()
    assert torch.equal(kinformer.generate(tiny(member), prompt, **options), first[0])
    assert torch.equal(kinformer.generate(tiny(member), prompt[:1], stop=stop, **options), stopped)
    assert stopped.shape[1] <= 42


def test_a_server_steps_captured_batches(captures):
    model = tiny("rope")
    items = [request([1 + n, 2, 3], 60 - 7 * n, seed=n) for n in range(3)]
    exhaust(Engine(model), [(9 * n, item) for n, item in enumerate(items)])
    assert captures
    recording.CAPTURES.clear()
    for item in items:
        sampling = {"temperature": 1.0, "seed": item.sampling.seed, "max_new_tokens": item.max_new_tokens}
        assert item.listener.tokens == {0: kinformer.generate(model, [item.tokens.tolist()], **sampling)[0].tolist()}


def test_what_no_graph_repeats_is_stepped_in_python_and_said(captures, prompt, caplog):
    model = tiny("linear-transformer")
    entered = model._entered
    for inside, reason in (
        (lambda x: x.sum().item(), "depends on the data"),
        (lambda x: torch.rand(()), "draws random numbers"),
        (lambda x: x.to("meta"), "copies between the host and the device"),
    ):
        model._entered = lambda x, valid, inside=inside: (inside(x), entered(x, valid))[1]
        tokens, state = ready(model)
        with torch.inference_mode(), trusted_arguments(), pytest.raises(UnrecordableError, match=reason):
            record(model, tokens, state)
    ours = session(model, prompt)
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            ours.step()
    assert ours._stepping.running is None and not captures
    assert "run in Python here, not as a graph of the GPU: a step copies between" in caplog.text


def test_a_device_that_refuses_leaves_steps_in_python(captures, gpt, prompt, caplog):
    def refused(function, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = session(gpt, prompt, recorded=False)
    plain = torch.stack([expected.step() for _ in range(9)])
    recording.CAPTURES["cpu"] = refused
    ours = session(gpt, prompt)
    with caplog.at_level(logging.INFO):
        assert torch.equal(torch.stack([ours.step() for _ in range(9)]), plain)
    assert ours._stepping.running is None and "not permitted" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CAUSAL)
def test_a_gpu_draws_the_same_tokens_from_graphs(name):
    torch.manual_seed(0)
    model = one_layer(TINY[name]).build().double().eval().cuda()
    prompt = torch.randint(model.vocab_size, (2, 24)).cuda()
    ours, expected = session(model, prompt), session(model, prompt, recorded=False)
    others = session(model, prompt.flip(1)), session(model, prompt.flip(1), recorded=False)
    for step in range(20):
        if step == 12:
            ours._stepping.record_at = 0
        assert torch.equal(ours.step(), expected.step())
        assert torch.equal(others[0].step(), others[1].step())
        torch.testing.assert_close(ours._logits, expected._logits, atol=1e-9, rtol=1e-9)
    assert running(ours) == (name not in IN_PYTHON)
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    for _ in range(3):
        assert torch.equal(ours.step(), expected.step())
    assert ours._stepping.running is None
