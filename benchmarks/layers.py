"""One layer for somebody's model: ours, x-transformers', fla's and PyTorch's beside each other.

    python benchmarks/layers.py            # about four minutes on two cores

Each contestant is a causal layer x [1, time, 512] -> y of 8 heads of 64, built as its authors show, under PyTorch's own
settings. fla's Triton kernels need a GPU, so its operations are taken in their PyTorch ("naive") forms, behind the
plainest projections. Compared are the lines that somebody writes, the time of the import beyond PyTorch's, and forward
and backward at 1,024, 4,096 and 16,384 tokens. Each layer must first be causal: changing later tokens changes no
earlier output.
"""

from __future__ import annotations

import inspect
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from common import Contestant, arguments, interleave, peer, prepare, save, show

DIM, HEADS, WIDTH, WINDOW = 512, 8, 64, 256
LENGTHS, QUICK = (1024, 4096, 16384), (128, 256)
Layer = Callable[[Tensor], Tensor]


def ours_softmax() -> Layer:
    import kinformer

    return kinformer.layer("gpt", DIM, num_heads=HEADS)


def ours_window() -> Layer:
    import kinformer

    return kinformer.layer("local", DIM, num_heads=HEADS, pattern={"kind": "local", "window": WINDOW})


def ours_linear() -> Layer:
    import kinformer

    return kinformer.layer("linear-transformer", DIM, num_heads=HEADS)


def ours_delta() -> Layer:
    import kinformer

    return kinformer.layer("gated-deltanet", DIM, num_heads=HEADS)


def torch_softmax() -> Layer:
    attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def layer(x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]

    return layer


def x_transformers_softmax() -> Layer:
    from x_transformers.x_transformers import Attention

    return Attention(dim=DIM, heads=HEADS, dim_head=WIDTH, causal=True, flash=True)


def local_attention_window() -> Layer:
    from local_attention import LocalMHA

    return LocalMHA(dim=DIM, heads=HEADS, dim_head=WIDTH, window_size=WINDOW, causal=True, exact_windowsize=True)


def fla_linear() -> Layer:
    from fla.ops.linear_attn.naive import naive_chunk_linear_attn

    class LinearAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
            y = naive_chunk_linear_attn(nn.functional.elu(q) + 1, nn.functional.elu(k) + 1, v, normalize=True)
            return self.out(y.flatten(2))

    return LinearAttention()


def fla_delta() -> Layer:
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    class GatedDeltaNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.gates, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 2 * HEADS), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
            g, beta = self.gates(x).unflatten(-1, (2, HEADS)).unbind(2)
            q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
            y = naive_chunk_gated_delta_rule(q, k, v, nn.functional.logsigmoid(g), beta.sigmoid())
            return self.out((y[0] if isinstance(y, tuple) else y).flatten(2))

    return GatedDeltaNet()


CONTESTANTS: dict[str, dict[str, tuple[Callable[[], Layer], str | None]]] = {
    "softmax attention": {
        "kinformer": (ours_softmax, None),
        "x-transformers": (x_transformers_softmax, "x_transformers"),
        "torch.nn.MultiheadAttention": (torch_softmax, None),
    },
    f"window of {WINDOW}": {
        "kinformer": (ours_window, None),
        "local-attention": (local_attention_window, "local_attention"),
    },
    "linear attention": {"kinformer": (ours_linear, None), "fla (PyTorch form)": (fla_linear, "fla")},
    "gated delta rule": {"kinformer": (ours_delta, None), "fla (PyTorch form)": (fla_delta, "fla")},
}
IMPORTS = {
    "kinformer.nn": "from kinformer.nn import layer; layer('gated-deltanet', 64, num_heads=4)",
    "x-transformers": "import x_transformers",
    "local-attention": "import local_attention",
    "fla": "from fla.layers import GatedDeltaNet",
}
MODULES = {"kinformer.nn": "kinformer", "x-transformers": "x_transformers", "local-attention": "local_attention"}


def lines(build: Callable[[], Layer]) -> int:
    """The lines that somebody writes, imports among them."""
    body = inspect.getsource(build).splitlines()[1:]
    return sum(1 for line in body if line.strip() and line.strip() != "import kinformer") + any(
        "import kinformer" in line for line in body
    )


def gate_causal(name: str, layer: Layer, time: int) -> None:
    """Stop the benchmark where a later token changes an earlier output."""
    x = torch.randn(1, time, DIM)
    moved = x.clone()
    moved[:, time // 2 :] += 1
    with torch.no_grad():
        gap = float((layer(moved) - layer(x))[:, : time // 2].abs().max())
    if not gap <= 1e-5:
        raise SystemExit(f"{name}: a later token changes an earlier output by {gap:.2g}; not timed.")


def stepping(layer: Layer, x: Tensor) -> Callable[[], None]:
    """Forward and backward to inputs and weights."""

    def step() -> None:
        y = layer(x)
        y.backward(torch.ones_like(y))

    return step


def import_seconds(statement: str, rounds: int) -> float:
    """The median seconds of ``statement`` in a new process that has imported PyTorch."""
    script = f"import time, torch; begun = time.perf_counter(); {statement}; print(time.perf_counter() - begun)"
    command = [sys.executable, "-W", "ignore", "-c", script]
    times = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(rounds + 1)]
    return statistics.median(float(text.split()[-1]) for text in times[1:])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="leave out lengths beyond")
    options = prepare(parser)
    options.rounds = options.rounds or (1 if options.quick else 7)
    result: dict[str, Any] = {"dim": DIM, "heads": HEADS, "head_dim": WIDTH, "window": WINDOW, "layers": {}}
    made: dict[str, dict[str, Layer]] = {}
    for what, builders in CONTESTANTS.items():
        made[what], facts = {}, {}
        for name, (build, module) in builders.items():
            if module is not None and peer(module) is None:
                continue
            torch.manual_seed(0)
            made[what][name] = build()
            gate_causal(f"{what}, {name}", made[what][name], 640)
            facts[name] = {"lines": lines(build), "seconds": {}}
        result["layers"][what] = facts
    for time in QUICK if options.quick else [length for length in LENGTHS if length <= options.longest]:
        x = torch.randn(1, time, DIM, requires_grad=True)
        field = [
            (what, name, Contestant(f"{what}, {name}", stepping(layer, x)))
            for what, layers in made.items()
            for name, layer in layers.items()
        ]
        interleave([contestant for *_, contestant in field], options.rounds)
        for what, name, contestant in field:
            result["layers"][what][name]["seconds"][str(time)] = contestant.median
    rounds = 1 if options.quick else 5
    result["import_seconds"] = {
        name: import_seconds(statement, rounds)
        for name, statement in IMPORTS.items()
        if peer(MODULES.get(name, name)) is not None
    }
    for what, facts in result["layers"].items():
        header = ["layer", "lines", *(f"{time} tokens, ms" for time in next(iter(facts.values()))["seconds"])]
        rows = [
            [name, fact["lines"], *(1000 * seconds for seconds in fact["seconds"].values())]
            for name, fact in facts.items()
        ]
        show(what, header, rows)
    show("import beyond PyTorch's", ["package", "s"], [[name, s] for name, s in result["import_seconds"].items()])
    save(options, "layers", result)


if __name__ == "__main__":
    main()
