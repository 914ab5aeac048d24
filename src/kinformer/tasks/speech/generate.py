"""Transcription of a file, or of speech while it is spoken."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.model import CausalModel, StackedCausalModel, StackedWholeModel, device_of
from kinformer.core.state import State
from kinformer.data.filterbank import Filterbank, RunningNorm, normalised, windows
from kinformer.data.resample import Resampler
from kinformer.data.sound import CHARACTERS
from kinformer.data.wav import WavStream, read_sound
from kinformer.generation.ctc import Greedy
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.shared.views import FrameInput, input_of
from kinformer.tasks.speech.decoding import decoder_of

if TYPE_CHECKING:
    from kinformer.tasks.speech import SpeechGenerationOptions

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
    result.state_bytes = 0 if listener.state is None else states.nbytes(listener.state)
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
