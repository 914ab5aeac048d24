"""What is each accelerator worth that has a plain way beside it? The same work with and without it, in turns.

    packed      generation with products of packed weights in C (generation/native.py), beside the model's own products
    projected   few queries over keys that are never made (kernels/attention/cached.py), beside keys and values made
    first sets        small sets attended all pairs at once where oneDNN makes the products (the same file), beside
    SDPA falloff     ALiBi without the keys that are too far to count (kernels/block_sparse/scores.py), beside all
    keys convolution short convolutions with gradients of their own (parts/projections.py), beside autograd's few rows
    a step of generation by PyTorch's own products (runtime/process.py), beside oneDNN's

Steps of generation are recorded; ``step_recording.py`` measures what recording is worth. Sets and few rows concern
processes in which oneDNN makes float32 products, which a command has on processors without AMX. They are measured in a
process of their own, and where the processor has AMX with oneDNN held to AVX-512. Both ways must give the same values.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from common import Contestant, arguments, gate_equal, in_process, interleave, prepare, save, show
from kinformer.core.pattern import Band
from kinformer.family.build import configure
from kinformer.generation import session as steps
from kinformer.generation.session import Session
from kinformer.generation.weights import pack
from kinformer.kernels import AttentionImpl
from kinformer.kernels import block_sparse as tiles
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.softmax import Projected
from kinformer.parts.projections import by_autograd, shifted_sum
from kinformer.parts.relative_positions import Alibi
from kinformer.runtime.process import begin_process, has_amx

ONEDNN = "--onednn"
HEADS, HEAD_DIM = 8, 64
WARM, STEPS = 32, 8
"""Tokens drawn before a session is timed, by which its step is recorded, and in one measurement."""
Way = Callable[[], Any]
Case = tuple[str, str, Way, Way]
"""An accelerator, what it is tried on, and the work with and without it."""


def decoder(dim: int, depth: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return configure("gpt", "small", 256, {"dim": dim, "layers": depth}).build().eval().to(dtype)


def stepping(model: nn.Module, batch: int, rounds: int, around: AbstractContextManager[Any]) -> Way:
    """``STEPS`` tokens of a session of ``model`` that goes on from call to call, ``around`` each."""
    session = Session(model, batch, temperature=0, room=max(steps.LONG, WARM + STEPS * (rounds + 2)))

    def work() -> None:
        with around:
            for _ in range(STEPS):
                session.step()

    session.feed(torch.zeros(batch, 1, dtype=torch.int64))
    for _ in range(WARM // STEPS):
        work()
    return work


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(torch.arange(64)[None])[0].float()


def packing(rounds: int, quick: bool) -> Iterator[Case]:
    shapes = [(256, 4, torch.float32)] if quick else [(256, 8, torch.float32), (768, 6, torch.float32)]
    for dim, depth, dtype in [*shapes, (256, 4 if quick else 8, torch.bfloat16)]:
        model = decoder(dim, depth, dtype)
        for batch in (1, 16):
            ours = pack(model)
            gate_equal("packed", logits(ours), logits(model), 1e-4 if dtype == torch.float32 else 5e-2)
            case = f"{depth} x {dim}, {str(dtype).removeprefix('torch.')}, batch {batch}"
            with_packed, without = (stepping(item, batch, rounds, nullcontext()) for item in (ours, model))
            yield "packed", case, with_packed, without


def projected(rounds: int, quick: bool) -> Iterator[Case]:
    """Global queries over a document, as Longformer and Big Bird have them."""
    dim, slots = HEADS * HEAD_DIM, 512 if quick else 4096
    x, weight = torch.randn(1, slots, dim), torch.randn(2, dim, dim) / dim**0.5
    x.requires_grad_()
    for queries in (1, 16, 48):
        q = torch.randn(1, HEADS, queries, HEAD_DIM)

        def ours(q: Tensor) -> Tensor:
            k, v = (Projected(x, item) for item in weight)
            return attention(q, k, v, Visibility(), Scoring(HEAD_DIM**-0.5)).out

        def made(q: Tensor) -> Tensor:
            k, v = (Projected(x, item).made(HEADS) for item in weight)
            return attention(q, k, v, Visibility(), Scoring(HEAD_DIM**-0.5)).out

        gate_equal("projected", ours(q).detach(), made(q).detach(), 1e-4)
        ways = [partial(_both_ways, partial(way, q)) for way in (ours, made)]
        yield "projected", f"{queries} queries, {slots} tokens of {dim}, forward and backward", *ways


def _both_ways(forward: Callable[[], Tensor]) -> None:
    forward().sum().backward()


def falloff(rounds: int, quick: bool) -> Iterator[Case]:
    for length in (1024,) if quick else (1024, 4096, 16384):
        q, k, v = torch.randn(3, 1, HEADS, length, HEAD_DIM).requires_grad_()
        scoring = Scoring(HEAD_DIM**-0.5, relative=Alibi(HEADS).relative(0, length - 1))

        def forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, worth: int) -> Tensor:
            with patch.object(tiles, "WORTH", worth):
                return attention(q, k, v, Visibility(Band()), scoring).out

        ours, every = (partial(forward, q, k, v, scoring, worth) for worth in (tiles.WORTH, sys.maxsize))
        gate_equal("falloff", ours().detach(), every().detach(), 1e-5)
        yield "falloff", f"{length} tokens, forward and backward", partial(_both_ways, ours), partial(_both_ways, every)


def convolution(rounds: int, quick: bool) -> Iterator[Case]:
    """Four taps over queries, keys and values of a layer, as Gated DeltaNet has them."""
    for batch, time in ((2, 64),) if quick else ((8, 512), (1, 4096), (64, 64)):
        tokens = torch.randn(batch, time + 3, 3 * HEADS, HEAD_DIM).transpose(1, 2).requires_grad_()
        weight = torch.randn(4, 3 * HEADS, HEAD_DIM).requires_grad_()
        ours, plain = (partial(way, tokens, weight, None) for way in (shifted_sum, by_autograd))
        gate_equal("convolution", ours().detach(), plain().detach(), 1e-6)
        case = f"{batch} x {time} tokens, {3 * HEADS * HEAD_DIM} channels, forward and backward"
        yield "convolution", case, partial(_both_ways, ours), partial(_both_ways, plain)


def by_onednn(work: Way) -> Way:
    """``work`` where oneDNN makes float32 products; who times it resets the setting."""

    def run() -> Any:
        torch.set_float32_matmul_precision("medium")
        return work()

    return run


def sets(rounds: int, quick: bool) -> Iterator[Case]:
    for queries, slots in ((8, 64), (16, 256), (64, 128), (128, 128)):
        q, k = torch.randn(4, HEADS, queries, HEAD_DIM), torch.randn(4, HEADS, slots, HEAD_DIM)

        def way(impl: AttentionImpl, q: Tensor = q, k: Tensor = k) -> Tensor:
            with torch.inference_mode():
                return attention(q, k, k, Visibility(), Scoring(HEAD_DIM**-0.5), impl=impl).out

        ours, theirs = (by_onednn(partial(way, impl)) for impl in ("chunked", "sdpa"))
        gate_equal("sets", ours(), theirs(), 1e-5)
        yield "sets", f"4 x {HEADS} heads, {queries} queries, {slots} keys", ours, theirs


def few_rows(rounds: int, quick: bool) -> Iterator[Case]:
    begin_process()
    for dim, depth in ((256, 4),) if quick else ((256, 8), (768, 6)):
        model = decoder(dim, depth)
        for batch in (1, 16):
            ours = by_onednn(stepping(model, batch, rounds, nullcontext()))
            plain = patch.object(steps, "few_rows", lambda *_: nullcontext())
            yield "few rows", f"{depth} x {dim}, batch {batch}", ours, by_onednn(stepping(model, batch, rounds, plain))


def race(cases: Iterator[Case], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for accelerator, case, ours, plain in cases:
        timed = [Contestant("with", ours), Contestant("without", plain)]
        interleave(timed, rounds)
        found = {f"{item.name} ms": 1000 * item.median for item in timed}
        ratio = timed[1].median / timed[0].median
        rows.append({"accelerator": accelerator, "case": case} | found | {"times as fast": ratio})
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(ONEDNN, action="store_true", help="sets and few rows alone, as JSON: a process of this script")
    options = prepare(parser)
    rounds, quick = options.rounds or (3 if options.quick else 21), options.quick
    if options.onednn:
        import json

        matrix = torch.randn(256, 256)
        expected = matrix @ matrix
        torch.set_float32_matmul_precision("medium")
        gate_equal("oneDNN's float32 products", matrix @ matrix, expected, 1e-5)
        print(json.dumps(race(chain(few_rows(rounds, quick), sets(rounds, quick)), rounds)))
        return
    parts = (packing, projected, falloff, convolution)
    rows = race(chain.from_iterable(part(rounds, quick) for part in parts), rounds)
    if has_amx():
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"
    rows += in_process(__file__, ONEDNN, "--rounds", rounds, *(["--quick"] if quick else []))  # type: ignore[arg-type]
    show("the same work with and without", list(rows[0]), [list(row.values()) for row in rows])
    save(options, "accelerators", {"rounds": rounds, "steps": STEPS, "onednn": _isa(), "rows": rows})


def _isa() -> str:
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "the processor's own")


if __name__ == "__main__":
    main()
