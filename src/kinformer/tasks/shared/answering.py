"""Problems written as lines, each with one answer of a causal model (recall, algorithms)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import progressing
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.shared.text import texts_in


def answers_to(
    source: Any, settings: PredictionSettings, check: Callable[[str], object], answer: Callable[[str], str]
) -> Iterator[Predicted]:
    """The answers to the problems of ``source``, one at a time; ``check`` raises where a text is no problem."""

    def check_item(item: Any) -> None:
        try:
            check(item.text)
        except KinformerError as error:
            raise KinformerError(f"{item.place}: {error.message}") from None

    inputs = texts_in(source, settings, check_item)
    with progressing(settings.quiet or inputs.total is None, "predicting") as progress:
        for number, item in enumerate(inputs.items, start=1):
            text = answer(item.text)
            label = {} if item.label is None else {"label": item.label}
            yield Predicted({"text": item.text} | label | {"answer": text}, f"{item.text}\t{text}")
            if progress is not None and inputs.total is not None:
                progress(number, inputs.total)
