"""The data of a training run: where it lies, its tokens, and the rows that its task makes of it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.cli import retrieval
from kinformer.cli.runs import tokenizer_of
from kinformer.cli.tasks import NEXT_TOKEN, edges_of, masking_of, open_data, task_of
from kinformer.core.errors import KinformerError
from kinformer.data import (
    ByteTokenizer,
    Corpus,
    FileTokenizer,
    Labelled,
    Tokenizer,
    open_corpus,
    spool,
    train_tokenizer,
)
from kinformer.data.corpus import STDLIB
from kinformer.family.runs import Run
from kinformer.training.feeds import Feed, HiddenTokens, Labels
from kinformer.training.settings import Settings

if TYPE_CHECKING:
    from kinformer.cli.train_options import Options

TOKENIZER = "tokenizer.json"


def spec_of(data: str, folder: Path) -> str:
    """``data`` as it can be found again: an absolute path, standard input as a file in the run folder."""
    if data == STDLIB:
        return data
    if data == "-":
        folder.mkdir(parents=True, exist_ok=True)
        return str(spool(sys.stdin.buffer, folder.resolve()))
    return str(Path(data).expanduser().resolve())


def tokenizer_for(options: Options, spec: str) -> Tokenizer:
    """The tokenizer that ``options`` name, or a new one for the training split of ``spec``."""
    if options.train_tokenizer is None:
        return ByteTokenizer() if options.tokenizer == "bytes" else FileTokenizer(options.tokenizer)
    if options.tokenizer != "bytes":
        raise KinformerError(
            f"--tokenizer {options.tokenizer} and --train-tokenizer {options.train_tokenizer} contradict; give one."
        )
    split = open_corpus(spec, holdout=options.holdout).splits["train"]
    with tempfile.TemporaryDirectory() as folder:
        return train_tokenizer(split, options.train_tokenizer, Path(folder) / TOKENIZER)


def data_of(run: Run) -> Corpus | Labelled:
    """What the run is trained on, as ids of its tokenizer."""
    return open_data(run.data, task_of(run), tokenizer_of(run))


def rows_of(run: Run, settings: Settings, data: Corpus | Labelled, device: str) -> Feed:
    """The rows of the run's task; neighbours are looked up on ``device`` where the model looks things up."""
    if isinstance(data, Labelled):
        return Labels(data, settings, edges_of(run.config))
    if task_of(run) == NEXT_TOKEN:
        return retrieval.feed(run, settings, data, device)
    masking = masking_of(run.config, tokenizer_of(run), settings.mask_share, settings.whole_words)
    return HiddenTokens(data, settings, masking, edges_of(run.config))
