"""What does a trained softmax model lose when its attention is converted, and what does the conversion save?

A GPT-2 of transformers learns bytes of Python's standard library for --steps. Then each contestant's mixer takes the
place of the attention in all its layers (``kinformer.interop.convert``): it learns the attention's outputs for
--transfer-steps, and the model is fine-tuned for --fine-tuning-steps; in its place, low-rank updates of the mixers
alone (LoRA, if peft is installed). Beside it the same patched model learns from scratch for as many steps as the
conversion has, at the learning rate of the first training, and without the transfer the fine-tuning has all steps.
Losses are bits per byte of held-out text.

    python benchmarks/conversion.py --threads 1
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from common import arguments, peer, prepare, save, show, text_bytes
from kinformer.interop import Phase, convert, patch
from kinformer.interop.conversion import evaluate, fine_tune

CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear-transformer": ("linear-transformer", {}),
    "gated-deltanet": ("gated-deltanet", {}),
    "local, window 32": ("local", {"set": {"pattern.window": 32}}),
}
LENGTH, ROWS, DIM, LAYERS, HEADS = 128, 16, 128, 4, 4
RATE, TRANSFER_RATE, FINE_TUNING_RATE, LORA_RATE = 2e-3, 2e-3, 1e-3, 5e-3


class Text:
    """The standard library as bytes; the last twentieth is held out."""

    def __init__(self, count: int) -> None:
        data = text_bytes(None, count)
        cut = len(data) * 19 // 20
        self.training, held_out = data[:cut], data[cut:]
        windows = held_out[: len(held_out) // LENGTH * LENGTH].view(-1, LENGTH)
        self.held_out = [{"input_ids": rows} for rows in windows[: 16 * ROWS].split(ROWS)]

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Windows [rows, length] that begin anywhere."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.training) - LENGTH, (ROWS,), generator=generator)
            yield self.training[starts[:, None] + torch.arange(LENGTH)]


def new_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS}
    dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def bits(nats: float) -> float:
    return nats / math.log(2)


def learned(model: Any, text: Text, phase: Phase, seed: int = 1) -> tuple[float, int]:
    """Train ``model`` from scratch, or go on training it; return the loss and the number of parameters trained."""
    count = fine_tune(model, text.batches(seed), phase)
    return bits(evaluate(model, text.held_out)), count


def contestant(name: str, softmax: Any, text: Text, options: Any) -> dict[str, Any]:
    mixer, settings = CONTESTANTS[name]
    steps = options.transfer_steps + options.fine_tuning_steps
    torch.manual_seed(1)
    begun = time.perf_counter()
    done = convert(
        copy.deepcopy(softmax),
        mixer,
        text.batches(2),
        evaluation=text.held_out,
        transfer=Phase(options.transfer_steps, TRANSFER_RATE),
        fine_tuning=Phase(0, FINE_TUNING_RATE),
        **settings,
    )
    losses = {phase: bits(done.losses[phase]) for phase in ("before", "patched", "transferred")}
    trained = {"transfer": done.trained["transfer"]}
    transferred, whole = copy.deepcopy(done.model), Phase(options.fine_tuning_steps, FINE_TUNING_RATE)
    losses["fine_tuned"], trained["fine_tuned"] = learned(done.model, text, whole, seed=3)
    seconds = time.perf_counter() - begun
    if peer("peft") is not None:
        lora = Phase(options.fine_tuning_steps, LORA_RATE, trains="lora")
        losses["lora"], trained["lora"] = learned(transferred, text, lora, seed=3)
    alone, anew = Phase(steps, FINE_TUNING_RATE), Phase(steps, RATE)
    losses["fine_tuned_alone"], _ = learned(patch(copy.deepcopy(softmax), mixer, **settings), text, alone)
    losses["from_scratch"], _ = learned(patch(new_model(), mixer, **settings), text, anew)
    result: dict[str, Any] = {"name": name, "mixer": mixer, "conversion_seconds": seconds, "losses": losses}
    result |= {"trained": trained, "errors": done.errors}
    result["copied"], result["new"] = done.layers[0].copied, done.layers[0].new
    print(name, {phase: round(loss, 3) for phase, loss in losses.items()}, f"{seconds:.0f} s", flush=True)
    return result


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--transfer-steps", type=int, default=200)
    parser.add_argument("--fine-tuning-steps", type=int, default=300)
    options = prepare(parser)
    if peer("transformers") is None:
        return
    if options.quick:
        options.steps = options.transfer_steps = options.fine_tuning_steps = 2
    text = Text(100_000 if options.quick else 4_500_000)
    softmax = new_model()
    begun = time.perf_counter()
    loss, _ = learned(softmax, text, Phase(options.steps, RATE))
    seconds = time.perf_counter() - begun
    print(f"softmax: {loss:.3f} bits per byte after {options.steps} steps, {seconds:.0f} s", flush=True)
    more = options.transfer_steps + options.fine_tuning_steps
    further, _ = learned(copy.deepcopy(softmax), text, Phase(more, FINE_TUNING_RATE))
    contestants = [contestant(name, softmax, text, options) for name in CONTESTANTS]
    phases = list(contestants[0]["losses"])
    rows = [(each["name"], *(each["losses"][phase] for phase in phases)) for each in contestants]
    show("bits per byte", ("mixer", *phases), rows)
    sizes = {"length": LENGTH, "rows": ROWS, "dim": DIM, "layers": LAYERS, "heads": HEADS, "vocab_size": 256}
    steps = {name: getattr(options, name) for name in ("steps", "transfer_steps", "fine_tuning_steps")}
    rates = {"lr": RATE, "transfer_lr": TRANSFER_RATE, "fine_tuning_lr": FINE_TUNING_RATE, "lora_lr": LORA_RATE}
    teacher = {"bits_per_byte": loss, "seconds": seconds, "after_as_many_more_steps": further}
    settings = {**sizes, **steps, **rates, "dtype": "float32", "parameters": softmax.num_parameters()}
    save(options, "conversion", {"settings": settings, "softmax": teacher, "contestants": contestants})


if __name__ == "__main__":
    main()
