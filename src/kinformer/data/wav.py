"""Sound files as samples: WAV (PCM of 8 to 32 bits) by the standard library, all else by soundfile (extra ``audio``).

Samples are float32 from -1 to 1; channels are mixed into one by their mean.
"""

from __future__ import annotations

import wave
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from kinformer.data.files import reading
from kinformer.runtime.errors import KinformerError

ENDINGS = (".wav", ".flac", ".ogg", ".mp3")


class SoundInfo(NamedTuple):
    """Of a file: samples a second, how many there are of each channel, and how many channels."""

    rate: int
    samples: int
    channels: int


def sound_info(path: str | Path) -> SoundInfo:
    """What a file says of itself, without its samples.

    Errors: ``KinformerError`` for a file that is missing, is no sound, or holds none.
    """
    with reading(path):
        try:
            with wave.open(str(path), "rb") as file:
                result = SoundInfo(file.getframerate(), file.getnframes(), file.getnchannels())
        except (wave.Error, EOFError) as error:
            info = _by_soundfile(path, error, "info")
            result = SoundInfo(info.samplerate, info.frames, info.channels)
    if result.samples < 1:
        raise KinformerError(f"{path}: holds 0 samples; remove it or record it again.")
    return result


def read_sound(path: str | Path) -> tuple[np.ndarray, int]:
    """Samples float32 [time] and their rate. Errors as of :func:`sound_info`."""
    with reading(path):
        try:
            with wave.open(str(path), "rb") as file:
                samples = _mixed(file.readframes(file.getnframes()), file.getsampwidth(), file.getnchannels())
                rate = file.getframerate()
        except (wave.Error, EOFError) as error:
            sound, rate = _by_soundfile(path, error, "read", dtype="float32", always_2d=True)
            samples = sound.mean(1)
    if not len(samples):
        raise KinformerError(f"{path}: holds 0 samples; remove it or record it again.")
    return samples, rate


class WavStream:
    """WAV that comes bit by bit, as from a microphone, whatever its head says of its length.

    Errors: ``KinformerError`` where it does not begin as WAV of PCM does.
    """

    def __init__(self, file: IO[bytes], place: str = "standard input") -> None:
        try:
            self._wave = wave.open(file, "rb")  # noqa: SIM115 (it belongs to the caller, who goes on reading)
        except (wave.Error, EOFError) as error:
            raise KinformerError(
                f"{place}: is no WAV of PCM samples ({_reason(error)}); convert it, as by ffmpeg -i SOUND -f wav -."
            ) from None
        self._file, self.rate = file, self._wave.getframerate()
        self._step = self._wave.getsampwidth() * self._wave.getnchannels()

    def read(self, seconds: float) -> np.ndarray:
        """The next samples float32 [time], so many seconds of them or what is left; none at the end."""
        wanted = max(1, round(seconds * self.rate)) * self._step
        data = b""
        while len(data) < wanted and (piece := self._file.read(wanted - len(data))):
            data += piece
        return _mixed(data, self._wave.getsampwidth(), self._wave.getnchannels())


def _mixed(data: bytes, width: int, channels: int) -> np.ndarray:
    """PCM of ``width`` bytes a sample as float32 [time]; what is left of a sample that was cut off is dropped."""
    raw = np.frombuffer(data[: len(data) // (width * channels) * width * channels], np.uint8)
    if width == 1:
        values = (raw.astype(np.float32) - 128) / 128
    else:
        whole = np.zeros((len(raw) // width, 4), np.uint8)
        whole[:, 4 - width :] = raw.reshape(-1, width)
        values = whole.reshape(-1).view("<i4").astype(np.float32) / 2**31
    return values.reshape(-1, channels).mean(1)


def _by_soundfile(path: str | Path, why: Exception, does: str, **options: Any) -> Any:
    """What soundfile finds in a file that is no WAV of PCM, because of ``why``."""
    try:
        import soundfile
    except ImportError:
        raise KinformerError(
            f"{path}: is no WAV of PCM samples ({_reason(why)}); other sounds need soundfile: "
            "pip install 'kinformer[audio]'."
        ) from None
    with suppress(soundfile.LibsndfileError):
        return getattr(soundfile, does)(str(path), **options)
    raise KinformerError(f"{path}: is no sound that can be read ({_reason(why)}); give WAV or FLAC.") from None


def _reason(error: Exception) -> str:
    return str(error) or "it ends too soon"
