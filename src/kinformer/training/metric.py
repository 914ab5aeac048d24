"""A metric by which a model is evaluated: its name, its unit, and whether less of it is better."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

SHARE = "share"


@dataclass(frozen=True)
class Metric:
    """A metric: ``name`` as in records (``bits_per_byte``); ``unit`` as it is read
    ("bits per byte"), SHARE for a share of 1."""

    name: str
    unit: str
    lower_is_better: bool = True

    def better(self, value: float, than: float) -> bool:
        """Return whether ``value`` is better than another; a value that is not finite never is."""
        return isfinite(value) and (value < than if self.lower_is_better else value > than)

    def text(self, value: float) -> str:
        """Return ``value`` with its unit: ``1.2345 bits per byte``, ``accuracy 51.2%``."""
        return f"{self.name.replace('_', ' ')} {value:.1%}" if self.unit == SHARE else f"{value:.4f} {self.unit}"


ACCURACY = Metric("accuracy", SHARE, lower_is_better=False)
SEQUENCE_ACCURACY = Metric("sequence_accuracy", SHARE, lower_is_better=False)
CALIBRATION_ERROR = Metric("calibration_error", SHARE)
BITS_PER_BYTE = Metric("bits_per_byte", "bits per byte")
BITS_PER_LABEL = Metric("bits_per_label", "bits per label")
BITS_PER_ACTION = Metric("bits_per_action", "bits per action")
ACTION_ERROR = Metric("action_error", "mean squared error of actions")
RETURN = Metric("mean_return", "mean return", lower_is_better=False)
BITS_PER_DIM = Metric("bits_per_dim", "bits per dimension")
BITS_PER_SYMBOL = Metric("bits_per_symbol", "bits per symbol")
ERROR_RATE = Metric("error_rate", SHARE)
BLEU = Metric("bleu", "BLEU", lower_is_better=False)
CHRF = Metric("chrf", "chrF2", lower_is_better=False)


def bits_per_masked(unit: str) -> Metric:
    """Return the metric of masked tokens, by what a token is: a byte, or a tokenizer's token."""
    return Metric(f"bits_per_masked_{unit}", f"bits per masked {unit}")


def flops(count: float) -> str:
    """Return ``count`` operations in thousands, millions, ...: 7.62 M."""
    for unit in ("", "K", "M", "G", "T"):
        if count < 1000:
            return f"{count:.3g} {unit}".rstrip()
        count /= 1000
    return f"{count:.3g} P"


def size(count: float) -> str:
    """Return ``count`` bytes in the binary unit that suits it: 512 B, 32.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
