"""Does memory grow with depth? A training step of 2,048 tokens, dim 256, by stacks of 4 and of 32 layers.

    saved     bytes of the distinct storages that autograd keeps for the backward pass (what checkpoints keep is theirs,
              and not among it)
    alive     the most bytes of tensors that are alive at once
    process   the peak of a fresh process's resident memory above what it was before the step
    states    what all layers hand on until the loss is known: an output of every layer, whatever the stack

Weights, their gradients and states are no activations: they are apart in saved and alive, and states are in process.
The reversible stack's activations must be equal at both depths within 10 %. Its gate: gradients of the same stack that
keeps everything, to 1e-7 in float64. Then what rounding does: the inputs that are made again of the outputs of 32
layers, against what they were, and gradients in float32 against float64, recomputed and kept.
"""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import kinformer
from common import arguments, in_process, memory, prepare, save, show, text_bytes
from kinformer.core.contract import Chunk
from kinformer.core.state import nbytes, tensors
from kinformer.lab.estimation.estimate import Live
from kinformer.stacks.reversible import LayerUse

MEMBERS = ("linear-transformer", "gpt")
STACKS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "checkpoints": {"stack.checkpoint": True},
    "reversible": {"stack": "reversible"},
    "reversible, chunks": {"stack": "reversible", "layers.*.feed_forward.chunks": 16},
}
DEPTHS = (4, 32)
EQUAL = 0.10


def build(member: str, stack: str, depth: int) -> Any:
    torch.manual_seed(0)
    changes = {"head.tied": False, "layers": depth} | STACKS[stack]
    if member == "gpt":
        changes["position.max_length"] = 2048
    return kinformer.build(member, recipe="benchmark", vocab_size=256, set=changes).train()


def loss_of(model: Any, window: Tensor, start: Any = None) -> tuple[Tensor, int]:
    """The loss of a window of tokens, and the bytes of the states that were handed on until it was known."""
    logits, state = model(window[:, :-1], start)
    loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    return loss, nbytes(state.layers)


def saved(model: Any, window: Tensor) -> int:
    """Bytes of distinct storages that autograd keeps, beside weights and states."""
    start = model.initial_state(1)
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *tensors(start))}
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = loss_of(model, window, start)
    del loss
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own)


def point(member: str, stack: str, depth: int, length: int) -> dict[str, Any]:
    """The memory of a step in this process, in bytes, and its seconds."""
    model, window = build(member, stack, depth), text_bytes(None, length + 1)[None]
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    resident, begun = memory("VmRSS"), time.perf_counter()
    loss, handed = loss_of(model, window)
    loss.backward()
    found = {"process": memory("VmHWM") - resident, "seconds": time.perf_counter() - begun, "states": handed}
    gradients = (weight.grad for weight in model.parameters())
    start = model.initial_state(1)
    with Live([*model.parameters(), *gradients, *tensors(start), window]) as live:
        loss, _ = loss_of(model, window, start)
        until_loss = live.peak - handed
        live.peak = live.now
        loss.backward()
    return found | {"alive": max(until_loss, live.peak), "saved": saved(model, window)}


def keeping(model: Any) -> Any:
    """The same model, whose reversible stack keeps everything."""
    other = copy.deepcopy(model)
    other.stack.config = other.stack.config.replace(recompute=False)
    return other


def gradient(model: Any, window: Tensor) -> Tensor:
    """That of all weights, in one vector of float64."""
    model.zero_grad()
    loss_of(model, window)[0].backward()
    return torch.cat([weight.grad.double().flatten() for weight in model.parameters()])


def off(found: Tensor, want: Tensor) -> float:
    return float((found - want).norm() / want.norm())


@torch.no_grad()
def drift(model: Any, x: Tensor) -> float:
    """How far the input of all layers, made of their outputs, is from what it was, by its largest value."""
    stack = model.stack
    state = stack.initial_state(len(x), dtype=x.dtype)
    a = b = x
    uses = [LayerUse(stack._branches(index), Chunk(x), x.dtype, False) for index in stack.order]
    for use, own in zip(uses, state, strict=True):
        a, b, _ = use.forward_to_undo(a, b, own)
    for use, own in zip(reversed(uses), reversed(state), strict=True):
        before = [(each, list(tensors(each)), [None] * len(list(tensors(each)))) for each in own]
        (a, b), *_ = use.backward((a, b), (None, None), before, ())
    return max(float((each - x).abs().max() / x.abs().max()) for each in (a, b))


def rounding(length: int, depth: int) -> dict[str, Any]:
    """Drift by dtype, gradients by what recomputing and float32 change."""
    model, window = build("gpt", "reversible", depth), text_bytes(None, length + 1)[None]
    exact = keeping(model).double()
    want = gradient(exact, window)
    drifts = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        typed = copy.deepcopy(model).to(dtype)
        drifts[str(dtype).removeprefix("torch.")] = drift(
            typed, functional.embedding(window[:, :-1], typed.input.table)
        )
    return {
        "depth": depth,
        "drift": drifts,
        "gradient_float64_recomputed": off(gradient(copy.deepcopy(model).double(), window), want),
        "gradient_float32_recomputed": off(gradient(model, window), want),
        "gradient_float32_kept": off(gradient(keeping(model), window), want),
        "gradient_float32_recomputed_against_kept": off(gradient(model, window), gradient(keeping(model), window)),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--point", nargs=4, help="measure one point (member, stack, depth, length) and print it")
    options = prepare(parser)
    if options.point:
        member, stack, depth, length = options.point
        print(json.dumps(point(member, stack, int(depth), int(length))))
        return
    length, depths = (128, (2, 6)) if options.quick else (2048, DEPTHS)
    found = rounding(64 if options.quick else 256, depths[-1])
    if found["gradient_float64_recomputed"] > 1e-7:
        raise SystemExit(f"gradients are off by {found['gradient_float64_recomputed']:.2g} in float64")
    points: list[dict[str, Any]] = []
    for member in MEMBERS:
        for stack in STACKS:
            for depth in depths:
                measured = in_process(__file__, "--point", member, stack, depth, length)
                points.append({"member": member, "stack": stack, "depth": depth} | measured)
    columns = ("member", "stack", "depth", "saved", "alive", "process", "states", "seconds")
    mib = [[p[c] / 2**20 if c in columns[3:7] else p[c] for c in columns] for p in points]
    show(f"one step of {length} tokens, MiB", columns, mib)
    growth = {}
    for member in MEMBERS:
        for stack in STACKS:
            shallow, deep = (p for p in points if (p["member"], p["stack"]) == (member, stack))
            growth[f"{member}, {stack}"] = {key: deep[key] / shallow[key] for key in ("saved", "alive", "process")}
    show(
        f"{depths[1]} layers against {depths[0]}",
        ("stack", "saved", "alive", "process"),
        [[name, *ratios.values()] for name, ratios in growth.items()],
    )
    print(json.dumps(found, indent=1))
    save(options, "reversible", {"length": length, "points": points, "growth": growth, "rounding": found})
    for name, ratios in growth.items():
        if "reversible" in name and max(ratios["saved"], ratios["alive"]) > 1 + EQUAL:
            raise SystemExit(f"{name}: activations grow with depth: {ratios}")


if __name__ == "__main__":
    main()
