"""Sound for speech recognition: recorded clips, or synthetic telephone tones.

Utterances of a split are numbered; each has samples at the data's rate and a transcript, made of *symbols*: characters,
or labels with spaces between them (words, digits, phonemes). Clips may be joined into longer utterances.
"""

from __future__ import annotations

import struct
import wave
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache, partial
from hashlib import sha256
from itertools import chain
from math import ceil, gcd, inf
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinformer.inputs.signals import CHARACTERS
from kinformer.lab.data.files import (
    Identified,
    SourceFile,
    content_of,
    existing_path,
    fingerprint_of,
    folder_files,
    reading_corpus,
    single_file,
)
from kinformer.lab.data.images import PARTS, SPLITS, hold_out
from kinformer.lab.data.labelled import TABLES, TableFormat, decode_text, lines_of, read_cells
from kinformer.lab.tables import check_ratio
from kinformer.runtime.errors import KinformerError, nearest, plural
from kinformer.runtime.files import reading, require_file
from kinformer.runtime.parsing import parse_json_line
from kinformer.runtime.plugins import import_extra
from kinformer.runtime.progress import note, note_once

# Another sampling rate by a windowed sinc, for sound at once or piece by piece (Smith 2002, Digital Audio Resampling).
#
#     y(m) = sum over n of x(n) h(m from/to - n),   h(t) = c sinc(c t) cos^2(pi c t / 2 Z)   for |c t| < Z
#
# c is 0.94 of the lower rate divided by the old rate, which cuts off frequencies that the new rate cannot hold. Z = 12
# zero crossings.

CROSSINGS, PASSED = 12, 0.94


class Resampler:
    """The conversion of sound from ``rate`` to ``to`` samples a second. Sound in pieces gives the same result as the
    whole. ``to / rate`` in lowest terms is n / o: every o input samples give n output samples, each by its own
    filter."""

    def __init__(self, rate: int, to: int) -> None:
        self.same = rate == to
        self.old, self.new = (item // gcd(rate, to) for item in (rate, to))
        # c: 0.94 of the lower rate's band, so that nothing beyond it is folded back.
        cut = PASSED * min(self.old, self.new) / self.old
        self.reach = ceil(CROSSINGS / cut)
        if self.new * (self.old + 2 * self.reach) > 1 << 24:  # numbers, which take some 40 bytes each
            raise KinformerError(
                f"sound of {rate:,} samples a second cannot be resampled to {to:,}: the rates have almost no common "
                f"divisor; convert it, as by ffmpeg -i SOUND -ar {to} NEW.wav."
            )
        at = torch.arange(self.new, dtype=torch.float64)[:, None] * self.old / self.new
        distance = cut * (at - torch.arange(-self.reach, self.reach + self.old, dtype=torch.float64))
        window = (distance.clamp(-CROSSINGS, CROSSINGS) * torch.pi / (2 * CROSSINGS)).cos().square()
        # h(t) = c sinc(c t) cos^2(pi c t / 2 Z), one filter for each of the ``new`` phases
        self.filters = (cut * torch.sinc(distance) * window).float()[:, None]
        self._waiting = torch.zeros(self.reach)
        self._came = self._gave = 0

    def feed(self, samples: Tensor, last: bool = False) -> Tensor:
        """Return the new samples that follow from ``samples`` [time]; with ``last`` all, ceil(time to / rate)."""
        if self.same:
            return samples
        self._came += len(samples)
        ahead = [torch.zeros(self.reach + self.old)] if last else []
        waiting = torch.cat([self._waiting, samples, *ahead])
        blocks = max(0, (len(waiting) - 2 * self.reach) // self.old)
        if not blocks:
            self._waiting = waiting
            return samples[:0]
        used = waiting[: blocks * self.old + 2 * self.reach]
        made = functional.conv1d(used[None, None], self.filters, stride=self.old)[0].T.flatten()
        self._waiting = waiting[blocks * self.old :]
        if last:
            made = made[: ceil(self._came * self.new / self.old) - self._gave]
        self._gave += len(made)
        return made


def resample(samples: Tensor, rate: int, to: int) -> Tensor:
    """Return ``samples`` [time] of ``rate`` samples a second at the rate ``to``."""
    return Resampler(rate, to).feed(samples, last=True)


# Sound files as samples: WAV (PCM of 8 to 32 bits) by the standard library, all else by soundfile (extra ``audio``).
#
# Samples are float32 from -1 to 1; channels are mixed into one by their mean.

ENDINGS = (".wav", ".flac", ".ogg", ".mp3")
MOST_RATE = 1_000_000
_PCM, _EXTENSIBLE, _FORM = 1, 0xFFFE, 40
_ENDLESS, _SKIPPED = 0x7FFF0000, 1 << 16
"""The least length in the head of a WAV that was written to a pipe: programs write as many bytes as possible there."""
_LEAST_SHARE = 0.99  # of MP3 the number of samples may be an estimate
_DAMAGED = ("is not readable sound", "record or convert it again")


class SoundInfo(NamedTuple):
    """The head of a sound file: samples a second, how many there are of each channel, and how many channels."""

    rate: int
    samples: int
    channels: int


def sound_info(path: str | Path) -> SoundInfo:
    """Return the head of a file, without its samples; refuse a file without sound, or shorter than its head says."""
    require_file(Path(path))
    with reading(path, *_DAMAGED):
        _require_length(Path(path))
        try:
            with wave.open(str(path), "rb") as file:
                if not 1 <= file.getsampwidth() <= 4:
                    raise wave.Error(f"samples of {plural(file.getsampwidth(), 'byte')}")
                info = SoundInfo(file.getframerate(), file.getnframes(), file.getnchannels())
        except (wave.Error, EOFError) as error:
            about = _by_soundfile(path, error, "info")
            info = SoundInfo(about.samplerate, about.frames, about.channels)
            check_ratio(path, 4 * info.samples * info.channels, Path(path).stat().st_size)
    if info.samples < 1:
        raise KinformerError(f"{path}: holds 0 samples; remove it or record it again.")
    if not 1 <= info.rate <= MOST_RATE:
        raise KinformerError(
            f"{path}: has {plural(info.rate, 'sample')} a second, but 1 to {MOST_RATE} are expected; convert it again."
        )
    return info


def read_sound(path: str | Path) -> tuple[np.ndarray, int]:
    """Return samples float32 [time] and their rate. Errors: as in :func:`sound_info`, and for NaN and infinity."""
    info = sound_info(path)
    with reading(path, *_DAMAGED):
        try:
            with wave.open(str(path), "rb") as file:
                samples = _mixed(file.readframes(info.samples), file.getsampwidth(), info.channels)
        except (wave.Error, EOFError) as error:
            sound, _ = _by_soundfile(path, error, "read", dtype="float32", always_2d=True)
            samples = sound.mean(1)
    if len(samples) < _LEAST_SHARE * info.samples:
        raise KinformerError(
            f"{path}: holds {plural(len(samples), 'sample')} of the {info.samples} it says; record it again."
        )
    if not np.isfinite(samples).all():
        bad = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise KinformerError(f"{path}: sample {bad} is {samples[bad]}, but all must be finite; record it again.")
    return samples, info.rate


def _require_length(path: Path) -> None:
    """Refuse a WAV shorter than its head says; readers of WAV accept it silently."""
    with path.open("rb") as file:
        if file.read(4) != b"RIFF":
            return
        size = path.stat().st_size
        file.seek(12)
        while len(head := file.read(8)) == 8:
            name, length = struct.unpack("<4sI", head)
            if name == b"data" and length > (present := size - file.tell()):
                raise KinformerError(
                    f"{path}: says that it holds {plural(length, 'byte')} of samples, but holds {present:,}; it was "
                    "cut off, or written to a pipe: record or convert it again, as by ffmpeg -i."
                )
            file.seek(length + length % 2, 1)


class WavStream:
    """A stream of WAV in parts, as from a microphone, up to the end of its samples, or up to the end of the stream
    where the head does not know their number."""

    def __init__(self, file: IO[bytes], place: str = "standard input") -> None:
        remedy = "convert it, as by ffmpeg -i SOUND -f wav -"
        self._file = file
        try:
            self.rate, self._width, self._channels, self._left = _stream_head(file)
        except (wave.Error, EOFError) as error:
            raise KinformerError(f"{place}: is no WAV of PCM samples ({_reason(error)}); {remedy}.") from None
        if not 1 <= self.rate <= MOST_RATE or not 1 <= self._width <= 4 or not self._channels:
            raise KinformerError(
                f"{place}: is no WAV of PCM samples (of {plural(self._width, 'byte')}, {self.rate} a second); {remedy}."
            )

    def read(self, seconds: float) -> np.ndarray:
        """Return the next ``seconds`` of samples, or the rest, float32 [time]; empty at the end."""
        wanted = max(1, round(seconds * self.rate)) * self._width * self._channels
        data = _read(self._file, int(min(wanted, self._left)))
        self._left -= len(data)
        return _mixed(data, self._width, self._channels)


def _stream_head(file: IO[bytes]) -> tuple[int, int, int, float]:
    """Read a stream of WAV up to its samples; return their rate, the bytes of each, the channels, and how many bytes of
    samples follow (infinitely many where the head does not say)."""
    head = _read(file, 12, exactly=True)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        raise wave.Error("file does not start with RIFF id" if head[:4] != b"RIFF" else "not a WAVE file")
    form = b""
    while True:
        name, length = struct.unpack("<4sI", _read(file, 8, exactly=True))
        if name == b"data":
            break
        chunk = _read(file, min(length, _FORM), exactly=True)
        for begin in range(len(chunk), length + length % 2, _SKIPPED):
            _read(file, min(_SKIPPED, length + length % 2 - begin), exactly=True)
        form = chunk if name == b"fmt " else form
    if len(form) < 16:
        raise wave.Error("the format of its samples is missing")
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    kind = struct.unpack("<H", form[24:26])[0] if kind == _EXTENSIBLE and len(form) == _FORM else kind
    if kind != _PCM:
        raise wave.Error(f"unknown format: {kind}")
    return rate, (bits + 7) // 8, channels, length if 0 < length < _ENDLESS else inf


def _read(file: IO[bytes], size: int, exactly: bool = False) -> bytes:
    """Return the next ``size`` bytes of a stream that may give fewer at a time, or its rest."""
    data = b""
    while len(data) < size and (piece := file.read(size - len(data))):
        data += piece
    if exactly and len(data) < size:
        raise EOFError
    return data


def _mixed(data: bytes, width: int, channels: int) -> np.ndarray:
    """Return PCM of ``width`` bytes a sample as float32 [time]; a last sample that was cut off is dropped."""
    raw = np.frombuffer(data[: len(data) // (width * channels) * width * channels], np.uint8)
    if width == 1:
        values = (raw.astype(np.float32) - 128) / 128
    else:
        words = np.zeros((len(raw) // width, 4), np.uint8)
        words[:, 4 - width :] = raw.reshape(-1, width)
        values = (words.reshape(-1).view("<i4") / 2**31).astype(np.float32)  # numpy 1.26 divides in float64
    return values.reshape(-1, channels).mean(1)


def _by_soundfile(path: str | Path, why: Exception, does: str, **options: object) -> Any:
    """Call soundfile for a file that cannot be read as WAV of PCM because of ``why``; refuse a file without sound."""
    what = content_of(Path(path))
    if what is not None and not what.startswith("sound"):
        raise KinformerError(f"{path}: is {what}, not sound; give WAV or FLAC.")
    other = f"{path}: is no WAV of PCM samples ({_reason(why)}); other sound"
    soundfile = import_extra("soundfile", other, "soundfile", "'kinformer[audio]'")
    with suppress(soundfile.SoundFileError):
        return getattr(soundfile, does)(str(path), **options)
    raise KinformerError(f"{path}: is not readable sound ({_reason(why)}); give WAV or FLAC.") from None


def _reason(error: Exception) -> str:
    return str(error) or "it ends too soon"


DTMF = "dtmf"
RATE = 8000
LOW, HIGH = (697.0, 770.0, 852.0, 941.0), (1209.0, 1336.0, 1477.0, 1633.0)
PAD = ("123A", "456B", "789C", "*0#D")
KEYS = tuple("0123456789*#ABCD")
KEYS_OF_A_CALL = (3, 7)
COUNTS = {"train": 8_000, "validation": 200, "test": 500}
TONE, PAUSE = (0.04, 0.16), (0.04, 0.2)
_SEEDS = {"train": 1, "validation": 2, "test": 3}
_AT = {key: (LOW[row], HIGH[column]) for row, keys in enumerate(PAD) for column, key in enumerate(keys)}


class Calls:
    """The sounds of telephone keys (dual-tone multi-frequency signalling, ITU-T Q.23, Q.24): sound without a file.

    A key is the sum of a low and a high tone. Calls are numbered. Each call draws its keys, durations of tones and
    pauses, levels and noise, within the limits that a receiver must accept: tones and pauses of 40 ms and more,
    frequencies 1.5 % off, one tone up to 6 dB above the other, noise 10 to 40 dB below them.

    The calls of a split, of ``join`` keys (least and most; 3 to 7 if not given): see :class:`Utterances`.
    """

    def __init__(self, split: str, join: tuple[int, int] | None = None) -> None:
        self.split = split
        count, (least, most) = COUNTS[split], join or KEYS_OF_A_CALL
        random = np.random.default_rng([_SEEDS[split], least, most])
        self.counts = random.integers(least, most + 1, count)
        self.pressed = random.integers(0, len(KEYS), (count, most))
        shape = (count, most)
        self.tones, self.pauses = (
            np.round(random.uniform(low, high, shape) * RATE).astype(np.int64) for low, high in (TONE, PAUSE)
        )
        self.before = np.round(random.uniform(*PAUSE, count) * RATE).astype(np.int64)
        real = np.arange(most) < self.counts[:, None]
        self.lengths = self.before + ((self.tones + self.pauses) * real).sum(1)

    def samples(self, number: int) -> Tensor:
        random = np.random.default_rng([_SEEDS[self.split], number])
        sound = np.zeros(int(self.lengths[number]))
        level, at = 10 ** random.uniform(-1.5, -0.5), int(self.before[number])
        for place, key in enumerate(self._pressed(number)):
            time = np.arange(self.tones[number, place]) / RATE
            for hertz in _AT[key]:
                loud = level * 10 ** (random.uniform(-3, 3) / 20)
                angle = 2 * np.pi * (hertz * random.uniform(0.985, 1.015) * time + random.uniform())
                sound[at : at + len(time)] += loud * np.sin(angle)
            at += len(time) + int(self.pauses[number, place])
        noise = level * 10 ** (-random.uniform(10, 40) / 20)
        sound += noise * random.standard_normal(len(sound))
        return torch.from_numpy(sound.clip(-1, 1).astype(np.float32))

    def transcript(self, number: int) -> str:
        return " ".join(self._pressed(number))

    def name(self, number: int) -> str:
        return f"call {number} of {self.split}"

    def _pressed(self, number: int) -> list[str]:
        return [KEYS[key] for key in self.pressed[number, : self.counts[number]]]


# The 61 phones of TIMIT's transcripts folded into the 39 classes by which error rates are reported (Lee and Hon 1989,
# "Speaker-independent phone recognition using hidden Markov models", table II).
#
# The table is from Kaldi's recipe for TIMIT (``egs/timit/s5/conf/phones.60-48-39.map``): classes confused with each
# other count as one, closures and pauses are silence, and the glottal stop ``q`` is left out of both transcripts. Names
# of the 48 phones that models are trained on there fold into the same classes.

SILENCE, LEFT_OUT = "sil", "q"
_ALONE = "ae aw ay b ch d dh dx eh ey f g iy jh k ow oy p r s t th uh v w y z"
_MERGED = {
    "aa": "ao", "ah": "ax ax-h", "er": "axr", "hh": "hv", "ih": "ix", "l": "el", "m": "em", "n": "en nx", "ng": "eng",
    "sh": "zh", "uw": "ux", SILENCE: "bcl dcl gcl kcl pcl tcl epi pau h# cl vcl",  # cl and vcl are closures of the 48
}  # fmt: skip
CLASSES = {phone: phone for phone in _ALONE.split()} | {
    phone: name for name, others in _MERGED.items() for phone in (name, *others.split())
}
"""The class of every phone but ``q``."""


def folded(phones: Sequence[str]) -> list[str]:
    """Return the classes of ``phones``, in upper or lower case; an unknown phone is an error."""
    names = [phone.lower() for phone in phones]
    for name in names:
        if name not in CLASSES and name != LEFT_OUT:
            raise KinformerError(
                f"`fold` timit39: {name!r} in a transcript is none of TIMIT's phones; leave it out for other symbols."
            )
    return [CLASSES[name] for name in names if name != LEFT_OUT]


# Recorded clips and their transcripts: which files, which words, which speaker, which part of the data.
#
#     clips/7_theo_3.wav        transcripts.tsv:  file<TAB>transcript[<TAB>speaker[<TAB>split]]
#     clips/9_lucas_0.wav                         a.wav<TAB>call me at noon<TAB>ann<TAB>train
#
# A table is TSV, CSV or JSON lines and stands beside the clips, under any name; its first line may name its columns,
# also as Common Voice (path, sentence, client_id) and Hugging Face (file_name, transcription) do, and LJSpeech's lines
# of ``name|text|normalised text`` are read. Tables ``train.tsv``, ``dev.tsv`` and ``test.tsv``, or one table in each of
# the folders ``train``, ``dev`` and ``test``, are the splits. Without a table the transcript is the first field of a
# file's name, up to the first underscore, and the speaker is the second where every name has three or more.

TABLE = "transcripts.tsv"
_COLUMNS = {
    "file": ("file", "path", "file_name", "filename", "audio"),
    "transcript": ("transcript", "transcription", "sentence", "text"),
    "speaker": ("speaker", "speaker_id", "client_id"),
    "split": ("split",),
}
"""The names of columns, ours first."""


@dataclass(frozen=True)
class Clip:
    """A file and its transcript. ``samples`` of a channel come at ``rate`` a second; ``split`` is empty if unknown."""

    name: str
    path: str
    transcript: str
    speaker: str = ""
    split: str = ""
    samples: int = 0
    rate: int = 0


def find_clips(path: Path) -> tuple[list[Clip], list[SourceFile], bool]:
    """Return the clips under ``path`` (a folder or a table), all files that name them, and whether a table does."""
    remedy = "give a folder of WAV or FLAC files, or a .tsv that lists them"
    path = existing_path(path, remedy)
    tables = [path] if path.is_file() else _tables(path)
    if tables:
        clips = [clip for item in tables for clip in _listed(item, path)]
        files = [*map(single_file, tables), *(single_file(Path(clip.path)) for clip in clips)]
    else:
        files = [file for file in folder_files(path, empty=True) if Path(file.name).suffix.lower() in ENDINGS]
        clips = _named(files)
    if not clips:
        raise KinformerError(f"{path}: does not hold sound; {remedy}.")
    infos = (sound_info(clip.path) for clip in clips)
    clips = [replace(clip, samples=info.samples, rate=info.rate) for clip, info in zip(clips, infos, strict=True)]
    return clips, files, bool(tables)


def _tables(folder: Path) -> list[Path]:
    """Return the tables of transcripts in ``folder``: of the usual name, of the splits, or the only one."""
    if (folder / TABLE).is_file():
        return [folder / TABLE]
    tables = [Path(file.path) for file in folder_files(folder, empty=True) if Path(file.name).suffix.lower() in TABLES]
    parts = [table for table in tables if _split_of(table, folder)]
    if any(_split_of(table, folder) == "train" for table in parts):
        if others := [table for table in tables if table not in parts]:
            note_once(
                f"note: {folder}: the splits have tables, so {plural(len(others), 'other table')} are not read, "
                f"{others[0].name} among them."
            )
        return parts
    if len(tables) > 1:
        raise KinformerError(
            f"{folder}: holds {plural(len(tables), 'table')}, {tables[0].name} and {tables[1].name} among them; give "
            f"the one with the transcripts as `data`, or call it {TABLE}."
        )
    return tables


def _split_of(table: Path, folder: Path) -> str:
    """Return the split of a table, by its name or its folder's; empty if none."""
    parts = table.relative_to(folder).parts if table != folder else (table.name,)
    return SPLITS.get(table.stem.lower(), SPLITS.get(parts[0].lower(), "") if len(parts) > 1 else "")


def _listed(table: Path, place: Path) -> list[Clip]:
    """Return the clips that a table lists; ``place`` is the table, or the folder of the data."""
    split, paths = _split_of(table, place) if table != place else "", cache(partial(_paths_by_name, table.parent))
    clips = [_clip(table, number, row, split, paths) for number, row in _rows(table)]
    if not clips:
        raise KinformerError(f"{table}: lists no clip; write file, transcript and, if known, speaker and split.")
    return clips


def _rows(table: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of every line that lists a clip, and its cells by the names of their columns."""
    with reading_corpus(table), table.open("rb") as file:
        if (kind := TABLES.get(table.suffix.lower(), "tsv")) == "jsonl":
            for number, line in enumerate(lines_of(file, str(table)), start=1):
                if line.strip():
                    row = parse_json_line(table, number, line, "write one object per line")
                    row = row.items() if isinstance(row, dict) else ()
                    row = {str(name).lower(): str(value) for name, value in row if value is not None}
                    yield number, {name: row[key] for name, key in _columns_in(list(row)).items()}
            return
        columns: list[str] | None = None
        for number, raw in _cells(file, str(table), kind):
            cells = [decode_text(cell, f"{table}, line {number}").strip() for cell in raw]
            if columns is None:
                named = _columns_in([cell.lower() for cell in cells])
                if {"file", "transcript"} <= named.keys():
                    by_name = {key: name for name, key in named.items()}
                    columns = [by_name.get(cell.lower(), cell) for cell in cells]
                    continue
                columns = ["file", "transcript", "speaker", "split"]
            if not 2 <= len(cells) <= len(columns):
                raise KinformerError(
                    f"{table}, line {number}: has {plural(len(cells), 'column')} where file, transcript and, if known, "
                    "speaker and split are expected; mend it, or name the columns in the first line."
                )
            yield number, dict(zip(columns, cells, strict=False))


def _columns_in(names: Sequence[str]) -> dict[str, str]:
    # The later names of a column are looked for first, so that the earlier ones replace them.
    return {ours: name for ours, usual in _COLUMNS.items() for name in reversed(usual) if name in names}


def _cells(file: BinaryIO, place: str, kind: TableFormat) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the lines of a table in cells; of LJSpeech's lines, the name and the normalised text."""
    name, bar, _ = file.readline().partition(b"|")
    file.seek(0)
    if kind == "tsv" or not bar or b"," in name:
        yield from read_cells(file, place, kind)
        return
    for number, line in enumerate(lines_of(file, place), start=1):
        if line:
            cells = line.split(b"|")
            yield number, [cells[0], cells[-1]]


def _paths_by_name(folder: Path) -> dict[str, str | None]:
    """Return the paths of the sounds under ``folder`` by name, with and without ending; None for a name of several."""
    paths: dict[str, str | None] = {}
    for file in folder_files(folder, empty=True):
        if (path := Path(file.name)).suffix.lower() in ENDINGS:
            paths |= {name: None if name in paths else file.path for name in (path.name, path.stem)}
    return paths


def _clip(
    table: Path, number: int, row: dict[str, str], split: str, paths: Callable[[], Mapping[str, str | None]]
) -> Clip:
    """Return the clip of a row; ``paths`` are the files beside the table, by name."""
    file, transcript, split = row.get("file", ""), row.get("transcript", ""), row.get("split", "").lower() or split
    if not transcript:
        raise KinformerError(f"{table}, line {number}: its transcript is empty; complete or remove the line.")
    path = table.parent / file if file and (table.parent / file).is_file() else paths().get(file)
    if path is None:
        names = ", or name the columns file and transcript in the first line" if number == 1 else ""
        raise KinformerError(
            f"{table}, line {number}: the file {table.parent / file} is missing; mend it or remove the line{names}."
        )
    if split and split not in SPLITS:
        raise KinformerError(f"{table}, line {number}: its split {split!r} is unknown; {nearest(split, SPLITS)}")
    return Clip(file, str(path), transcript, row.get("speaker", ""), SPLITS.get(split, ""))


def _named(files: Sequence[SourceFile]) -> list[Clip]:
    """Return the clips of a folder, by their names."""
    fields = [Path(file.name).stem.split("_") for file in files]
    has_speakers = all(len(parts) > 2 for parts in fields)
    clips = []
    for file, parts in zip(files, fields, strict=True):
        if not parts[0].strip():
            raise KinformerError(
                f"{file.path}: its name begins with no transcript, as in 7_theo_0.wav; rename it or list it in {TABLE}."
            )
        split = SPLITS.get(file.name.split("/")[0], "")
        clips.append(Clip(file.name, file.path, parts[0].strip(), parts[1] if has_speakers else "", split))
    return clips


def split_clips(clips: Sequence[Clip], options: SoundOptions, place: str) -> dict[str, list[Clip]]:
    """Return the clips of each split: named ones, clips that ``options`` choose, the rest by their names' hashes."""
    by_split: dict[str, list[Clip]] = {name: [clip for clip in clips if clip.split == name] for name in ("", *PARTS)}
    if chosen := _chosen(clips, options, place):
        names = {clip.name for clip in chosen}
        by_split = {name: [clip for clip in some if clip.name not in names] for name, some in by_split.items()}
        by_split["test"] = chosen
    rest = by_split["train"] + by_split[""]
    hashes = [sha256(clip.name.encode("utf-8", "surrogateescape")).digest() for clip in rest]
    rows = hold_out([name for name in PARTS[1:] if by_split[name]], hashes, options.share, place, "clips")
    rows["train"].sort()
    return {name: [rest[index] for index in rows[name]] if name in rows else by_split[name] for name in PARTS}


def _chosen(clips: Sequence[Clip], options: SoundOptions, place: str) -> list[Clip]:
    """Return the clips that the rule holds out for the test."""
    speaker, pattern = options.speaker, options.pattern
    if speaker is not None and pattern is not None:
        raise KinformerError(
            f"`held_out_speaker` {speaker} and `test_clips` {pattern} contradict; give one of the two."
        )
    speakers = sorted({clip.speaker for clip in clips if clip.speaker})
    if speaker is not None and speaker not in speakers:
        speakers_text = f"its speakers are {', '.join(speakers)}" if speakers else "it does not say who speaks"
        raise KinformerError(f"`held_out_speaker` {speaker}: is not in {place}; {speakers_text}.")
    if speaker is not None:
        return [clip for clip in clips if clip.speaker == speaker]
    chosen = [clip for clip in clips if pattern is not None and fnmatch(clip.name, pattern)]
    if pattern is not None and not chosen:
        raise KinformerError(f"`test_clips` {pattern}: matches no file of {place}, such as {clips[0].name}; mend it.")
    return chosen


LABELS = "labels"
ROUNDS = 40
ROOM = 1 << 26
"""How many samples of every split are kept in memory."""
LONGEST_PAUSE, SHORTEST_PAUSE = 0.3, 0.05
_JOINED = 0x4A4F494E


class Utterances(Protocol):
    """The utterances of a split: ``lengths`` int64 [count] in samples, and for each number the samples, the
    ``transcript`` and the ``name``, by which messages call it."""

    lengths: np.ndarray

    def samples(self, number: int) -> Tensor:
        """Return the samples of the utterance ``number``, float32 [time]."""

    def transcript(self, number: int) -> str: ...

    def name(self, number: int) -> str: ...


@dataclass(frozen=True, kw_only=True)
class SoundOptions:
    """The options of recordings: ``units`` (characters or labels; None as they fit the data), ``join`` (how many clips
    make an utterance, least and most), ``rate`` of sampling (None: the rate of most clips). The test has the clips of
    one ``speaker``, or whose names match ``pattern``; missing splits take a ``share`` of the rest (None: 5 %)."""

    units: str | None = None
    join: tuple[int, int] | None = None
    rate: int | None = None
    speaker: str | None = None
    pattern: str | None = None
    share: float | None = None


@dataclass(frozen=True, eq=False)
class Sound(Identified):
    """Utterances in three splits, ``rate`` samples a second, and the ``symbols`` that transcripts are made of."""

    rate: int
    unit: str
    symbols: tuple[str, ...]
    splits: Mapping[str, Utterances]

    @property
    def identity(self) -> dict[str, object]:
        return super().identity | {
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
    """Return the sound that ``spec`` names: ``dtmf``, a folder of clips, or a table of clips. ``symbols``: the symbols
    of a trained model, in their order, if there is one."""
    if spec == DTMF:
        return _tones(options)
    path = Path(spec).expanduser()
    clips, files, table = find_clips(path)
    fingerprint = fingerprint_of(files)
    rates = [clip.rate for clip in clips]
    rate = options.rate or max(sorted(set(rates)), key=rates.count)
    if others := sorted(set(rates) - {rate}):
        have = ", ".join(f"{other:,}" for other in others)
        some = f"{len(rates) - rates.count(rate):,} of {plural(len(rates), 'clip')} have {have} samples a second"
        note(f"note: {path.name}: {some} and are resampled to {rate:,}.")
    unit = options.units or (CHARACTERS if table else LABELS)
    splits = split_clips(clips, options, str(path))
    if symbols is None:
        trained = {symbol for clip in splits["train"] for symbol in split_symbols(clip.transcript, unit)}
        symbols = sorted(trained | ({" "} if options.join is not None and unit == CHARACTERS else set()))
    usual = set(symbols)
    for clip in chain.from_iterable(splits.values()):
        if unused := [symbol for symbol in split_symbols(clip.transcript, unit) if symbol not in usual]:
            raise KinformerError(
                f"{clip.path}: its transcript {clip.transcript!r} has the symbol {unused[0]!r}, which no training "
                f"transcript has ({plural(len(symbols), 'symbol')}: {' '.join(symbols)[:60]}); mend it or leave the "
                "clip out."
            )
    parts: dict[str, Utterances] = {
        name: Recorded(some, _groups(some, options.join, ROUNDS if name == "train" else 1), rate, number)
        for number, (name, some) in enumerate(splits.items())
    }
    return Sound(path.resolve().name, fingerprint.split(":")[1][:12], fingerprint, rate, unit, tuple(symbols), parts)


def _tones(options: SoundOptions) -> Sound:
    recorded = {"held_out_speaker": options.speaker, "test_clips": options.pattern}
    for option, unused in (recorded | {"holdout": options.share, "sample_rate": options.rate}).items():
        if unused is not None:
            raise KinformerError(f"`{option}` {unused}: is for recordings, but telephone tones are made; leave it out.")
    splits: dict[str, Utterances] = {name: Calls(name, options.join) for name in PARTS}
    least, most = options.join or KEYS_OF_A_CALL
    symbols = (" ", *KEYS) if options.units == CHARACTERS else KEYS
    return Sound(DTMF, "1", f"{DTMF}-{least}-{most}", RATE, options.units or LABELS, symbols, splits)


def _groups(clips: Sequence[Clip], join: tuple[int, int] | None, rounds: int) -> list[np.ndarray]:
    """Return the clips of every utterance: one each, or some of one speaker, each clip once a round."""
    if join is None:
        return [np.array([number]) for number in range(len(clips))]
    speakers: dict[str, list[int]] = defaultdict(list)
    for number, clip in enumerate(clips):
        speakers[clip.speaker].append(number)
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
