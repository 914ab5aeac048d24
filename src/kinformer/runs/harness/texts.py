"""Prompts of the harness continued as batches: greedily or drawn, until a stop string or the end of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kinformer.core.model import CausalModel
from kinformer.data import Tokenizer
from kinformer.generation.sampling import SamplingOptions
from kinformer.generation.session import Session
from kinformer.generation.stops import StoppedText, ends_of_text
from kinformer.runtime.errors import KinformerError, nearest
from kinformer.runtime.parsing import JsonObject

MAX_NEW_TOKENS = 256
"""Tokens that are drawn at most where a task names no number, as in the harness."""
ROWS = 32
LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The names under which tasks limit the tokens to draw; the first that is present counts."""
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}
"""Options of other libraries that mean nothing at these values."""


class Prompt(NamedTuple):
    """The ids to continue, and the task's ``generation_kwargs``."""

    tokens: Sequence[int]
    options: JsonObject


class Drawing(NamedTuple):
    """How prompts are continued: by at most ``max_new_tokens``, until one of the texts ``stops``."""

    max_new_tokens: int
    stops: tuple[str, ...]
    sampling: tuple[tuple[str, Any], ...]


def drawing_of(options: JsonObject) -> Drawing:
    """Return what ``generation_kwargs`` of a task mean: greedy, unless `do_sample` or a temperature is set.

    Errors: ``KinformerError`` for an option that generation here does not have.
    """
    values = {name: value for name, value in options.items() if value is not None}
    until = values.pop("until", [])
    stops = (until,) if isinstance(until, str) else tuple(until)
    numbers = [int(values.pop(name)) for name in LIMIT_NAMES if name in values]
    temperature = float(values.pop("temperature", 1.0 if values.get("do_sample") else 0.0))
    temperature = 0.0 if values.pop("do_sample", temperature > 0) is False else temperature
    values = {name: value for name, value in values.items() if NEUTRAL.get(name) != value}
    for name in values:
        if name not in SamplingOptions.__annotations__:
            raise KinformerError(
                f"generation_kwargs: {name!r} is not an option of generation here; "
                f"{nearest(name, sorted(SamplingOptions.__annotations__))}"
            )
    if not temperature:  # a greedy draw reads nothing else of the probabilities
        values = {name: value for name, value in values.items() if name == "repetition_penalty"}
    sampling = {"temperature": temperature} | values
    max_new_tokens = numbers[0] if numbers else MAX_NEW_TOKENS
    return Drawing(max_new_tokens, tuple(stop for stop in stops if stop), tuple(sampling.items()))


def continued(
    model: CausalModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    length: int | None,
    rows: int | None,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield the number of each of ``prompts`` and its continuation, as batches of at most ``rows`` are done.

    ``length``: how many tokens of prompt and continuation the model reads at most; of a longer prompt the end counts.
    ``generator``: gives the seed of every batch; None is PyTorch's global one.
    """
    groups: dict[Drawing, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(drawing_of(prompt.options), []).append(number)
    for drawing, numbers in groups.items():
        room = None if length is None else length - drawing.max_new_tokens
        if room is not None and room < 1:
            raise KinformerError(
                f"a task draws up to {drawing.max_new_tokens} tokens, which leaves no room for a prompt in a context "
                f"of {length}; give a larger `context`, or the task a smaller max_gen_toks."
            )
        numbers.sort(key=lambda number: len(prompts[number].tokens), reverse=True)
        for start in range(0, len(numbers), rows or ROWS):
            batch = numbers[start : start + (rows or ROWS)]
            ends = [list(prompts[number].tokens[-room if room else 0 :]) for number in batch]
            yield from zip(batch, _batch(model, tokenizer, ends, drawing, generator), strict=True)


def _batch(
    model: CausalModel,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    drawing: Drawing,
    generator: torch.Generator | None,
) -> list[str]:
    """Return the continuations of ``prompts``, stepped together until the last of them has ended."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts])
    valid = torch.arange(longest) < torch.tensor([[len(ids)] for ids in prompts])
    sampling = dict(drawing.sampling)
    if sampling.get("seed") is None:
        sampling["seed"] = int(torch.randint(2**62, (), generator=generator))
    session = Session(model, len(prompts), room=drawing.max_new_tokens, **sampling)
    session.feed(tokens, valid)
    ends = ends_of_text(model)
    rows = [StoppedText(tokenizer.stream(ids), drawing.stops, ends) for ids in prompts]
    texts = [""] * len(prompts)
    for drawn in session.stream(drawing.max_new_tokens):
        for number, (row, token) in enumerate(zip(rows, drawn, strict=True)):
            texts[number] += "" if row.stopped else row.feed(token)
        if all(row.stopped for row in rows):
            break
    return [text if row.stopped else text + row.finish() for text, row in zip(texts, rows, strict=True)]
