"""Many sequences as one batch: each is what it is alone, whoever joins and leaves beside it."""

import pytest
import torch

import kinformer
from kinformer.core import state as states
from kinformer.lab.serving.engine import ROOM, BusyError, Engine, Limits, row_bytes
from kinformer.runtime.errors import KinformerError

from ..generation.conftest import tiny
from ..members import CAUSAL, TINY, one_layer
from .conftest import exhaust, request

MEMBERS = ["gpt", "linear-transformer", "gated-deltanet", "transformer-xl", "local"]


@pytest.fixture(params=MEMBERS, scope="module")
def model(request):
    return tiny(request.param)


def prompt_of(length, seed):
    return torch.randint(0, 17, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model, item):
    """What ``kinformer.generate`` makes of a request, row by row."""
    sampling = item.sampling
    rows = item.first_stream + item.copies
    new = kinformer.generate(
        model,
        [item.tokens.tolist()] * rows,
        max_new_tokens=item.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
    )
    return {copy: new[item.first_stream + copy].tolist() for copy in range(item.copies)}


def test_streams_that_come_and_go_are_each_what_it_is_alone(model):
    settings = [{}, {"temperature": 0.0}, {"top_k": 3}, {"temperature": 0.7, "top_p": 0.8}]
    arrivals = [
        (3 * n, request(prompt_of(1 + 7 * n % 29, n), 5 + 11 * n % 40, seed=n, **settings[n % 4])) for n in range(12)
    ]
    arrivals.append((2, request(prompt_of(70, 99), 9, seed=5, copies=3, first_stream=2)))
    engine = Engine(model, Limits(max_streams=8, chunk=16))
    exhaust(engine, arrivals)
    for _, item in arrivals:
        assert item.listener.tokens == alone(model, item)
        assert item.listener.reasons == dict.fromkeys(range(item.copies), "length")
    assert engine.rows == 0 and engine.state_bytes == 0 and not engine.waiting
    assert engine.counts["prompt"] == sum(len(item.tokens) for _, item in arrivals)
    assert engine.counts["drawn"] == sum(item.copies * item.max_new_tokens for _, item in arrivals)


def test_a_long_prompt_does_not_stop_the_others():
    engine = Engine(tiny("linear-transformer"), Limits(chunk=8))
    short, long = request([1, 2], 30), request(prompt_of(160, 1), 2)
    exhaust(engine, [(0, short), (1, long)], most=40)
    assert engine.counts["steps"] < 35
    engine = Engine(tiny("linear-transformer"), Limits(chunk=8))
    first, second = request(prompt_of(80, 1), 2), request([3], 2)
    engine.submit(first)
    engine.submit(second)
    for _ in range(3):
        engine.turn()
    assert second.listener.reasons and not first.listener.tokens, "prompts take turns"


def test_rows_outlive_their_room():
    model = tiny("rope")
    item, other = request([1, 2, 3], 2 * ROOM + 20, seed=3), request([5], ROOM + 30, seed=4)
    exhaust(Engine(model), [(0, item), (20, other)])
    assert item.listener.tokens == alone(model, item) and other.listener.tokens == alone(model, other)


def test_a_listener_ends_its_copy_and_nobody_elses():
    model = tiny("gpt")
    free = alone(model, request([4, 5], 30, seed=2, copies=3))
    stop = free[1][6]
    item = request([4, 5], 30, seed=2, copies=3, stop=stop)
    exhaust(Engine(model), [(0, item)])
    for copy, tokens in free.items():
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert item.listener.tokens[copy] == tokens[:end]
        assert item.listener.reasons[copy] == ("stop" if stop in tokens else "length")


@pytest.mark.parametrize("where", ["waiting", "prompt", "batch"])
def test_who_left_is_ended(where):
    engine = Engine(tiny("gpt"), Limits(max_streams=2, chunk=4))
    gone, stays = request(prompt_of(20, 1), 100, copies=2), request([1], 5, seed=1)
    if where == "waiting":
        engine.submit(other := request([2], 3, copies=2))
    engine.submit(gone)
    engine.submit(stays)
    for _ in range({"waiting": 1, "prompt": 2, "batch": 9}[where]):
        engine.turn()
    heard = len(gone.listener.tokens.get(0, ()))
    assert bool(heard) == (where == "batch")
    engine.cancel(gone)
    exhaust(engine)
    assert len(gone.listener.tokens.get(0, ())) == heard and not gone.listener.reasons
    assert stays.listener.tokens == alone(engine.model, stays)
    assert engine.counts["cancelled"] == 2 and engine.rows == 0
    if where == "waiting":
        assert other.listener.reasons == {0: "length", 1: "length"}


def test_more_than_fit_wait_and_more_than_may_wait_are_refused():
    engine = Engine(tiny("gpt"), Limits(max_streams=2, max_waiting=1))
    items = [request([n], 4, seed=n) for n in range(3)]
    for item in items:
        engine.submit(item)
    with pytest.raises(BusyError, match="repeat the request later"):
        engine.submit(request([1], 4))
    engine.turn()
    assert (engine.rows, engine.waiting, engine.counts["refused"]) == (2, 1, 1)
    exhaust(engine)
    assert all(item.listener.tokens == alone(engine.model, item) for item in items)


def test_rows_are_admitted_by_the_bytes_of_their_state():
    model = tiny("rope")
    bound = 3 * row_bytes(model, 20)
    engine = Engine(model, Limits(max_state_bytes=bound))
    for n in range(5):
        engine.submit(request([n] * 10, 10, seed=n))
    engine.turn()
    assert engine.rows == 3 and engine.waiting == 2
    seen = []
    while engine.turn():
        seen.append(engine.state_bytes)
    assert 0 < max(seen) <= bound
    with pytest.raises(KinformerError, match="max_state_bytes.*lower max_tokens"):
        engine.submit(request([1], 20_000))


@pytest.mark.parametrize("name", CAUSAL)
def test_the_bound_of_a_row_holds_what_it_holds(name):
    model = one_layer(TINY[name]).build().eval()
    engine = Engine(model)
    limit = model.max_length or 10**6
    lengths = [min(limit // 2, length) for length in (3, 40, 150)]
    items = [request([7] * length, min(limit // 2, 40)) for length in lengths]
    for item in items:
        engine.submit(item)
    while engine.turn():
        assert engine.state_bytes <= engine.rows * row_bytes(model, max(item.length for item in items))
    assert all(item.listener.reasons == {0: "length"} for item in items)


def test_scores_are_the_models():
    model = tiny("gpt")
    tokens = prompt_of(23, 4)
    item = request(tokens, 0, logprobs=2, scores_prompt=True)
    exhaust(Engine(model, Limits(chunk=5)), [(0, item)])
    expected = model(torch.tensor([tokens]))[0][0].log_softmax(-1)
    assert item.listener.prompt[0] is None and item.listener.reasons == {0: "length"}
    for place, score in enumerate(item.listener.prompt[1:]):
        assert score.logprob == pytest.approx(float(expected[place, tokens[place + 1]].detach()), abs=1e-9)
        assert [token for token, _ in score.top] == expected[place].topk(2).indices.tolist()
    item = request(tokens, 3, logprobs=1, temperature=0.0)
    exhaust(Engine(model), [(0, item)])
    assert [score.top[0][0] for score in item.listener.logprobs[0]] == item.listener.tokens[0]
    assert item.listener.logprobs[0][0].logprob == pytest.approx(float(expected[-1].max().detach()), abs=1e-9)


def test_a_failing_model_fails_its_requests_and_serves_the_next():
    model = tiny("gpt")
    engine = Engine(model)
    item = request([1, 2], 50)
    engine.submit(item)
    for _ in range(3):
        engine.turn()
    weight = next(model.parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    exhaust(engine)
    assert "not finite" in str(item.listener.error) and engine.rows == 0 and engine.counts["failed"] == 1
    prompt = request([1, 2], 50)
    exhaust(engine, [(0, prompt)])
    assert "not finite" in str(prompt.listener.error)
    with torch.no_grad():
        weight.copy_(before)
    good = request([1, 2], 5)
    exhaust(engine, [(0, good)])
    assert good.listener.tokens == alone(model, good)


def test_a_state_without_memory_fails_its_request_alone(monkeypatch):
    def limited(state, slots):
        if slots > 300:
            raise RuntimeError("can't allocate memory")
        return reserve(state, slots)

    reserve = states.reserve
    monkeypatch.setattr(states, "reserve", limited)
    engine = Engine(tiny("rope"))
    long, short = request([1] * 400, 3), request([2], 6, seed=1)
    exhaust(engine, [(0, long), (0, short)])
    assert "could not be computed (can't allocate memory)" in str(long.listener.error) and engine.rows == 0
    assert short.listener.tokens == alone(engine.model, short)


def test_a_lack_of_memory_counts_every_row_once(monkeypatch):
    def full(state, rows):
        raise RuntimeError("can't allocate memory")

    model = tiny("linear-transformer")
    new = alone(model, request([1], 20, seed=1))[0]
    end = next(place for place, token in enumerate(new) if place and token not in new[:place])
    engine = Engine(model, Limits(chunk=4))
    ended, lost, absorbed = request([1], 20, seed=1, stop=new[end]), request([2], 20), request([3] * 200, 20)
    for item in (ended, lost, absorbed):
        engine.submit(item)
    monkeypatch.setattr(states, "select_rows", full)
    while not ended.listener.reasons:
        engine.turn()
    assert ended.listener.reasons == {0: "stop"} and ended.listener.error is None
    assert "can't allocate memory" in str(lost.listener.error)
    assert engine.rows == 1 and (engine.counts["stop"], engine.counts["failed"]) == (1, 1)
    exhaust(engine)
    assert absorbed.listener.tokens == alone(model, absorbed) and engine.rows == 0


@pytest.mark.parametrize("place", ["Batch.step", "Prefill.absorb", "Prefill.__init__"])
def test_an_error_ends_the_engine_and_its_requests(monkeypatch, place):
    engine = Engine(tiny("gpt"), Limits(max_streams=1))
    monkeypatch.setattr(f"kinformer.lab.serving.engine.{place}", lambda *_: 1 // 0)
    items = [request([1], 5), request([2], 5)]
    for item in items:
        engine.submit(item)
    with pytest.raises(ZeroDivisionError):
        engine.run()
    assert all("repeat the request" in str(item.listener.error) for item in items)
    with pytest.raises(BusyError, match="shutting down"):
        engine.submit(request([3], 5))


def test_who_leaves_at_once_is_ended(monkeypatch):
    engine, gone = Engine(tiny("gpt")), request([1], 50)
    admit = engine._admit

    def entering():
        admit()
        if not engine.counts["steps"] and not engine.rows:
            engine.submit(gone)
            engine.cancel(gone)

    monkeypatch.setattr(engine, "_admit", entering)
    exhaust(engine)
    assert engine.counts["cancelled"] == 1 and not gone.listener.tokens


@pytest.mark.parametrize(
    ("tokens", "new", "sentence"),
    [
        ([], 3, "empty"),
        ([99], 3, "token 99"),
        ([1] * 50, 300, "prompt and max_tokens need 349 positions, but .* max_length = .* lower max_tokens"),
        ([-1], 1, "token -1"),
    ],
)
def test_what_can_never_be_served_is_refused(tokens, new, sentence):
    with pytest.raises(KinformerError, match=sentence):
        Engine(tiny("gpt")).submit(request(tokens, new))


def test_the_state_shrinks_when_the_longest_row_leaves():
    engine = Engine(tiny("rope"))
    long, short = request([1] * 400, 3), request([2], 60, seed=1)
    engine.submit(long)
    engine.submit(short)
    sizes = []
    while engine.turn():
        sizes.append(engine.state_bytes)
    assert sizes[-1] < max(sizes) / 4
    assert short.listener.tokens == alone(engine.model, short)
