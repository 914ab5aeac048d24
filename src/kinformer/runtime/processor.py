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
