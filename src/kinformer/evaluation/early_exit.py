"""The exits by which tokens leave a stack with early exits, and the savings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kinformer.core import state as states
from kinformer.core.model import Model, device_of
from kinformer.core.stack import Stack
from kinformer.runtime.words import plural
from kinformer.stacks.exit_rules import AtExit, ExitRule
from kinformer.stacks.exits import Exits
from kinformer.training.metric import Metric

LAYERS_PER_TOKEN = Metric("layers_per_token", "layers per token")
ROUNDS = 9


@dataclass(frozen=True, kw_only=True)
class Exited:
    """The ``tokens`` by the exit that they left by, behind this many ``layers``, the last being all.

    ``flops_saved``: the share of the FLOPs of all layers and the head that was not spent. ``speedup``: how many times
    as long all layers would have taken. None where they were not measured.
    """

    layers: tuple[int, ...]
    tokens: tuple[int, ...]
    flops_saved: float | None = None
    speedup: float | None = None

    @property
    def saves(self) -> bool:
        """Return whether less is computed than by all layers, the predictions at the
        exits included, as far as was measured."""
        return self.flops_saved is None or self.flops_saved > 0

    @property
    def layers_per_token(self) -> float:
        pairs = zip(self.layers, self.tokens, strict=True)
        return sum(layers * count for layers, count in pairs) / sum(self.tokens)

    @property
    def facts(self) -> dict[str, object]:
        """Return the values as JSON-ready data."""
        by_layer = {str(layers): count for layers, count in zip(self.layers, self.tokens, strict=True)}
        facts = {LAYERS_PER_TOKEN.name: self.layers_per_token, "layers": self.layers[-1], "tokens_by_layers": by_layer}
        return facts | {"flops_saved": self.flops_saved, "speedup": self.speedup}

    @property
    def text(self) -> str:
        """Return the values as one line of text."""
        parts = [f"{self.layers_per_token:.2f} of {plural(self.layers[-1], 'layer')} per token"]
        if self.flops_saved is not None:
            parts.append(f"{self.flops_saved:.0%} of the FLOPs saved")
        if self.speedup is not None:
            parts.append(f"{self.speedup:.2f} times as fast as with all layers")
        return ", ".join(parts)


class EarlyExitRecorder:
    """The count of tokens of a model that left by each exit so far."""

    def __init__(self, stack: Stack | None) -> None:
        self.stack = stack
        self.tokens = [0] * (0 if stack is None else len(stack.exits))

    @property
    def result(self) -> Exited | None:
        """Return the counts; None where there were no tokens, or all tokens go through all layers anyway."""
        if self.stack is None or not sum(self.tokens):
            return None
        return Exited(layers=tuple(use + 1 for use in self.stack.exits), tokens=tuple(self.tokens))

    def note(self, exits: Tensor, valid: Tensor | None) -> None:
        """Count the valid tokens of a chunk."""
        some = exits.flatten() if valid is None else exits[valid]
        counts = torch.bincount(some, minlength=len(self.tokens)).tolist()
        self.tokens = [before + count for before, count in zip(self.tokens, counts, strict=True)]


def early_exit_stack(model: nn.Module | Model) -> Exits | None:
    """Return the model's stack where its tokens may leave early, as its rule is now; else None."""
    assert isinstance(model, nn.Module)
    stacks: Iterator[Any] = (module for module in model.modules() if isinstance(module, Stack) and module.exits)
    return next((stack for stack in stacks if getattr(stack, "rule", None) is not None and not stack.rule.off), None)


@contextmanager
def noting_exits(model: nn.Module | Model) -> Iterator[EarlyExitRecorder]:
    """Count by which exits all valid tokens of ``model`` leave within the context."""
    stack = early_exit_stack(model)
    early_exit = EarlyExitRecorder(stack)
    hook = None if stack is None else stack.left.register_forward_hook(lambda _, batch, __: early_exit.note(*batch))
    try:
        yield early_exit
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def with_rule(stack: Exits | None, rule: ExitRule | None) -> Iterator[None]:
    """Use another rule of ``stack`` within the context, or none: all tokens go through all layers. Without a stack
    nothing changes."""
    if stack is None:
        yield
        return
    previous, stack.rule = stack.rule, rule
    try:
        yield
    finally:
        stack.rule = previous


class Forced(ExitRule):
    """A rule by which all tokens leave by one exit, after the ``rule`` was evaluated at its usual cost."""

    def __init__(self, rule: ExitRule, exit: int) -> None:
        super().__init__(rule.exits)
        self.rule, self.exit = rule, exit

    def asks(self, number: int) -> bool:
        return self.rule.asks(number)

    def forward(self, at: AtExit) -> Tensor:
        self.rule(at)
        return torch.full(at.x.shape[:1], max(self.exit, at.number), device=at.x.device)


def saved(model: Any, result: Exited, past: int, rows: int = 1, source: int = 0) -> Exited:
    """Return ``result`` with what early exits save where tokens come one at a time after ``past`` others, and after a
    ``source`` of this many, which is read before and not counted.

    FLOPs are counted and times measured for a token that leaves by each exit and for one that passes all layers.
    """
    stack = early_exit_stack(model)
    assert stack is not None and stack.rule is not None
    rules = [*(Forced(stack.rule, exit) for exit in range(len(stack.exits))), None]
    flops, seconds = [0] * len(rules), [[0.0] * ROUNDS for _ in rules]
    with torch.no_grad():
        tokens = model.input.example(rows, past + 1, device_of(model))
        with with_rule(stack, None):
            if source:
                state = model.begin(model.source_input.example(rows, source, device_of(model)))
            else:
                state = model.initial_state(rows)
            state = model.head_inputs(tokens[:, :past], state)[1] if past else state
        state = states.reserve(state, 1)
        for round, (index, rule) in product(range(ROUNDS), enumerate(rules)):
            copy_of_state = states.fork(state)
            counting = FlopCounterMode(display=False, custom_mapping=PACKED) if round == 0 else nullcontext()
            started_at = time.perf_counter()
            with with_rule(stack, rule), counting:
                model.logits(model.head_inputs(tokens[:, past:], copy_of_state)[0])
            seconds[index][round] = time.perf_counter() - started_at
            if isinstance(counting, FlopCounterMode):
                flops[index] = counting.get_total_flops()
    fastest = [min(times[1:]) for times in seconds]
    spent, took = (
        sum(tokens * cost for tokens, cost in zip(result.tokens, costs, strict=False))
        / (sum(result.tokens) * costs[-1])
        for costs in (flops, fastest)
    )
    return replace(result, flops_saved=1 - spent, speedup=1 / took)


def _packed_flops(x: Sequence[int], *_: object, out_shape: Sequence[int], **__: object) -> int:
    return 2 * prod(out_shape) * x[-1]


PACKED = {torch.ops.mkldnn._linear_pointwise: _packed_flops} if hasattr(torch.ops.mkldnn, "_linear_pointwise") else {}
"""How the FLOPs of products whose weights are packed (``generation.packed``) are counted."""
