"""What needs a GPU, in a few minutes: kernels, patterns, steps of training and generation, every member, a comparison.

    python benchmarks/gpu.py                                # on a machine with a CUDA device; writes results/gpu.json
    python benchmarks/gpu.py --parts kernels patterns       # only these, into what the result file has already
    python benchmarks/gpu.py --parts generation members training distances --seconds 120    # less than nine minutes
    TRITON_INTERPRET=1 python benchmarks/gpu.py --quick     # tiny shapes, Triton's interpreter where there is no GPU

    floor        the fastest product and copy of this GPU
    kernels      forward and backward of kernel attention: ours in PyTorch and in Triton
    peers        the same in bfloat16 beside fla's kernels, where installed
    patterns     forward and backward of softmax attention: tiles of ours, FlexAttention, dense SDPA
    distances    forward and backward of softmax attention with tables by distance: our tiles, our kernel in Triton
    training     a step of the recipe benchmark in fp32 and under bf16 autocast, beside x-transformers and GPT-2, and of
                 gpt compiled, also by ``mode="reduce-overhead"``, whose passes are CUDA graphs
    generation   one more token of a session, its draw included, in Python and from a CUDA graph
    members      a training step of every causal member of text under bf16 autocast, its memory, a token both ways
    comparison   `kinformer compare` of three members, bf16-mixed

Every kernel must first give the values and gradients of its reference for a short text. A part that fails says why, and
the others go on; with --seconds a part begins no row after that time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import kinformer
from causal_members import causal_members
from common import RESULTS, Contestant, arguments, gate_equal, gate_learning, interleave, peer, prepare, save, show
from common import kinformer as kinformer_command
from kinformer.core.parts import Relative
from kinformer.generation.session import Session
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.delta import DeltaTokens, delta_rule, delta_steps
from kinformer.kernels.linear import LinearState, linear_attention
from kinformer.parts.patterns.sequence import Causal, Local, Strided
from peers import PeerShape, hugging_face, x_transformers

Attend = Callable[..., Tensor]
Rows = Iterator[dict[str, Any]]
RULES = ("sums", "decayed sums", "gated delta", "sums by channel", "delta by channel", "erased by channel")
chosen = list(RULES)
"""The rules that kernels and peers are timed for."""
MEMBERS = ("gpt", "linear-transformer", "fast-weights", "gated-deltanet", "local")
STEPPED = ("gpt", "local", "linear-transformer", "fast-weights", "gated-deltanet", "rwkv7")
COMPARED = ("gpt", "linear-transformer", "gated-deltanet")
WAYS = ("in Python", "recorded")
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 3e-2}


def finished() -> None:
    """Wait for the device, which works ahead of Python."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rule(name: str, impl: str) -> Attend:
    """Kernel attention by the rule ``name`` of q, k, v, beta and log decays, both [batch, heads, time]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        empty = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=torch.float32)
        if name.endswith("by channel"):
            decay = decay.unsqueeze(-1) * torch.linspace(0.5, 1.5, q.shape[3], device=q.device)
        if name.startswith("erased"):  # as in RWKV-7: other keys are erased than those that are written
            erase = (k * torch.linspace(0.5, 1.0, k.shape[3], device=k.device, dtype=k.dtype)).unsqueeze(3)
            steps = DeltaTokens(q, k.unsqueeze(3), v.unsqueeze(3), beta.unsqueeze(3), erase, decay)
            return delta_steps(steps, empty, impl=impl)[0]  # type: ignore[arg-type]
        if "delta" in name:
            return delta_rule(q, k, v, beta, empty, log_decay=decay, impl=impl)[0]  # type: ignore[arg-type]
        log_decay = None if name == "sums" else decay
        state = LinearState(empty, empty[..., 0])
        return linear_attention(q, k, v, state, log_decay=log_decay, eps=None, impl=impl)[0]  # type: ignore[arg-type]

    return attend


def fla(name: str) -> Attend | None:
    """The same rule by the package fla on a CUDA device, of tensors [batch, time, heads, ...], or None."""
    if not torch.cuda.is_available() or name.endswith("by channel") or peer("fla.ops") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.simple_gla import chunk_simple_gla

    def attend(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        if name == "gated delta":
            return chunk_gated_delta_rule(q, k, v, decay, beta, scale=1.0)[0]
        if name == "decayed sums":
            return chunk_simple_gla(q, k, v, decay, scale=1.0)[0]
        return chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]

    return attend


def turned(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors [batch, heads, time, ...] in the layout of fla, [batch, time, heads, ...]."""
    return tuple(x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad) for x in inputs)


def tokens(shape: Sequence[int], device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k of length 1, v, beta and log decays, all requiring gradients but the last two."""
    q, k, v = (torch.randn(*shape, device=device) for _ in range(3))
    beta, gate = (torch.randn(*shape[:3], device=device) for _ in range(2))
    q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    moving = tuple(x.to(dtype).requires_grad_() for x in (q, k, v))
    return (*moving, beta.sigmoid(), functional.logsigmoid(gate + 3))


def differentiated(attend: Attend, inputs: tuple[Tensor, ...], learnt: int = 3) -> tuple[Tensor, ...]:
    """The output of ``attend``, and the gradients of the first inputs: q, k and v, unless said otherwise."""
    y = attend(*inputs)
    gradients = torch.autograd.grad(y, inputs[:learnt], torch.ones_like(y))
    finished()
    return (y.detach(), *gradients)


def timed(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each."""
    racing = [Contestant(name, step) for name, step in contestants.items()]
    interleave(racing, rounds, warm_up=2)
    return {contestant.name: contestant.median for contestant in racing}


def shapes(quick: bool) -> list[tuple[int, int, int, int]]:
    """Batches, heads, tokens and widths of kernel attention."""
    return [(1, 1, 40, 16)] if quick else [(4, 16, 2048, 64), (1, 16, 16384, 64), (1, 16, 4096, 128)]


def kernels(device: str, quick: bool, rounds: int) -> Rows:
    """Rows of kernel attention by rule, dtype and length."""
    for dtype in (torch.float32,) if quick else (torch.bfloat16, torch.float32):
        for shape in shapes(quick):
            for name in chosen:
                ways = {impl: rule(name, impl) for impl in ("chunked", "triton")}
                short = tokens((1, 2, 40 if quick else 200, shape[3]), device, dtype)
                expected = differentiated(rule(name, "reference"), short)
                for way, attend in ways.items():
                    for ours, theirs in zip(differentiated(attend, short), expected, strict=True):
                        gate_equal(f"{name}, {way}", ours.float(), theirs.float(), TOLERANCE[dtype])
                inputs = tokens(shape, device, dtype)
                seconds = timed({way: partial(differentiated, ways[way], inputs) for way in ways}, rounds)
                yield {"rule": name, "dtype": str(dtype), "shape": shape, "seconds": seconds}


def peers(device: str, quick: bool, rounds: int) -> Rows:
    """Rows of kernel attention in bfloat16 beside fla, which chooses its tiles at the first call of a shape."""
    for shape in shapes(quick):
        for name in chosen:
            theirs = fla(name)
            if theirs is None:
                continue
            begun = time.monotonic()
            short = tokens((1, 2, 200, shape[3]), device, torch.bfloat16)
            expected = differentiated(rule(name, "reference"), short)
            for got, want in zip(differentiated(theirs, turned(short)), expected, strict=True):
                gate_equal(f"{name}, fla", got.transpose(1, 2).float(), want.float(), TOLERANCE[torch.bfloat16])
            inputs = tokens(shape, device, torch.bfloat16)
            ways = {impl: partial(differentiated, rule(name, impl), inputs) for impl in ("chunked", "triton")}
            ways["fla"] = partial(differentiated, theirs, turned(inputs))
            ways["fla"]()
            choosing = time.monotonic() - begun
            seconds = timed(ways, rounds)
            yield {"rule": name, "shape": shape, "fla_first_seconds": choosing, "seconds": seconds}


def patterns(device: str, quick: bool, rounds: int) -> Rows:
    """Rows of softmax attention by pattern and dtype, beside dense SDPA of the causal triangle."""
    long, short = ([(1, 2, 64, 16)], 64) if quick else ([(16, 16, 1024, 64), (1, 16, 16384, 64)], 1024)
    configs = {
        "causal": Causal.Config(),
        "window": Local.Config(window=short // 4),
        "strided": Strided(stride=8 if quick else 128),
    }
    for dtype, (name, config), shape in product(
        (torch.float32,) if quick else (torch.bfloat16, torch.float32), configs.items(), long
    ):
        impls = ("chunked",) if device == "cpu" else ("chunked", "flex")
        ways = {impl: patterned(config, impl) for impl in impls}
        if name == "window":
            ways["masked SDPA"] = patterned(config, "sdpa")
        inputs = tokens((1, 2, short, shape[3]), device, dtype)[:3]
        expected = differentiated(patterned(config, "reference"), inputs)
        for way, attend in ways.items():
            for ours, theirs in zip(differentiated(attend, inputs), expected, strict=True):
                gate_equal(f"{name}, {way}", ours.float(), theirs.float(), TOLERANCE[dtype])
        ways["dense SDPA"] = partial(functional.scaled_dot_product_attention, is_causal=True)
        inputs = tokens(shape, device, dtype)[:3]
        seconds = timed({way: partial(differentiated, ways[way], inputs) for way in ways}, rounds)
        yield {"pattern": name, "dtype": str(dtype), "shape": shape, "seconds": seconds}


def patterned(config: Any, impl: str) -> Attend:
    """Softmax attention of q, k and v within a pattern."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2], device=q.device).expand(q.shape[0], -1)
        visibility = Visibility(config.build(), positions, True)
        return attention(q, k, v, visibility, Scoring(q.shape[3] ** -0.5), impl=impl).out  # type: ignore[arg-type]

    return attend


def distances(device: str, quick: bool, rounds: int) -> Rows:
    """Rows of causal softmax attention whose scores depend on distances, a decay or padding, with all gradients."""
    batch, heads, time, width = (1, 2, 40, 16) if quick else (16, 16, 1024, 64)
    cases: dict[str, dict[str, tuple[int, ...]]] = {
        "biases of 128 distances": {"bias": (heads, 128)},
        "biases of all distances": {"bias": (heads, time)},
        "factors of all distances": {"factor": (heads, time)},
        "keys and values of 16 distances": {"keys": (1, 16, width), "values": (1, 16, width)},
        "keys of all distances": {"keys": (heads, time, width)},
        "decay": {},
        "padding": {},
    }
    for dtype, name in product((torch.float32,) if quick else (torch.bfloat16, torch.float32), cases):
        learnt = tuple(
            torch.rand(shape, device=device, dtype=dtype if len(shape) == 3 else None).requires_grad_()
            for shape in cases[name].values()
        )
        ways = {impl: scored(name, tuple(cases[name]), impl) for impl in ("chunked", "triton")}
        inputs = *tokens((1, heads, min(time, 256), width), device, dtype)[:3], *learnt
        expected = differentiated(scored(name, tuple(cases[name]), "reference"), inputs, len(inputs))
        for way, attend in ways.items():
            for ours, theirs in zip(differentiated(attend, inputs, len(inputs)), expected, strict=True):
                gate_equal(f"{name}, {way}", ours.float(), theirs.float(), TOLERANCE[dtype])
        inputs = *tokens((batch, heads, time, width), device, dtype)[:3], *learnt
        seconds = timed({way: partial(differentiated, ways[way], inputs, len(inputs)) for way in ways}, rounds)
        yield {"scores": name, "dtype": str(dtype), "shape": (batch, heads, time, width), "seconds": seconds}


def scored(name: str, tables: tuple[str, ...], impl: str) -> Attend:
    """Causal softmax attention of q, k and v with the ``tables`` of distances, a decay or padding."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *learnt: Tensor) -> Tensor:
        relative = Relative(0, **dict(zip(tables, learnt, strict=True))) if tables else None
        falls = torch.linspace(0, -9, q.shape[2], device=q.device, dtype=torch.float64).expand(q.shape[:3])
        padding = (torch.arange(q.shape[2], device=q.device) < 9).expand(len(q), -1)
        visibility = Visibility(Causal.Config().build(), key_padding_mask=padding if name == "padding" else None)
        scoring = Scoring(q.shape[3] ** -0.5, relative=relative, decay=falls if name == "decay" else None)
        return attention(q, k, v, visibility, scoring, impl=impl).out  # type: ignore[arg-type]

    return attend


def training(device: str, quick: bool, rounds: int) -> Rows:
    """Rows of training steps: forward, cross entropy, backward and fused AdamW."""
    batch, length = (2, 32) if quick else (32, 1024)
    shape = PeerShape(layers=4, dim=256, heads=4, head_dim=64, hidden=1024, length=length)
    window = torch.randint(256, (batch, length + 1), device=device)
    for bf16 in (False,) if quick else (False, True):
        models: dict[str, nn.Module | None] = {
            member: kinformer.build(member, recipe="tiny" if quick else "benchmark", vocab_size=256)
            for member in (MEMBERS[:2] if quick else MEMBERS)
        }
        if not quick:
            models |= {"x-transformers": x_transformers(shape, flash=True), "GPT-2": hugging_face(shape)}
        steps = {name: step_of(model.to(device), window, bf16) for name, model in models.items() if model is not None}
        for name, step in steps.items():
            gate_learning(name, [step() for _ in range(3)])
        for name, seconds in timed(dict(steps), rounds).items():
            row = {"model": name, "bf16": bf16, "batch": batch, "length": length, "seconds": seconds}
            yield row | {"tokens_per_second": batch * length / seconds}
    for mode in ("default", "reduce-overhead"):
        model = kinformer.build("gpt", recipe="tiny" if quick else "benchmark", vocab_size=256).to(device)
        begun = time.monotonic()
        step = step_of(torch.compile(model, mode=mode), window, bf16=not quick)
        gate_learning(f"gpt, {mode}", [step() for _ in range(3)])
        row = {"model": f"gpt compiled, {mode}", "bf16": not quick, "batch": batch, "length": length}
        row["first_seconds"] = time.monotonic() - begun
        seconds = timed({"step": step}, rounds)["step"]
        yield row | {"seconds": seconds, "tokens_per_second": batch * length / seconds}


def step_of(model: nn.Module, window: Tensor, bf16: bool) -> Callable[[], float]:
    """A training step of ``model`` on ``window`` [batch, time + 1], which returns the loss before it."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        with torch.autocast(window.device.type, torch.bfloat16) if bf16 else nullcontext():
            logits = model(window[:, :-1])
        logits = logits if isinstance(logits, Tensor) else logits[0]
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        loss.backward()
        for weight in model.parameters():  # fused AdamW knows no sparse gradients, which product keys have
            if weight.grad is not None and weight.grad.is_sparse:
                weight.grad = weight.grad.to_dense()
        optimiser.step()
        optimiser.zero_grad()
        return float(loss.detach())

    return step


def generation(device: str, quick: bool, rounds: int) -> Rows:
    """Rows of steps of one token, batch 1 and 64: in Python, and as a CUDA graph."""
    for member in STEPPED[:3] if quick else STEPPED:
        model = kinformer.build(member, recipe="tiny" if quick else "benchmark", vocab_size=256).to(device).eval()
        for batch in (1,) if quick else (1, 64):
            prompt = torch.randint(256, (batch, 64), device=device)
            yield {"member": member, "batch": batch} | token_of(model, prompt, rounds)


def token_of(model: nn.Module, prompt: Tensor, rounds: int) -> dict[str, Any]:
    """Seconds of one more token of a session after ``prompt`` [batch, time], and how its recorded steps are made."""
    options: dict[str, Any] = {"temperature": 0.0, "room": 256}
    sessions = {way: Session(model, len(prompt), recorded=way == "recorded", **options) for way in WAYS}
    drawn = []
    for session in sessions.values():
        session.feed(prompt)
        drawn.append(torch.stack([session.step() for _ in range(8)]))
    gate_equal("tokens of recorded steps", drawn[1], drawn[0], 0.0)
    running = sessions["recorded"]._stepping.running

    def step(session: Session) -> None:
        session.step()
        finished()

    seconds = timed({way: partial(step, session) for way, session in sessions.items()}, rounds)
    return {"steps": type(running).__name__ if running else "in Python", "seconds": seconds}


def members(device: str, quick: bool, rounds: int) -> Rows:
    """A row for every causal member: the recipe benchmark, a training step under bf16 autocast, its highest memory,
    and one more token of one sequence."""
    batch, length = (2, 32) if quick else (16, 1024)
    window = torch.randint(256, (batch, length + 1), device=device)
    for name in causal_members()[: 2 if quick else None]:
        row: dict[str, Any] = {"member": name}
        try:
            model = kinformer.build(name, recipe="tiny" if quick else "benchmark", vocab_size=256).to(device)
            step = step_of(model, window, bf16=True)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            gate_learning(name, [step() for _ in range(3)])
            row["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
            row["seconds"] = {"a step": timed({"step": step}, min(rounds, 5))["step"]}
            row["tokens_per_second"] = batch * length / row["seconds"]["a step"]
            token = token_of(model.eval(), window[:1, :64], min(rounds, 10))
            row["steps"] = token["steps"]
            row["seconds"] |= {f"a token {way}": seconds for way, seconds in token["seconds"].items()}
            del model, step
        except (RuntimeError, SystemExit, ValueError) as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            print(f"{name}: {row['error']}", flush=True)
            row.setdefault("seconds", {})
        yield row


def floor(device: str, quick: bool, rounds: int) -> Rows:
    """A row of the fastest product of 8192 x 8192 bfloat16 numbers and the fastest copy of 4 GiB."""
    size = 64 if quick else 8192
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    source = torch.randn(size * size * (1 if quick else 16), device=device)
    target = torch.empty_like(source)

    def product() -> None:
        a @ b
        finished()

    def copy() -> None:
        target.copy_(source)
        finished()

    seconds = timed({"product": product, "copy": copy}, rounds)
    rates = {
        "flops_per_second": 2 * size**3 / seconds["product"],
        "bytes_per_second": 2 * source.numel() * 4 / seconds["copy"],
    }
    yield rates | {"seconds": seconds}


def comparison(quick: bool) -> dict[str, Any]:
    """What ``kinformer compare`` writes of three members in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("--steps", 4 if quick else 300, "--seeds", 2 if quick else 3, "--sweep", 0)
        small = ("--recipe", "tiny", "--length", 32, "--max-bytes", 4000, "--rounds", 1) * quick
        precision = ("--precision", "bf16-mixed")
        return kinformer_command("compare", *COMPARED, *words, *precision, *small, "--out", folder)


PARTS = {
    "floor": floor, "kernels": kernels, "peers": peers, "patterns": patterns, "distances": distances,
    "training": training, "generation": generation, "members": members,
}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[Any]]]:
    """The header and cells of ``rows``, seconds as milliseconds, those of several contestants in a column each."""
    ways = (
        list(dict.fromkeys(way for row in rows for way in row["seconds"]))
        if isinstance(rows[0]["seconds"], dict)
        else []
    )
    names = list(dict.fromkeys(name for row in rows for name in row if name != "seconds"))
    cells = []
    for row in rows:
        seconds = row["seconds"]
        times = [seconds.get(way) for way in ways] if ways else [seconds]
        cells.append([str(row.get(name)) for name in names] + [None if time is None else 1000 * time for time in times])
    return (*names, *(f"{way} ms" for way in ways or ("",))), cells


def merged(earlier: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``earlier`` rows with those that were measured again replaced, and the new ones behind them."""
    names = ("rule", "pattern", "scores", "model", "member", "dtype", "shape", "bf16", "batch", "length")

    def what(row: dict[str, Any]) -> str:
        return json.dumps([row.get(name) for name in names])

    again = {what(row): row for row in rows}
    return [again.pop(what(row), row) for row in earlier] + list(again.values())


def before(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """The parts that the result file has of this device, which stay unless they are measured anew."""
    path = options.out or RESULTS / "gpu.json"
    if options.quick or not path.is_file():
        return {}
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return (
        {name: result[name] for name in (*PARTS, "comparison") if name in result} if result["device"] == device else {}
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "comparison"), default=(*PARTS, "comparison"))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES, help="of kernels and peers, only these")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="a part begins no row after so long")
    options = prepare(parser)
    chosen[:] = options.rules
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        raise SystemExit("there is no CUDA device here; try the script out with --quick and TRITON_INTERPRET=1.")
    rounds = options.rounds or (1 if options.quick else 20)
    name = torch.cuda.get_device_name() if device == "cuda" else "none, interpreted"
    result: dict[str, Any] = {"device": name} | before(options, name)
    for part in options.parts:
        begun = time.monotonic()
        try:
            if part == "comparison":
                result[part] = comparison(options.quick)
            else:
                rows, earlier = [], result.get(part, [])
                for row in PARTS[part](device, options.quick, rounds):
                    rows.append(row)
                    result[part] = merged(earlier, rows)
                    save(options, "gpu", result)
                    if time.monotonic() - begun > options.seconds:
                        print(f"{part}: ends after {len(rows)} rows, as --seconds has it", flush=True)
                        break
                if rows:
                    show(part, *table(rows))
        except (Exception, SystemExit) as error:
            print(f"{part}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
        print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
        save(options, "gpu", result)


if __name__ == "__main__":
    main()
