"""The lengths at which runs are measured, as the options name them, and the names of runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import parse_counts
from kinformer.runtime.progress import note

if TYPE_CHECKING:
    from kinformer.core.model_config import ModelConfig
    from kinformer.tasks.runs import TrainedRun


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
