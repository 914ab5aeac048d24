"""ListOps: an encoder predicts what nested lists of digits and operators compute (see ``lab.data.listops``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.lab.tasks.classify import Classify
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.task import DataNeeds, EvaluationNeeds, Source
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

    from kinformer.lab.data import Labelled
    from kinformer.lab.data.labelled import TextItem

NAME = "listops"


@dataclass(frozen=True, kw_only=True)
class ListOpsOptions:
    """Options of training on ListOps."""

    examples: int = 96_000
    """Lists to train on."""
    example_tokens: str = "500-2000"
    """How many tokens a list has, more than the one and fewer than the other."""

    def __post_init__(self) -> None:
        if self.examples < 8:
            raise KinformerError(f"`examples` {self.examples}: ListOps needs 8 or more.")
        least, dash, most = self.example_tokens.partition("-")
        if not (dash and least.isdecimal() and most.isdecimal()):
            raise KinformerError(f"`example_tokens` {self.example_tokens}: is no range; write as in 500-2000.")

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the range of tokens as numbers."""
        least, _, most = self.example_tokens.partition("-")
        return int(least), int(most)


class ListOps(Classify):
    """Ten classes, which are drawn with the lists."""

    name = NAME
    title = "ListOps"
    description = (
        "Learns what nested lists compute (Nangia and Bowman 2018), as long as in the Long Range Arena. Measured by "
        "accuracy; a tenth to a sixth is right by guessing."
    )
    data = DataNeeds(
        default=NAME,
        refused=dict.fromkeys(
            ("data", "holdout", "tokenizer", "train_tokenizer", "text_field"),
            "ListOps brings its own data and symbols; leave it out.",
        ),
    )
    evaluation = EvaluationNeeds(
        refused={**Classify.evaluation.refused, "data": "ListOps brings its own data; leave it out."}
    )
    Options = ListOpsOptions
    special_apart = True

    def open(self, source: Source, options: ListOpsOptions, cache: Path | None = None) -> Labelled:
        from kinformer.lab.data.listops import open_listops

        return open_listops(options.examples, options.bounds, cache=cache)

    def spec_to_measure(self, subject: LoadedRun, data: str | None) -> str:
        return NAME

    def encoder(self, subject: LoadedRun) -> Callable[[TextItem], np.ndarray]:
        from kinformer.lab.data.listops import read

        return lambda item: read(item.text, item.place)


TASK = ListOps()
