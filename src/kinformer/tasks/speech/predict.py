"""The transcripts of sound files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kinformer.data.files import reading
from kinformer.data.items import STDIN
from kinformer.data.sound import join_symbols
from kinformer.data.wav import ENDINGS, read_sound, sound_info
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import progressing
from kinformer.tasks.predictions import FileSource, Predicted, PredictionSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.speech.decoding import decoder_of
from kinformer.tasks.speech.generate import Listener, writing_of

if TYPE_CHECKING:
    from kinformer.tasks.speech import SpeechPredictionOptions


def predict(
    subject: LoadedRun, source: FileSource, settings: PredictionSettings, options: SpeechPredictionOptions
) -> Iterator[Predicted]:
    """Yield the transcripts of the files of ``source`` (a WAV or FLAC file, a folder of them, or a list of paths), in
    order."""
    symbols, unit, rate = writing_of(subject.run)
    decode = decoder_of(subject, symbols, unit, options.prefixes, options)
    for file, samples, sound_rate in sounds(source, settings.max_items, settings.quiet, "predicting"):
        with torch.inference_mode():
            logits = Listener(subject.model, sound_rate, rate).feed(samples, last=True)
        transcript = join_symbols([symbols[symbol - 1] for symbol in decode(logits)], unit)
        row = {"audio": str(file), "text": transcript, "sound_seconds": len(samples) / sound_rate}
        yield Predicted(row, f"{file}\t{transcript}")


def sounds(source: FileSource, limit: int | None, quiet: bool, doing: str) -> Iterator[tuple[Path, np.ndarray, int]]:
    """Yield the files of ``source`` (a WAV or FLAC file, a folder of them, or a list of paths) in order, each with its
    samples [time] and how many of them are a second; at most ``limit`` files. A bar says what the caller is ``doing``.

    The heads of all files are looked at before the first is read.
    """
    files = _files(source)[:limit]
    for file in files:
        sound_info(file)
    with progressing(quiet, doing) as progress:
        for number, file in enumerate(files, start=1):
            yield file, *read_sound(file)
            if progress is not None:
                progress(number, len(files))


def _files(source: FileSource) -> list[Path]:
    """Return the paths of ``source``: a file, those of a folder and its folders in order, or a list of paths."""
    if source == STDIN:
        raise KinformerError("-: sound files are not read from standard input; give a folder, or a WAV or FLAC file.")
    if not isinstance(source, str | Path):
        return [Path(file) for file in source]
    path = Path(source).expanduser()
    with reading(path):
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in inside if file == path or (file.suffix.lower() in ENDINGS and file.is_file())]
    if not files:
        raise KinformerError(f"{path}: holds no sound; give a folder of WAV or FLAC files, or one of them.")
    return files
