"""Problems written as lines, each with one answer of a causal model (recall, algorithms)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import progressing
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.shared.text import texts_in

if TYPE_CHECKING:
    from kinformer.tasks.next_token.generate import Generated
    from kinformer.tasks.runs import LoadedRun


DRAWS_NOTHING = SimpleNamespace(seed=0)
"""The options of an answer, which takes the most probable tokens."""


def answers_to(
    source: Any,
    settings: PredictionSettings,
    check: Callable[[str], object],
    subject: LoadedRun,
    answer: Callable[..., Generated],
) -> Iterator[Predicted]:
    """The answers to the problems of ``source``, one at a time: ``answer(subject, text, options, write)`` as for
    generation. ``check`` raises where a text is no problem."""

    def check_item(item: Any) -> None:
        try:
            check(item.text)
        except KinformerError as error:
            raise KinformerError(f"{item.place}: {error.message}") from None

    inputs = texts_in(source, settings, check_item)
    with progressing(settings.quiet or inputs.total is None, "predicting") as progress:
        for number, item in enumerate(inputs.items, start=1):
            text = answer(subject, item.text, DRAWS_NOTHING, None).samples[0].text
            label = {} if item.label is None else {"label": item.label}
            yield Predicted({"text": item.text} | label | {"answer": text}, f"{item.text}\t{text}")
            if progress is not None and inputs.total is not None:
                progress(number, inputs.total)
