"""Sound files as samples: WAV (PCM of 8 to 32 bits) by the standard library, all else by soundfile (extra ``audio``).

Samples are float32 from -1 to 1; channels are mixed into one by their mean.
"""

from __future__ import annotations

import struct
import wave
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from kinformer.data.formats import content_of
from kinformer.runtime.archives import check_ratio
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import reading, require_file
from kinformer.runtime.words import plural

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
