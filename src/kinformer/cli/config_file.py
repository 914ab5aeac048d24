"""``--config run.toml``: options in a file, by their names.

member = "gpt"
data = "book.txt"
batch_size = 16
set = {dim = 256, "layers.*.dropout" = 0.1}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kinformer.cli.form import bare, is_positional
from kinformer.runtime.errors import RARE, KinformerError, nearest
from kinformer.runtime.files import require_file
from kinformer.runtime.parsing import parse_toml


def read(path: str, valid_names: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Return positional arguments by name, and the options as arguments; ``valid_names`` are all, with their types."""
    require_file(Path(path))
    try:
        settings = parse_toml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise KinformerError(f"--config {path}: cannot be read ({error.strerror}); give a TOML file.") from None
    except ValueError as error:
        raise KinformerError(f"--config {path}: is not TOML ({error}); write name = value in each line.") from None
    positional: dict[str, object] = {}
    arguments: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if name in RARE and "set" in valid_names:
            raise KinformerError(f'{path}: {name!r} is rarely changed; write set = {{"training.{name}" = {value}}}.')
        if flag not in valid_names or flag == "config":
            raise KinformerError(f"{path}: {name!r} is not an option; {nearest(flag, set(valid_names) - {'config'})}")
        place, hint = f"{path}: {name}", bare(valid_names[flag])
        if is_positional(valid_names[flag]):
            values = [_text(place, item) for item in value] if isinstance(value, list) else [_text(place, value)]
            positional[flag.replace("-", "_")] = tuple(values) if hint == tuple[str, ...] else " ".join(values)
        elif hint is bool:
            arguments += _switch(place, flag, value)
        else:
            arguments += [f"--{flag}={text}" for text in _texts(place, value)]
    return positional, arguments


def _switch(place: str, flag: str, value: object) -> list[str]:
    if not isinstance(value, bool):
        raise KinformerError(f"{place} is {value!r} but must be true or false.")
    return [f"--{flag}"] if value else []


def _texts(place: str, value: object) -> list[str]:
    """Return an option's value as it is written on the command line; of a list or a table, one text for each item."""
    if isinstance(value, dict):
        return [f"{path}={_setting(item)}" for path, item in value.items()]
    return [_text(place, item) for item in value] if isinstance(value, list) else [_text(place, value)]


def _setting(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _text(place: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise KinformerError(f"{place} is {value!r} but must be a text or a number.")
    return str(value)
