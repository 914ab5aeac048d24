"""Transcripts and vectors of sound: of files, and of speech while it is spoken."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import CausalModel, StackedCausalModel, StackedWholeModel, device_of
from kinformer.core.state import State, nbytes
from kinformer.generation.beam import Greedy
from kinformer.inputs.filterbank import CHARACTERS, Filterbank, RunningNorm, normalised, windows
from kinformer.lab.data.files import reading_corpus
from kinformer.lab.data.labelled import STDIN
from kinformer.lab.data.sound import join_symbols
from kinformer.lab.data.waves import ENDINGS, Resampler, WavStream, read_sound, sound_info
from kinformer.lab.tasks.evaluation import Embedded, EmbeddingSettings, FileSource, Predicted, PredictionSettings
from kinformer.lab.tasks.runs import LoadedRun, TrainedRun
from kinformer.lab.tasks.shared.records import FrameInput, input_of
from kinformer.lab.tasks.shared.text import pooled
from kinformer.lab.tasks.speech.work import decoder_of, features_of
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.progress import progressing

if TYPE_CHECKING:
    from kinformer.lab.tasks.speech import SpeechGenerationOptions, SpeechPredictionOptions


# Transcription of a file, or of speech while it is spoken.

PIECE = 0.08
"""The length of a piece of sound in seconds."""


@dataclass
class Transcribed:
    """The ``transcript`` of ``heard`` seconds of sound in this many ``seconds``; ``interrupted`` by Ctrl-C."""

    run: str
    audio: str
    transcript: str = ""
    heard: float = 0.0
    seconds: float = 0.0
    state_bytes: int = 0
    interrupted: bool = False

    @property
    def facts(self) -> dict[str, object]:
        """Return the transcript as values for JSON."""
        return {
            "run": self.run, "audio": self.audio, "text": self.transcript, "sound_seconds": self.heard,
            "seconds": self.seconds, "state_bytes": self.state_bytes,
        }  # fmt: skip

    @property
    def text(self) -> str:
        """Return what the transcript cost, as a line to print."""
        speed = f", {self.heard / self.seconds:.1f} times as fast as spoken" if self.seconds else ""
        return f"{self.heard:.2f} s of sound in {self.seconds:.3f} s{speed}; state {plural(self.state_bytes, 'byte')}"


class Listener:
    """A model that reads sound of ``rate`` samples a second piece by piece: a causal one writes at once, an encoder at
    the end."""

    def __init__(self, model: StackedCausalModel | StackedWholeModel, rate: int, heard_rate: int) -> None:
        self.model: Any = model  # called as its protocol says
        self.state: State = None
        self.input: FrameInput = input_of(model.config)
        self.causal = model.config.protocol is CausalModel
        self.resampler, self.bank = Resampler(rate, heard_rate), Filterbank(heard_rate, self.input.mels)
        self.norm: Callable[[Tensor], Tensor] = RunningNorm() if self.causal else normalised
        self.samples, self.started = torch.zeros(0), False
        self.frames = torch.zeros(self.input.width - self.input.stride, self.input.mels)

    def feed(self, samples: np.ndarray, last: bool = False) -> Tensor:
        """Return the logits [new positions, classes] of what ``samples`` [time] complete; with ``last`` of all the
        rest."""
        self.samples = torch.cat([self.samples, self.resampler.feed(torch.from_numpy(samples), last)])
        if not (self.causal or last):
            return torch.zeros(0, 1)
        values = self._windows(self._features(last), last) if self.causal else self._whole()
        if not len(values):
            return torch.zeros(0, 1)
        outputs = self.model(values[None].to(device_of(self.model)), *([self.state] if self.causal else []))
        logits, self.state = outputs if self.causal else (outputs, None)
        return logits[0].float().cpu()

    def _whole(self) -> Tensor:
        return windows(self._features(last=True), self.input.width, self.input.stride)

    def _windows(self, features: Tensor, last: bool) -> Tensor:
        """Return the positions [new, width, mels] that are complete; zeros complete the last one."""
        width, stride = self.input.width, self.input.stride
        frames = torch.cat([self.frames, features])
        if last:
            frames = torch.cat([frames, frames.new_zeros((width - stride - len(frames)) % stride, frames.shape[1])])
        new = (len(frames) - (width - stride)) // stride
        self.frames = frames[new * stride :]
        return frames.unfold(0, width, stride).mT if new else frames[:0]

    def _features(self, last: bool) -> Tensor:
        """Return the features of all complete frames [frames, mels]; at the end (``last``) of one frame at least."""
        if len(self.samples) < self.bank.size and (self.started or not last):
            return torch.zeros(0, self.input.mels)
        self.started = True
        features = self.bank(self.samples)
        self.samples = self.samples[len(features) * self.bank.hop :]
        return self.norm(features)


def transcribe(
    subject: LoadedRun, audio: str, options: SpeechGenerationOptions, write: Callable[[str], None] | None
) -> Transcribed:
    """Write down the sound in the file ``audio``, or - of standard input; every piece of text is given to ``write``."""
    run, model = subject.run, subject.model
    symbols, unit, rate = writing_of(run)
    decode = decoder_of(subject, symbols, unit, options.prefixes, options)
    sound_rate, pieces = _sound(audio)
    listener, path = Listener(model, sound_rate, rate), Greedy()
    result, transcribed = Transcribed(str(run.folder), audio), []
    between = "" if unit == CHARACTERS else " "

    def add(numbers: list[int]) -> None:
        for symbol in numbers:
            text = (between if result.transcript else "") + symbols[symbol - 1]
            result.transcript += text
            if write is not None:
                write(text)

    try:
        with torch.inference_mode():
            for samples, last in pieces:
                started_at = time.perf_counter()
                logits = listener.feed(samples, last)
                result.heard += len(samples) / sound_rate
                transcribed.append(logits)
                if options.prefixes == 1:
                    add(path.feed(logits))
                elif last:
                    add(decode(torch.cat([item for item in transcribed if len(item)])))
                result.seconds += time.perf_counter() - started_at
    except KeyboardInterrupt:
        result.interrupted = True
    result.state_bytes = 0 if listener.state is None else nbytes(listener.state)
    return result


def writing_of(run: TrainedRun) -> tuple[list[str], str, int]:
    """Return the symbols that a run writes, their unit, and the samples a second that it hears."""
    identity = run.data.get("identity") or {}
    symbols, unit, rate = (identity.get(name) for name in ("symbols", "unit", "rate"))
    if not isinstance(symbols, list) or not isinstance(rate, int):
        raise KinformerError(f"{run.folder}: does not say which symbols it writes; give a run of speech.")
    return symbols, str(unit), rate


def _sound(audio: str) -> tuple[int, Iterator[tuple[np.ndarray, bool]]]:
    """Return the rate of sound, and its pieces, each with whether it is the last."""
    if audio == "-":
        stream = WavStream(sys.stdin.buffer)
        return stream.rate, _ended((stream.read(PIECE) for _ in count()), "standard input")
    samples, rate = read_sound(audio)
    step = max(1, round(PIECE * rate))
    return rate, _ended((samples[at : at + step] for at in range(0, len(samples) + step, step)), audio)


def _ended(pieces: Iterator[np.ndarray], place: str) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield ``pieces`` up to the first empty one, which is the last."""
    any_came = False
    for piece in pieces:
        any_came |= len(piece) > 0
        if not any_came:
            raise KinformerError(f"{place}: holds 0 samples; record it again.")
        yield piece, not len(piece)
        if not len(piece):
            return


# The transcripts of sound files.


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
    with reading_corpus(path):
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in inside if file == path or (file.suffix.lower() in ENDINGS and file.is_file())]
    if not files:
        raise KinformerError(f"{path}: holds no sound; give a folder of WAV or FLAC files, or one of them.")
    return files


# Vectors of sound files: the last hidden states of a run of speech, one vector for each file.


def embed(subject: LoadedRun, source: FileSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
    """Yield the vectors of the files of ``source`` (a WAV or FLAC file, a folder, or a list of paths), in order."""
    model, heard_rate = subject.model, writing_of(subject.run)[2]
    bank = Filterbank(heard_rate, model.config.input.mels)
    for file, samples, rate in sounds(source, settings.max_items, settings.quiet, "embedding"):
        heard = Resampler(rate, heard_rate).feed(torch.from_numpy(samples), True)
        frames = features_of(heard, bank, model.config)[None].to(device_of(model))
        with torch.inference_mode():
            states = model.hidden(frames)[0]
            vectors = pooled(states, states.new_ones(states.shape[:2], dtype=torch.bool), settings.pooling)
        yield Embedded("audio", str(file), vectors[0].numpy())
