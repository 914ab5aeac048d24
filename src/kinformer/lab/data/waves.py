"""Sound as samples: files, sampling rates, and the tones of telephone keys."""

from __future__ import annotations

import struct
import wave
from contextlib import suppress
from math import ceil, gcd
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinformer.lab.data.formats import content_of
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import reading, require_file
from kinformer.runtime.tables import check_ratio

# Another sampling rate by a windowed sinc, for sound at once or piece by piece (Smith 2002, Digital Audio Resampling).
#
#     y(m) = sum over n of x(n) h(m from/to - n),   h(t) = c sinc(c t) cos^2(pi c t / 2 Z)   for |c t| < Z
#
# c is 0.94 of the lower rate by the old one, so that what the new rate cannot hold is cut off; Z = 12 zero crossings.

CROSSINGS, PASSED = 12, 0.94


class Resampler:
    """The conversion of sound of ``rate`` samples a second to ``to``. Fed in pieces it returns what it would for the
    whole.

    ``to / rate`` in lowest terms is n / o: every o samples that come give n, each by a filter of its own.
    """

    def __init__(self, rate: int, to: int) -> None:
        self.same = rate == to
        self.old, self.new = (item // gcd(rate, to) for item in (rate, to))
        # c: 0.94 of the lower rate's band, so that nothing beyond it is folded back.
        cut = PASSED * min(self.old, self.new) / self.old
        self.reach = ceil(CROSSINGS / cut)
        at = torch.arange(self.new, dtype=torch.float64)[:, None] * self.old / self.new
        distance = cut * (at - torch.arange(-self.reach, self.reach + self.old, dtype=torch.float64))
        window = (distance.clamp(-CROSSINGS, CROSSINGS) * torch.pi / (2 * CROSSINGS)).cos().square()
        # h(t) = c sinc(c t) cos^2(pi c t / 2 Z), one filter for each of the ``new`` phases
        self.filters = (cut * torch.sinc(distance) * window).float()[:, None]
        self._waiting = torch.zeros(self.reach)
        self._came = self._gave = 0

    def feed(self, samples: Tensor, last: bool = False) -> Tensor:
        """Return the new samples that follow from ``samples`` [time]; with ``last``
        all, ceil(time to / rate) samples in sum."""
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
"""What those who write to a pipe say that it holds, at least: as many bytes as there can be."""
_LEAST_SHARE = 0.99  # of MP3 the number of samples may be an estimate
_DAMAGED = ("is no sound that can be read", "record or convert it again")


class SoundInfo(NamedTuple):
    """The head of a sound file: samples a second, how many there are of each channel, and how many channels."""

    rate: int
    samples: int
    channels: int


def sound_info(path: str | Path) -> SoundInfo:
    """Return the head of a file, without its samples.

    Errors: ``KinformerError`` for a file that is missing, is no sound, holds none, or less than it says.
    """
    require_file(Path(path))
    with reading(path, *_DAMAGED):
        _require_length(Path(path))
        try:
            with wave.open(str(path), "rb") as file:
                info = _info(file)
        except (wave.Error, EOFError) as error:
            about = _by_soundfile(path, error, "info")
            info = SoundInfo(about.samplerate, about.frames, about.channels)
            check_ratio(path, 4 * info.samples * info.channels, Path(path).stat().st_size)
    if info.samples < 1:
        raise KinformerError(f"{path}: holds 0 samples; remove it or record it again.")
    if not 1 <= info.rate <= MOST_RATE:
        raise KinformerError(
            f"{path}: has {plural(info.rate, 'sample')} a second, but 1 to {MOST_RATE} are expected; record or "
            "convert it again."
        )
    return info


def read_sound(path: str | Path) -> tuple[np.ndarray, int]:
    """Return samples float32 [time] and their rate. Errors as of
    :func:`sound_info`, and for numbers that are not finite."""
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


def _info(file: wave.Wave_read) -> SoundInfo:
    if not 1 <= file.getsampwidth() <= 4:
        raise wave.Error(f"samples of {plural(file.getsampwidth(), 'byte')}")
    return SoundInfo(file.getframerate(), file.getnframes(), file.getnchannels())


def _require_length(path: Path) -> None:
    """Refuse a WAV that says it holds more than it does, which its readers would take as it is."""
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
    """A stream of WAV in parts, as from a microphone, up to the end of its samples; of a stream whose head does not
    know how many there are, all that comes.

    Errors: ``KinformerError`` where it does not begin as WAV of PCM does.
    """

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
        """Return the next samples float32 [time], this many seconds of them or the rest; none at the end."""
        wanted = max(1, round(seconds * self.rate)) * self._width * self._channels
        if self._left is not None:
            wanted = min(wanted, self._left)
        data = b""
        while len(data) < wanted and (piece := self._file.read(wanted - len(data))):
            data += piece
        if self._left is not None:
            self._left -= len(data)
        return _mixed(data, self._width, self._channels)


def _stream_head(file: IO[bytes]) -> tuple[int, int, int, int | None]:
    """Read a stream of WAV up to its samples; return their rate, the bytes of each, the channels, and how many bytes of
    samples follow (None where the head does not say)."""
    head = _exactly(file, 12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        raise wave.Error("file does not start with RIFF id" if head[:4] != b"RIFF" else "not a WAVE file")
    form = b""
    while True:
        name, length = struct.unpack("<4sI", _exactly(file, 8))
        if name == b"data":
            break
        chunk = _exactly(file, min(length, _FORM))
        for begin in range(len(chunk), length + length % 2, _SKIPPED):
            _exactly(file, min(_SKIPPED, length + length % 2 - begin))
        form = chunk if name == b"fmt " else form
    if len(form) < 16:
        raise wave.Error("the format of its samples is missing")
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    kind = struct.unpack("<H", form[24:26])[0] if kind == _EXTENSIBLE and len(form) == _FORM else kind
    if kind != _PCM:
        raise wave.Error(f"unknown format: {kind}")
    return rate, (bits + 7) // 8, channels, length if 0 < length < _ENDLESS else None


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (piece := file.read(size - len(data))):
            raise EOFError
        data += piece
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
    """Call soundfile for a file that is no WAV of PCM, because of ``why``, unless it is no sound at all."""
    what = content_of(Path(path))
    if what is not None and not what.startswith("sound"):
        raise KinformerError(f"{path}: is {what}, not sound; give WAV or FLAC.")
    try:
        import soundfile
    except ImportError:
        raise KinformerError(
            f"{path}: is no WAV of PCM samples ({_reason(why)}); other sounds need soundfile: "
            "pip install 'kinformer[audio]'."
        ) from None
    with suppress(soundfile.SoundFileError):
        return getattr(soundfile, does)(str(path), **options)
    raise KinformerError(f"{path}: is no sound that can be read ({_reason(why)}); give WAV or FLAC.") from None


def _reason(error: Exception) -> str:
    return str(error) or "it ends too soon"


DTMF = "dtmf"
RATE = 8000
LOW, HIGH = (697.0, 770.0, 852.0, 941.0), (1209.0, 1336.0, 1477.0, 1633.0)
PAD = ("123A", "456B", "789C", "*0#D")
KEYS = tuple("0123456789*#ABCD")
COUNTS = {"train": 8_000, "validation": 200, "test": 500}
TONE, PAUSE = (0.04, 0.16), (0.04, 0.2)
_SEEDS = {"train": 1, "validation": 2, "test": 3}
_AT = {key: (LOW[row], HIGH[column]) for row, keys in enumerate(PAD) for column, key in enumerate(keys)}


class Calls:
    """The sounds of telephone keys (dual-tone multi-frequency signalling, ITU-T Q.23, Q.24): sound without a file.

    A key is the sum of a low and a high tone. Calls are numbered; each has keys, durations of tones and pauses,
    levels and noise of its own, within what a receiver must bear: tones and pauses of 40 ms and more, frequencies
    1.5 % off, one tone up to 6 dB above the other, noise 10 to 40 dB below them.

    The calls of a split, of ``join`` keys (least and most; 3 to 7 if not given): see ``lab.data.sound.Utterances``.
    """

    def __init__(self, split: str, join: tuple[int, int] | None = None) -> None:
        self.split = split
        count, (least, most) = COUNTS[split], self.keys(join)
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

    @staticmethod
    def keys(join: tuple[int, int] | None) -> tuple[int, int]:
        """Return how many keys a call has, least and most."""
        return join or (3, 7)

    def samples(self, number: int) -> Tensor:
        """Return the samples of the call ``number``, float32 [time]."""
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
        """Return the keys with spaces between."""
        return " ".join(self._pressed(number))

    def name(self, number: int) -> str:
        """Return the name of the call ``number`` in messages."""
        return f"call {number} of {self.split}"

    def _pressed(self, number: int) -> list[str]:
        return [KEYS[key] for key in self.pressed[number, : self.counts[number]]]
