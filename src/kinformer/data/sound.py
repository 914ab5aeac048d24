"""Sound for speech recognition: recorded clips (``data.clips``), or synthetic telephone tones (``data.dtmf``).

Utterances of a split are numbered; each has samples at the data's rate and a transcript, made of *symbols*: characters,
or labels with spaces between them (words, digits, phonemes). Clips may be joined into longer utterances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kinformer.data.clips import Clip, Holdout, find_clips, split_clips
from kinformer.data.dtmf import DTMF, KEYS, RATE, Calls
from kinformer.data.extents import fingerprint_of
from kinformer.data.resample import resample
from kinformer.data.wav import read_sound
from kinformer.runtime.errors import KinformerError, require
from kinformer.runtime.progress import note
from kinformer.runtime.words import plural

CHARACTERS, LABELS = "characters", "labels"
ROUNDS = 40
ROOM = 1 << 26
"""How many samples of every split are kept in memory."""
LONGEST_PAUSE, SHORTEST_PAUSE = 0.3, 0.05
_JOINED = 0x4A4F494E


class Utterances(Protocol):
    """The utterances of a split: ``lengths`` int64 [count] in samples, and each one's samples and transcript."""

    lengths: np.ndarray

    def samples(self, number: int) -> Tensor:
        """Return the samples of the utterance ``number``, float32 [time]."""
        ...

    def transcript(self, number: int) -> str: ...

    def name(self, number: int) -> str: ...


@dataclass(frozen=True, kw_only=True)
class SoundOptions:
    """The options of recordings: ``units`` (characters or labels; None as they fit the data), ``join`` (how
    many clips make an utterance, least and most), ``rate`` of sampling (None: that of most clips),
    ``held``: the rule of held-out clips."""

    units: str | None = None
    join: tuple[int, int] | None = None
    rate: int | None = None
    held: Holdout = field(default_factory=Holdout)

    def __post_init__(self) -> None:
        require("sample_rate", self.rate, 1000)


@dataclass(frozen=True, eq=False)
class Sound:
    """Utterances in three splits, ``rate`` samples a second, and the ``symbols`` that transcripts are made of."""

    name: str
    version: str
    fingerprint: str
    rate: int
    unit: str
    symbols: tuple[str, ...]
    splits: Mapping[str, Utterances]

    @property
    def identity(self) -> dict[str, object]:
        """Return the identity that a run folder stores as JSON."""
        return {
            "name": self.name, "version": self.version, "fingerprint": self.fingerprint,
            "rate": self.rate, "unit": self.unit, "symbols": list(self.symbols),
            "examples": {name: len(split.lengths) for name, split in self.splits.items()},
        }  # fmt: skip


def split_symbols(transcript: str, unit: str) -> list[str]:
    """Return the symbols of a transcript."""
    return list(transcript) if unit == CHARACTERS else transcript.split()


def join_symbols(symbols: Sequence[str], unit: str) -> str:
    """Return the transcript that the symbols make."""
    return ("" if unit == CHARACTERS else " ").join(symbols)


class Recorded:
    """The utterances of one clip each, or of several with pauses; ``groups`` are their clips, by number."""

    def __init__(self, clips: Sequence[Clip], groups: Sequence[np.ndarray], rate: int, seed: int) -> None:
        self.clips, self.groups, self.rate = clips, groups, rate
        self._resampled: dict[int, Tensor] = {}
        self._room = ROOM
        lengths = np.array([ceil(clip.samples * rate / clip.rate) for clip in clips], np.int64)
        random = np.random.default_rng([_JOINED, seed])
        low, high = (round(seconds * rate) for seconds in (SHORTEST_PAUSE, LONGEST_PAUSE))
        self.pauses = [random.integers(low, high + 1, len(group) - 1) for group in groups]
        sums = [int(lengths[group].sum() + pauses.sum()) for group, pauses in zip(groups, self.pauses, strict=True)]
        self.lengths = np.array(sums, np.int64)

    def samples(self, number: int) -> Tensor:
        pieces: list[Tensor] = []
        for index, pause in zip(self.groups[number].tolist(), [*self.pauses[number].tolist(), 0], strict=True):
            pieces += [self._clip(index), torch.zeros(pause)]
        return torch.cat(pieces)

    def transcript(self, number: int) -> str:
        return " ".join(clip.transcript for clip in self._of(number))

    def name(self, number: int) -> str:
        return " + ".join(clip.name for clip in self._of(number))

    def _clip(self, index: int) -> Tensor:
        """Return a clip's samples, cached as long as there is room."""
        if index in self._resampled:
            return self._resampled[index]
        samples, rate = read_sound(self.clips[index].path)
        resampled = resample(torch.from_numpy(samples), rate, self.rate)
        if len(resampled) <= self._room:
            self._resampled[index] = resampled
            self._room -= len(resampled)
        return resampled

    def _of(self, number: int) -> list[Clip]:
        return [self.clips[index] for index in self.groups[number].tolist()]


def open_sound(spec: str, options: SoundOptions, symbols: Sequence[str] | None = None) -> Sound:
    """Return the sound that ``spec`` names: ``dtmf``, a folder of clips, or a table of them.

    ``symbols``: the symbols of a trained model, in their order, if there is one. Errors: ``KinformerError`` for data
    that cannot be read, and for a transcript with a symbol that no training transcript has.
    """
    if spec == DTMF:
        return _tones(options)
    path = Path(spec).expanduser()
    clips, files, table = find_clips(path)
    fingerprint = fingerprint_of(files)
    rates = [clip.rate for clip in clips]
    rate = options.rate or max(sorted(set(rates)), key=rates.count)
    _tell_resampled(path.name, rates, rate)
    unit = options.units or (CHARACTERS if table else LABELS)
    splits = split_clips(clips, options.held, str(path))
    all_symbols = _symbols(splits, unit, options.join is not None) if symbols is None else tuple(symbols)
    for some in splits.values():
        _check_symbols(some, unit, all_symbols)
    parts: dict[str, Utterances] = {
        name: Recorded(some, _groups(some, options.join, ROUNDS if name == "train" else 1), rate, number)
        for number, (name, some) in enumerate(splits.items())
    }
    return Sound(path.resolve().name, fingerprint.split(":")[1][:12], fingerprint, rate, unit, all_symbols, parts)


def _tones(options: SoundOptions) -> Sound:
    for flag, unused in (
        ("`held_out_speaker`", options.held.speaker),
        ("`test_clips`", options.held.pattern),
        ("`holdout`", options.held.share),
        ("`sample_rate`", options.rate),
    ):
        if unused is not None:
            raise KinformerError(f"{flag} {unused}: is for recordings, but telephone tones are made; leave it out.")
    splits: dict[str, Utterances] = {name: Calls(name, options.join) for name in ("train", "validation", "test")}
    least, most = Calls.keys(options.join)
    name = f"{DTMF}-{least}-{most}"
    return Sound(DTMF, "1", name, RATE, options.units or LABELS, _with_space(KEYS, options.units), splits)


def _with_space(symbols: Sequence[str], unit: str | None) -> tuple[str, ...]:
    return (*([" "] if unit == CHARACTERS else []), *symbols)


def _tell_resampled(name: str, rates: Sequence[int], rate: int) -> None:
    others = sorted({clip_rate for clip_rate in rates if clip_rate != rate})
    if others:
        count = sum(clip_rate != rate for clip_rate in rates)
        have = ", ".join(f"{other:,}" for other in others)
        clips = f"{count:,} of {plural(len(rates), 'clip')} have {have} samples a second"
        note(f"note: {name}: {clips} and are resampled to {rate:,}.")


def _symbols(splits: Mapping[str, Sequence[Clip]], unit: str, joined: bool) -> tuple[str, ...]:
    symbols = {symbol for clip in splits["train"] for symbol in split_symbols(clip.transcript, unit)}
    return tuple(sorted(symbols | ({" "} if joined and unit == CHARACTERS else set())))


def _check_symbols(clips: Sequence[Clip], unit: str, trained: Sequence[str]) -> None:
    """Refuse symbols that no model trained on the ``trained`` ones could write."""
    symbols = set(trained)
    for clip in clips:
        for symbol in split_symbols(clip.transcript, unit):
            if symbol not in symbols:
                raise KinformerError(
                    f"{clip.path}: its transcript {clip.transcript!r} has the symbol {symbol!r}, which no training "
                    f"transcript has ({plural(len(trained), 'symbol')}: {' '.join(trained)[:60]}); mend it or leave "
                    "the clip out."
                )


def _groups(clips: Sequence[Clip], join: tuple[int, int] | None, rounds: int) -> list[np.ndarray]:
    """Return the clips of every utterance: one each, or some of one speaker,
    every clip once in each of the ``rounds``."""
    if join is None:
        return [np.array([number]) for number in range(len(clips))]
    speakers: dict[str, list[int]] = {}
    for number, clip in enumerate(clips):
        speakers.setdefault(clip.speaker, []).append(number)
    groups: list[np.ndarray] = []
    for turn in range(rounds):
        for place, speaker in enumerate(sorted(speakers)):
            random = np.random.default_rng([_JOINED, turn, place])
            order = random.permutation(speakers[speaker])
            while len(order):
                count = int(random.integers(join[0], join[1] + 1))
                if len(order) - count < join[0]:
                    count = len(order) if len(order) <= join[1] else len(order) - join[0]
                groups.append(order[:count])
                order = order[count:]
    return groups
