"""The options that the tasks of text have of their own, for training and for measuring, and what reads a list of
numbers. Free of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.runtime.errors import KinformerError, choose, marked, require, require_share
from kinformer.runtime.fields import Checked
from kinformer.runtime.parsing import parse_counts
from kinformer.runtime.progress import note

if TYPE_CHECKING:
    from kinformer.core.stack import ModelConfig
    from kinformer.lab.tasks.runs import TrainedRun


@dataclass(frozen=True, kw_only=True)
class NextTokenOptions:
    """Options of training models of the next token."""

    segments: bool = False
    """Train on consecutive segments of `length` tokens: the state is carried from one to the next, gradients not."""
    reset_documents: bool = False
    """Begin a new sequence at every document in a row: no token sees an earlier document. `segments` always does."""

    def __post_init__(self) -> None:
        if self.segments and self.reset_documents:
            raise KinformerError("`reset_documents`: `segments` begin a new sequence at every document; leave one out.")


OF_HARNESS = ("fewshot", "limit")
"""The options of tasks of lm-evaluation-harness."""


@dataclass(frozen=True, kw_only=True)
class NextTokenEvaluationOptions(Checked):
    """Options of evaluating models of the next token."""

    context: str | None = None
    """Measure in windows of N tokens, or with the state carried from end to end (N or "carried"). If not given, as it
    was trained: carried after training with `segments`, else in windows of the training length."""
    overlap: float = 0.0
    """The share of each window that repeats the one before and is not scored again."""
    lengths: str | None = None
    """Also measure in windows of each of these lengths and by position within them, as in 128,512,2048, or 1x,4x,16x
    for multiples of the training length. A length beyond a model's positions is left out."""
    plot: str | None = None
    """Draw what `lengths`, `recl` or `datastore` measured, as PNG or SVG by the ending of this name."""
    recl: bool = False
    """Measure the relative effective context length of a group of runs instead; `lengths` are the contexts tried."""
    hardest: float = 0.1
    """With `recl`: the share of tokens that count, those that the shorter context explains least."""
    positions: int = 512
    """With `recl`: how many tokens are predicted, evenly spread, each again at every context."""
    holdout: float | None = None
    """Take the last share of the data for validation and test, instead of the run's."""
    baseline: bool = False
    """Also count 5-grams of the training split and measure their prediction."""
    harness: str | None = None
    """Instead do these tasks of lm-evaluation-harness, by name or as YAML files, as in blimp,own/task.yaml."""
    fewshot: int | None = None
    """With `harness`: N examples before every question (the task's own number if not given)."""
    limit: int | None = None
    """With `harness`: the first N items of every task."""

    def __post_init__(self) -> None:
        require("positions", self.positions, 1)
        require("fewshot", self.fewshot, 0)
        require("limit", self.limit, 1)
        require_share("overlap", self.overlap, zero=True)
        require_share("holdout", self.holdout)
        if not 0 < self.hardest <= 1:
            raise KinformerError(f"`hardest` is {self.hardest:g} but must be above 0 and at most 1.")
        self._check_unread()
        super().__post_init__()

    def _check_unread(self) -> None:
        """Refuse what the way of measuring does not read."""
        for option in fields(self):
            if getattr(self, option.name) == option.default:
                continue
            if option.name in ("hardest", "positions") and not self.recl:
                raise KinformerError(f"{marked(option.name)}: says how `recl` is measured; give `recl` too.")
            if option.name in OF_HARNESS and self.harness is None:
                raise KinformerError(f"{marked(option.name)}: is for tasks of a harness; give `harness` TASKS too.")
            if option.name not in ("context", "harness", *OF_HARNESS) and self.harness is not None:
                raise KinformerError(f"{marked(option.name)}: means nothing to tasks of a `harness`; leave it out.")
            if option.name in ("context", "overlap", "baseline") and self.recl:
                raise KinformerError(f"{marked(option.name)}: does not go together with `recl`; leave one out.")


@dataclass(frozen=True, kw_only=True)
class MlmOptions:
    """Options of masked language modelling."""

    mask_share: float = 0.15
    """The share of all tokens that is predicted."""
    whole_words: bool = False
    """All tokens of a word are masked together."""

    def __post_init__(self) -> None:
        if not 0 < self.mask_share < 1:
            raise KinformerError(f"`mask_share` is {self.mask_share:g} but must lie between 0 and 1.")


def whole_numbers(flag: str, text: str, of: str, example: str) -> tuple[int, ...]:
    """``"4,8"`` as distinct numbers above 0, in order: numbers ``of`` something."""
    try:
        return tuple(parse_counts(text))
    except ValueError:
        raise KinformerError(f"{flag} {text}: are no numbers of {of}; write as in {example}.") from None


@dataclass(frozen=True, kw_only=True)
class MaskPredictionOptions:
    """Options of predicting masked tokens."""

    mask: str = "[MASK]"
    """What stands for a masked token in the texts."""

    def __post_init__(self) -> None:
        if not self.mask:
            raise KinformerError("`mask` is empty but must be what stands for a masked token, such as [MASK].")


# The random changes of training data that the option ``augment`` names. Free of PyTorch.

NOTHING = "none"


def changes_of(augment: str, valid_names: Iterable[str]) -> tuple[str, ...]:
    """Return the names in ``augment``, such as ``crop,flip``; refuse those that are none of ``valid_names``."""
    names = () if augment == NOTHING else tuple(augment.split(","))
    for name in names:
        choose(name, (*valid_names, NOTHING), "`augment`")
    return names


# The options that tasks of images share. Free of PyTorch.

AUGMENTATIONS = ("crop", "resized-crop", "flip")
"""Changes of images that leave their patches what they are."""


@dataclass(frozen=True, kw_only=True)
class FirstImages:
    """Options of evaluating on images."""

    max_items: int | None = None
    """Measure on the first N images only."""

    def __post_init__(self) -> None:
        require("max_items", self.max_items, 1)


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """Options of training on patches without labels."""

    resize: int | None = None
    """Scale pictures of a folder until their shorter side has N pixels, and take the middle square."""
    augment: str = NOTHING
    """How training images are changed at each step: some of crop,resized-crop,flip, or none. Digits and letters must
    not be flipped."""

    def __post_init__(self) -> None:
        require("resize", self.resize, 1)
        _ = self.augmentations

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Return the names in ``augment``."""
        return changes_of(self.augment, AUGMENTATIONS)


# The lengths at which runs are measured, as the options name them, and the names of runs side by side.


@dataclass(frozen=True)
class Length:
    """A length as an option names it: ``number`` tokens, or this many ``times`` the training length."""

    number: int
    times: bool

    def tokens(self, run: TrainedRun) -> int:
        """Return the length in tokens for a run."""
        if not self.times:
            return self.number
        trained = trained_at(run)
        if trained is None:
            raise KinformerError(
                f"`lengths` {self.number}x: {run.folder} does not say its training length; give tokens."
            )
        return self.number * trained


def parse_lengths(text: str | None) -> list[Length]:
    """Return ``128,512`` or ``1x,4x`` (times the training length) as lengths; none for None."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    try:
        return [Length(parse_counts(part.removesuffix("x"))[0], part.endswith("x")) for part in parts]
    except ValueError:
        raise KinformerError(
            f"`lengths` {text}: is not a list of whole numbers; write as in 128,512,2k, or as in 1x,4x,16x for "
            "multiples of the training length."
        ) from None


def trained_at(run: TrainedRun) -> int | None:
    """Return the training length of a run, None where it does not say."""
    length = run.training.get("length")
    return length if isinstance(length, int) else None


def tell_untrained(run: TrainedRun, tokens: int) -> None:
    """Note where a text of this many ``tokens`` reaches positions at which the model was never trained."""
    trained = trained_at(run)
    if trained is None or tokens <= trained or getattr(run.options, "segments", False) or not _bounded(run.config):
        return
    note(
        f"note: {run.folder}: positions beyond {trained}, its training length, were never trained, and up to {tokens} "
        f"are asked for; expect worse predictions there, stay within {trained}, or train on longer rows (`length`)."
    )


def _bounded(config: ModelConfig) -> bool:
    """Return whether a model has positions, or distances that no pattern limits, that must be learned in training."""
    parts = [getattr(config, "position", None), getattr(config.input, "embedding", None)]
    for layer in config.layers:
        mixer = getattr(layer, "mixer", None)
        if getattr(getattr(mixer, "pattern", None), "kind", "causal") == "causal":
            parts.append(getattr(mixer, "position", None))
    return any(getattr(part, "bounded_by_training", False) for part in parts)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names where these differ, else their paths."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
