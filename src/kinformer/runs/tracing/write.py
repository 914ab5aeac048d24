"""A trace in words, as JSON-ready facts, as an interactive page, and as arrays."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinformer.figures.trace_page import trace_page
from kinformer.runs.tracing.record import AttentionTrace, Reading, Trace
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import write_atomic

ENDINGS = (".html", ".npz")
STEPS = 32767


def check(path: Path) -> None:
    """Refuse a file's name with an ending other than .html and .npz."""
    if path.suffix.lower() not in ENDINGS:
        raise KinformerError(f"`out` {path}: ends in neither .html (a page) nor .npz (arrays); name it so.")
    if path.is_dir():
        raise KinformerError(f"`out` {path}: is a folder; give the name of a file.")


def write(traced: Trace, path: Path) -> None:
    """Write a trace as the ending of ``path`` says: the page, or its tensors by name."""
    if path.suffix.lower() == ".html":
        page = trace_page(traced.title, page_data(traced))
        write_atomic(path, lambda target: target.write_text(page, encoding="utf-8"))
        return
    arrays: dict[str, Any] = {
        name: value for reading in readings(traced) for name, value in _arrays(reading, reading is not traced)
    }

    def save(target: Path) -> None:
        with target.open("wb") as file:
            np.savez_compressed(file, **arrays)

    write_atomic(path, save)


def readings(traced: Trace) -> list[Reading]:
    """Return the source's reading, if there is one, and the text's."""
    return [traced] if traced.source is None else [traced.source, traced]


def _arrays(reading: Reading, of_source: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a reading by name, as in "layer 1/weights"."""
    before = "encoder, " if of_source else ""
    for name in ("ids", "exits", "steps"):
        if (value := getattr(reading, name)) is not None:
            yield before + name, value.numpy()
    for number, hidden_states in enumerate(reading.hidden_states, start=1):
        yield f"{before}hidden_states/{number}", hidden_states.numpy()
    for item in reading.attention:
        for name in ("weights", "values", "outputs", "constant", "buckets", "spans"):
            if (value := getattr(item, name)) is not None:
                yield f"{item.place}/{name}", value.numpy()


def page_data(traced: Trace) -> dict[str, object]:
    """Return what the page draws, see :func:`kinformer.figures.trace_page.trace_page`."""
    several = readings(traced)
    names = ["Text"] if len(several) == 1 else ["Source", "Target"]
    return {
        "readings": [
            {"name": name, "tokens": list(item.tokens), "exits": _list(item.exits), "steps": _list(item.steps)}
            for name, item in zip(names, several, strict=True)
        ],
        "places": [_place(item, number) for number, reading in enumerate(several) for item in reading.attention],
    }


def _place(item: AttentionTrace, reading: int) -> dict[str, object]:
    facts: dict[str, object] = {
        name: getattr(item, name) for name in ("place", "mixer", "heads", "note", "keys", "implied")
    }
    facts |= {"reading": reading, "buckets": _list(item.buckets), "spans": _list(item.spans)}
    if item.weights is None:
        return facts | {"weights": None, "queries": 0, "count": 0, "unit": 0.0}
    largest = max(float(item.weights.abs().max()), 1e-12)
    steps = (item.weights.double() / largest * STEPS).round().to(torch.int16).numpy().astype("<i2")
    packed = base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode("ascii")
    _, queries, count = item.weights.shape
    return facts | {"weights": packed, "queries": queries, "count": count, "unit": largest / STEPS}


def _list(tensor: Tensor | None) -> list[object] | None:
    return None if tensor is None else tensor.tolist()


def facts_of(traced: Trace) -> dict[str, object]:
    """Return a trace without its tensors as JSON-ready data: tokens, exits, steps, and of each head how far and how
    widely it looks."""
    facts: dict[str, object] = {"title": traced.title}
    for name, reading in zip(("source", "text") if traced.source else ("text",), readings(traced), strict=True):
        facts[name] = {
            "tokens": list(reading.tokens),
            "exits": _list(reading.exits),
            "steps": _list(reading.steps),
            "attention": [_facts(item) for item in reading.attention],
        }
    return facts


def _facts(item: AttentionTrace) -> dict[str, object]:
    facts: dict[str, object] = {name: getattr(item, name) for name in ("place", "mixer", "keys", "implied", "note")}
    facts |= {"buckets": _list(item.buckets), "spans": _list(item.spans), "heads": []}
    if item.weights is not None:
        distance, spread = mean_distance(item.weights), perplexity(item.weights)
        facts["heads"] = [
            {
                "head": head,
                "mean_distance": distance[index].item() if item.keys == "text" else None,
                "effective_keys": spread[index].item(),
            }
            for index, head in enumerate(item.heads)
        ]
    return facts


def mean_distance(weights: Tensor) -> Tensor:
    """Return how many tokens away the mean of a head's weights [heads, queries, keys] is, [heads], in magnitude."""
    _, queries, keys = weights.shape
    away = (torch.arange(queries)[:, None] - torch.arange(keys)).abs().to(weights.dtype)
    size = weights.abs()
    return (size * away).sum((1, 2)) / size.sum((1, 2)).clamp_min(1e-12)


def perplexity(weights: Tensor) -> Tensor:
    """Return the mean number of keys that a head's queries look at, [heads]: 2 to the entropy of a row of
    ``weights`` [heads, queries, keys] in bits, their magnitudes scaled to sum to 1."""
    size = weights.abs()
    total = size.sum(-1, keepdim=True)
    shares = size / total.clamp_min(1e-12)
    entropy = -(shares * shares.clamp_min(1e-12).log()).sum(-1)
    some = total[..., 0] > 0
    return (entropy.exp() * some).sum(-1) / some.sum(-1).clamp_min(1)


def lines_of(traced: Trace) -> Iterator[str]:
    """Yield a trace in words, a line for each mixer."""
    for reading in readings(traced):
        for item in reading.attention:
            if item.weights is None:
                yield f"{item.place}: {item.note}"
                continue
            spread = ", ".join(f"{value:.1f}" for value in perplexity(item.weights).tolist())
            line = f"{item.place} ({item.mixer}): a query looks at {spread} keys"
            if item.keys == "text":
                line += (
                    ", " + ", ".join(f"{value:.1f}" for value in mean_distance(item.weights).tolist()) + " tokens away"
                )
            yield f"{line}{' by head' if len(item.heads) > 1 else ''}"
        if reading.exits is not None:
            yield f"exits: {reading.exits.double().mean().item():.2f} layers per token"
        if reading.steps is not None:
            yield f"halting: {reading.steps.double().mean().item():.2f} steps per token"
