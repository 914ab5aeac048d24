"""The options that commands share. Free of PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Annotated, TypeVar

import tyro

from kinformer.lab.cli.parsing import overrides
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError, nearest, require, require_seed
from kinformer.runtime.fields import Checked, require_types

Member = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MEMBER")]
RunFolder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
RunFolders = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
Inputs = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE|FOLDER|-")]
Changes = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH=VALUE")]
Hidden = Annotated[Mapping[str, object], tyro.conf.Suppress]

__all__ = [
    "Changes",
    "CommonOptions",
    "Hidden",
    "Inputs",
    "Member",
    "Printing",
    "RunFolder",
    "RunFolders",
    "options_as",
    "require",
]

O = TypeVar("O")


@dataclass(frozen=True, kw_only=True)
class Printing(Checked):
    """The options of printing, which every command takes."""

    json: bool = False
    """Print one JSON object instead of text."""
    quiet: bool = False
    """Print only the result, without progress or notes."""
    verbose: bool = False
    """Print more: versions, device and threads at first, time and memory at the end, and after an error its traceback
    and, with several processes, PyTorch's messages."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Read options by name from this file, as in: batch_size = 16. Options on the command line take precedence."""


@dataclass(frozen=True, kw_only=True)
class CommonOptions(Printing):
    """The options that every command with random numbers takes."""

    seed: int = 0
    """The seed of all random numbers."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        super().__post_init__()


def options_as(request: type[O], options: object) -> O:
    """Return the ``request`` that a command's ``options`` describe; its ``set`` maps paths to values."""
    values = {field.name: getattr(options, field.name) for field in fields(request)}  # type: ignore[arg-type]
    if "set" in values:
        changes = overrides(values["set"])
        values["set"] = {path: value for path, value in changes.items() if not path.startswith(TRAINING)}
        values |= _training_settings(
            request, {path: value for path, value in changes.items() if path.startswith(TRAINING)}
        )
    return request(**values)


TRAINING = "training."
"""Where ``--set`` has the settings of training."""


def _training_settings(request: type, changes: Mapping[str, str]) -> dict[str, object]:
    """Return the settings of training among the changes, by name, as JSON values or text."""
    names = {field.name for field in fields(Settings)} & {field.name for field in fields(request)}
    values: dict[str, object] = {}
    for path, text in changes.items():
        name = path.removeprefix(TRAINING)
        if name not in names:
            raise KinformerError(f"`set` {path}: is no setting of training here; {nearest(name, names)}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    require_types(SimpleNamespace(**{field.name: field.default for field in fields(Settings)} | values), Settings)
    return values
