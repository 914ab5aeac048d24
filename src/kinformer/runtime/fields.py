"""Checks that options and settings have the types of their dataclass, and numbers in range, wherever they come from."""

from __future__ import annotations

import ast
import inspect
import math
import os
import textwrap
import types
import typing
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

from kinformer.runtime.errors import (
    KinformerError,
    marked,
    require,
    require_below_largest,
    require_finite_number,
    require_share,
)

C = typing.TypeVar("C")

_NAMES: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_NAMES |= {os.PathLike: "a path", Mapping: "a mapping"}

_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "dropout": (lambda value: 0 <= value < 1, "at least 0 and below 1"),
    "std": (lambda value: value >= 0, "0 or more"),
    "eps": (lambda value: value >= 0, "0 or more"),
    "base": (lambda value: value > 1, "above 1"),
    "head_dim": (lambda value: value >= 1, "1 or more"),
    "hidden_dim": (lambda value: value >= 1, "1 or more"),
    "chunks": (lambda value: value >= 1, "1 or more"),
}
"""The range of a number by its name, in every config. Outside its range a model cannot be built, or its outputs are not
finite."""


def require_ranges(values: Mapping[str, object]) -> None:
    """Raise where a number of a config is not finite, or outside the range of its name."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if isinstance(value, int):
            require_below_largest(name, value)
        if not math.isfinite(value):
            raise KinformerError(f"{name} must be a finite number, but is {value}.")
        inside, range_text = _RANGES.get(name, (None, ""))
        if inside is not None and not inside(value):
            raise KinformerError(f"{name} must be {range_text}, but is {value:g}.")


PATHS = (
    "data", "out", "prompt_file", "datastore", "retriever", "init", "tokenizer", "plot", "image", "audio",
    "language_model",
)  # fmt: skip
"""The names of options of paths, in all commands and tasks."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The base of options whose numbers are checked when the options are made. Its ``__post_init__`` ends the chain of
    ``super().__post_init__()`` calls.

    Every class of options may have ``LEAST``, the least values of its numbers by name, and ``SHARES``, the intervals of
    its shares of 1: ``{"holdout": "(0, 1)", "ema": "[0, 1]"}``.
    """

    LEAST: typing.ClassVar[Mapping[str, float]] = {}
    SHARES: typing.ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Raise for a number outside its limits, NaN, infinity, too large numbers, and an empty path, which would be
        the current folder."""
        for cls in type(self).__mro__:
            for name, least in vars(cls).get("LEAST", {}).items():
                require(name, getattr(self, name), least)
            for name, interval in vars(cls).get("SHARES", {}).items():
                require_share(name, getattr(self, name), zero=interval[0] == "[", one=interval[-1] == "]")
        for option in fields(self):
            value = getattr(self, option.name)
            if value == "" and option.name in PATHS:
                raise KinformerError(f"{marked(option.name)} is empty but must be a path; give one, or leave it out.")
            if isinstance(value, float):
                require_finite_number(option.name, value)
            elif isinstance(value, int):
                require_below_largest(marked(option.name), value)


def optional(*names: str) -> Callable[[type[C]], type[C]]:
    """Return a class decorator, to stand below ``@dataclass``, that makes the inherited fields ``names`` optional.

    An optional field is None until it is resolved. Type checkers see the field as its base declares it.
    """

    def decorate(cls: type[C]) -> type[C]:
        hints = typing.get_type_hints(cls, include_extras=True)
        for name in names:
            cls.__annotations__[name] = hints[name] | None
            setattr(cls, name, None)
        return cls

    return decorate


def require_types(options: object, declared: type, names: Container[str] | None = None) -> None:
    """Raise where the value of a field in ``options`` is not of the type that the dataclass ``declared`` declares;
    ``names``: check only these fields."""
    for name, kind in _plain_types(declared).items():
        if names is None or name in names:
            require_kind(name, getattr(options, name), *kind)


def require_kind(name: str, value: object, *kinds: object) -> None:
    """Raise where the option or argument ``name`` has a ``value`` of none of the types ``kinds``."""
    if not any(is_of_kind(value, kind) for kind in kinds):
        raise KinformerError(f"{marked(name)} is {value!r} but must be {' or '.join(map(kind_name, kinds))}.")


def require_list(name: str, values: object) -> None:
    """Raise where the argument ``name`` is not a list or tuple of texts or paths; a single text is an error too."""
    if not isinstance(values, list | tuple) or not all(isinstance(value, str | os.PathLike) for value in values):
        raise KinformerError(f"{marked(name)} is {values!r} but must be a list of texts, as in ['gpt', 'local'].")


def require_path(name: str, value: object) -> None:
    """Raise where the argument ``name`` is neither text nor a path, or is empty, which would be the current folder."""
    require_kind(name, value, str, os.PathLike)
    if value == "":
        raise KinformerError(f"the path of the {name} is empty; give the path of a file or folder.")


@cache
def _plain_types(declared: type) -> dict[str, tuple[object, ...]]:
    """Return the types of every field whose types are all plain, by name."""
    hints = typing.get_type_hints(declared)
    plain = {}
    for field in fields(declared):
        hint = hints[field.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = tuple(_without_items(kind) for kind in (typing.get_args(hint) if union else (hint,)))
        if all(kind in (*_NAMES, type(None)) or typing.get_origin(kind) is Literal for kind in kinds):
            plain[field.name] = kinds
    return plain


def _without_items(kind: object) -> object:
    """Return ``Mapping`` for ``Mapping[str, Any]``, and other types unchanged."""
    origin = typing.get_origin(kind)
    return origin if origin in _NAMES else kind


def is_of_kind(value: object, kind: object) -> bool:
    """Return whether ``value`` is of the plain type ``kind``; a whole number is a number, and a bool is neither."""
    if typing.get_origin(kind) is Literal:
        return any(value == item and type(value) is type(item) for item in typing.get_args(kind))
    if isinstance(value, bool):
        return kind is bool
    return isinstance(kind, type) and isinstance(value, (int, float) if kind is float else kind)


def kind_name(kind: object) -> str:
    """Return the name of the plain type ``kind`` in messages."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    return "left out" if kind is type(None) else _NAMES[kind]


@cache
def field_docs(cls: type) -> Mapping[str, str]:
    """Return the text under every field of a dataclass and of its bases, by name, as one line; a class without source
    code adds nothing."""
    docs: dict[str, str] = {}
    for part in filter(is_dataclass, reversed(cls.__mro__)):
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        except (OSError, TypeError):  # the class was made without a source
            continue
        assert isinstance(definition, ast.ClassDef)
        for pair in pairwise(definition.body):
            match pair:
                case (ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text)))):
                    docs[name] = " ".join(text.split())
    return docs
