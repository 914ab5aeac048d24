"""Early exits, measured: the exits that tokens take, samples with and without exits, and thresholds that bound a
risk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, comb, exp, log, prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from kinformer.adaptive.rules import AtExit, ExitRule, ThresholdRule
from kinformer.adaptive.stack import ExitStack
from kinformer.core.model import Model, device_of
from kinformer.core.state import fork, reserve
from kinformer.lab.data import Split
from kinformer.lab.evaluation.bits import Windows, batches
from kinformer.lab.training.logging import Metric
from kinformer.runtime.errors import plural

# The exits by which tokens leave a stack with early exits, and the savings.

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

    def __init__(self, stack: ExitStack | None) -> None:
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


def early_exit_stack(model: nn.Module | Model) -> ExitStack | None:
    """Return the model's stack where its tokens may leave early, as its rule is now; else None."""
    assert isinstance(model, nn.Module)
    stacks = (module for module in model.modules() if isinstance(module, ExitStack))
    return next((stack for stack in stacks if stack.leaves_early), None)


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
def with_rule(stack: ExitStack | None, rule: ExitRule | None) -> Iterator[None]:
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


PACKED = {torch.ops.mkldnn._linear_pointwise: _packed_flops} if hasattr(torch.ops.mkldnn, "_linear_pointwise") else {}
"""How the FLOPs of products whose weights are packed (``generation.packed``) are counted."""


# Learn then Test by fixed-sequence testing, as CALM chooses its threshold (Schuster et al. 2022, sections 3.2 and 4;
# Angelopoulos et al. 2021).
#
# Thresholds are tested from the most careful one down. Each hypothesis is that the risk at a threshold is above delta;
# with the mean loss E of n independent samples, each loss in [0, 1], its p-value is
#
#     hoeffding     p = exp(-2 n max(0, delta - E)^2)                                              as in CALM
#     bentkus       p = min(exp(-n kl(min(E, delta), delta)), e P(Bin(n, delta) <= ceil(n E)))     as in Learn then Test
#
# with kl(a, b) = a ln(a / b) + (1 - a) ln((1 - a) / (1 - b)); the second is never larger, so that fewer samples do.
#
# The first threshold with p > epsilon ends the test, and the one before is chosen: its risk is at most delta with a
# probability of at least 1 - epsilon over the samples, however many thresholds were tested.


class Tested(NamedTuple):
    """A ``threshold``, the mean loss ``risk`` of the samples with it, and the ``p``-value of a risk above delta."""

    threshold: float
    risk: float
    p: float


Bound = Literal["bentkus", "hoeffding"]


def p_value(risk: float, samples: int, delta: float, bound: Bound) -> float:
    """Return the p-value of a risk above ``delta`` where the mean loss of ``samples`` is ``risk``."""
    hoeffding = exp(-2 * samples * max(0.0, delta - risk) ** 2)
    if bound == "hoeffding":
        return hoeffding
    # min(exp(-n kl(min(E, delta), delta)), e P(Bin(n, delta) <= ceil(n E)))
    least = min(risk, delta)
    kl = (least * log(least / delta) if least else 0.0) + (1 - least) * log((1 - least) / (1 - delta))
    return min(exp(-samples * kl), exp(1) * _binomial(_rounded_up(samples * risk), samples, delta))


def samples_needed(delta: float, epsilon: float, bound: Bound) -> int:
    """Return how many samples without any loss it takes to conclude that the risk is at most ``delta``."""
    # p = epsilon at E = 0, solved for n: exp(-2 n delta^2), or exp(-n kl(0, delta)) = (1 - delta)^n.
    return ceil(log(1 / epsilon) / (2 * delta**2 if bound == "hoeffding" else -log(1 - delta)))


def fixed_sequence(
    thresholds: Sequence[float],
    risk: Callable[[float], float],
    samples: int,
    delta: float,
    epsilon: float,
    bound: Bound = "bentkus",
) -> list[Tested]:
    """Test ``thresholds`` in this order; the last of the list is the first that failed, unless none did."""
    tested: list[Tested] = []
    for threshold in thresholds:
        measured = risk(threshold)
        tested.append(Tested(threshold, measured, p_value(measured, samples, delta, bound)))
        if tested[-1].p > epsilon:
            break
    return tested


def chosen(tested: Sequence[Tested], epsilon: float) -> Tested | None:
    """Return the last threshold that passed, None where the very first failed."""
    passed = [threshold for threshold in tested if threshold.p <= epsilon]
    return passed[-1] if passed else None


def grid(count: int, nearest: float = 1e-3) -> list[float]:
    """Return ``count`` thresholds from 1 - ``nearest`` down to 0, whose distances to 1 grow by one factor."""
    # Distances to 1 from ``nearest`` to 1 in equal ratios: thresholds are densest where the risk is least.
    return [1 - nearest ** (1 - index / (count - 1)) for index in range(count)]


def dissimilarity(
    left: Sequence[Sequence[int]] | np.ndarray, right: Sequence[Sequence[int]] | np.ndarray
) -> np.ndarray:
    """Return 1 - ROUGE-L (Lin 2004) of sequences of ids, pair by pair, [n]: of their F-measure, which for sequences of
    one length is 1 - (longest common subsequence) / length.

        ROUGE-L = 2 LCS(a, b) / (|a| + |b|), 1 where both are empty
    """
    lengths = np.array([len(a) + len(b) for a, b in zip(left, right, strict=True)])
    # Two fillings below all ids, which match nothing
    common = _common(_filled(left, -1), _filled(right, -2))
    return 1 - np.where(lengths > 0, 2 * common / np.maximum(lengths, 1), 1.0)


def _filled(rows: Sequence[Sequence[int]] | np.ndarray, filling: int) -> np.ndarray:
    if isinstance(rows, np.ndarray):
        return rows
    filled = np.full((len(rows), max(map(len, rows))), filling, np.int64)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return filled


def _common(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the lengths [n] of the longest common subsequences of rows [n, length] and [n, other length]."""
    before = np.zeros((len(right), right.shape[1] + 1), np.int64)
    for index in range(left.shape[1]):
        same = before[:, :-1] + (left[:, index, None] == right)
        after = np.zeros_like(before)
        after[:, 1:] = np.maximum(same, before[:, 1:])
        # L(i, j) = max(L(i-1, j-1) + [same], L(i-1, j), L(i, j-1)), a row of the table at a time
        before = np.maximum.accumulate(after, axis=1)
    return before[:, -1]


def upper_bound(losses: np.ndarray, confidence: float) -> float:
    """Return a bound that the mean of independent losses [n] in [0, 1] exceeds with a probability of at most 1 -
    confidence.

    The largest r with e P(Bin(n, r) <= ceil(sum of losses)) > 1 - confidence: Bentkus' inequality (2004).
    """
    count, total = len(losses), _rounded_up(float(losses.sum()))
    low, high = float(losses.mean()), 1.0
    # Bisection: 60 halvings exhaust float64.
    for _ in range(60):
        middle = (low + high) / 2
        if exp(1) * _binomial(total, count, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _rounded_up(total: float) -> int:
    # Rounding errors of a sum must not raise a whole number to the next.
    return ceil(total - 1e-9)


def _binomial(limit: int, count: int, share: float) -> float:
    """Return P(Bin(count, share) <= limit)."""
    if share >= 1:
        return float(limit >= count)
    if share <= 0:
        return 1.0
    return sum(
        exp(log(comb(count, k)) + k * log(share) + (count - k) * log(1 - share)) for k in range(min(limit, count) + 1)
    )


# Samples of what a model writes with early exits and without, and the loss between the two (Schuster et al. 2022,
# section 3.1).
#
#     textual    L = D(early, whole)                                     D = 1 - ROUGE-L of two sequences of tokens
#     risk       L = max(0, D(early, truth) - D(whole, truth))

Consistency = Literal["textual", "risk"]
Written = Sequence[Sequence[int]] | np.ndarray
"""Sequences of tokens, one of each sample."""


class Sampling(NamedTuple):
    """How samples are drawn and written: ``size`` of them from the part ``split`` of ``data`` (None: the run's), by
    ``seed``, ``batch_size`` side by side. ``prompt_tokens`` and ``new_tokens`` are those of running text, ``beam`` that
    of translations; None where they do not apply."""

    size: int
    data: str | None
    split: str
    seed: int
    batch_size: int
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    beam: int | None = None


class Samples:
    """Samples of a task's data. A subclass sets ``truth``, the references in the data, defines ``write()`` and
    ``saved(threshold)``, and then calls ``begin()``.

    ``identity``: that of the data. ``how``: the settings of generation, for JSON. ``exits``: those of the tokens that
    were written, by threshold.
    """

    truth: Written
    whole: Written

    def __init__(self, model: Any, identity: Mapping[str, object], how: Mapping[str, object]) -> None:
        self.model, self.identity, self.how = model, identity, how
        self.exits: dict[float, Exited] = {}

    def begin(self) -> None:
        """Generate every sample with all layers."""
        self.whole = self.write()

    def write(self) -> Written:
        """Return what the model generates for every sample, with its present exits."""
        raise NotImplementedError

    def saved(self, threshold: float) -> Exited:
        """Return what a threshold that was tried saves for one growing sequence."""
        raise NotImplementedError

    def losses(self, threshold: float, consistency: Consistency) -> np.ndarray:
        """Return the loss of every sample, in [0, 1], shape [size]."""
        with at_threshold(self.model, threshold), noting_exits(self.model) as recorder:
            early = self.write()
        assert recorder.result is not None
        self.exits[threshold] = recorder.result
        if consistency == "textual":
            return dissimilarity(early, self.whole)
        return (dissimilarity(early, self.truth) - dissimilarity(self.whole, self.truth)).clip(0)


@contextmanager
def at_threshold(model: Any, threshold: float) -> Iterator[None]:
    """Set one threshold for all exits of ``model`` within the context."""
    rule = model.stack.rule
    before, rule.thresholds = rule.thresholds, (threshold,) * (rule.exits - 1)
    try:
        yield
    finally:
        rule.thresholds = before


# Thresholds of every exit by random search (Depth-Adaptive Transformer, Elbayad et al. 2020, section 3.2.2).
#
# The predictions of every exit for every token are recorded once, with all tokens in all layers (as in aligned
# training); then each draw of thresholds costs nothing but comparisons. It is neglected here that later layers see
# tokens that have left as they were, so the result must be measured afterwards.

_AT_ONCE = 1 << 22


class Draw(NamedTuple):
    """A draw: ``thresholds`` of every exit but the last, and the mean ``nats`` and ``layers`` per token with them."""

    thresholds: tuple[float, ...]
    nats: float
    layers: float


@dataclass(frozen=True)
class Outlook:
    """The predictions of n tokens at every exit, behind this many ``layers``: ``confidence``
    [exits - 1, n] and ``nats`` [exits, n]."""

    confidence: np.ndarray
    nats: np.ndarray
    layers: tuple[int, ...]

    def search(self, draws: int, seed: int) -> list[Draw]:
        """Return those of ``draws`` random thresholds, each exit's evenly between its lowest and highest confidence,
        that none beats in both nats and layers, fewest layers first."""
        generator = np.random.default_rng(seed)
        low, high = self.confidence.min(1), self.confidence.max(1)
        thresholds = generator.uniform(low, high, (draws, len(low)))
        measured = np.concatenate(list(self._measured(thresholds)))
        order = np.lexsort((measured[:, 0], measured[:, 1]))
        best, draws_in_front = np.inf, []
        for index in order:
            if measured[index, 0] < best:
                best = measured[index, 0]
                draws_in_front.append(Draw(tuple(thresholds[index].tolist()), *measured[index].tolist()))
        return draws_in_front

    def _measured(self, thresholds: np.ndarray) -> Iterator[np.ndarray]:
        """Yield nats and layers, [some draws, 2]."""
        layers, count = np.array(self.layers), self.nats.shape[1]
        for some in np.array_split(thresholds, max(1, len(thresholds) * count // _AT_ONCE)):
            exit = np.full((len(some), count), len(self.layers) - 1)
            for number in range(len(self.layers) - 2, -1, -1):
                # From the last exit down, so that the first exit that lets a token leave is written last.
                exit[self.confidence[number] >= some[:, number, None]] = number
            nats = self.nats[exit, np.arange(count)].mean(1)
            yield np.stack([nats, layers[exit].mean(1)], axis=1)


def outlook(model: Any, split: Split, windows: Windows, chunk: int = 2048) -> Outlook:
    """Return the predictions of every exit of ``model``, whose stack has a
    threshold rule, for every token of ``split``."""
    stack, last = model.stack, []
    recorder = _Recorder(stack.rule)
    with torch.inference_mode(), with_rule(stack, recorder):
        for group in batches(len(split) - 1, windows, max(1, chunk // windows.context)):
            rows = split.rows(np.array([window.start for window in group]), group[0].size + 1)
            tokens = torch.from_numpy(rows).to(model.input.device)
            recorder.targets = tokens[:, 1:].flatten()
            logits, _ = model(tokens[:, :-1])
            last.append(recorder.nats_of(logits.flatten(0, 1)))
    nats = [*(np.concatenate(item) for item in recorder.nats), np.concatenate(last)]
    confidence = np.stack([np.concatenate(item) for item in recorder.confidence])
    return Outlook(confidence, np.stack(nats), tuple(use + 1 for use in stack.exits))


class _Recorder(ExitRule):
    """A rule that lets no token leave, and notes the ``rule``'s confidence and the
    nats of the ``targets`` at every exit."""

    targets: Tensor

    def __init__(self, rule: ThresholdRule) -> None:
        super().__init__(rule.exits)
        self.rule = rule
        self.confidence: list[list[np.ndarray]] = [[] for _ in range(self.last)]
        self.nats: list[list[np.ndarray]] = [[] for _ in range(self.last)]

    def forward(self, at: AtExit) -> Tensor:
        self.confidence[at.number].append(self.rule.confidence(at).float().cpu().numpy())
        self.nats[at.number].append(self.nats_of(at.logits()))
        return torch.full(at.x.shape[:1], self.last, device=at.x.device)

    def nats_of(self, logits: Tensor) -> np.ndarray:
        """Return -ln p of the targets, [n]."""
        return functional.cross_entropy(logits.float(), self.targets, reduction="none").cpu().numpy()
