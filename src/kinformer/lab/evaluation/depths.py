"""The depth of each token in a model that lets tokens leave early or halt: layers used, or steps taken."""

from __future__ import annotations

import contextlib
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

from kinformer.adaptive.rules import AtExit, ExitRule
from kinformer.adaptive.stack import ExitStack
from kinformer.core.model import Model, device_of
from kinformer.core.state import fork, reserve
from kinformer.generation import native
from kinformer.lab.training.logging import Metric
from kinformer.runtime.errors import plural
from kinformer.stacks.sequential import HaltingState, Universal

# The exits by which tokens leave a stack with early exits, and the savings.

LAYERS_PER_TOKEN = Metric("layers_per_token", "layers per token")
ROUNDS = 9


@dataclass(frozen=True, kw_only=True)
class Exited:
    """The numbers of ``tokens`` that left by each exit, and the number of ``layers`` before each exit.
    ``flops_saved``: the share of the FLOPs of all layers and the head that was saved. ``speedup``: the time with all
    layers divided by the time with early exits. Both are None if they were not measured."""

    layers: tuple[int, ...]
    tokens: tuple[int, ...]
    flops_saved: float | None = None
    speedup: float | None = None

    @property
    def saves(self) -> bool:
        """Return whether early exits save FLOPs, with the cost of the exits' predictions; True if not measured."""
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
    """Counts the tokens of a model that leave by each exit."""

    def __init__(self, stack: ExitStack | None) -> None:
        self.stack = stack
        self.tokens = [0] * (0 if stack is None else len(stack.exits))

    @property
    def result(self) -> Exited | None:
        """Return the counts; None if there were no tokens, or all tokens go through all layers."""
        if self.stack is None or not sum(self.tokens):
            return None
        return Exited(layers=tuple(use + 1 for use in self.stack.exits), tokens=tuple(self.tokens))

    def note(self, exits: Tensor, valid: Tensor | None) -> None:
        """Count the valid tokens of a chunk."""
        some = exits.flatten() if valid is None else exits[valid]
        counts = torch.bincount(some, minlength=len(self.tokens)).tolist()
        self.tokens = [before + count for before, count in zip(self.tokens, counts, strict=True)]


def early_exit_stack(model: nn.Module | Model) -> ExitStack | None:
    """Return the model's stack if tokens may leave it early by its present rule, else None."""
    assert isinstance(model, nn.Module)
    stacks = (module for module in model.modules() if isinstance(module, ExitStack))
    return next((stack for stack in stacks if stack.leaves_early), None)


@contextmanager
def noting_exits(model: nn.Module | Model) -> Iterator[EarlyExitRecorder]:
    """Count the exits of all valid tokens of ``model`` within the context."""
    early_exit = EarlyExitRecorder(stack := early_exit_stack(model))
    with contextlib.ExitStack() as hooks:
        if stack is not None:
            hooks.enter_context(stack.left.register_forward_hook(lambda _, batch, __: early_exit.note(*batch)))
        yield early_exit


@contextmanager
def with_rule(stack: ExitStack | None, rule: ExitRule | None) -> Iterator[None]:
    """Use another ``rule`` of ``stack``, if any, within the context; with None tokens go through all layers."""
    if stack is None:
        yield
        return
    previous, stack.rule = stack.rule, rule
    try:
        yield
    finally:
        stack.rule = previous


class Forced(ExitRule):
    """A rule by which all tokens leave by one exit. It also computes ``rule``, so that it has the same cost."""

    def __init__(self, rule: ExitRule, exit: int) -> None:
        super().__init__(rule.exits)
        self.rule, self.exit = rule, exit

    def asks(self, number: int) -> bool:
        return self.rule.asks(number)

    def forward(self, at: AtExit) -> Tensor:
        self.rule(at)
        return torch.full(at.x.shape[:1], max(self.exit, at.number), device=at.x.device)


def saved(model: Any, result: Exited, past: int, rows: int = 1, source: int = 0) -> Exited:
    """Return ``result`` with the savings of early exits when tokens come one at a time after ``past`` tokens.
    FLOPs are counted and times measured for a token that leaves by each exit and for a token that goes through all
    layers. A model over a source first reads ``source`` tokens, which are not counted."""
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
        state = reserve(state, 1)
        for round, (index, rule) in product(range(ROUNDS), enumerate(rules)):
            copy_of_state = fork(state)
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


PACKED = {native.product.overloadpacket: _packed_flops}
"""The FLOP counters of products with packed weights (``generation.weights``)."""


# Steps per token in a model whose stack lets tokens halt.

PONDER_STEPS = Metric("ponder_steps", "steps per token")


class PonderRecorder:
    """Counts the steps of the tokens of a model; ``halts``: whether tokens can take fewer than all steps."""

    def __init__(self, model: nn.Module) -> None:
        stacks = (module for module in model.modules() if isinstance(module, Universal))
        self.deciding = [stack.halting for stack in stacks if stack.halting is not None]
        self.tokens, self.steps = 0, 0

    @property
    def halts(self) -> bool:
        return bool(self.deciding)

    @property
    def mean(self) -> float | None:
        """Return the steps per token, None if there were no tokens or no token halts."""
        return self.steps / self.tokens if self.tokens else None

    def note(self, _: nn.Module, arguments: tuple[HaltingState, *tuple[object, ...]]) -> None:
        """Count the tokens that take the next step of a stack whose tokens halt."""
        progress = arguments[0]
        running = int(progress.running.sum())
        self.steps += running
        self.tokens += running if progress.number == 0 else 0


@contextmanager
def noting_steps(model: nn.Module) -> Iterator[PonderRecorder]:
    """Count the steps of all valid tokens of ``model`` within the context."""
    recorder = PonderRecorder(model)
    with contextlib.ExitStack() as hooks:
        for part in recorder.deciding:
            hooks.enter_context(part.register_forward_pre_hook(recorder.note))
        yield recorder


class Depths:
    """The depths of tokens: ``last`` [batch, time] int64 are the steps or layers of the last call, 0 where not valid,
    in the model's left-aligned order. ``metric`` is the unit."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.last = torch.zeros(0, 0, dtype=torch.int64)

    def step(self, _: nn.Module, arguments: tuple[HaltingState, *tuple[object, ...]]) -> None:
        """Record which tokens take the next step of a stack whose tokens halt."""
        progress = arguments[0]
        running = progress.running.long()
        self.last = running if progress.number == 0 else self.last + running

    def left(self, layers: Tensor, exits: Tensor, valid: Tensor | None) -> None:
        """Record the ``exits`` of the tokens of a chunk; ``layers`` is the number of layers before each exit."""
        depth = layers.to(exits.device)[exits]
        self.last = depth if valid is None else depth.masked_fill(~valid, 0)


@contextmanager
def noting_depths(model: nn.Module | Model) -> Iterator[Depths | None]:
    """Record the depths of all tokens of a causal ``model`` within the context; None if they cannot differ."""
    stack = getattr(model, "stack", None)
    halting, exits = stack.halting if isinstance(stack, Universal) else None, early_exit_stack(model)
    if halting is not None:
        with halting.register_forward_pre_hook((depths := Depths(PONDER_STEPS)).step):
            yield depths
    elif exits is not None:
        depths, layers = Depths(LAYERS_PER_TOKEN), torch.tensor([use + 1 for use in exits.exits])
        with exits.left.register_forward_hook(lambda _, batch, __: depths.left(layers, *batch)):
            yield depths
    else:
        yield None
