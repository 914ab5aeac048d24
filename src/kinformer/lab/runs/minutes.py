"""The sizes of ``train MEMBER --minutes M``: without sizes from the user, the sizes that learn most in the time.

A budget of computation has an optimal model size (Hoffmann et al. 2022): a larger model makes too few steps, and a
smaller model stops improving. The seconds of a step are measured here. The table ``SIZES`` has the number of steps
that a size needs to become better than the size before. The rows of the table up to dim 192, the recipe and the
vocabularies were chosen by sweeps (``benchmarks/minutes.py``); the larger rows follow by proportion. The user's
options do not change.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from kinformer.core.config import override
from kinformer.core.stack import ModelConfig
from kinformer.family.kinds import kinds
from kinformer.family.table import member
from kinformer.lab.data import Split
from kinformer.lab.runs.options import TrainOptions
from kinformer.lab.tasks.task import Task, TrainingPlan
from kinformer.lab.training.data_module import DataModule
from kinformer.lab.training.distributed import Group
from kinformer.lab.training.loop import Trainer, Updater
from kinformer.lab.training.schedule import FORWARD_SHARE, PROBE_SHARE, Pace
from kinformer.lab.training.settings import WARM_UP_STEPS, Settings
from kinformer.runtime.errors import KinformerError, marked, plural, spelled

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


# The recipe and rows of ``--minutes M`` where rows are not parts of a running text: images, speech, episodes.
#
# Such rows cannot be shortened, so only the recipe and the number of rows can be chosen. Recipes and rows form a
# ladder from cheap to dear. Each rung is measured before the next rung, and the climb ends at the first rung that
# makes fewer than ``STEPS`` steps in the time.

STEPS = 10 * WARM_UP_STEPS
"""The fewest steps for which a dearer rung is taken. A judgement, not measured: ten warm-ups, so that the learning rate
falls for nine tenths of the run."""
RECIPES, ROWS = ("tiny", "small"), (0.25, 1.0)
"""From cheap to dear: recipes, and the share of the usual rows of a step."""
ROOM = 4.0
"""The factor by which a rung has to exceed ``STEPS`` before the next recipe is measured. A judgement, not measured: a
step of ``small`` takes about four times as long as a step of ``tiny`` or longer, so less room would not suffice."""


@dataclass(frozen=True)
class Rung:
    """A rung of the ladder: ``options`` with a recipe and a number of rows, and the ``steps`` that the time allows."""

    options: TrainOptions
    flags: tuple[str, ...]
    steps: int

    @property
    def text(self) -> str:
        """The number of steps that fit into the time on this machine, and the flags that make the same choice."""
        steps = plural(self.steps, "step")
        chosen = f"; chosen for that: {spelled(' '.join(self.flags))}" if self.flags else ""
        return f"kinformer: in {self.options.minutes:g} minutes about {steps} can be made{chosen}"


class Ladder(Choosing):
    """Chooses the recipe and the rows that the options leave open, for tasks without running text."""

    def choose(self) -> Rung:
        """Return the dearest rung that makes ``STEPS`` steps in the time, or else the cheapest rung."""
        best: Rung | None = None
        for options, recipe in self._rungs():
            changes_recipe = best is not None and recipe != (best.options.recipe or "small")
            if best is not None and best.steps < STEPS * (ROOM if changes_recipe else ROWS[1] / ROWS[0]):
                break
            rung = self._measured(options)
            if best is not None and rung.steps < STEPS:
                break
            best = rung
        assert best is not None
        return best

    def _rungs(self) -> list[tuple[TrainOptions, str]]:
        """Return the options and the recipe of every rung that can be planned, from cheap to dear.

        The last rung has the usual options.
        """
        wanted = self.options
        usual = int(wanted.batch_size or self.task.settings.get("batch_size") or Settings.batch_size)
        share = wanted.parallelism.replicas * wanted.accumulate
        shares = ROWS if wanted.batch_size is None else (1.0,)
        rows = {max(share, int(usual * part) // share * share) for part in shares}
        recipes = (
            [name for name in RECIPES if name in member(wanted.member).recipes] if self.recipe is not None else [None]
        )
        rungs = []
        for recipe, number in product(recipes, sorted(rows)):
            options = replace(
                wanted,
                recipe=wanted.recipe if recipe in (None, "small") else recipe,
                batch_size=wanted.batch_size if number == usual else number,
            )
            with suppress(KinformerError):
                self.plan(options)
                rungs.append((options, recipe or wanted.recipe or "small"))
        return rungs or [(wanted, wanted.recipe or "small")]

    def _measured(self, options: TrainOptions) -> Rung:
        plan = self.plan(options)
        update, data = measured_update(plan, self.task, self.device)
        seconds = update.seconds_per_step(PROBE_SHARE * self.budget)
        steps = Pace(seconds, FORWARD_SHARE * seconds * data.validations).steps(self.left())
        return Rung(options, tuple(flags_between(self.requested, options)), max(1, steps))


class Size(NamedTuple):
    """A size: a model's width, the rows of a step, and the tokens of a row.

    steps: the number of steps from which on this size is better than the size before.
    cost: the cost of a step, relative to the first size.
    """

    dim: int
    rows: int
    length: int
    steps: int
    cost: float


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
    gains until a text is read many times.
    """

    passes: float
    dropout: float
    weight_decay: float


REREAD = (Reread(4.5, 0.0, 0.3), Reread(7.0, 0.1, 0.3), Reread(15.0, 0.2, 0.5))
PROBED = 1
"""The index of the size to measure first."""


@dataclass(frozen=True)
class Choice:
    """The complete options, and the facts for the lines about the choice."""

    options: TrainOptions
    flags: tuple[str, ...]
    steps: int
    tokens: int
    seconds: float
    passes: float

    @property
    def text(self) -> str:
        """Two lines: the number of steps that fit into the time on this machine, and the flags of the same choice."""
        speed = self.steps * self.tokens / max(self.seconds, 1e-9)
        return (
            f"kinformer: in {self.options.minutes:g} minutes {plural(self.steps, 'step')} can be made ({speed:,.0f} "
            f"tokens/s), {self.passes:.2g} times the data; chosen for that:\n"
            f"kinformer: {spelled(' '.join(self.flags))}"
        )


def decides(options: TrainOptions) -> bool:
    """Return whether the minutes decide the missing options; they do not for a run with a datastore."""
    return options.minutes is not None and options.datastore is None


def with_vocabulary(options: TrainOptions, task: Task, train: Callable[[], Split]) -> TrainOptions:
    """Return ``options`` with a vocabulary that suits the size of the split ``train`` and the minutes.

    A tokenizer saves computation, because one token stands for several bytes. The options stay unchanged if they name
    a tokenizer, or if the library of tokenizers is missing.
    """
    record = member(options.member)
    sources = options.tokenizer, options.train_tokenizer, options.init, options.retriever
    has_tokenizer = any(source is not None for source in sources)
    reads = task.data.running_text and task.data.tokenized and record.causal and "tokenizer" not in record.needs
    if has_tokenizer or not reads or not decides(options):
        return options
    if importlib.util.find_spec("tokenizers") is None:
        return options
    size, minutes = train().bytes, options.minutes or 0
    bounds = [(max(least, item * minutes), count) for least, item, count in VOCABULARIES]
    fitting = [count for least, count in bounds if least <= size <= ENCODED_A_MINUTE * minutes]
    return replace(options, train_tokenizer=fitting[-1]) if fitting else options


@cache
def fastest_precision(device: str) -> str:
    """Return bf16-mixed if this machine multiplies bfloat16 matrices faster than float32 matrices, else fp32.

    A CPU must be at least 20 % faster in bfloat16, measured on a product of 512 x 512 matrices.
    """
    if device == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported() else "fp32"

    def seconds(dtype: torch.dtype) -> float:
        x = torch.randn(512, 512).to(dtype)
        times = []
        for _ in range(8):
            start = time.perf_counter()
            x @ x
            times.append(time.perf_counter() - start)
        return min(times)

    return "bf16-mixed" if seconds(torch.bfloat16) < 0.8 * seconds(torch.float32) else "fp32"


def resized(config: ModelConfig, dim: int, heads_of_64: bool = True) -> dict[str, int]:
    """Return the changes that give a model of ``config`` the width ``dim``, with feed-forwards in proportion.

    Heads become 64 wide. The number of heads stays if heads of 64 do not fit or ``heads_of_64`` is false. The result
    is empty if the width cannot change.
    """
    for scaled in [("num_heads", "hidden_dim")] * heads_of_64 + [("hidden_dim",)]:
        changes = _changes(config, dim, scaled)
        with suppress(KinformerError):
            override(config, changes, kinds()).build()  # not on the meta device, which takes a second to load
            return changes
    return {}


def rotated(config: ModelConfig) -> dict[str, str]:
    """Return the changes from learned positions to rotary positions (Su et al. 2021) in softmax attention.

    The result is empty for a model with any other positions. On Tiny Shakespeare, a model with rotary positions is as
    good after one minute as a model with learned positions after four.
    """
    plain = getattr(getattr(config, "position", None), "kind", None) == "learned"
    if plain and all(_kind(layer, "position") == "none" and _kind(layer, "score") for layer in config.layers):
        return {"position": "none", "layers.*.mixer.position": "rope"}
    return {}


def _kind(layer: nn.Module, slot: str) -> str | None:
    return getattr(getattr(getattr(layer, "mixer", None), slot, None), "kind", None)


def _changes(config: ModelConfig, dim: int, scaled: Sequence[str]) -> dict[str, int]:
    changes = {"dim": dim}
    result: dict[str, dict[int, int]] = {}
    for index, layer in enumerate(config.layers):
        for path, value in _sizes(layer, config.dim, dim):
            if path.endswith(tuple(scaled)):
                result.setdefault(path, {})[index] = value
    for path, values in result.items():
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
        seconds = self._seconds_per_step(base, PROBE_SHARE * self.budget)
        left = max(0.0, self.left())
        size = [size for size in SIZES if left >= size.steps * seconds * size.cost / base.cost][-1]
        exact = seconds * size.cost / base.cost
        if size.cost > base.cost:  # the cost relative to the probed size is a rough guide, so this size is measured too
            exact = self._seconds_per_step(size, PROBE_SHARE * self.budget)
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
        chosen: dict[str, Any] = {
            name: value for name, value in complete.items() if getattr(self.options, name) is None
        }
        changes: dict[str, object] = {}
        if self.recipe is not None:
            changes = {**self._widths(self.recipe, size), **self._positions(self.recipe)}
        return replace(
            self.options,
            **chosen,
            task_options={**task_options, **self.options.task_options},
            set={**changes, **self.options.set},
        )

    def _widths(self, recipe: ModelConfig, size: Size) -> dict[str, int]:
        """Return the changes to the width of ``size``; none if ``set`` names a width."""
        has_width = any(path == "dim" or path.endswith("hidden_dim") for path in self.options.set)
        return {} if has_width else resized(recipe, size.dim)

    def _positions(self, recipe: ModelConfig) -> dict[str, str]:
        """Return the changes from learned to rotary positions; none for encoders and for configs with other
        positions."""
        config = override(recipe, dict(self.options.set), kinds())
        return rotated(config) if member(self.options.member).causal else {}

    def _seconds_per_step(self, size: Size, limit: float) -> float:
        update, _ = measured_update(self.plan(self._complete(size)), self.task, self.device)
        return update.seconds_per_step(limit)
