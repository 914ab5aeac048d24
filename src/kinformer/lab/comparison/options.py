"""The options of comparing and of timing members. Free of PyTorch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from kinformer.family.table import member
from kinformer.lab.runs.options import LearningOptions, Machine
from kinformer.lab.training.settings import OptimizerName, Precision
from kinformer.runtime.errors import KinformerError, choose, marked, require, require_above, require_kind
from kinformer.runtime.parsing import parse_counts

HYBRID = "hybrid=gated-deltanet:3,rope:1"
USES: Mapping[str, Mapping[str, Any]] = {
    "text": {
        "members": ("rope", "local", "forgetting", "gated-deltanet", HYBRID),
        "set": {"local:layers.*.mixer.pattern.window": "64"},
    },
    "long": {
        "members": ("rope", "forgetting", "mamba2", "gated-deltanet", HYBRID), "total_minutes": 30.0,
        "length": 1024, "batch_size": 1, "contexts": "1x,4x,16x", "lengths": "1024,4096,16384",
    },
    "recall": {"members": ("rope", "linear-transformer", "mamba2", "gated-deltanet", HYBRID), "task": "recall"},
    "speed": {
        "members": ("rope", "local", "linear-transformer", "mamba2", "gated-deltanet"), "lengths": "512,2048,8192",
    },
    "memory": {"members": ("rope", "local", "mla", "mamba2", "gated-deltanet"), "lengths": "512,2048,8192"},
}  # fmt: skip
"""The members of each use, and its values of missing options. The window of ``local`` is narrow, because otherwise the
window is as long as a training row and ``local`` trains exactly as ``rope``. No member for long texts has learned
positions, because a model with learned positions cannot read past the end of its table."""
USUAL_MINUTES = 20.0
"""The total minutes of a comparison without another budget, unless its use has more."""
BUDGETS = ("steps", "tokens", "minutes", "total_minutes")
MAX_PARAMETERS = 10**12
MEASURED_BYTES = 200_000
"""The usual number of bytes of the test split to measure on."""
WORKS = ("forward", "step", "prefill", "decode")
"""The works of a model that can be timed."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(LearningOptions):
    """Members side by side: one parameter budget, one data set in one order, and one recipe except for the learning
    rate."""

    for_: Literal["text", "long", "recall", "speed", "memory"] | None = None
    """The use of the members: chooses missing members, lengths and minutes, and the first sentences of the report
    (text if members are missing)."""
    parameters: int | None = None
    """Parameters of every model, within 5 %; as many as the first member's recipe has, or as suit `total_minutes`."""
    steps: int | None = None
    """Optimiser steps of every run, instead of `total_minutes` (1000 with `sweep`)."""
    tokens: int | None = None
    """Tokens of every run, instead of `steps`."""
    minutes: float | None = None
    """Minutes of training of every run, instead of `steps`: a faster member makes more steps."""
    total_minutes: float | None = None
    """Minutes of the whole command (20, or 30 for long texts): members train in turns, all by as many steps, at sizes
    that suit the time and learning rates by width."""
    seeds: int | None = None
    """Runs of every member, with seeds from `seed` on; two or more give a spread, and tests of the differences (1, or
    with `total_minutes` more where steps are plenty)."""
    sweep: int | None = None
    """Learning rates tried for every member, a factor of 2 apart; more where the best is at an end. 0 tries none (3;
    with `total_minutes` 0)."""
    sweep_steps: int | None = None
    """Steps of a run of the sweep (a fifth of `steps`)."""
    lr: float | None = None
    """The middle of the sweep, or without one the learning rate (0.01 with muon, else 0.001; with `total_minutes` by
    width)."""
    recipe: str | None = None
    """Which of the members' recipes; its width is fitted to the parameter budget (small, or what suits
    `total_minutes`)."""
    length: int | None = None
    """Tokens of each row of a batch (256, or what all members' positions allow)."""
    batch_size: int | None = None
    """Rows of a step (8, or what suits `total_minutes`)."""
    optimizer: OptimizerName = "muon"
    """Muon takes the layers' matrices and AdamW the rest."""
    precision: Precision | None = None
    """bf16-mixed computes in bfloat16 where bfloat16 is safe (fp32, or with `total_minutes` the faster one)."""
    ema: float | None = None
    """Measure a moving average of the weights over this share of the steps so far (0, none, or what suits
    `total_minutes`)."""
    first: int | None = None
    """Measure on the first N bytes of the test split only (200,000 of text if not given)."""
    contexts: str = "1x,2x,4x"
    """Lengths of context at which the first seed is measured too, in multiples of `length` or in tokens."""
    lengths: str = "128,512,2048"
    """Lengths at which time and memory are measured, of one row."""
    rounds: int = 5
    """How often each time is measured, in turns."""
    set: Mapping[str, object] = field(default_factory=dict)
    """A change to all members, or NAME:PATH=VALUE to one, as in wide:layers=8; may be given again."""
    out: str = "comparison"
    """The folder of results; results in this folder are not computed again."""
    seed: int = 0
    """The first seed."""

    LEAST = {
        "steps": 1, "tokens": 1, "seeds": 1, "length": 1, "batch_size": 1, "rounds": 1, "sweep_steps": 1, "sweep": 0,
        "first": 2, "seed": 0,
    }  # fmt: skip
    SHARES = {"ema": "[0, 1]"}

    def __post_init__(self) -> None:
        assert self.measured_lengths
        if not all(re.fullmatch(r" *0*[1-9]\d{0,17}x? *", part, re.ASCII) for part in self.contexts.split(",")):
            raise KinformerError(f"`contexts` {self.contexts}: is not a list of lengths; write as in 1x,2x or 256.")
        require("parameters", self.parameters, 1, MAX_PARAMETERS)
        limits = [name for name in BUDGETS if getattr(self, name) is not None]
        for name in limits:
            require_above(name, getattr(self, name), 0)
        if len(limits) > 1:
            raise KinformerError(f"{' and '.join(map(marked, limits))} contradict; give one.")
        if self.total_minutes is not None and (self.sweep or self.sweep_steps):
            raise KinformerError(
                f"`total_minutes` {self.total_minutes:g}: takes learning rates from a table; give `steps` instead, or "
                "leave `sweep` and `sweep_steps` out."
            )
        if self.sweep == 2:
            raise KinformerError("`sweep` 2: does not have a middle; try 3 learning rates or more, or 0 for none.")
        require_above("lr", self.lr, 0)
        super().__post_init__()

    @property
    def row_length(self) -> int:
        """The tokens of a row; ``with_length`` sets ``length`` first."""
        assert self.length is not None
        return self.length

    @property
    def middle(self) -> float:
        """The middle of the sweep's learning rates; the default for Muon is ten times the default for AdamW."""
        return self.lr if self.lr is not None else 1e-2 if self.optimizer == "muon" else 1e-3

    @property
    def measured_lengths(self) -> tuple[int, ...]:
        """The lengths, in tokens, at which time and memory are measured."""
        return whole_numbers(self.lengths, "`lengths`")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Machine):
    """The options of timing members."""

    recipe: str = "benchmark"
    """Which of the members' recipes."""
    lengths: str = "128,512,2048"
    """Tokens of a row, as in 512,2048,8192; in decoding, of the prompt."""
    batch_size: int = 1
    """Sequences of a batch."""
    work: str = "forward,step,prefill,decode"
    """What is timed: forward, step (a forward with its loss and the backward), prefill (reading a prompt), decode (a
    token)."""
    rounds: int = 5
    """How often each time is measured, in turns; the median counts."""
    memory: bool = False
    """Also measure the highest memory of a training step, each member in a separate process."""
    peers: bool = False
    """Also time GPT-2 of transformers and the decoder of x-transformers, of the sizes of gpt, where installed."""
    set: Mapping[str, object] = field(default_factory=dict)
    """A change to all members, as in `set` layers=2; may be given again."""
    seed: int = 0
    """The seed of weights and tokens."""

    LEAST = {"batch_size": 1, "rounds": 1, "seed": 0}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.works:
            choose(name, WORKS, "`work`")
        assert self.sizes

    @property
    def works(self) -> tuple[str, ...]:
        """The kinds of work that ``work`` names."""
        return tuple(name.strip() for name in self.work.split(","))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The lengths, in tokens, at which members are timed."""
        return whole_numbers(self.lengths, "`lengths`")


def whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Return the numbers of a text such as ``128,512``, in order."""
    try:
        return tuple(parse_counts(text))
    except ValueError:
        raise KinformerError(f"{flag} {text}: is not a list of whole numbers; write as in 128,512 or 1k,4k.") from None


_SPEC = re.compile(r"(?:(?P<name>[\w.+-]+)=)?(?P<parts>[\w-]+(?::\d+)?(?:,[\w-]+(?::\d+)?)*)")


def parse_spec(spec: str) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    """Return the name of the entrant ``spec``, its members as written, and each member with its number of layers."""
    require_kind("member", spec, str)
    match = _SPEC.fullmatch(spec)
    if match is None:
        examples = "gpt, wide=gpt, or a hybrid as in linear-transformer:3,gpt:1"
        raise KinformerError(f"{spec}: is not a member; write as in {examples}.")
    parts = []
    for part in match["parts"].split(","):
        name, _, count = part.partition(":")
        if count and not int(count):
            raise KinformerError(f"{spec}: {name} has 0 layers of the cycle; give 1 or more, or leave it out.")
        parts.append((member(name).name, int(count or 1)))
    if len(parts) == 1 and ":" in match["parts"]:
        raise KinformerError(f"{spec}: is a ratio of one member; name another, as in {spec},gpt:1.")
    if len({member(name).causal for name, _ in parts}) > 1:
        raise KinformerError(f"{spec}: mixes causal members with such as read whole texts; choose of one kind.")
    return match["name"] or match["parts"], match["parts"], tuple(parts)


def planned(members: Sequence[str], options: CompareOptions) -> tuple[Sequence[str], CompareOptions]:
    """Return the members and options of a comparison; the use, if any, chooses missing members and options."""
    use: Any = options.for_ or (None if members else "text")
    chosen = {"total_minutes": USUAL_MINUTES} | (dict(USES[use]) if use else {})
    members = members or chosen["members"]
    chosen.pop("members", None)
    if any(getattr(options, name) is not None for name in (*BUDGETS, "sweep", "sweep_steps")):
        chosen.pop("total_minutes", None)
    names = {spec.partition("=")[0] for spec in members}
    changes = {path: value for path, value in chosen.pop("set", {}).items() if path.partition(":")[0] in names}
    plain = {item.name: item.default for item in fields(CompareOptions)}
    chosen = {name: value for name, value in chosen.items() if getattr(options, name) == plain[name]}
    return members, replace(options, **chosen, for_=use, set=changes | dict(options.set))
