"""The options that commands share. Free of PyTorch until :meth:`Computing.device_of` is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    import torch

Member = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MEMBER")]
RunFolder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
RunFolders = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]
Count = Annotated[int | None, tyro.conf.arg(metavar="N")]
Number = Annotated[float | None, tyro.conf.arg(metavar="X")]
Context = Annotated[str | None, tyro.conf.arg(metavar="N|carried")]
Changes = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH=VALUE")]


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    json: bool = False
    """Print one JSON object instead of text."""
    seed: int = 0
    """Decides everything random."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a command computes."""

    device: str = "auto"
    """cpu, cuda, cuda:1, ... ; auto takes a GPU if there is one."""
    threads: Count = None
    """CPU threads (PyTorch's own choice if not given)."""

    def prepare(self, seed: int) -> torch.device:
        """The device, after setting the threads and PyTorch's global seed."""
        import torch

        if self.threads is not None:
            require("--threads", self.threads, 1)
            torch.set_num_threads(self.threads)
        require("--seed", seed, 0)
        torch.manual_seed(seed)
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise KinformerError(f"--device {self.device}: cannot be used here ({reason}); use cpu or auto.") from None
        return device


@dataclass(frozen=True, kw_only=True)
class Computing(Machine, Common):
    """What every command that computes takes."""


def require(flag: str, value: float | None, least: float) -> None:
    """Raise a :class:`KinformerError` when an option's ``value`` is below ``least``."""
    if value is not None and not value >= least:
        raise KinformerError(f"{flag} is {value:g} but must be {least:g} or more.")
