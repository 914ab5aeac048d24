"""What do parts and mixers of recent models cost beside plain attention, from 1,024 to 32,768 tokens?

    python benchmarks/modern_lengths.py --threads 1        # some fifteen minutes

One layer of width 256 with 4 heads of 64 in float32, rotary positions where softmax attention needs them: the processor
time of the forward and backward of a whole text, and of a token after it, in turns, and the bytes of the state.
Texts beyond 4,096 tokens are trained on once. Every layer must first give the same outputs for a text in one chunk and
in two.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from common import arguments, gate_equal, medians, prepare, save, show
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.state import nbytes, reserve
from kinformer.family.build import configure

DIM, HEADS, WIDTH, TOLERANCE = 256, 4, 64, 1e-4
LENGTHS, QUICK, LONG, STEPS = (1024, 4096, 16_384, 32_768), (128, 256), 4096, 16
PLAIN = "softmax"
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    PLAIN: ("rope", {}),
    "sink_logit": ("rope", {"score": "sink_logit"}),
    "capped": ("rope", {"score": "capped"}),
    "head_gate": ("rope", {"gate": "head"}),
    "element_gate": ("rope", {"gate": "element"}),
    "qk_norm": ("rope", {"projection": "normalised"}),
    "exclusive": ("rope", {"exclusive": True}),
    "differential": ("differential", {}),
    "forgetting": ("forgetting", {}),
    "mla": ("mla", {}),
    "sinks": ("rope", {"pattern": {"kind": "sinks", "window": 256}}),
    "window": ("rope", {"pattern": {"kind": "local", "window": 256}}),
    "moba": ("moba", {"block": 256, "count": 4}),
    "nsa": ("nsa", {"block": 64, "count": 16, "window": 512}),
    "nsa_overlapping": (
        "nsa",
        {"block": 64, "count": 16, "window": 512, "compression": "mlp", "summary_length": 32, "summary_stride": 16},
    ),
    "gated-deltanet": ("gated-deltanet", {}),
    "kda": ("kda", {}),
    "mamba2": ("mamba2", {}),
    "log_linear": ("mamba2", {"levels": 15}),
    "rwkv7": ("rwkv7", {}),
}
"""The member whose mixer it is, as its small recipe has it, and what is changed of that."""


def built(name: str) -> CausalMixer:
    torch.manual_seed(0)
    member, changes = LAYERS[name]
    paths = {f"layers.0.mixer.{path}": value for path, value in ({"num_heads": HEADS} | changes).items()}
    layer: CausalMixer = configure(member, "small", set=paths).layers[0].mixer.build(DIM)
    return layer


def first_state(mixer: CausalMixer, x: Tensor) -> Any:
    return mixer.initial_state(len(x), dtype=x.dtype)


def learned(mixer: CausalMixer, x: Tensor) -> None:
    x = x.detach().requires_grad_()
    torch.autograd.grad(mixer(Chunk(x), first_state(mixer, x))[0].square().sum(), x)


def gate(names: list[str]) -> float:
    """Hold every layer's outputs for a text in two chunks to those in one; return the largest gap."""
    x, gaps = torch.randn(1, 600, DIM), []
    with torch.no_grad():
        for name in names:
            mixer = built(name)
            whole, _ = mixer(Chunk(x), first_state(mixer, x))
            begin, state = mixer(Chunk(x[:, :377]), first_state(mixer, x))
            end, _ = mixer(Chunk(x[:, 377:]), state)
            gaps.append(gate_equal(name, torch.cat([begin, end], 1), whole, TOLERANCE))
    return max(gaps)


def after(name: str, past: int, rounds: int) -> tuple[float, int]:
    """Milliseconds of a token after ``past`` others in a reserved state, and the bytes of the state before it."""
    mixer, x = built(name), torch.randn(1, past, DIM)
    with torch.inference_mode():
        _, state = mixer(Chunk(x), first_state(mixer, x))
        size = nbytes(state)

        def run() -> None:
            at = reserve(state, STEPS)
            for token in x[:, :STEPS].split(1, 1):
                _, at = mixer(Chunk(token), at)

        return medians({name: run}, rounds, True)[name] / STEPS, size


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), help="only these")
    options = prepare(parser)
    names, rounds = options.layers, options.rounds or (1 if options.quick else 3)
    lengths = QUICK if options.quick else LENGTHS
    gap = gate(names)
    training, tokens, states = {}, {}, {}
    for length in lengths:
        x, short = torch.randn(1, length, DIM), length <= LONG
        steps = {name: partial(learned, built(name), x) for name in names}
        training[length] = medians(steps, rounds if short else 1, short)
        measured = {name: after(name, length, rounds) for name in names}
        tokens[length], states[length] = ({name: pair[i] for name, pair in measured.items()} for i in (0, 1))
        print(f"{length} tokens: measured", flush=True)
    tables = {"forward and backward, ms": training, "one token, ms": tokens, "state, bytes": states}
    for title, table in tables.items():
        show(title, ("layer", *map(str, lengths)), [[name, *(table[n][name] for n in lengths)] for name in names])
    shape = {"dim": DIM, "heads": HEADS, "width": WIDTH}
    result = {"shape": shape, "rounds": rounds, "gap": gap, "training": training, "tokens": tokens, "states": states}
    save(options, "modern_lengths", result)


if __name__ == "__main__":
    main()
