"""Operators of generation steps on a CPU in C (``native.c``): products of few rows, and attention of one query.

A step of one token reads every weight once. PyTorch's products of one row reach a fraction of the memory's bandwidth
in 16 and 8 bits, and each of the small operators around them takes microseconds to begin. The machine's C compiler
compiles the file once for the processor at hand, in a second; the library stays in the user's cache. Where no compiler
is installed, PyTorch's own operators are used.

``benchmarks/llama_cpp.py`` keeps them: with PyTorch's own operators a token took 1.9 to 4.4 times as long as in
llama.cpp in 16 and 8 bits, and with these it takes what ``llama_cpp.json`` says. Delete both files when PyTorch's
operators take at most 1.2 times as long.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.runtime.compiling import constant
from kinformer.runtime.files import default_cache
from kinformer.runtime.process import processor

LANES = 16
"""Rows of weights that are stored side by side."""
_OPTIONS = "-O3 -march=native -fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno -shared -fPIC"
_DEFINED = torch.library.Library("kinformer_step", "DEF")
_DEFINED.define("product(Tensor x, Tensor w, int out, Tensor scales, Tensor bias) -> Tensor")
_DEFINED.define("chain(Tensor(a!)[] tensors, Tensor program) -> Tensor")
_DEFINED.define("attend(Tensor(a!)[] tensors, float scale, bool pairs) -> Tensor")  # in chains alone
NONE = torch.empty(0)
"""The value of a tensor argument that a call leaves out."""
_OPERATORS = torch.ops.kinformer_step
product, chain, attend = _OPERATORS.product.default, _OPERATORS.chain.default, _OPERATORS.attend.default


def pack(matrix: Tensor) -> Tensor:
    """Return ``matrix`` [rows, columns] as the operator reads it, [spans, columns / step, LANES, step], with zeros
    behind its last row and column: span by span, column by column, in 16 and 8 bits ``step`` = 2 columns at a time."""
    step = 1 if matrix.dtype == torch.float32 else 2
    matrix = functional.pad(matrix, (0, -matrix.shape[1] % step, 0, -len(matrix) % LANES))
    return matrix.view(-1, LANES, matrix.shape[1] // step, step).transpose(1, 2).contiguous()


def unpack(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Return the matrix [rows, columns] of :func:`pack`."""
    return packed.transpose(1, 2).reshape(len(packed) * LANES, -1)[:rows, :columns]


@constant
def is_native() -> bool:
    """Return whether the operators run in C; the first call compiles them where no earlier process has."""
    return _registered()


@cache
def _registered() -> bool:
    try:
        return ctypes.CDLL(str(_compiled())).enter() == 0
    except (OSError, AttributeError):
        return False


def _compiled() -> Path:
    """Return the compiled library, from the user's cache or new. Where this compiler cannot compile it, an empty file
    stands for it from then on, which no process can load.

    Errors: ``OSError`` where no file can be made.
    """
    source, libraries = Path(__file__).with_suffix(".c"), Path(torch.__file__).parent / "lib"
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler is installed")
    flags = next((line for line in (processor() or "").splitlines() if line.startswith("flags")), "")
    code, date = source.read_text(encoding="utf-8"), os.stat(compiler).st_mtime_ns
    facts = (code, _OPTIONS, compiler, date, flags, torch.__version__, str(libraries))
    name = f"step-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    stored = default_cache() / "native" / name
    if stored.exists():
        return stored
    stored.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=stored.parent) as folder:
        made = Path(folder) / name
        command = [compiler, *_OPTIONS.split(), "-o", str(made), str(source), "-lm", f"-L{libraries}", "-ltorch_cpu"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        except subprocess.SubprocessError:
            made.write_bytes(b"")
        os.replace(made, stored)  # at once, for processes that look for it now
    return stored
