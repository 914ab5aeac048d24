"""The part of the pairs that a run is measured on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kinformer.data.pairs import NUMBER_WORDS, Pairs, Parallel
from kinformer.runtime.errors import choose
from kinformer.tasks.evaluation import EvaluationSettings
from kinformer.tasks.runs import TrainedRun
from kinformer.tasks.shared.text import note_other_data, spec_of
from kinformer.tasks.task import Source

if TYPE_CHECKING:
    from kinformer.tasks.translate import Translate


class HeldOutPairs(NamedTuple):
    """A part of the ``data``; ``same`` says whether it is the very data that the run was trained on."""

    data: Parallel
    pairs: Pairs
    same: bool


def held_out_pairs(task: Translate, run: TrainedRun, evaluation_settings: EvaluationSettings) -> HeldOutPairs:
    """Open the part of the pairs to measure on; a note says where it is not the run's own."""
    spec = spec_of(run, evaluation_settings.data)
    holdout = None if spec == NUMBER_WORDS else run.data.get("holdout")
    data = task.open(Source(spec, holdout, run.tokenizer), run.options)
    same = note_other_data(run, data, evaluation_settings.data is not None)
    return HeldOutPairs(data, data.splits[choose(evaluation_settings.split, data.splits, "`split`")], same)
