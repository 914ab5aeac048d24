"""The sizes of ``train MEMBER --minutes M``: without sizes from the user, the sizes that learn most in the time.

A budget of computation has an optimal model size (Hoffmann et al. 2022): a larger model makes too few steps, and a
smaller model stops improving. The seconds of a step are measured here. The table ``SIZES`` has the number of steps
that a size needs to become better than the size before. The rows of the table up to dim 192, the recipe and the
vocabularies were chosen by sweeps (``benchmarks/minutes.py``); the larger rows follow by proportion. Tasks without
running text have recipes of members as sizes, in the table ``RUNGS``. The user's options do not change.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kinformer.core.config import override
from kinformer.core.stack import ModelConfig
from kinformer.family.build import configure, storable
from kinformer.family.kinds import kinds
from kinformer.family.table import member
from kinformer.lab.data import Split
from kinformer.lab.data.tokenizer import text_pieces
from kinformer.lab.runs.options import TrainOptions
from kinformer.lab.tasks.task import Task, TrainingPlan
from kinformer.lab.training.data_module import DataModule, rows_of, take_rows
from kinformer.lab.training.distributed import Group
from kinformer.lab.training.loop import Trainer, Updater
from kinformer.lab.training.schedule import PROBE_SHARE
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError, marked, plural, spelled
from kinformer.runtime.progress import note


def spelled_minutes(minutes: float) -> str:
    """Return ``minutes`` with their noun."""
    return f"{minutes:g} minute{'' if minutes == 1 else 's'}"


# Choosing options by a budget of minutes: the base of choosers, the timing of a step, and the choice as flags.


@dataclass
class Choosing:
    """The base of choosers by minutes: ``options`` are the ``requested`` options with a vocabulary.

    plan: return the training plan of complete options, or refuse the options.
    recipe: the config that may change; None if the user chose the model.
    started_at: when the minutes began to count, by ``time.monotonic()``.
    """

    requested: TrainOptions
    options: TrainOptions
    task: Task
    plan: Callable[[TrainOptions], TrainingPlan]
    recipe: ModelConfig | None
    device: str
    started_at: float

    @property
    def budget(self) -> float:
        """Return the whole budget in seconds."""
        return 60 * (self.options.minutes or 0)

    def left(self) -> float:
        """Return the remaining seconds of the budget."""
        return self.budget - (time.monotonic() - self.started_at)

    def step_seconds(self, options: TrainOptions) -> float:
        """Return the measured seconds of a step of the training that ``options`` describe."""
        update, _ = measured_update(self.plan(options), self.task, self.device)
        return update.seconds_per_step(PROBE_SHARE * self.budget)

    def has_width(self) -> bool:
        """Return whether ``set`` names a width."""
        return any(path == "dim" or path.endswith("hidden_dim") for path in self.options.set)


def measured_update(plan: TrainingPlan, task: Task, device: str) -> tuple[Updater, DataModule]:
    """Return an updater that makes the steps of ``plan``, and its data, for timing a step."""
    torch.manual_seed(plan.settings.seed)
    model = plan.config.build()
    data = task.data_module(plan)
    objective = task.objective(plan.settings.objective, model, data)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, data, objective, plan.settings, Path(folder), Group(torch.device(device)), quiet=True)
    return trainer.update, data


def flags_between(before: TrainOptions, after: TrainOptions) -> Iterator[str]:
    """Yield the options that differ, in the notation of the command line."""
    for field in fields(TrainOptions):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(new, Mapping):
            for name, value in new.items():
                if name in old:
                    continue
                if field.name == "set":
                    yield f"`set` '{name}={value}'" if "*" in name else f"`set` {name}={value}"
                else:
                    yield marked(name) if value is True else f"{marked(name)} {value}"
        elif new != old:
            yield f"{marked(field.name)} {new}"


@dataclass(frozen=True)
class Choice:
    """The complete options, and the facts for the lines about the choice; ``passes``: over the data of running text."""

    options: TrainOptions
    flags: tuple[str, ...]
    steps: int
    tokens: int = 0
    seconds: float = 0.0
    passes: float | None = None

    @property
    def text(self) -> str:
        """Two lines: the number of steps that fit into the time on this machine, and the flags of the same choice."""
        speed = self.steps * self.tokens / max(self.seconds, 1e-9)
        steps = f"{'about ' if self.passes is None else ''}{plural(self.steps, 'step')} can be made"
        facts = "" if self.passes is None else f" ({speed:,.0f} tokens/s), {self.passes:.2g} times the data"
        chosen = f"; chosen for that:\nkinformer: {spelled(' '.join(self.flags))}" if self.flags else ""
        return f"kinformer: in {spelled_minutes(self.options.minutes or 0)} {steps}{facts}{chosen}"


# The size, rows and length of ``--minutes M`` where rows are not parts of a running text: images, speech, episodes.
#
# ``Task.in_minutes`` and ``Task.row_lengths`` hold the data of a task. The smallest size comes first. Its rows double
# while a step takes little longer, or while the time still allows enough steps. Then sizes grow while the time allows
# the steps that a size needs.


class Rung(NamedTuple):
    """A size: a recipe, the factor of its width, and the steps from which on it is best (a judgement, not measured)."""

    recipe: str
    scale: float
    steps: int


RUNGS = (Rung("tiny", 1, 0), Rung("tiny", 2, 2000), Rung("small", 0.5, 6000), Rung("small", 1, 15000))
ROWS = (8, 16, 32, 64)
GROWTH, STEPS = 1.5, 600
"""Rows double while a step takes at most ``GROWTH`` times as long, or while the time allows ``STEPS`` steps."""
USUAL: Mapping[str, Any] = {"ema": 0.07}
"""The recipe of tasks whose ``in_minutes`` names no other values."""
RATE, WIDTH = 3e-3, 32
"""The learning rate of a model of ``WIDTH`` at the most rows; it falls with width^(1/2) and with rows^(-1/4)."""
WHOLE, MULTIPLE = 99, 8
"""The percentage of rows that fit into the length, and the multiple to which the length is rounded."""


def learning_rate(width: int, rows: int) -> float:
    """Return the learning rate of AdamW, to two digits."""
    return float(f"{RATE * (WIDTH / width) ** 0.5 * (rows / ROWS[-1]) ** 0.25:.1e}")


class Part(NamedTuple):
    """The rows of a batch, the same in every step, for timing a step."""

    rows: Any
    carries: bool
    sums: tuple[str, ...]

    def batch(self, step: int, rank: int, world: int) -> Any:
        return self.rows


class Ladder(Choosing):
    """Chooses the length, size, rows and learning rate that the options leave open, for tasks without running text."""

    def choose(self) -> Choice:
        """Return the choice of the largest size that makes its steps in the time."""
        usual = self._usual()
        sizes = self._sizes(usual)
        _, options = next(sizes, (0, replace(usual, length=self.options.length)))
        options, seconds = self._with_rows(options)
        for least, larger in sizes:
            if self.left() < GROWTH * least * seconds:
                break
            larger = replace(larger, batch_size=options.batch_size)
            measured = self.step_seconds(larger)
            if self.left() < least * measured:
                break
            options, seconds = larger, measured
        if options.lr is None and options.init is None and options.optimizer in (None, "adamw"):
            plan = self.plan(options)  # a trained model keeps the usual learning rate
            options = replace(options, lr=learning_rate(getattr(plan.config, "dim", WIDTH), plan.settings.batch_size))
        steps = max(1, int(max(0.0, self.left()) / seconds))
        return Choice(options, tuple(flags_between(self.requested, options)), steps)

    def _usual(self) -> TrainOptions:
        """Return the options with the values of the task for a limited time, and a length that fits most rows."""
        values = {**USUAL, **self.task.in_minutes}
        of_model = values.pop("set", {})
        if self.recipe is None:  # the user chose the model
            values.pop("recipe", None)
            of_model = {}
        if self.options.init is not None:
            values.pop("lr", None)
        of_task = {field.name for field in fields(self.task.Options)}
        general = values.keys() - of_task
        chosen = {name: values[name] for name in general if getattr(self.options, name) is None}
        task_options = {name: value for name, value in values.items() if name in of_task}
        options = replace(self.options, **chosen, task_options={**task_options, **self.options.task_options})
        with suppress(KinformerError):  # a member without these parts keeps its own
            changed = replace(options, set={**of_model, **options.set})
            self.plan(changed)
            options = changed
        if options.length is None:
            with suppress(KinformerError):
                plan = self.plan(options)
                lengths = self.task.row_lengths(plan.data, plan.config)
                if lengths is not None:
                    most = int(np.percentile(lengths, WHOLE, method="higher"))
                    return replace(options, length=-(-most // MULTIPLE) * MULTIPLE)
        return options

    def _sizes(self, options: TrainOptions) -> Iterator[tuple[int, TrainOptions]]:
        """Yield the options of every size that can be planned, from small to large, with the steps that it needs."""
        fixed = self.recipe is None or options.recipe is not None
        for rung in [Rung(options.recipe or "small", 1, 0)] if fixed else RUNGS:
            if rung.scale != 1 and self.has_width():
                continue
            with suppress(KinformerError):
                sized = options if self.options.init else self._of_size(options, rung)
                self.plan(sized)
                yield rung.steps, sized

    def _of_size(self, options: TrainOptions, rung: Rung) -> TrainOptions:
        """Return the options with the recipe and the width of ``rung``, and with positions for the length."""
        config = configure(options.member, rung.recipe)
        changes: dict[str, object] = {}
        if rung.scale != 1:
            changes |= resized(config, round(rung.scale * config.dim), heads_of_64=False)
        if options.length is not None and self.options.length is None:
            changes |= position_changes(override(config, dict(options.set), kinds()), options.length)
        recipe = None if rung.recipe == "small" else rung.recipe
        return replace(options, recipe=options.recipe or recipe, set={**changes, **options.set})

    def _with_rows(self, options: TrainOptions) -> tuple[TrainOptions, float]:
        """Return the options with as many rows as a step learns from in little more time, and the seconds of a step."""
        if options.batch_size is not None:
            return options, self.step_seconds(options)
        share = options.parallelism.replicas * options.accumulate
        choices = sorted({-(-rows // share) * share for rows in ROWS})
        update, data = measured_update(self.plan(replace(options, batch_size=choices[-1])), self.task, self.device)
        # On a busy machine the time of a processor tells sizes apart, and the time of the clock does not.
        clock = time.process_time if self.device == "cpu" else time.monotonic
        started_at, worked = time.monotonic(), clock()
        batch = data.batch(0, 0, 1)
        reading, count = (clock() - worked) / choices[-1], rows_of(batch)
        best, times = 0, list[float]()
        for rows in choices:
            if len(times) > best + 2 or (times and self.left() < 0):  # one measurement alone may be wrong
                break
            part = take_rows(batch, slice(max(options.accumulate, count * rows // choices[-1])))
            update.data = Part(part, data.carries, data.sums)
            times.append(update.seconds_per_step(PROBE_SHARE * self.budget / len(choices), clock) + rows * reading)
            slowness = (time.monotonic() - started_at) / max(1e-9, clock() - worked)
            grows = times[-1] > GROWTH ** (len(times) - 1) * times[0]
            if not grows or self.left() >= STEPS * slowness * times[-1]:
                best = len(times) - 1
        return replace(options, batch_size=choices[best]), slowness * times[best]


class Size(NamedTuple):
    """A size: a model's width, the rows of a step, and the tokens of a row."""

    dim: int
    rows: int
    length: int
    steps: int
    """The number of steps from which on this size is better than the size before."""
    cost: float
    """The cost of a step, relative to the first size."""


SIZES = (
    Size(128, 4, 128, 0, 1.0),
    Size(128, 8, 128, 900, 1.5),
    Size(192, 8, 128, 3000, 2.2),
    Size(256, 8, 256, 5000, 5.5),
    Size(384, 16, 256, 8000, 20.0),
    Size(512, 16, 512, 20000, 70.0),
)
RECIPE: Mapping[str, str | float] = {"optimizer": "muon", "lr": 5e-3, "ema": 0.07}
"""The recipe of every size. With a moving average of the weights, one learning rate suits short and long runs, and a
decay to a tenth of the learning rate is as good as a decay to three tenths."""
HEAD_DIM = 64
VOCABULARIES = ((100_000, 0, 512), (300_000, 0, 2048), (1_000_000, 400_000, 4096))
"""Vocabularies as (bytes of text, bytes of text per minute, tokens): both bounds must be met. A larger vocabulary needs
more text, because a model with more tokens memorises a repeated text sooner."""
ENCODED_A_MINUTE = 7_000_000
"""The most bytes of text per minute for which a tokenizer is trained. Encoding them takes a tenth of the time, at about
1.2 MB a second; a longer text is learnt as bytes."""


class Reread(NamedTuple):
    """The regularisation of a model that reads a text more than ``passes`` times, which keeps it from memorising.
    Weight decay is larger than usual (Kim et al. 2025, arXiv 2509.14786, on repeated data). Dropout costs more than it
    gains until a text is read many times."""

    passes: float
    dropout: float
    weight_decay: float


REREAD = (Reread(4.5, 0.0, 0.3), Reread(7.0, 0.1, 0.3), Reread(15.0, 0.2, 0.5))
PROBED = 1
"""The index of the size to measure first."""


def decides(options: TrainOptions) -> bool:
    """Return whether the minutes decide the missing options; they do not for a run with a datastore."""
    return options.minutes is not None and options.datastore is None


def with_vocabulary(options: TrainOptions, task: Task, splits: Callable[[], Mapping[str, Split]]) -> TrainOptions:
    """Return ``options`` with a vocabulary that suits the minutes and the size of the split "train" of ``splits``. A
    tokenizer saves computation, because one token stands for several bytes. The options stay unchanged if they name a
    tokenizer, if the library of tokenizers is missing, or if the data is not UTF-8 text."""
    record = member(options.member)
    sources = options.tokenizer, options.train_tokenizer, options.init, options.retriever
    has_tokenizer = any(source is not None for source in sources)
    reads = task.data.running_text and task.data.tokenized and record.causal and "tokenizer" not in record.needs
    if has_tokenizer or not reads or not decides(options) or importlib.util.find_spec("tokenizers") is None:
        return options
    size, minutes = splits()["train"].bytes, options.minutes or 0
    bounds = [(max(least, item * minutes), count) for least, item, count in VOCABULARIES]
    fitting = [count for least, count in bounds if least <= size <= ENCODED_A_MINUTE * minutes]
    if not fitting:
        return options
    try:
        for piece in (piece for split in splits().values() for piece in text_pieces(split)):
            piece.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        note(f"note: the data is not UTF-8 text (it has the byte {wrong:#04x}), so the model reads bytes.")
        return options
    return replace(options, train_tokenizer=fitting[-1])


@cache
def fastest_precision(device: str) -> str:
    """Return bf16-mixed if this machine multiplies bfloat16 matrices faster than float32 matrices, else fp32. A CPU
    must be at least 20 % faster in bfloat16, measured on a product of 512 x 512 matrices."""
    if device == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported() else "fp32"

    def seconds(dtype: torch.dtype) -> float:
        x = torch.randn(512, 512).to(dtype)
        return min(timeit.repeat(lambda: x @ x, number=1, repeat=8))

    return "bf16-mixed" if seconds(torch.bfloat16) < 0.8 * seconds(torch.float32) else "fp32"


def resized(config: ModelConfig, dim: int, heads_of_64: bool = True) -> dict[str, int]:
    """Return the changes that give a model of ``config`` the width ``dim``, with feed-forwards in proportion; none if
    the width cannot change. Heads become 64 wide, unless heads of 64 do not fit or ``heads_of_64`` is false."""
    for scaled in [("num_heads", "hidden_dim")] * heads_of_64 + [("hidden_dim",)]:
        changes = _changes(config, dim, scaled)
        with suppress(KinformerError):
            override(config, changes, kinds()).build()  # not on the meta device, which takes a second to load
            return changes
    return {}


def rotated(config: ModelConfig) -> dict[str, str]:
    """Return the changes from learned to rotary positions (Su et al. 2021) in softmax attention; none for a model with
    other positions. On Tiny Shakespeare, rotary positions are as good after one minute as learned ones after four."""
    plain = getattr(getattr(config, "position", None), "kind", None) == "learned"
    if plain and all(_kind(layer, "position") == "none" and _kind(layer, "score") for layer in config.layers):
        return {"position": "none", "layers.*.mixer.position": "rope"}
    return {}


def with_exact_gelu(config: ModelConfig) -> dict[str, str]:
    """Return the changes from GELU by tanh to GELU itself, which takes a CPU less time (``small_steps.json``); none for
    a model with another activation."""
    activations = {getattr(getattr(layer, "feed_forward", None), "activation", None) for layer in config.layers}
    return {"layers.*.feed_forward.activation": "gelu"} if activations == {"gelu_tanh"} else {}


def position_changes(config: ModelConfig, length: int) -> dict[str, int]:
    """Return the changes after which a model of ``config`` reads ``length`` positions; none if no change suffices."""
    changes: dict[str, int] = {}

    def suffices() -> bool:
        with unallocated():
            return (getattr(override(config, changes, kinds()).build(), "max_length", None) or length) >= length

    if suffices():
        return {}
    for path in ("position.max_length", "layers.*.mixer.max_length", "layers.*.mixer.position.max_length"):
        with suppress(KinformerError):
            longer = override(config, changes | {path: length}, kinds())
            if storable(longer) != storable(override(config, changes, kinds())):
                changes[path] = length
    with suppress(KinformerError):
        return changes if suffices() else {}
    return {}


def _kind(layer: nn.Module, slot: str) -> str | None:
    return getattr(getattr(getattr(layer, "mixer", None), slot, None), "kind", None)


def _changes(config: ModelConfig, dim: int, scaled: Sequence[str]) -> dict[str, int]:
    changes = {"dim": dim}
    sizes: dict[str, dict[int, int]] = {}
    for index, layer in enumerate(config.layers):
        for path, value in _sizes(layer, config.dim, dim):
            if path.endswith(tuple(scaled)):
                sizes.setdefault(path, {})[index] = value
    for path, values in sizes.items():
        if len(values) == len(config.layers) and len(set(values.values())) == 1:
            changes[f"layers.*.{path}"] = values[0]
        else:
            changes |= {f"layers.{index}.{path}": value for index, value in values.items()}
    return changes


def _sizes(layer: object, before: int, dim: int) -> Iterator[tuple[str, int]]:
    for part in ("mixer", "feed_forward"):
        config = getattr(layer, part, None)
        if (hidden := getattr(config, "hidden_dim", None)) is not None:
            yield f"{part}.hidden_dim", hidden * dim // before
        if getattr(config, "num_heads", None) is not None and getattr(config, "head_dim", None) is None:
            yield f"{part}.num_heads", max(1, dim // HEAD_DIM)


class Chooser(Choosing):
    """Chooses the size, the recipe of training and the regularisation that the options leave open, for running text."""

    def choose(self) -> Choice:
        """Return the choice of the largest size that makes its steps in the time."""
        base = SIZES[PROBED]
        seconds = self.step_seconds(self._complete(base))
        left = max(0.0, self.left())
        size = [size for size in SIZES if left >= size.steps * seconds * size.cost / base.cost][-1]
        exact = seconds * size.cost / base.cost
        if size.cost > base.cost:  # the cost relative to the probed size is a rough guide, so this size is measured too
            exact = self.step_seconds(self._complete(size))
            left = self.left()
            if left < size.steps * exact:
                smaller = SIZES[SIZES.index(size) - 1]
                size, exact = smaller, exact * smaller.cost / size.cost
        return self._choice(size, max(1, int(left / exact)), left)

    def _choice(self, size: Size, steps: int, seconds: float) -> Choice:
        options = self._complete(size)
        plan = self.plan(options)
        tokens = plan.settings.batch_size * plan.settings.length
        passes = steps * tokens / max(1, len(plan.data.splits["train"]))
        for reread in [item for item in REREAD if passes > item.passes][-1:]:
            options = self._regularised(options, reread)
        return Choice(options, tuple(flags_between(self.requested, options)), steps, tokens, seconds, passes)

    def _regularised(self, options: TrainOptions, reread: Reread) -> TrainOptions:
        """Return ``options`` with the dropout and the weight decay of ``reread``; the user's values stay."""
        if options.weight_decay is None:
            options = replace(options, weight_decay=reread.weight_decay)
        if reread.dropout and self.recipe is not None and not any("dropout" in path for path in self.options.set):
            dropout = replace(options, set={**options.set, "layers.*.dropout": reread.dropout})
            with suppress(KinformerError):
                self.plan(dropout)
                return dropout
        return options

    def _complete(self, size: Size) -> TrainOptions:
        """Return complete options: ``size`` decides the options that the user left open."""
        needs = dict(member(self.options.member).needs)
        task_options = {field.name: needs.pop(field.name) for field in fields(self.task.Options) if field.name in needs}
        share = self.options.parallelism.replicas * self.options.accumulate
        rows = -(-size.rows // share) * share
        sizes = {"batch_size": rows, "length": size.length, "precision": fastest_precision(self.device)}
        complete = {**RECIPE, **sizes, **needs}
        chosen: dict[str, Any] = {name: complete[name] for name in complete if getattr(self.options, name) is None}
        changes: dict[str, object] = {}
        if self.recipe is not None:
            config = override(self.recipe, dict(self.options.set), kinds())
            changes |= {} if self.has_width() else resized(self.recipe, size.dim)
            changes |= rotated(config) | with_exact_gelu(config) if member(self.options.member).causal else {}
        task_options |= self.options.task_options
        return replace(self.options, **chosen, task_options=task_options, set={**changes, **self.options.set})
