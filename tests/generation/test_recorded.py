"""Recorded steps draw what the model's own draw, and what cannot be recorded is stepped as ever."""

import copy
import gc
import io
import subprocess
import sys
import weakref

import pytest
import torch

from kinformer.core.state import difference, select_rows
from kinformer.generation import recording
from kinformer.generation.recording import (
    Recording,
    Ref,
    SlotCount,
    Tape,
    UnrecordableError,
    View,
    _WatchedReads,
    at_any_length,
    compile_calls,
    logits_after,
    record,
    simplify,
)
from kinformer.generation.session import Session
from kinformer.kernels.attention import _CPU, TABLE
from kinformer.runtime.compiling import trusted_arguments
from kinformer.runtime.errors import KinformerError
from tests.members import CAUSAL, TINY, one_layer

from .conftest import tiny

IN_PYTHON = {
    "sparse-transformer": "its pattern is looked up by position",
    "reformer": "its state grows by whole leaves",
    "path": "its state grows by whole leaves",
    "tensorized": "its state grows by whole leaves",
    "universal": "tokens halt early",
    "depth-adaptive": "tokens leave early",
    "compressive": "it compresses where a row's memory is full",
    "memorizing": "it searches where rows differ",
    "moba": "the host looks whether a token completes a block",
    "nsa": "the same",
}


def session(model, prompt, recorded=True, room=12):
    made = Session(model, len(prompt), temperature=0, room=room, recorded=recorded)
    made._stepping.record_at = 2
    made.feed(prompt)
    return made


def stepped_beside(name):
    """Return a session of a member with recorded steps and one without, after the same tokens and logits."""
    torch.manual_seed(0)
    model = one_layer(TINY[name]).build().eval()
    prompt = torch.randint(model.vocab_size, (2, 24))
    ours, expected = session(model, prompt), session(model, prompt, recorded=False)
    for step in range(20):  # beyond the window and the reserved room
        if step == 12:
            ours._stepping.record_at = 0
        assert torch.equal(ours.step(), expected.step())
        torch.testing.assert_close(ours._logits, expected._logits, atol=1e-5, rtol=1e-5)
    return ours, expected


@pytest.mark.parametrize("name", CAUSAL)
def test_recorded_steps_are_the_models_own(name):
    ours, expected = stepped_beside(name)
    assert (ours._stepping.running is not None) == (name not in IN_PYTHON)
    assert expected._stepping.running is None
    with torch.inference_mode():
        state = ours._stepping.settled(ours._state)
    assert difference(state, expected._state) < 1e-5


WIDTHS = {"sha-rnn": {"dim": 48, "layers.*.feed_forward.hidden_dim": 96}}
"""Of heads whose roots are no binary fractions."""


@pytest.mark.parametrize("name", CAUSAL)
def test_recorded_steps_in_float64_round_nothing_to_float32(name):
    model = tiny(name, **WIDTHS.get(name, {"dim": 48}))
    length, batch = (400, 1) if name == "reformer" else (24, 2)  # by then its state grows no more
    prompt = torch.randint(17, (batch, length), generator=torch.Generator().manual_seed(2))
    ours, expected = session(model, prompt), session(model, prompt, recorded=False)
    for _ in range(6):
        assert torch.equal(ours.step(), expected.step())
        torch.testing.assert_close(ours._logits, expected._logits, atol=1e-12, rtol=1e-12)
    assert (ours._stepping.running is not None) == (name == "reformer" or name not in IN_PYTHON)


def test_a_recorded_session_is_forked_and_fed_and_its_rows_are_picked(model, prompt):
    ours, expected = session(model, prompt), session(model, prompt, recorded=False)
    for _ in range(5):
        assert torch.equal(ours.step(), expected.step())
    assert ours._stepping.running is not None
    twins = ours.fork(2), expected.fork(2)
    for each in (ours, expected):
        each.feed(prompt[:, :3])
    for _ in range(5):
        assert torch.equal(ours.step(), expected.step())
        assert torch.equal(twins[0].step(), twins[1].step())
    assert ours._stepping.running is not None
    rows, tokens, picked = torch.tensor([2, 0, 2]), prompt[:, :1], []
    with torch.inference_mode():
        for each in (ours, expected):
            state = select_rows(each._stepping.settled(each._state), rows)
            picked.append(logits_after(model, tokens, state)[0])
    torch.testing.assert_close(*picked)


def test_a_row_that_is_shorter_is_recorded_too(gpt, prompt):
    valid = torch.arange(11) < torch.tensor([[11], [7], [2]])
    drawn = []
    for recorded in (True, False):
        made = Session(gpt, 3, temperature=0, room=8, recorded=recorded)
        made._stepping.record_at = 2
        made.feed(prompt, valid)
        drawn.append(torch.stack([made.step() for _ in range(30)]))
    assert torch.equal(*drawn)


def _replaced(model):
    model.norm.weight = torch.nn.Parameter(model.norm.weight.detach() * 1.5)


def _given_other_data(model):
    model.norm.weight.data = model.norm.weight.data * 1.5


def _written(model):
    with torch.no_grad():
        model.norm.weight.mul_(1.5)


def _hooked(module):
    module.register_forward_hook(lambda _, inputs, output: output * 1.5)


CHANGES = {
    "loaded in place": lambda model: model.load_state_dict({k: 1.5 * v for k, v in model.state_dict().items()}),
    "loaded by assignment": lambda model: model.load_state_dict(
        {k: 1.5 * v for k, v in model.state_dict().items()}, assign=True
    ),
    "a parameter replaced": _replaced,
    "a parameter's data replaced": _given_other_data,
    "a parameter written to": _written,
    "a hook": lambda model: _hooked(model.norm),
    "a hook deep inside": lambda model: _hooked(model.stack.layers[1].feed_forward),
    "a hook before": lambda model: model.norm.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1.5,)),
    "a submodule replaced": lambda model: setattr(model, "norm", torch.nn.Identity()),
    "a layer replaced": lambda model: model.stack.layers.__setitem__(0, copy.deepcopy(model.stack.layers[1])),
    "a forward replaced": lambda model: setattr(model.norm, "forward", lambda x: x * 1.5),
}


@pytest.mark.parametrize(("member", "frozen"), [("gpt", False), ("linear-transformer", True)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_recorded_session_follows_changes_of_its_model(change, member, frozen, prompt):
    models = [tiny(member).requires_grad_(not frozen) for _ in range(2)]
    ours, expected = session(models[0], prompt), session(models[1], prompt, recorded=False)
    for _ in range(5):
        assert torch.equal(ours.step(), expected.step())
    assert ours._stepping.running is not None
    before = ours._logits.clone()
    for model in models:
        CHANGES[change](model)
    for _ in range(3):
        assert torch.equal(ours.step(), expected.step())
        torch.testing.assert_close(ours._logits, expected._logits, atol=1e-12, rtol=1e-12)
    assert ours._stepping.running is None
    unchanged = session(tiny(member), prompt, recorded=False)
    for _ in range(6):
        unchanged.step()
    assert (before - unchanged._logits).abs().max() > 0


def test_training_mode_ends_a_recording(gpt, prompt):
    ours = session(gpt, prompt)
    for _ in range(5):
        ours.step()
    assert ours._stepping.running is not None
    gpt.train()
    ours.step()
    assert ours._stepping.running is None
    gpt.eval()


@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.float])
@pytest.mark.parametrize("recorded", [False, True])
def test_another_dtype_in_mid_session_is_one_sentence(convert, recorded, prompt):
    model = tiny("gpt")
    ours = session(model, prompt, recorded)
    for _ in range(5):
        ours.step()
    convert(model)
    for going_on in (ours.step, lambda: ours.feed(prompt)):
        with pytest.raises(KinformerError, match="but this session began with torch.float64"):
            going_on()


def test_a_second_session_takes_the_recording_of_the_first(prompt):
    model = tiny("gpt")
    first = session(model, prompt, room=64)
    for _ in range(5):
        first.step()
    second = Session(model, 3, temperature=0, room=64)
    second.feed(prompt)
    for _ in range(18):  # it looks for one now and then
        second.step()
    assert second._stepping.running.recording is first._stepping.running.recording
    twin = copy.deepcopy(model)
    assert not twin._recordings and model._recordings
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    assert not torch.load(buffer, weights_only=False)._recordings


def test_a_session_of_a_hundred_tokens_is_recorded_and_one_of_twenty_is_not(prompt):
    model = tiny("gpt")
    for room, recorded in ((20, False), (96, True)):
        made = Session(model, 3, temperature=0, room=room)
        made.feed(prompt)
        for _ in range(4):
            made.step()
        assert (made._stepping.running is not None) == recorded


@pytest.mark.parametrize("member", ["gpt", "local", "linear-transformer"])
def test_a_recording_serves_shorter_prompts_and_less_room(member, prompt):
    model = tiny(member)
    first = session(model, prompt, room=64)
    for _ in range(5):
        first.step()
    second = session(model, prompt[:, :2], room=50)
    plain = session(model, prompt[:, :2], recorded=False)
    for _ in range(30):
        assert torch.equal(second.step(), plain.step())
    assert second._stepping.running.recording is first._stepping.running.recording
    longer = session(model, prompt, room=90)
    for _ in range(5):
        longer.step()
    assert (longer._stepping.running.recording is first._stepping.running.recording) == (member != "gpt")


@pytest.mark.parametrize("frozen", [False, True])
def test_recordings_are_freed_with_their_model(frozen, prompt):
    def runs():
        gc.collect()
        return [one for one in gc.get_objects() if type(one) in (Recording, torch._C.ScriptFunction)]

    gc.collect()
    gc.freeze()  # what was there before is not looked through again
    weights = []
    for _ in range(3):
        model = tiny("gpt").requires_grad_(not frozen)
        for _ in range(3):
            made = session(model, prompt)
            for _ in range(5):
                made.step()
            assert made._stepping.running is not None
        weights.append(weakref.ref(model.norm.weight))
        del model, made
    left = runs()
    gc.unfreeze()
    assert not left and not any(weight() is not None for weight in weights)


def test_memory_does_not_grow_over_models():
    """A function of ``torch.jit.trace`` stays with the process, constants and all: here 1 MiB for every model."""
    program = """
import gc, resource, sys, torch, kinformer
from kinformer.generation.session import Session
used = []
for number in range(24):
    model = kinformer.build("gpt", recipe="tiny", set={"dim": 128}).eval().requires_grad_(False)
    made = Session(model, 1, temperature=0, room=40)
    made._stepping.record_at = 2
    made.feed(torch.zeros(1, 5, dtype=torch.int64))
    for _ in range(5):
        made.step()
    assert made._stepping.running is not None
    del model, made
    gc.collect()
    used.append(int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20)
assert not {"torch._dynamo", "sympy"} & set(sys.modules), "PyTorch's compiler takes a second to import"
print(used[-1] - used[7])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 8  # MiB over 16 models


def ready(model):
    made = session(model, torch.zeros(1, 5, dtype=torch.int64), recorded=False)
    for _ in range(3):
        made.step()
    return made._pending[-1].tokens, made._state


def refusal(model):
    tokens, state = ready(model)
    with torch.inference_mode(), trusted_arguments(), pytest.raises(UnrecordableError) as refused:
        record(model, tokens, state)
    return refused.value


def test_without_the_interpreter_sessions_step_in_python(gpt, prompt, monkeypatch):
    expected = session(gpt, prompt, recorded=False)
    plain = torch.stack([expected.step() for _ in range(24)])
    monkeypatch.delattr(torch._C, "_create_function_from_graph")
    assert "cannot write it down" in str(refusal(gpt))
    stepped = session(gpt, prompt)
    assert torch.equal(torch.stack([stepped.step() for _ in range(24)]), plain)
    assert stepped._stepping.running is None


def test_what_depends_on_the_length_is_found_before(gpt, monkeypatch):
    few = ready(gpt)[1].layers[0][0].capacity * 2 * 8  # between now and the end of the buffers: another kernel
    monkeypatch.setitem(TABLE, _CPU, TABLE[_CPU]._replace(few_keys=few))
    monkeypatch.setattr(recording, "is_native", lambda: False)  # the operator in C has the call at every length
    refused = refusal(gpt)
    assert "depends on the length" in str(refused)
    assert refused.steps > 0


def test_what_watches_or_draws_is_not_recorded(linear):
    handle = linear.norm.register_forward_hook(lambda *_: None)
    assert "hooks" in str(refusal(linear))
    handle.remove()
    model = tiny("linear-transformer")
    entered = model._entered
    model._entered = lambda x, valid: entered(x + 0 * torch.rand(()), valid)
    assert "random" in str(refusal(model))
    model._entered = lambda x, valid: entered(x, valid) if x.sum().item() > -1e9 else x
    assert "depends on the data" in str(refusal(model))
    model._entered = lambda x, valid: entered(x[(x == x).all(-1)][None], valid)
    assert "depends on the data" in str(refusal(model))
    for reading in (torch.Tensor.tolist, torch.Tensor.numpy, lambda x: bool((x == x).all())):
        model._entered = lambda x, valid, reading=reading: (reading(x), entered(x, valid))[1]
        assert "reads the data" in str(refusal(model))


def taped(step, *inputs):
    tape = Tape(inputs)
    with torch.inference_mode(), tape, _WatchedReads():
        output = step(*inputs)
    return tape, tape.ref(output)


def test_numbers_that_count_slots_follow_the_past():
    def step(past):
        slots = past.shape[2]
        return past + torch.arange(slots, dtype=past.dtype)[:, None] * torch.ones(slots, 1).double() + slots

    def views(rule):
        return [(View(0, 3, rule), View(0, 8, rule))]

    (short, output), (long, _) = (taped(step, torch.zeros(1, 1, slots, 2).double()) for slots in (3, 8))
    calls = at_any_length(short, long, views("doubles"))
    assert calls[0].arguments[0] == SlotCount(0, 0)
    with torch.inference_mode():
        past = torch.randn(1, 1, 5, 2).double()
        assert torch.equal(compile_calls(calls, 1, 0, [output])(past)[0], step(past))
    unlike = [*views("doubles"), (View(1, 4, "a window"), View(1, 9, "a window"))]
    for pairs in ([], unlike):  # nothing counts them, or it is open which buffer does
        with pytest.raises(UnrecordableError, match="depends on the length"):
            at_any_length(short, long, pairs)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.square() if x.shape[2] > 4 else x,
        lambda x: x.square() if x.shape[2] > 4 else x.exp(),
        lambda x: x * (1.0 if x.shape[2] > 4 else 2.0),
        lambda x: x + torch.tensor([float(x.shape[2])]),
        lambda x: x.sum(2 if x.shape[2] > 4 else 1),
        lambda x: x.view(-1, 2 * x.shape[2]),
    ],
)
def test_what_no_size_expresses_depends_on_the_length(step):
    short, long = (taped(step, torch.zeros(1, 1, slots, 2))[0] for slots in (3, 8))
    with pytest.raises(UnrecordableError, match="depends on the length"):
        at_any_length(short, long, [(View(0, 3, ""), View(0, 8, ""))])


def test_a_tape_takes_sizes_in_place_writes_lists_and_types():
    weight = torch.randn(4, 4)

    def step(x):
        parts = [part.to(torch.promote_types(x.dtype, torch.float64)) for part in (x @ weight).split([1, 3], dim=-1)]
        parts[0][:, 0] = 7
        picked = torch.cat(parts, dim=-1)[torch.tensor([1, 0])]
        return torch.where(picked > 0, picked.clamp(max=float("inf")), 0.5).contiguous(
            memory_format=torch.preserve_format
        )

    tape, output = taped(step, torch.randn(2, 4))
    assert any(tensor is weight for tensor in tape.captured) and output.number > 0
    run = compile_calls(tape.calls, 1, len(tape.captured), [output, Ref(0)])
    with torch.inference_mode():
        x = torch.randn(2, 4)
        torch.testing.assert_close(run(x, *tape.captured), (step(x), x), rtol=0, atol=0)


def test_constants_repeats_and_whole_views_are_left_out():
    weight = torch.randn(3, 3)

    def step(x, count, twin):
        turns = [(number.double() * torch.arange(3).exp()).cos() for number in (count, twin)]
        x = x[:, :] * turns[0] + x * turns[1] @ weight.t().double()
        x.add_(x.new_zeros(3).add_(1))  # written to, so not a constant
        return x + x.new_zeros(3).add_(1), x.sin()

    inputs = torch.randn(2, 3).double(), torch.tensor(4), torch.tensor(4)
    tape = Tape(inputs)
    with torch.inference_mode(), tape, _WatchedReads():
        outputs = step(*inputs)
    calls, captured, refs = simplify(tape.calls, [tape], [tape.ref(outputs[0])], [(1, 2)])
    names = [call.operator._schema.name.split("::")[1] for call in calls]
    assert len(tape.calls) > len(calls) and names.count("cos") == 1 and names.count("new_zeros") == 2
    assert not {"arange", "exp", "slice", "t", "sin"} & set(names)
    assert sum(tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for tensor in captured) < 2
    run = compile_calls(calls, 3, len(captured), refs)
    with torch.inference_mode():
        for number in (7, 9):
            x, count = torch.randn(2, 3).double(), torch.tensor(number)
            assert torch.equal(run(x.clone(), count, count, *captured)[0], step(x, count, count)[0])


def test_positions_of_equal_layers_are_counted_once(prompt):
    model = tiny("rope")
    ours = session(model, prompt)
    for _ in range(5):
        ours.step()
    recording = ours._stepping.running.recording
    assert recording.twins and str(recording.function.graph).count("aten::cos(") == 1
    with torch.inference_mode():
        state = ours._stepping.settled(ours._state)
        assert recording.begin(state) is not None
        last = state.layers[-1][0]
        last._state = last._state._replace(seen=last.seen + 1)  # one layer alone is one token ahead
        assert recording.begin(state) is None
