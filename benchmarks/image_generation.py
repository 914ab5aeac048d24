"""Images a second, value by value: linear attention with its state, softmax attention recomputed and with its cache.

    python benchmarks/image_generation.py                     # MNIST: 784 positions, 8 layers
    python benchmarks/image_generation.py --images cifar      # CIFAR-10: 3,072 positions, 16 layers

The shapes are those of the Linear Transformer's experiments (Katharopoulos et al. 2020, tables 1 and 2): dim 256, 8
heads x 32, feed-forward 1,024, a mixture of ten logistics; the mixer alone differs. Each contestant draws as many
images at once as --memory holds. Beside them stand Reformer's attention with 1 and 4 rounds, the recurrent form of
pytorch-fast-transformers where it is installed, and one image at batch 1.

A few positions are timed in rounds, at the beginning, in the middle and at the end of an image; what a whole one takes
is their mean by the trapezoid rule, since the cost of a position is linear in how many came before. Before anything is
timed, values drawn one by one must have the logits of one pass over all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from common import Contestant, arguments, gate_equal, interleave, prepare, save, show
from kinformer.core.contract import MixerConfig
from kinformer.core.parts import Likelihood
from kinformer.core.state import repeat_rows, reserve
from kinformer.family.build import configure
from kinformer.generation.recording import logits_after
from kinformer.generation.session import Steps
from kinformer.generation.weights import pack
from kinformer.inputs.images import START
from kinformer.mixers.buckets import LSHAttention
from kinformer.mixers.linear import LinearAttention
from kinformer.mixers.softmax import SoftmaxAttention
from peers import PeerShape, idiap

RECIPES = {"mnist": "paper-mnist", "cifar": "paper-cifar"}
HEADS, STEPS, SHORT, TOLERANCE = 8, 4, 40, 2e-3
MIXERS: dict[str, MixerConfig] = {
    "linear": LinearAttention.Config(num_heads=HEADS),
    "softmax": SoftmaxAttention.Config(num_heads=HEADS),
    "LSH, 1 round": LSHAttention.Config(num_heads=HEADS, num_buckets=16, chunk_size=32, rounds=1),
    "LSH, 4 rounds": LSHAttention.Config(num_heads=HEADS, num_buckets=16, chunk_size=32, rounds=4),
}


def model_of(images: str, mixer: MixerConfig, quick: bool) -> Any:
    config = configure("linear-transformer", RECIPES[images])
    layers = tuple(layer.replace(mixer=mixer) for layer in config.layers)
    return config.replace(layers=layers[:2] if quick else layers).build().eval()


@dataclass
class Drawing:
    """``batch`` images that are drawn together by ``model``, from ``position`` on."""

    model: Any
    batch: int
    position: int
    recompute: bool = False
    values: Tensor = field(init=False)
    stepping: Steps = field(init=False)
    state: Any = None

    def __post_init__(self) -> None:
        begun = torch.randint(256, (1, max(1, self.position)))
        begun[:, 0] = START
        if self.recompute:
            self.values = begun.expand(self.batch, -1).contiguous()
            return
        with torch.inference_mode():
            if self.position > 1:
                state = self.model.head_inputs(begun[:, :-1])[1]
            else:
                state = self.model.initial_state(1)
            self.state = reserve(repeat_rows(state, self.batch), 16 * STEPS)
        self.values = begun[:, -1:].expand(self.batch, -1).contiguous()
        self.stepping = Steps(self.model, STEPS, recorded=False)

    def step(self) -> None:
        """Draw STEPS values of every image; recomputing one value takes a pass over all before it, so it draws one."""
        head: Likelihood = self.model.head
        with torch.inference_mode():
            for _ in range(1 if self.recompute else STEPS):
                if self.recompute:
                    logits, _ = logits_after(self.model, self.values, None)
                else:
                    logits, self.state = self.stepping.step(self.values, self.state)
                drawn = head.draw(logits, torch.rand(self.batch, head.draws), 1.0)
                if not self.recompute:
                    self.values = drawn[:, None]


@dataclass
class Peer:
    """The recurrent form of pytorch-fast-transformers, which draws the likeliest of 256 classes."""

    model: nn.Module
    batch: int
    token: Tensor = field(init=False)
    state: Any = None

    def __post_init__(self) -> None:
        self.token = torch.zeros(self.batch, dtype=torch.int64)

    def step(self) -> None:
        with torch.inference_mode():
            for position in range(STEPS):
                logits, self.state = self.model.one(self.token, position, self.state)  # type: ignore[operator]
                self.token = logits.argmax(-1)


def gate(name: str, model: Any) -> float:
    """One by one, the logits are those of one pass."""
    values = torch.randint(256, (2, SHORT))
    with torch.inference_mode():
        whole, _ = model(values)
        state, parts = reserve(model.initial_state(2), SHORT), []
        for column in values.split(1, 1):
            logits, state = model(column, state)
            parts.append(logits)
    return gate_equal(name, torch.cat(parts, 1), whole, TOLERANCE)


def batches(options: argparse.Namespace, model: Any, length: int) -> dict[str, int]:
    """How many images fit into the memory, of each way to draw them."""
    if options.quick:
        return {"state": 4, "cache": 2, "recompute": 1}
    layers, dim, room = len(model.stack.layers), model.config.dim, options.memory * 2**30
    return {
        "state": min(options.most, int(room / (4 * layers * dim * 34 * 4))),
        "cache": min(options.most, int(room / (2 * layers * 2 * dim * length * 4))),
        "recompute": max(1, min(32, int(room / (length * dim * 32 * 4)))),
    }


def places(length: int, rounds: int) -> list[int]:
    last = length - STEPS * (rounds + 3)
    return [1, last // 2, last]


def per_image(seconds: Sequence[float], at: Sequence[int], length: int, batch: int) -> float:
    """Seconds an image of ``length`` positions takes, of seconds per position of ``batch`` images ``at`` three of them;
    what is beyond the last is as it."""
    mean = ((seconds[0] + seconds[1]) / 2 * (at[1] - at[0]) + (seconds[1] + seconds[2]) / 2 * (at[2] - at[1])) / (
        at[2] - at[0]
    )
    return mean * length / batch


def one_image(model: Any, length: int, dtype: torch.dtype) -> float:
    """Seconds for one whole image with packed weights of ``dtype``, stepped as ``kinformer generate`` does it."""
    model, head = pack(model.to(dtype)), model.head
    value, state = torch.full((1, 1), START), reserve(model.initial_state(1), length)
    begun = time.perf_counter()
    with torch.inference_mode():
        stepping = Steps(model, length, recorded=True)
        for _ in range(length):
            logits, state = stepping.step(value, state)
            value = head.draw(logits, torch.rand(1, head.draws), 1.0)[:, None]
    return time.perf_counter() - begun


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--images", choices=tuple(RECIPES), default="mnist")
    parser.add_argument("--memory", type=float, default=4, help="GiB that the images drawn at once may take")
    parser.add_argument("--most", type=int, default=1024, help="images drawn at once at most")
    options = prepare(parser)
    rounds = options.rounds or (1 if options.quick else 5)
    models = {name: model_of(options.images, mixer, options.quick) for name, mixer in MIXERS.items()}
    length = models["linear"].config.input.raster.size
    gaps = {name: gate(name, model) for name, model in models.items()}
    size, at = batches(options, models["linear"], length), places(length, rounds)
    runs: dict[str, tuple[int, list[Contestant]]] = {}
    for name, model in models.items():
        batch = size["state" if name == "linear" else "cache"]
        label = f"{name}, cached" if name == "softmax" else name
        runs[label] = (
            batch,
            [Contestant(f"{label} at {place}", Drawing(model, batch, place).step, True) for place in at],
        )
    runs["softmax, recomputed"] = (
        size["recompute"],
        [
            Contestant(f"recomputed at {place}", Drawing(models["softmax"], size["recompute"], place, True).step, True)
            for place in at
        ],
    )
    config = models["linear"].config
    peer = idiap(
        PeerShape(layers=len(config.layers), dim=256, heads=HEADS, head_dim=32, hidden=1024, length=length),
        recurrent=True,
    )
    if peer is not None:
        other = Peer(peer.eval(), size["state"])
        runs["pytorch-fast-transformers"] = size["state"], [Contestant("idiap", other.step)]
    interleave([each for _, some in runs.values() for each in some], rounds)
    found = {}
    for name, (batch, some) in runs.items():
        steps = 1 if name == "softmax, recomputed" else STEPS
        seconds = [each.median / steps for each in some] * (3 if len(some) == 1 else 1)
        found[name] = {
            "batch": batch,
            "seconds_per_position": seconds,
            "images_per_second": 1 / per_image(seconds, at, length, batch),
        }
    speed = {name: each["images_per_second"] for name, each in found.items()}
    rows = [[name, each["batch"], speed[name], speed["linear"] / speed[name]] for name, each in found.items()]
    show(f"{options.images}: {length} positions", ("", "images at once", "images/s", "linear is faster by"), rows)
    single = {}
    for dtype in () if options.quick else (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        single[name] = one_image(model_of(options.images, MIXERS["linear"], False), length, dtype)
    for name, taken in single.items():
        print(f"one image at batch 1, {name} weights: {taken:.2f} s")
    result = {
        "images": options.images,
        "positions": length,
        "timed_at": at,
        "steps": STEPS,
        "rounds": rounds,
        "extrapolation": "whole images are extrapolated from the timed positions by the trapezoid rule",
        "gaps": gaps,
        "contestants": found,
        "one_image_seconds": single,
    }
    save(options, f"image_generation_{options.images}", result)


if __name__ == "__main__":
    main()
