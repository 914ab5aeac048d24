"""A causal model's step of one token as a package of machine code, which PyTorch's AOTInductor compiles ahead of time.

The package holds the weights. It runs without a compiler, on the kind of processor and with the version of PyTorch that
it was made on. It checks no argument, so its callers do.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinformer.core.model import CausalModel
from kinformer.interop.graphs.flat import FlatStep, captured, without_notes
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import checksum

FILE = "model.pt2"
COMPILERS = ("g++", "clang++", "c++")
Step = Callable[..., list[Tensor]]


def require_compiler() -> None:
    """Raise where no C++ compiler is installed, which making a package takes and running one does not."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    if not any(map(shutil.which, names)):
        raise KinformerError(
            f"`format` aoti: needs a C++ compiler, but {' or '.join(names)} is not installed here; install g++, or "
            "export on another machine with this kind of processor."
        )


def machine() -> dict[str, str]:
    """Return what a package is made for: PyTorch's version, the processor, and what vectors it has."""
    return {
        "torch": torch.__version__,
        "processor": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def write_package(model: CausalModel, folder: Path) -> dict[str, Any]:
    """Compile the step of ``model`` for one sequence into ``folder``; return the facts of the file.

    Errors: ``KinformerError`` for a model that is no graph, and where the compiler fails.
    """
    step = FlatStep(model, {})
    program = captured(step, rows=1, tokens=1)
    try:
        with without_notes():
            torch._inductor.aoti_compile_and_package(program, package_path=str(folder / FILE))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise KinformerError(f"AOTInductor cannot compile this model; it says: {lines[0]}") from error
    return {
        "file": FILE,
        "sha256": checksum(folder / FILE),
        "machine": machine(),
        "state": [leaf.facts for leaf in step.leaves],
    }


def load_package(path: Path, facts: Mapping[str, Any]) -> Step:
    """Return the step (token [1, 1], leaves) -> [logits, leaves] of the package at ``path``, which has these ``facts``.

    Errors: ``KinformerError`` for a file that is another one, or was made for another machine.
    """
    current = machine()
    for name, made_for in facts["machine"].items():
        if current.get(name) != made_for:
            raise KinformerError(
                f"{path}: was made for {name} {made_for}, but here is {current.get(name)}; export the run again, here."
            )
    if checksum(path) != facts["sha256"]:
        raise KinformerError(f"{path}: is not the file that was exported (its checksum differs); export the run again.")
    loaded: Step = torch._inductor.aoti_load_package(str(path))
    return loaded
