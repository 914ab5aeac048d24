"""Sessions: prompts in chunks and of unlike length, forks, stops, limits."""

import pytest
import torch

import kinformer
from kinformer.core.state import ReservedState
from kinformer.generation.session import Session
from kinformer.runtime.errors import KinformerError

from .conftest import tiny


def greedy_from_scratch(model, row, count):
    tokens = row
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens[None])[0][0, -1:].argmax(-1)])
    return tokens[len(row) :]


def test_greedy_is_the_argmax_of_the_whole_context(model, prompt):
    new = kinformer.generate(model, prompt, max_new_tokens=25, temperature=0)
    assert new.dtype == torch.int64 and new.shape == (3, 25)
    for row, told in zip(prompt, new, strict=True):
        assert torch.equal(told, greedy_from_scratch(model, row, 25))


def test_windowed_attention_generates_as_from_scratch(prompt):
    model = tiny("gpt", **{"layers.*.mixer.pattern": {"kind": "local", "window": 5}})
    new = kinformer.generate(model, prompt[:1], max_new_tokens=80, temperature=0)[0]
    assert torch.equal(new, greedy_from_scratch(model, prompt[0], 80))


@pytest.mark.parametrize("side", ["left", "right", "scattered"])
def test_prompts_of_unlike_length_go_on_as_each_alone(model, prompt, side):
    lengths = [11, 4, 1]
    if side == "scattered":
        valid = torch.zeros(3, 11, dtype=torch.bool)
        for row, length in enumerate(lengths):
            valid[row, torch.linspace(0, 10, length).long()] = True
    else:
        index = torch.arange(11)
        counts = torch.tensor(lengths)[:, None]
        valid = index < counts if side == "right" else index >= 11 - counts
    padded = torch.where(valid, prompt, -1)
    told = kinformer.generate(model, padded, valid=valid, max_new_tokens=12, temperature=0)
    for row in range(3):
        assert torch.equal(told[row], greedy_from_scratch(model, prompt[row][valid[row]], 12))


def test_the_prompt_may_come_in_any_pieces(model, prompt):
    valid = torch.arange(11) < torch.tensor([[11], [7], [2]])
    whole = Session(model, 3, seed=1)
    whole.feed(prompt, valid)
    pieces = Session(model, 3, seed=1, chunk=3)
    pieces.feed(prompt[:, :8], valid[:, :8])
    pieces.feed(prompt[:, 8:], valid[:, 8:])
    assert whole.length == pieces.length == 11
    for _ in range(10):
        assert torch.equal(whole.step(), pieces.step())


def test_text_may_be_fed_after_steps(model, prompt):
    session = Session(model, 3, temperature=0)
    session.feed(prompt)
    drawn = [session.step() for _ in range(4)]
    session.feed(prompt[:, :5])
    after = session.step()
    context = torch.cat([prompt, torch.stack(drawn, 1), prompt[:, :5]], dim=1)
    with torch.no_grad():
        assert torch.equal(after, model(context)[0][:, -1].argmax(-1))


def test_a_fork_and_its_origin_go_on_alone(model, prompt):
    session = Session(model, 3, seed=4)
    session.feed(prompt)
    session.step()
    twin, copies = session.fork(), session.fork(3)
    expected = [session.step() for _ in range(8)]
    assert torch.equal(torch.stack(expected), torch.stack([twin.step() for _ in range(8)]))
    alone = Session(model, 1, seed=4)
    alone.feed(prompt[:1])
    alone.step()
    drawn = torch.stack([copies.step() for _ in range(8)])
    assert drawn.shape == (8, 9)
    assert torch.equal(drawn[:, 0], torch.stack([alone.step() for _ in range(8)])[:, 0])
    assert len({tuple(column) for column in drawn.T.tolist()}) > 3


def test_several_samples_from_one_prompt_are_those_of_their_streams(model, prompt):
    session = Session(model, seed=2)
    session.feed(prompt[:1])
    forked = session.fork(4)
    drawn = torch.stack([forked.step() for _ in range(9)], dim=1)
    repeated = kinformer.generate(model, prompt[:1].expand(4, -1), max_new_tokens=9, seed=2)
    assert torch.equal(drawn, repeated)


def test_a_stop_sequence_ends_its_row_wherever_steps_cut_it(model, prompt):
    free = kinformer.generate(model, prompt, max_new_tokens=40, seed=6)
    stop = free[0, 7:10].tolist()
    told = kinformer.generate(model, prompt, max_new_tokens=40, seed=6, stop=[stop, [99]])
    ends = []
    for row in free.tolist():
        places = [n for n in range(3, 41) if row[n - 3 : n] == stop]
        ends.append(places[0] if places else 40)
    assert told.shape[1] == max(ends)
    for row, end, full in zip(told.tolist(), ends, free.tolist(), strict=True):
        assert row[:end] == full[:end]
        assert set(row[end:]) <= {stop[-1]}
    session = Session(model, 1, seed=6, stop=[stop])
    session.feed(prompt[:1])
    assert [token for [token] in session.stream()] == free[0, : ends[0]].tolist()
    assert session.finished


def test_a_stop_inside_the_prompt_does_not_count(linear, prompt):
    free = kinformer.generate(linear, prompt[:1], max_new_tokens=1, temperature=0)[0]
    stop = [int(prompt[0, -1]), int(free[0])]
    session = Session(linear, temperature=0, stop=[stop])
    session.feed(prompt[:1])
    session.step()
    assert not session.finished


def test_each_token_is_told_before_the_next_is_computed(linear, prompt, monkeypatch):
    events = []
    hidden = linear.head_inputs
    monkeypatch.setattr(linear, "head_inputs", lambda *args, **kw: events.append("computed") or hidden(*args, **kw))
    session = Session(linear, seed=0)
    session.feed(prompt[:1])
    for _ in session.stream(3):
        events.append("told")
    assert events == ["computed", "told"] * 3


def test_positions_beyond_the_end_are_refused_before_anything_is_computed(gpt, prompt, monkeypatch):
    assert kinformer.generate(gpt, prompt, max_new_tokens=118).shape == (3, 118)
    calls = []
    monkeypatch.setattr(gpt, "head_inputs", lambda *args, **kw: calls.append(args))
    told = "129 tokens are to be absorbed, but this model's positions end at max_length = 128"
    with pytest.raises(KinformerError, match=told):
        kinformer.generate(gpt, prompt, max_new_tokens=119)
    session = Session(gpt, 1)
    with pytest.raises(KinformerError, match=told):
        session.feed(torch.zeros(1, 129, dtype=torch.int64))
    assert not calls


def test_stepping_stops_at_the_last_position(gpt):
    session = Session(gpt, seed=0)
    session.feed(torch.zeros(1, 127, dtype=torch.int64))
    session.step()
    session.step()
    with pytest.raises(KinformerError, match="positions end at max_length = 128"):
        session.step()


def test_the_state_is_reserved_and_its_bytes_are_told(gpt, linear, prompt):
    session = Session(gpt, room=8)
    assert session.state_bytes == 0
    session.feed(prompt[:1])
    assert any(isinstance(mixer, ReservedState) for layer in session._state.layers for mixer in layer)
    before = session.state_bytes
    for _ in range(60):
        session.step()
    assert session.state_bytes > before
    session = Session(linear)
    session.feed(prompt[:1])
    before = session.state_bytes
    for _ in range(60):
        session.step()
    assert session.state_bytes == before == 2 * (2 * 16 * 17 * 8) + 8


def test_results_are_ordinary_tensors_and_the_mode_comes_back(linear, prompt):
    linear.train()
    new = kinformer.generate(linear, prompt, max_new_tokens=2)
    assert linear.training
    linear.eval()
    assert not new.is_inference()
    linear(new)[0].sum().backward()
    linear.zero_grad()


def test_damaged_weights_are_told(prompt):
    model = tiny("linear-transformer")
    with torch.no_grad():
        model.norm.weight[3] = torch.nan
    with pytest.raises(KinformerError, match="are not finite numbers"):
        kinformer.generate(model, prompt, max_new_tokens=2)


def test_wrong_prompts_are_told(linear, prompt):
    def generate(tokens, **options):
        return kinformer.generate(linear, tokens, **({"max_new_tokens": 1} | options))

    with pytest.raises(KinformerError, match="holds token 17, but this model knows 0 to 16"):
        generate(prompt.clamp(max=16).index_fill(1, torch.tensor([2]), 17))
    with pytest.raises(KinformerError, match="holds token -1"):
        generate(torch.tensor([[-1]]))
    with pytest.raises(KinformerError, match="the prompt of row 0 is empty"):
        generate(prompt[:, :0])
    with pytest.raises(KinformerError, match="the prompt of row 1 is empty"):
        generate(prompt, valid=torch.tensor([[True], [False], [True]]).expand(3, 11))
    with pytest.raises(KinformerError, match=r"must be \[batch, time\], but have the shape \(11,\)"):
        generate(prompt[0])
    with pytest.raises(KinformerError, match=r"with valid \(3, 4\)"):
        generate(prompt, valid=torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(KinformerError, match="max_new_tokens is 0"):
        generate(prompt, max_new_tokens=0)
    with pytest.raises(KinformerError, match="a stop sequence is empty"):
        generate(prompt, stop=[[]])
    with pytest.raises(KinformerError, match="row 0 of this session is empty"):
        Session(linear).step()
    with pytest.raises(KinformerError, match="training mode"):
        Session(kinformer.build("gpt", recipe="tiny"))


def test_an_encoder_is_refused(prompt):
    model = kinformer.build("bert", recipe="tiny").eval()
    with pytest.raises(KinformerError, match="a model of type Encoder reads whole texts and continues none"):
        kinformer.generate(model, prompt, max_new_tokens=2)


def test_without_a_number_as_many_tokens_are_drawn_as_there_are_positions():
    model = kinformer.build("gpt", recipe="tiny", set={"position.max_length": 12})
    prompt = torch.zeros(1, 3, dtype=torch.int64)
    assert kinformer.generate(model, prompt, seed=0).shape == (1, model.max_length - 3 + 1)
    assert len(model.layers) == len(model.config.layers) and model.layers is model.stack.layers
