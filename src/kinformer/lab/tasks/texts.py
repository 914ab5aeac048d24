"""Shared by the tasks of text: their data and its held-out parts, the ids of their models, windows to measure in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.model import CausalModel, Model, StackedCausalModel, StackedWholeModel, device_of
from kinformer.core.pattern import Pattern
from kinformer.core.stack import ModelConfig
from kinformer.lab.data import Corpus, FileTokenizer, Split, Tokenizer, first_bytes, open_corpus
from kinformer.lab.data.buckets import STEP_OF_WIDTH, BosEos, lay
from kinformer.lab.data.files import shared_bytes
from kinformer.lab.data.labelled import Check, Columns, Inputs, TextItem, TextSource, read_texts, refuse_empty
from kinformer.lab.data.tokenizer import prompt_ids
from kinformer.lab.evaluation.bits import Windows, streamable
from kinformer.lab.tasks.evaluation import (
    Embedded,
    EmbeddingSettings,
    Evaluation,
    EvaluationSettings,
    ItemSettings,
    LoadedRun,
    PredictionSettings,
    TextTable,
    TrainedRun,
    evaluated,
    in_batches,
    input_of,
)
from kinformer.lab.tasks.task import Data, Source, TrainingPlan
from kinformer.lab.training.logging import Metric
from kinformer.runtime.errors import KinformerError, choose, plural, require_finite
from kinformer.runtime.parsing import parse_counts
from kinformer.runtime.progress import note, note_once

SPECIAL_TOKENS = 3
"""Ids that a new encoder has for itself: a mask, BOS and EOS."""
CARRIED = "carried"
USUAL_COLUMNS = Columns()


VOCABULARIES = ((100_000, 1000), (200_000, 2000), (1_000_000, 4000), (4_000_000, 8000), (100_000_000, 32000))
"""(bytes, tokens): the size of a new vocabulary for this many bytes of text or more."""


def vocabulary_for(size: int, tokens: int | None = None) -> int | None:
    """Return how many tokens a new vocabulary for ``size`` bytes of text has, ``tokens`` if given; None, for bytes, of
    a short text or without the package tokenizers."""
    tokens = tokens or max((count for least, count in VOCABULARIES if size >= least), default=None)
    if tokens is not None and find_spec("tokenizers") is None:
        note(
            "note: the package 'tokenizers' is not installed, so this is trained on bytes; "
            "pip install 'kinformer[text]' gives it a vocabulary."
        )
        return None
    return tokens


def open_text(source: Source, options: object, cache: Path | None = None) -> Corpus:
    """Return the corpus that ``source`` names; a note says that a table is read as it stands."""
    if source.spec.endswith((".csv", ".tsv")):
        note_once(f"note: {Path(source.spec).name} is read as running text; its columns are for `task` classify.")
    return open_corpus(source.spec, cache=cache, tokenizer=source.tokenizer, holdout=source.holdout)


def vocab_size_of(config: ModelConfig) -> int:
    """Return how many ids a model of tokens knows."""
    return input_of(config).vocab_size


def mask_token_of(config: ModelConfig) -> int | None:
    """Return the id that stands for a mask, None where the model has none."""
    return getattr(config.input, "mask_token", None)


def ends_of(config: ModelConfig) -> BosEos:
    """Return the tokens that begin and end every text of an encoder."""
    eos = next(iter(getattr(config.input, "eos_tokens", ())), None)
    return BosEos(getattr(config.input, "bos_token", None), eos)


def tokenizer_of(run: TrainedRun) -> Tokenizer:
    """Return the tokenizer of a run that reads text."""
    if run.tokenizer is None:
        raise KinformerError(f"{run.folder}: does not have a tokenizer; put its tokenizer.json there.")
    return run.tokenizer


def check_ids(plan: TrainingPlan, model: nn.Module, ids: int, special_apart: bool = False) -> None:
    """Refuse a model of images, a model that knows fewer than ``ids``, or one whose special tokens stand for something
    else among them; a tokenizer's may be among its own ids, unless they are ``special_apart``."""
    check_sequence(model)
    config = plan.config
    if vocab_size_of(config) < ids:
        raise KinformerError(
            f"`set` input.vocab_size={vocab_size_of(config)}: the tokenizer has {plural(ids, 'token')}, and the model "
            "needs as many; leave it out, or choose another tokenizer."
        )
    if isinstance(plan.tokenizer, FileTokenizer) and not special_apart:
        return
    names = ("mask_token", "bos_token", "eos_token")
    for name, token in zip(names, (mask_token_of(config), *ends_of(config)), strict=True):
        if token is not None and token < ids:
            raise KinformerError(
                f"{name} is {token}, but the ids below {ids} belong to the data; begin with another run, or "
                f"give `set` input.{name}={ids} or higher, below vocab_size."
            )


def check_sequence(model: nn.Module) -> None:
    """Refuse a model whose attention is for images: a text is one sequence of tokens, without rows of pixels."""
    for module in model.modules():
        pattern = getattr(module, "pattern", None)
        if isinstance(pattern, Pattern) and pattern.domain != "sequence":
            raise KinformerError(
                f"`data`: is a sequence of tokens, but this model's attention pattern is for an {pattern.domain}; "
                "draw images with `task` image, or choose a pattern for sequences, as "
                '`set` \'layers.*.mixer.pattern={"kind": "local"}\', or another recipe.'
            )


def check_long_enough(corpus: Corpus, rows: int, length: int) -> None:
    """Refuse data with too few tokens for a batch or for validation."""
    corpus.splits["train"].require(rows * length + 1, f"training with `length` {length}", " or a smaller `length`")
    corpus.splits["validation"].require(2, "validation")


@dataclass(frozen=True)
class HeldOut:
    """The ``split`` called ``name`` of ``data`` to measure on; ``same``: the run was trained on the very data."""

    data: Any
    split: Any
    name: str
    same: bool

    @classmethod
    def of(cls, run: TrainedRun, settings: EvaluationSettings, data: Any) -> HeldOut:
        """Return the split of ``data`` that ``settings`` name; a note says where the data are not the run's own."""
        split = data.splits[choose(settings.split, data.splits, "`split`")]
        return cls(data, split, settings.split, note_other_data(run, data, settings.data is not None))

    @property
    def identity(self) -> dict[str, object]:
        """Return the identity of the data, for JSON, with the split and whether the data are the run's."""
        return dict(self.data.identity) | {"split": self.name, "same_as_run": self.same}

    def report(
        self,
        subject: LoadedRun,
        metrics: Mapping[Metric, float],
        text: Iterable[str | TextTable],
        ending: str = "",
        **more: Any,
    ) -> Evaluation:
        """Return the evaluation of ``subject`` on this split. A line that names both, and closes with ``ending``,
        stands above the ``text``; ``more`` is passed to :func:`kinformer.lab.tasks.evaluation.evaluated`."""
        heading = f"{subject.title} on {self.data.name} {self.data.version}, {self.name} split{ending}"
        return evaluated(subject, metrics, self.identity, (heading, *text), **more)


def spec_of(run: TrainedRun, data: str | None) -> str:
    """Return the name of the data: ``data``, or the run's own where it is None."""
    spec = data if data is not None else run.data.get("spec")
    if not isinstance(spec, str):
        raise KinformerError(f"{run.folder}: does not say what data it was trained on; give `data` PATH.")
    return spec


def held_out(run: TrainedRun, settings: EvaluationSettings, holdout: float | None = None) -> HeldOut:
    """Return the part of the data to measure on; a note says where it is not the run's own.
    ``holdout``: the held-out share, the run's own if None."""
    corpus, part = measured_part(run, settings, holdout)
    same = note_other_data(run, corpus, settings.data is not None)
    trained_at = run.data.get("holdout")
    if same and part.name != "train" and holdout not in (None, trained_at):
        trained = open_corpus(spec_of(run, settings.data), holdout=trained_at).splits["train"]
        note_shared([trained], part, "among the text that the run was trained on")
    return HeldOut(corpus, part, part.name, same)


def measured_part(run: TrainedRun, settings: EvaluationSettings, holdout: float | None = None) -> tuple[Corpus, Split]:
    """Return the data that ``settings`` name and their part to measure on; ``holdout`` as of :func:`held_out`."""
    holdout = run.data.get("holdout") if holdout is None else holdout
    corpus = open_corpus(spec_of(run, settings.data), tokenizer=run.tokenizer, holdout=holdout)
    part = corpus.splits[choose(settings.split, corpus.splits, "`split`")]
    if settings.first is not None:
        part = first_bytes(part, settings.first, corpus.tokenizer)
    return corpus, part


def note_shared(seen: Sequence[Split], part: Split, where: str) -> None:
    """Note how much of the text of ``part`` is also text of ``seen``, which stands ``where``."""
    pieces = (piece for split in seen for piece in split.text.extents.pieces)
    share = shared_bytes(pieces, part.text.extents.pieces) / max(1, part.bytes)
    if share:
        amount = "" if share == 1 else f"{share:.1%} of "
        note(
            f"note: {amount}the {part.name} split of {part.corpus} is {where}, so these figures are not of held-out "
            "text."
        )


def note_other_data(run: TrainedRun, data: Data, requested: bool) -> bool:
    """Return whether the run was trained on ``data``; a note says where it was not."""
    trained_on = (run.data.get("identity") or {}).get("fingerprint")
    if trained_on is None:
        note(f"note: the run does not say what data it was trained on; {data.name} may have been part of it.")
    elif data.fingerprint != trained_on:
        reason = "is other data than the run was trained on" if requested else "has changed since the run was trained"
        note(
            f"note: {data.name} {reason} (now {data.fingerprint[:19]}, then {trained_on[:19]}); "
            "the figure is not comparable with the figures of the run."
        )
    return data.fingerprint == trained_on


def texts_in(
    source: TextSource, settings: PredictionSettings, check: Check | None = None, usual: Columns = USUAL_COLUMNS
) -> Inputs[TextItem]:
    """Return the texts of ``source`` to predict from, as ``settings`` say; ``check`` raises for one that the task
    cannot read (by default, an empty one). ``usual``: how the task names and orders the columns of tables."""
    columns = usual._replace(text=settings.text_field, label=settings.label_field)
    return read_texts(source, columns, settings.format, settings.first, check, settings.skip_bad)


def main_windows(
    run: TrainedRun,
    model: CausalModel,
    context: str | int | None = None,
    overlap: float = 0.0,
    beside_lengths: bool = False,
) -> Windows | None:
    """Return the windows of ``context`` tokens, or as the run was trained; None where the state is carried."""
    context = None if context is None else str(context)
    endless = streamable(model)
    if context == CARRIED and not endless:
        raise KinformerError(
            f"`context` {CARRIED}: this model's state grows without bound, or its positions end; give `context` N."
        )
    if context == CARRIED or (context is None and endless and getattr(run.options, "segments", False)):
        if overlap and not beside_lengths:
            raise KinformerError(
                f"`overlap` {overlap:g}: the state is carried here; give `context` N or `contexts` too."
            )
        return None
    if context is None:
        if not isinstance(run.training.get("length", model.max_length), int):
            raise KinformerError(f"{run.folder}: does not say at what length it was trained; give `context` N.")
        return Windows(context=whole_length(run, model), overlap=overlap)
    if not re.fullmatch(r"\d{1,18}", context, re.ASCII):
        raise KinformerError(
            f"`context` {context}: is neither a number of tokens nor {CARRIED!r}; give `context` 512 or the like."
        )
    return Windows(context=int(context), overlap=overlap)


def check_positions(model: Model, windows: Windows | None) -> None:
    """Refuse windows beyond the model's positions."""
    if windows is not None and model.max_length is not None and windows.context > model.max_length:
        raise KinformerError(
            f"a context of {plural(windows.context, 'token')} is beyond this model's positions, which end at "
            f"max_length = {model.max_length}; give `context` and `contexts` no larger."
        )


def whole_length(run: TrainedRun, model: Model) -> int:
    """Return the length that an encoder was trained at, within its positions."""
    length = run.training.get("length", model.max_length or 512)
    return length if model.max_length is None else min(length, model.max_length)


# Vectors of texts: the last hidden states of a trained run, one vector for each text.


def embed_texts(subject: LoadedRun, source: TextSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
    """Yield the texts of ``source`` (a file or a folder, "-", or a list) in order, each with its vector."""
    run = subject.run
    if run.tokenizer is None:
        raise KinformerError(f"{run.folder}: its model reads no text; give a run that does.")
    embedder = TextEmbedder(run, subject.model, settings.pooling)
    columns = Columns(settings.text_field, settings.label_field)
    inputs = read_texts(source, columns, settings.format, settings.first, refuse_empty, settings.skip_bad)
    yield from embedder.read(inputs, settings)


class TextReader:
    """A ``model`` of ``run`` that reads texts, cut to the run's training length; ``cut`` counts the longer texts."""

    def __init__(self, run: TrainedRun, model: StackedCausalModel | StackedWholeModel, ends: BosEos) -> None:
        self.model, self.ends, self.length, self.cut = model, ends, whole_length(run, model), 0

    def lay(self, texts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor | None]:
        """Return the tokens [batch, time] of ``texts`` on the model's device, and which are valid (None: all)."""
        room = self.length - self.ends.size
        self.cut += sum(len(ids) > room for ids in texts)
        longest = min(max(map(len, texts)), room) + self.ends.size
        width = min(self.length, -(-longest // STEP_OF_WIDTH) * STEP_OF_WIDTH)
        tokens, valid = lay([ids[:room] for ids in texts], self.ends, width)
        device = device_of(self.model)
        return torch.from_numpy(tokens).to(device), None if valid is None else torch.from_numpy(valid).to(device)

    def encode(self, item: TextItem) -> np.ndarray:
        """Return the ids of a text; raise for a text that the run cannot read."""
        raise NotImplementedError

    def __call__(self, batch: Sequence[tuple[TextItem, np.ndarray]]) -> list[Any]:
        """Return the results of texts that come with their ids."""
        raise NotImplementedError

    def read(self, inputs: Inputs[TextItem], settings: ItemSettings) -> Iterator[Any]:
        """Yield the result of every text, in order; a note says how many were cut."""
        pairs = ((item, self.encode(item)) for item in inputs.items)
        yield from in_batches(pairs, settings.batch_size, lambda pair: len(pair[1]), self, inputs.total, settings.quiet)
        if self.cut:
            note(
                f"note: {plural(self.cut, 'text')} of more than {self.length} tokens, the training length, counted by "
                "their beginning only."
            )


class TextEmbedder(TextReader):
    """A run that makes vectors of texts by ``pooling`` its last hidden states: their mean, the first or the last."""

    def __init__(self, run: TrainedRun, model: StackedCausalModel | StackedWholeModel, pooling: str) -> None:
        assert run.tokenizer is not None
        super().__init__(run, model, BosEos() if run.config.protocol is CausalModel else ends_of(model.config))
        self.tokenizer, self.pooling = run.tokenizer, pooling

    def encode(self, item: TextItem) -> np.ndarray:
        return prompt_ids(self.tokenizer, item.text)

    def __call__(self, batch: Sequence[tuple[TextItem, np.ndarray]]) -> list[Embedded]:
        tokens, valid = self.lay([ids for _, ids in batch])
        with torch.inference_mode():
            encoded = self.model.hidden(tokens, valid=valid)
            real = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
            vectors = pooled(encoded[0], real, self.pooling)
        return [
            Embedded("text", item.text, row, item.label) for (item, _), row in zip(batch, vectors.numpy(), strict=True)
        ]


def pooled(hidden_states: Tensor, valid: Tensor, pooling: str) -> Tensor:
    """Return vectors float32 [batch, dim], on the CPU, of ``hidden_states`` [batch, time, dim], whose ``valid`` [batch,
    time] positions come first."""
    states, counts = hidden_states.float(), valid.sum(1)
    if pooling == "first":
        vectors = states[:, 0]
    elif pooling == "last":
        vectors = states[torch.arange(len(counts), device=counts.device), counts - 1]
    else:
        vectors = (states * valid[..., None]).sum(1) / counts[:, None]
    require_finite(bool(vectors.isfinite().all()))
    return vectors.cpu()


# Lengths of contexts as options name them, and names of runs side by side.


def lengths_in(text: str | None, run: TrainedRun) -> list[int]:
    """Return the lengths ``128,512``, or ``1x,4x`` times the training length of ``run``, in tokens; none for None."""
    lengths = []
    for part in [] if text is None else map(str.strip, text.split(",")):
        try:
            (length,) = parse_counts(part.removesuffix("x"))
        except ValueError:
            raise KinformerError(
                f"`contexts` {text}: is not a list of whole numbers; write as in 128,512,2k, or as in 1x,4x,16x for "
                "multiples of the training length."
            ) from None
        trained = trained_at(run) if part.endswith("x") else 1
        if trained is None:
            raise KinformerError(f"`contexts` {length}x: {run.folder} does not say its training length; give tokens.")
        lengths.append(length * trained)
    return lengths


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
