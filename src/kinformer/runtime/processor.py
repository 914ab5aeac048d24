"""The processor at hand: the flags that Linux reports, and the class that measured tables are keyed by."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def processor() -> str | None:
    """Return Linux's description of the processor, its flags among it; None where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None


@cache
def processor_class() -> str:
    """Return the key of tables by processor: ``AMX``, ``AVX-512 and bfloat16`` or ``other``, by the flags."""
    flags = processor() or ""
    return "AMX" if "amx_tile" in flags else "AVX-512 and bfloat16" if "avx512_bf16" in flags else "other"


def has_amx() -> bool:
    """Return whether this x86 processor has AMX tiles; True where that cannot be determined."""
    return processor() is None or processor_class() == "AMX"


def emulates_bfloat16() -> bool:
    """Return whether this is an x86 processor without bfloat16 products, which are then several times slower than
    float32 products; False if that cannot be determined."""
    flags = processor() or ""
    return "sse2" in flags and processor_class() == "other" and "avx_ne_convert" not in flags


def multiplies_int8(device: str) -> bool:
    """Return whether PyTorch's int8 products are exact and faster than float32 products on the device, a kind such as
    ``cpu``."""
    return device == "cpu" and _has_vnni()


@cache
def _has_vnni() -> bool:
    import torch

    flags = processor() or ""
    return torch.backends.mkldnn.is_available() and ("avx512_vnni" in flags or "avx_vnni" in flags)
