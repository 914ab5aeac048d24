"""What do parts of recent models cost in softmax attention: a sink logit, output gates, pinned first tokens?

The recipe `benchmark` of gpt (4 layers, dim 256, 4 heads x 64) as it is, and with one part each, in one process: a
training step at 8 x 512 and 1 x 4,096 tokens (forward, cross entropy, backward), and a generation step of one token
after 1,024. What has a window is compared with the plain window of 256. Before, every model must give the logits that
it has with impl = "reference".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import kinformer
from common import Contestant, arguments, gate_equal, interleave, prepare, save, show, text_bytes

MIXER = "layers.*.mixer"
WINDOW = {f"{MIXER}.pattern": {"kind": "local", "window": 256}}
PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink_logit": {f"{MIXER}.score": "sink_logit"},
    "sink_logit, fixed": {f"{MIXER}.score": {"kind": "sink_logit", "learned": False}},
    "gate = head": {f"{MIXER}.gate": "head"},
    "gate = element": {f"{MIXER}.gate": "element"},
    "window": WINDOW,
    "window, sink_logit": WINDOW | {f"{MIXER}.score": "sink_logit"},
    "sinks (4 and the window)": {f"{MIXER}.pattern": {"kind": "sinks", "window": 256}},
}
SHAPES = ((8, 512), (1, 4096))
PAST = 1024


def build(part: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    changes = {"position": "none", f"{MIXER}.position": "rope"} | PARTS[part] | more
    return kinformer.build("gpt", recipe="benchmark", vocab_size=256, set=changes)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """A step without the optimiser, which is the same for all."""

    def __init__(self, part: str, tokens: Tensor) -> None:
        self.model, self.tokens = build(part), tokens

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        loss_of(self.model, self.tokens).backward()


class Generation:
    """Steps of one token, as a session makes them: recorded."""

    def __init__(self, part: str, prompt: Tensor, steps: int) -> None:
        from kinformer.generation.session import Session

        self.session = Session(build(part).eval(), 1, temperature=0, room=100_000)
        self.session.feed(prompt)
        self.steps = steps
        for _ in range(8):
            self.session.step()

    def __call__(self) -> None:
        for _ in range(self.steps):
            self.session.step()


def check(tokens: Tensor) -> dict[str, float]:
    """The largest gap of each part's logits to those of the reference."""
    gaps = {}
    for part in PARTS:
        with torch.no_grad():
            logits = [build(part, **{f"{MIXER}.impl": impl})(tokens)[0] for impl in ("auto", "reference")]
        gaps[part] = gate_equal(part, *logits, 1e-5)
    return gaps


def measure(make: Any, rounds: int) -> dict[str, dict[str, float]]:
    contestants = [Contestant(part, make(part), fast=True) for part in PARTS]
    interleave(contestants, rounds, warm_up=2)
    seconds = {item.name: item.median for item in contestants}
    base = {part: "window" if "window" in part else "plain" for part in PARTS}
    return {part: {"ms": 1e3 * seconds[part], "ratio": seconds[part] / seconds[base[part]]} for part in PARTS}


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(rounds=9, threads=1)
    options = prepare(parser)
    shapes, steps, rounds = (((2, 64),), 2, 2) if options.quick else (SHAPES, 16, options.rounds)
    text = text_bytes(None, 8 * 513 + 4097)
    gaps = check(text[: 2 * 401].view(2, 401))
    results: dict[str, Any] = {}
    for batch, time in shapes:
        tokens = text[: batch * (time + 1)].view(batch, time + 1)
        results[f"training step, {batch} x {time}"] = measure(lambda part, x=tokens: Training(part, x), rounds)
    prompt = text[None, : 64 if options.quick else PAST]
    with torch.inference_mode():
        results["16 generated tokens"] = measure(lambda part: Generation(part, prompt, steps), rounds)
    for title, table in results.items():
        show(title, ("part", "ms", "times"), [[part, row["ms"], row["ratio"]] for part, row in table.items()])
    save(options, "attention_parts", {"rounds": rounds, "past": PAST, "gaps": gaps, "results": results})


if __name__ == "__main__":
    main()
