"""A job without HTTP: what one request may make the server build and keep."""

import asyncio
import sys
import threading
import time

import numpy as np
import pytest
import torch

import kinformer
from kinformer.lab.data.tokenizer import ByteTokenizer
from kinformer.lab.serving import answers, fields, job
from kinformer.lab.serving.answers import Answer, ChatAnswer
from kinformer.lab.serving.engine import Engine, Limits
from kinformer.lab.serving.job import Job
from kinformer.runtime.errors import KinformerError


class CountingTokenizer(ByteTokenizer):
    """A tokenizer that counts its calls."""

    def __init__(self):
        self.encoded = self.decoded = 0

    def encode(self, text):
        self.encoded += 1
        return super().encode(text)

    def decode(self, tokens):
        self.decoded += 1
        return super().decode(tokens)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return kinformer.build("linear-transformer", recipe="tiny", vocab_size=256).eval()


def body_of(supported=fields.COMPLETION, **values):
    return fields.read({"model": "run", "seed": 0, **values}, supported)


@pytest.mark.parametrize(
    ("prompts", "values"),
    [(["a"], {"n": 10**12, "echo": True}), (["a"] * 200_000, {}), (["a"], {"n": 5})],
)
def test_too_many_rows_are_refused_before_a_prompt_is_read(model, prompts, values):
    tokenizer = CountingTokenizer()
    with pytest.raises(KinformerError, match="this server"):
        Job(Engine(model, Limits(max_streams=4)), tokenizer, body_of(**values), prompts, 16)
    assert tokenizer.encoded == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_echoed_with_its_scores_counts_for_every_copy(model, monkeypatch, stream):
    monkeypatch.setattr(job, "MOST_VALUES", 2 * 100 * 6)
    engine, tokenizer = Engine(model), CountingTokenizer()
    values = {"n": 2, "echo": True, "logprobs": 5, "max_tokens": 0, "stream": stream}
    Job(engine, tokenizer, body_of(**values), ["a" * 100], 16)
    with pytest.raises(KinformerError, match="1,212 values .* but must have at most 1,200; lower n"):
        Job(engine, tokenizer, body_of(**values), ["a" * 100, "b"], 16)


def test_new_tokens_count_where_the_answer_is_one(model, monkeypatch):
    monkeypatch.setattr(job, "MOST_VALUES", 100)
    with pytest.raises(KinformerError, match="101 values"):
        Job(Engine(model), ByteTokenizer(), body_of(max_tokens=101), ["a"], 16)
    Job(Engine(model), ByteTokenizer(), body_of(max_tokens=101, stream=True), ["a"], 16)


async def _taken(receiving):
    """What the pieces of a job are, up to their end, and the error at their end."""
    pieces, error = [], None
    try:
        async for piece in receiving:
            pieces.append(piece)
    except KinformerError as ended:
        error = ended
    return pieces, error


async def _connected():
    await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_that_is_not_read_ends(model, monkeypatch, stream):
    monkeypatch.setattr(job, "MOST_BEHIND", 8)

    async def exchange():
        engine = Engine(model)
        item = Job(engine, ByteTokenizer(), body_of(max_tokens=60, stream=stream), [[65, 66]], 16)
        item.submit()
        turns = 1
        while engine.turn():
            turns += 1
        pieces, error = await _taken(item.pieces(_connected))
        return engine, turns, pieces, error

    engine, turns, pieces, error = asyncio.run(exchange())
    assert engine.rows == 0
    if stream:
        assert len(pieces) == 10 and "10 pieces of the stream waited for its client" in str(error)
        assert turns < 40 and engine.counts["cancelled"] == 1
    else:
        assert error is None and pieces[-1].reason == "length" and engine.counts["drawn"] == 60


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Answer, body_of(n=2, echo=True, logprobs=20)),
        (ChatAnswer, body_of(fields.CHAT, n=2, logprobs=True, top_logprobs=20, messages=[])),
    ],
)
def test_a_token_is_decoded_once_for_an_answer(model, kind, body):
    async def exchange():
        engine, tokenizer = Engine(model), CountingTokenizer()
        item = Job(engine, tokenizer, body, ["abcabcabc" * 5], 8)
        item.submit()
        while engine.turn():
            pass
        pieces, error = await _taken(item.pieces(_connected))
        assert error is None
        return item, tokenizer, pieces

    item, tokenizer, pieces = asyncio.run(exchange())
    answer, before = kind(body, tokenizer, item.choices), tokenizer.decoded
    for piece in pieces:
        answer.take(piece)
    full = answer.full(item.usage)
    assert len(full["choices"]) == 2 and full["usage"]["completion_tokens"] == 16
    seen = {score.token for tokens in answer.tokens for score in tokens}
    seen |= {token for tokens in answer.tokens for item in tokens if item.score for token, _ in item.score.top}
    assert tokenizer.decoded - before == len(seen)


def _turns_of_others(call):
    """How many turns another thread has while ``call`` runs."""
    turns, done = 0, threading.Event()

    def take_turns():
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0)

    before, thread = sys.getswitchinterval(), threading.Thread(target=take_turns)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        began = turns
        call()
        return turns - began
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)


def test_other_threads_run_while_a_large_answer_is_written():
    data = {"scores": [[float("nan"), "\udc80\u00e9", {"a": n / 7}] for n in range(20_000)]}
    assert answers.encoded_by_parts(data) == answers.encoded(data)
    assert _turns_of_others(lambda: answers.encoded_by_parts(data)) > 50


def test_other_threads_run_while_long_numbers_are_read():
    data = b"[" + b",".join([b"9" * 4000] * 200) + b"]"
    assert _turns_of_others(lambda: fields.parse(b'{"prompt": ' + data + b"}")) > 50


def test_a_long_prompt_is_never_a_list(model, monkeypatch):
    ids = np.arange(1 << 16) % 256
    listed = []

    class Ids(np.ndarray):
        def tolist(self):
            listed.append(len(self))
            return super().tolist()

    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: ids.view(Ids))
    item = Job(Engine(model), ByteTokenizer(), body_of(max_tokens=1), ["a"], 16)
    assert item.prompt_tokens == len(ids) and max(listed) < 64
