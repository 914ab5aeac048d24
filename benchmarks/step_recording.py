"""What could record a step of generation, and what does each way cost? Batch 1, float32.

    in Python    the step as the model makes it, into a reserved state
    recorded     the same, written down once (generation/recording.py)
    in C         recorded from packed weights, with operators in C (generation/native.py; needs a C compiler)
    exported     torch.export's graph of the step, run as a module; slots are joined, for graphs return what they change
    AOTInductor  the same graph compiled ahead of time to C++ (needs a C++ compiler)

4 layers, dim 256, after 64 and 512 tokens. Every way must first give the logits of one forward over the whole text.
What cannot be made is reported with its reason. All ways go on from step to step, at the same lengths in every round.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from common import Contestant, arguments, gate_equal, interleave, prepare, save, show
from kinformer.core.state import reserve
from kinformer.family.build import configure
from kinformer.generation.recording import logits_after, record
from kinformer.generation.weights import pack
from kinformer.runtime.compiling import trusted_arguments

MEMBERS, LENGTHS = ("linear-transformer", "gpt"), (64, 512)
STEPS = 4
"""Tokens of one measurement."""
GATE = 8
"""Steps whose logits are compared."""
Step = Callable[[Tensor], Tensor]
"""Logits [1, vocab] after the next token [1, 1], which a state of its own absorbs."""
Make = Callable[[nn.Module, Tensor, int], Step]
"""(model, tokens, length) -> the step behind the first ``length`` of the tokens [1, time]."""


class StateStep(nn.Module):
    """A step as a function of tensors alone: (token, *leaves of the state) -> (logits, *leaves of the state after)."""

    def __init__(self, model: nn.Module, state: Any) -> None:
        super().__init__()
        self.model = model
        self.tree = tree_structure(state)

    def forward(self, token: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        logits, state = logits_after(self.model, token, tree_unflatten(leaves, self.tree))
        return logits, tree_leaves(state)


def state_after(model: Any, tokens: Tensor, length: int) -> Any:
    return model.head_inputs(tokens[:, :length])[1]


def in_python(model: nn.Module, tokens: Tensor, length: int) -> Step:
    state = reserve(state_after(model, tokens, length), tokens.shape[1])

    def step(token: Tensor) -> Tensor:
        nonlocal state
        with torch.inference_mode(), trusted_arguments():
            logits, state = logits_after(model, token, state)
        return logits

    return step


def recorded(model: nn.Module, tokens: Tensor, length: int) -> Step:
    state = reserve(state_after(model, tokens, length - 1), tokens.shape[1])
    with torch.inference_mode(), trusted_arguments():  # as a session makes its steps
        _, state = logits_after(model, tokens[:, length - 1 : length], state)  # lays the buffers out
        recording = record(model, tokens[:, length : length + 1], state)
        running = recording.begin(state)
    assert running is not None

    def step(token: Tensor) -> Tensor:
        with torch.inference_mode():
            return running.outputs(token)[0]

    return step


def in_c(model: nn.Module, tokens: Tensor, length: int) -> Step:
    if (packed := pack(model)) is model:
        raise RuntimeError("there is no C compiler")
    return recorded(packed, tokens, length)


def program(model: nn.Module, tokens: Tensor, length: int) -> tuple[torch.export.ExportedProgram, list[Tensor]]:
    """torch.export's graph of the step, at any number of past slots, and the leaves of the state.

    The leaves lie in memory as those that the graph returns: AOTInductor takes their strides here and checks none.
    """
    state = state_after(model, tokens, length)
    leaves = [leaf.contiguous() for leaf in tree_leaves(state)]
    longer = tree_leaves(state_after(model, tokens, length + 1))
    past = torch.export.Dim("past", min=2, max=(model.max_length or 1024) - 1)
    grows = [{2: past} if leaf.shape != more.shape else None for leaf, more in zip(leaves, longer, strict=True)]
    with torch.no_grad():
        shapes = {"token": None, "leaves": grows}
        graph = torch.export.export(StateStep(model, state), (tokens[:, :1].clone(), leaves), dynamic_shapes=shapes)
    return graph, leaves


def going_on(run: Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]], leaves: list[Tensor]) -> Step:
    def step(token: Tensor) -> Tensor:
        nonlocal leaves
        with torch.no_grad():
            logits, leaves = run(token, leaves)
        return logits

    return step


def exported(model: nn.Module, tokens: Tensor, length: int) -> Step:
    graph, leaves = program(model, tokens, length)
    return going_on(graph.module(), leaves)


def aot_inductor(model: nn.Module, tokens: Tensor, length: int) -> Step:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise RuntimeError("there is no C++ compiler")
    graph, leaves = program(model, tokens, length)
    with fresh_cache(), tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(graph, package_path=str(Path(folder) / "step.pt2"))
        return going_on(torch._inductor.aoti_load_package(path), leaves)


WAYS: dict[str, Make] = {
    "in Python": in_python,
    "recorded": recorded,
    "in C": in_c,
    "exported": exported,
    "AOTInductor": aot_inductor,
}


def ways_of(name: str, model: nn.Module, tokens: Tensor, length: int) -> tuple[dict[str, Step], list[dict[str, Any]]]:
    """The steps that could be made and are right, and what is reported of each way so far."""
    expected = model(tokens[:, : length + GATE])[0][0, length:]
    steps, rows = {}, []
    for way, make in WAYS.items():
        row: dict[str, Any] = {"member": name, "tokens": length, "way": way}
        begun = time.perf_counter()
        try:
            steps[way] = make(model, tokens, length)
        except Exception as error:
            row["refused"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:300]
        else:
            row["seconds to make"] = time.perf_counter() - begun
            logits = [steps[way](tokens[:, length + number][:, None]) for number in range(GATE)]
            row["gap"] = gate_equal(f"{name}, {way}", torch.cat(logits), expected, 1e-4)
        rows.append(row)
    return steps, rows


def race(steps: dict[str, Step], tokens: Tensor, length: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step."""

    def run(step: Step, places: list[int]) -> None:
        for _ in range(STEPS):
            step(tokens[:, places[0]][:, None])
            places[0] += 1

    timed = [Contestant(way, partial(run, step, [length + GATE])) for way, step in steps.items()]
    interleave(timed, rounds)
    return {item.name: 1000 * item.median / STEPS for item in timed}


def main() -> None:
    options = prepare(arguments(__doc__))
    rounds = options.rounds or (3 if options.quick else 31)
    rows = []
    for name in MEMBERS:
        model = configure(name, "small", 256, {"dim": 256, "layers": 4}).build().eval().requires_grad_(False)
        for length in LENGTHS[:1] if options.quick else LENGTHS:
            tokens = torch.randint(256, (1, length + GATE + STEPS * (rounds + 1) + 1))
            steps, made = ways_of(name, model, tokens, length)
            found = race(steps, tokens, length, rounds)
            rows += [row | ({"ms a step": found[row["way"]]} if row["way"] in found else {}) for row in made]
    columns = ("member", "tokens", "way", "seconds to make", "ms a step", "gap", "refused")
    show("a step of generation", columns, [[row.get(column) for column in columns] for row in rows])
    save(options, "step_recording", {"shape": "4 x 256", "rounds": rounds, "steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
