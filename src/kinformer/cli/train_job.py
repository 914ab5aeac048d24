"""What ``kinformer train`` is to do, checked and written down before anything is trained."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from kinformer.cli.train_begin import begin
from kinformer.cli.train_data import data_of, rows_of
from kinformer.cli.train_new import begun
from kinformer.cli.train_resume import resumed
from kinformer.core.errors import KinformerError
from kinformer.family.runs import Run
from kinformer.training.checkpoint import Checkpoints
from kinformer.training.feeds import Feed
from kinformer.training.settings import Settings

if TYPE_CHECKING:
    from kinformer.cli.train_options import Options


@dataclass(frozen=True)
class Job:
    """A run folder that is ready, and how to train in it. Plain enough to be sent to other processes."""

    run: Run
    settings: Settings
    device: str
    strategy: Literal["ddp", "fsdp"]
    threads: int | None

    def feed(self) -> Feed:
        """The rows of the run's task, as ids of its tokenizer."""
        return rows_of(self.run, self.settings, data_of(self.run), self.device)

    def model(self) -> Any:
        """The model as the run begins: new, or with the weights of the run that it was told to begin with."""
        model = self.run.build()
        init = self.run.data.get("init")
        if init and not Checkpoints(self.run.folder / "checkpoints", 1).steps():
            begin(model, self.run, init)
        return model


def device_type(device: str) -> str:
    """The type that the option ``device`` means, such as "cpu"."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device.split(":")[0]


def prepare(options: Options) -> Job:
    """Check everything that can be checked, write the run folder's config, and say what is to be done."""
    if options.compile:
        _require_compiler()
    device = device_type(options.device)
    if device == "cuda" and options.devices > torch.cuda.device_count():
        raise KinformerError(
            f"--devices {options.devices}: there are {torch.cuda.device_count()} GPUs; ask for fewer, or --device cpu."
        )
    run, settings = resumed(options) if options.resume else begun(options, device)
    return Job(run, settings, device, options.strategy, options.threads)


def _require_compiler() -> None:
    """torch.compile writes C++ for a CPU; without a compiler it would fail in the midst of the first step."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise KinformerError(
            f"--compile: the C++ compiler {compiler!r} is not there; install it, set CXX, or leave --compile out."
        )
