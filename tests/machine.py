"""What results can be held to on the processor that runs the suite, and other processors put in its place."""

from pathlib import Path

from kinformer.runtime import process as processor

FLAGS = {"AMX": "avx512f avx512_bf16 amx_tile amx_bf16", "AVX-512 and bfloat16": "avx512f avx512_bf16", "other": "avx2"}
"""Flags of a processor of each class of the measured tables."""


def pretend(name):
    """Have the library take this processor for one of the class ``name``; call this before kernels are imported."""
    flags = f"flags\t\t: fpu {FLAGS[name]}\n"
    processor.processor = lambda: flags
    processor.processor_class.cache_clear()
    processor._EMULATED = processor.emulates_bfloat16()


def product_tolerance(setting):
    """rtol and atol of float32 products under ``setting`` of ``torch.set_float32_matmul_precision`` here.

    Any setting but "highest" allows bfloat16 (8 bits of mantissa) where the processor multiplies tiles of it.
    """
    try:
        real = Path("/proc/cpuinfo").read_text()
    except OSError:
        real = "amx_tile"
    narrow = setting != "highest" and "amx_tile" in real
    return {"rtol": 2e-2, "atol": 2e-2} if narrow else {"rtol": 1e-4, "atol": 1e-5}
