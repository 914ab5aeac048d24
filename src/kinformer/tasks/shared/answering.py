"""Problems written as lines, each with one answer of a causal model (recall, algorithms)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import progressing
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.shared.text import texts_in

if TYPE_CHECKING:
    from kinformer.data.items import TextItem, TextSource
    from kinformer.tasks.next_token.generate import Generated
    from kinformer.tasks.runs import LoadedRun


def answers_to(
    source: TextSource,
    settings: PredictionSettings,
    check: Callable[[str], object],
    subject: LoadedRun,
    answer: Callable[..., Generated],
) -> Iterator[Predicted]:
    """Yield the answers to the problems of ``source``, one at a time, by ``answer(subject, text)``; ``check`` raises
    where a text is no problem."""

    def check_item(item: TextItem) -> None:
        try:
            check(item.text)
        except KinformerError as error:
            raise KinformerError(f"{item.place}: {error.message}") from None

    inputs = texts_in(source, settings, check_item)
    with progressing(settings.quiet or inputs.total is None, "predicting") as progress:
        for number, item in enumerate(inputs.items, start=1):
            text = answer(subject, item.text).samples[0].text
            label = {} if item.label is None else {"label": item.label}
            yield Predicted({"text": item.text} | label | {"answer": text}, f"{item.text}\t{text}")
            if progress is not None and inputs.total is not None:
                progress(number, inputs.total)
