"""What do spans by token cost beside spans by head, in time and in state? (Sukhbaatar et al. 2019, section 2.2)

Times a layer whose tokens have spans of their own beside one whose heads have the same spans, at several shares of the
longest one, reading and in training, behind a check that both give the same. Then trains a model with dynamic spans in
three ways for equally many steps: as published, with bounded spans (``bounded``), and with a price of the bound
(``state_penalty``); held-out bits per byte, and the bytes of a state after more tokens than the longest span.

    python benchmarks/dynamic_spans.py --data war-and-peace.txt
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import Contestant, arguments, interleave, kinformer, prepare, save, sets, show, text_bytes, train
from kinformer.core.contract import Chunk
from kinformer.core.state import nbytes
from kinformer.lab.runs.run import open_run
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.projections import MultiHead
from kinformer.parts.relative_positions import DistanceKeys
from kinformer.parts.scores import DynamicSpan, SoftSpan

DIM, HEADS, BATCH, ROUNDS = 128, 4, 4, 7
SHARES = (0.018, 0.25, 0.98)
SIZES = {"layers": 4, "dim": DIM, "layers.*.mixer.num_heads": HEADS, "layers.*.feed_forward.hidden_dim": 4 * DIM}
TRAINING = ("--tokenizer", "bytes", "--optimizer", "muon", "--lr", 5e-3, "--batch-size", BATCH)
WAYS: dict[str, dict[str, Any]] = {
    "as published": {"state_penalty": 0.0, "bounded": "false"},
    "bounded": {"state_penalty": 0.0, "bounded": "true"},
    "bounded, with a price": {"state_penalty": 2e-6, "bounded": "true"},  # as the recipe
}


def layer(span: SoftSpan.Config) -> SoftmaxAttention:
    position = DistanceKeys.Config(max_distance=span.max_span)
    parts = {"projection": MultiHead.Config(bias=False), "position": position, "span": span}
    return SoftmaxAttention.Config(num_heads=HEADS, bias=False, **parts).build(DIM)


def layers(share: float, most: int) -> dict[str, SoftmaxAttention]:
    """A layer with the spans of heads, and one with those of tokens, all of them that share, with equal weights."""
    by_head = layer(SoftSpan.Config(max_span=most, initial=share))
    by_token = layer(DynamicSpan.Config(max_span=most, initial=share, bounded=True))
    weights = {name: value for name, value in by_head.state_dict().items() if not name.startswith("span.")}
    by_token.load_state_dict(weights, strict=False)
    return {"by head": by_head, "by token": by_token}


def timed(share: float, most: int, length: int, rounds: int) -> dict[str, Any]:
    """Seconds and bytes of state of both layers, reading and in training, behind --most tokens."""
    pair, x = layers(share, most), torch.randn(BATCH, most + length, DIM)
    past, rest = x[:, :most], x[:, most:]

    def output(name: str) -> torch.Tensor:
        return pair[name](Chunk(rest), begun[name])[0]

    def read(name: str) -> None:
        with torch.no_grad():
            output(name)

    def step(name: str) -> None:
        output(name).square().sum().backward()

    with torch.no_grad():
        begun = {name: mixer(Chunk(past), mixer.initial_state(BATCH))[1] for name, mixer in pair.items()}
        torch.testing.assert_close(*map(output, pair), atol=1e-4, rtol=1e-3)
    found: dict[str, Any] = {"share": share, "state_bytes": {name: nbytes(x) for name, x in begun.items()}}
    ways: dict[str, Callable[[str], None]] = {"read": read, "step": step}
    for what, run in ways.items():
        contestants = [Contestant(name, partial(run, name), fast=True) for name in pair]
        interleave(contestants, rounds)
        found[f"{what}_seconds"] = {each.name: each.median for each in contestants}
    return found


def trained(way: str, options: Any) -> dict[str, Any]:
    """Bits per byte, bytes of state and the farthest that any token may look, by layer and head, of a trained model."""
    folder = options.runs / way.replace(",", "").replace(" ", "-")
    span = {f"layers.*.mixer.span.{name}": value for name, value in (WAYS[way] | {"max_span": options.most}).items()}
    changes = SIZES | span | {"layers.*.mixer.position.max_distance": options.most}
    where = ("--data", options.data, "--length", options.length, "--steps", options.steps)
    limits: tuple[Any, ...] = ("--threads", torch.get_num_threads(), "--max-bytes", "2k" if options.quick else "200k")
    train("adaptive-span", folder, torch.get_num_threads(), "--recipe", "dynamic", *sets(changes), *TRAINING, *where)
    model = open_run(folder).model()
    text = text_bytes(None if options.data == "stdlib" else options.data, options.most + options.length)[None]
    with torch.no_grad():
        state = model(text)[1]
    windows = [list(module.windows) for module in model.modules() if isinstance(module, DynamicSpan)]
    bits = kinformer("evaluate", folder, *limits)["bits_per_byte"]
    return {"bits_per_byte": bits, "state_bytes": nbytes(state), "windows": windows}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="the text (Python's own sources if not given)")
    parser.add_argument("--most", type=int, default=1024, help="the longest span, in tokens")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=120, help="of training")
    options = prepare(parser)
    if options.quick:
        options.steps, options.most, options.length, options.rounds = 2, 128, 64, 1
    torch.manual_seed(0)
    times = [timed(share, options.most, options.length, options.rounds or ROUNDS) for share in SHARES]
    with tempfile.TemporaryDirectory() as scratch:
        options.runs = Path(scratch)
        models = {way: trained(way, options) for way in WAYS}
    kinds = ("read_seconds", "step_seconds", "state_bytes")
    show(
        "spans by token, relative to the same spans by head",
        ("share of the longest", "reading", "training step", "state"),
        [[each["share"], *(each[kind]["by token"] / each[kind]["by head"] for kind in kinds)] for each in times],
    )
    rows = [[way, each["bits_per_byte"], each["state_bytes"]] for way, each in models.items()]
    show("trained with spans by token", ("", "bits per byte", "state bytes"), rows)
    settings = {name: getattr(options, name) for name in ("most", "length", "steps")} | {"sizes": SIZES, "ways": WAYS}
    result = {"settings": settings, "training": list(TRAINING), "data": Path(options.data).name}
    save(options, "dynamic_spans", result | {"times": times, "trained": models})


if __name__ == "__main__":
    main()
