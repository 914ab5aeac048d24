"""Lines translated in order, each written as soon as it is translated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kinformer.core.model import SourceModel, device_of
from kinformer.data.items import TextItem, TextSource
from kinformer.data.tables import LABEL_NAMES, TEXT_NAMES, Columns
from kinformer.data.tokenizer import as_bytes
from kinformer.evaluation.early_exit import Exited, noting_exits, saved
from kinformer.generation.beam import Hypothesis, Search, beam_search
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.next_token.generate import Generated, Sample
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.record import GenerationSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.arriving import arriving, in_batches
from kinformer.tasks.shared.text import ends_of, texts_in
from kinformer.tasks.translate.options import BeamOptions
from kinformer.tasks.translate.rows import padded

if TYPE_CHECKING:
    from torch import Tensor

LONGER = 50
"""How many tokens a translation may have more than its source (Vaswani et al. 2017, section 6.1)."""


class Translator:
    """Translates texts with a run's model, by the beam search that ``decoding`` describes."""

    def __init__(self, subject: LoadedRun, decoding: BeamOptions) -> None:
        self.model: SourceModel = subject.model
        tokenizer = subject.run.tokenizer
        if tokenizer is None:
            raise KinformerError(f"{subject.run.folder}: has no tokenizer; put its tokenizer.json there.")
        self.tokenizer = tokenizer
        self.ends = ends_of(subject.run.config)
        assert self.ends.bos is not None and self.ends.eos is not None
        self.state_bytes = 0
        self.search = Search(self.ends.bos, self.ends.eos, decoding.beam, decoding.length_penalty)

    def __call__(self, texts: Sequence[bytes]) -> list[Hypothesis]:
        """Return hypotheses, whose tokens :meth:`text` decodes; an empty text has an empty translation."""
        ids = self.encode(texts)
        full = [number for number, row in enumerate(ids) if len(row) > 1]
        hypotheses = [Hypothesis([], 0.0) for _ in ids]
        if full:
            tokens, valid = (item.to(device_of(self.model)) for item in padded([ids[number] for number in full]))
            room = (self.model.max_length or 2**62) - 1  # BOS has a position, too
            limits = [max(1, min(len(ids[number]) + LONGER, room)) for number in full]
            for number, hypothesis in zip(full, self._searched(tokens, valid, limits), strict=True):
                hypotheses[number] = hypothesis
        return hypotheses

    def encode(self, texts: Sequence[bytes]) -> list[list[int]]:
        """Return the ids of texts, with EOS. Errors: ``KinformerError`` for one that is longer than the model reads."""
        ids = [[*item.tolist(), self.search.eos] for item in self.tokenizer.encode_batch(texts)]
        longest = self.model.max_source_length
        for text, row in zip(texts, ids, strict=True):
            if longest is not None and len(row) > longest:
                raise KinformerError(
                    f"the line {text[:40].decode('utf-8', 'replace')!r}... has {plural(len(row), 'token')}, but the "
                    f"model reads sources of {longest} at most; split it."
                )
        return ids

    def _searched(self, tokens: Tensor, valid: Tensor, limits: Sequence[int]) -> list[Hypothesis]:
        import torch

        with torch.inference_mode():
            hypotheses = beam_search(self.model, self.model.begin(tokens, valid), self.search, limits)
        self.state_bytes = max(self.state_bytes, hypotheses.state_bytes)
        return hypotheses.best

    def saved(self, exited: Exited, source_tokens: int, new_tokens: int, lines: int) -> Exited:
        """Return ``exited`` with what early exits save of a token in the middle of a translation, where this many
        ``lines`` have that many tokens."""
        # One more for EOS, of the source as of the translation
        return saved(self.model, exited, (new_tokens // lines + 1) // 2, source=source_tokens // lines + 1)

    def text(self, hypothesis: Hypothesis) -> str:
        """Return the hypothesis as text, in one line."""
        tokens = [token for token in hypothesis.tokens if token < self.tokenizer.vocab_size]
        return " ".join(self.tokenizer.decode(tokens).splitlines())


def translate_lines(
    subject: LoadedRun,
    prompt: bytes | str | Iterable[bytes],
    options: GenerationSettings,
    write: Callable[[str], None] | None,
) -> Generated:
    """Translate the lines of ``prompt``; each is given to ``write``, with a line's end, when all before it are there.

    Lines that come one by one are translated as they come, together with those that arrived meanwhile.
    """
    translator, result = Translator(subject, options.task_options), Generated([], 0, seed=options.seed)
    started_at = time.perf_counter()
    with noting_exits(subject.model) as leaving:
        try:
            for lines in arriving(lines_of(prompt), options.task_options.batch_size):
                for line, output in zip(lines, translator(lines), strict=True):
                    text = translator.text(output)
                    result.samples.append(Sample(output.tokens, text, stopped=True))
                    result.prompt_tokens += len(translator.tokenizer.encode(line))
                    result.new_tokens += len(output.tokens)
                    if write is not None:
                        write(text + "\n")
        except KeyboardInterrupt:
            result.interrupted = True
    result.seconds, result.state_bytes = time.perf_counter() - started_at, translator.state_bytes
    if leaving.result is not None and result.samples:
        sizes = result.prompt_tokens, result.new_tokens, len(result.samples)
        result.exits = translator.saved(leaving.result, *sizes)
    return result


def predict_lines(
    subject: LoadedRun, source: TextSource, settings: PredictionSettings, decoding: BeamOptions
) -> Iterator[Predicted]:
    """Yield the translations of the texts of ``source``, in order; an empty one has an empty translation."""
    translator = Translator(subject, decoding)

    def check(item: TextItem) -> None:
        try:
            translator.encode([item.text.encode()])
        except KinformerError as error:
            raise KinformerError(f"{item.place}: {error.message}") from None

    def translated(batch: Sequence[TextItem]) -> list[Predicted]:
        hypotheses = translator([item.text.encode() for item in batch])
        return [_predicted(item, translator.text(result)) for item, result in zip(batch, hypotheses, strict=True)]

    languages = (subject.run.data.get("identity") or {}).get("languages", ())
    usual = [[kind, *languages[side : side + 1]] for side, kind in enumerate(("source", "target"))]
    columns = Columns(text_names=(*TEXT_NAMES, *usual[0]), label_names=(*LABEL_NAMES, *usual[1]), text_first=True)
    inputs = texts_in(source, settings, check, columns)
    yield from in_batches(
        inputs.items, settings.batch_size, lambda item: len(item.text), translated, inputs.total, settings.quiet
    )


def _predicted(item: TextItem, translation: str) -> Predicted:
    label = {} if item.label is None else {"label": item.label}
    return Predicted({"text": item.text} | label | {"translation": translation}, translation)


def lines_of(prompt: bytes | str | Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a text, or those that come one by one, without their ends; UTF-8, or a
    :class:`KinformerError`."""
    if isinstance(prompt, str):
        prompt = as_bytes(prompt)
    lines = prompt.removesuffix(b"\n").split(b"\n") if isinstance(prompt, bytes) else prompt
    for number, line in enumerate(lines, start=1):
        line = line.rstrip(b"\r\n")
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise KinformerError(
                f"line {number} of the input is not UTF-8 (byte {line[error.start]:#04x}); convert it first, as with "
                "iconv."
            ) from None
        yield line
