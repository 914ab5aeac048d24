"""The errors of Kinformer, as sentences for its users, and the checks of options and settings that raise them.

Every message is one sentence with the value, the expectation, the place and the remedy. A message marks the names of
options with backticks, as in "`max_bytes` is 0". A reader in Python sees ``max_bytes``, a reader of the command line
``--max-bytes`` (:func:`spelled`).
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Literal

_MARKED = re.compile(r"(?<!`)`([a-z][a-z0-9_]*)`(?!`)")
_CHANGE = re.compile(r"""(?<!`)`set` ('?)([\w.*:]+)=(.+?)\1(?=[,;:.)]*(?:\s|$))""")
_AS_FLAGS: ContextVar[bool] = ContextVar("as_flags", default=False)


class KinformerError(ValueError):
    """Something that a user can cause and mend; the command line prints it and exits with 2."""

    def __str__(self) -> str:
        return spelled(self.message)

    @property
    def message(self) -> str:
        """Return the sentence with its marks."""
        return super().__str__()


def marked(name: str) -> str:
    """Return the option ``name`` as messages mark it."""
    return f"`{name}`"


RARE = (
    "min_lr_ratio", "layer_decay", "momentum", "beta2", "table_lr", "checkpoint_minutes", "keep", "async_saves",
    "log_every", "stages", "plateau_factor", "plateau_patience",
)  # fmt: skip
"""Rarely changed settings of training: the command line sets them by path (`set`), without flags."""

FORMER = {"max_items": "first", "max_bytes": "first", "limit": "first", "lengths": "contexts"}
"""Former names of options, which still work, and the names of today."""


def today(name: str, names: Collection[str]) -> str:
    """Return the name of today for an option's former ``name`` where ``names`` has the former one no more."""
    return FORMER[name] if name not in names and FORMER.get(name) in names else name


def flag_of(name: str) -> str:
    """Return the option ``name`` on the command line: ``batch_size`` is ``--batch-size``, and the rarely changed
    ``beta2`` is ``--set training.beta2``; a value may follow both after an equals sign."""
    return f"{flag_of('set')} training.{name}" if name in RARE else f"--{name.rstrip('_').replace('_', '-')}"


def spelled(message: str) -> str:
    """Return ``message`` with the marked options spelled as Python arguments, or inside :func:`as_flags` as flags."""
    if _AS_FLAGS.get():
        return _MARKED.sub(lambda match: flag_of(match[1]), message)
    return _MARKED.sub(r"\1", _CHANGE.sub(_change, message).replace("} set={", ", "))


def _change(match: re.Match[str]) -> str:
    """Return a change of a config, ``set`` path=value, as Python has it."""
    _, path, value = match.groups()
    if value in ("true", "false", "null"):
        value = {"true": "True", "false": "False", "null": "None"}[value]
    elif re.match(r"[A-Za-z_][\w-]*$", value):
        value = f'"{value}"'
    return f'set={{"{path}": {value}}}'


@contextmanager
def as_flags(wanted: bool = True) -> Iterator[None]:
    """Spell options in messages as flags within the context, or, unless ``wanted``, as Python arguments."""
    token = _AS_FLAGS.set(wanted)
    try:
        yield
    finally:
        _AS_FLAGS.reset(token)


MOST_NAMES = 60
"""The most names that a message lists where none is near."""


def close_names(word: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """Return the names that resemble ``word``, the nearest first."""
    # A word of more than 2.28 times the letters of a name cannot reach the cutoff; a word may have millions of letters.
    comparable = [name for name in names if len(word) < 2.3 * len(name)]
    return get_close_matches(word, comparable, n=limit, cutoff=0.61) if comparable else []


def nearest(word: str, names: Iterable[str], limit: int = 3) -> str:
    """Return the valid names nearest to ``word`` for a message, or all names if none is near and they are few."""
    names = sorted(set(names))
    close = close_names(word, names, limit)
    if len(names) > MOST_NAMES and not close:
        close = get_close_matches(word[:99], names, n=limit, cutoff=0.0)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "valid names are " + ", ".join(names) + "." if names else "it has none."


def choose(word: str, names: Iterable[str], place: str) -> str:
    """Return ``word`` if it is one of ``names``, else raise a :class:`KinformerError` that names the nearest."""
    names = list(names)
    if word not in names:
        raise KinformerError(f"{place}: {word!r} is unknown; {nearest(word, names)}")
    return word


def memory_sentence(error: BaseException) -> str | None:
    """Return the message for an ``error`` of NumPy or PyTorch that means a lack of memory; None for any other."""
    text = str(error)
    lacking = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and re.search(r"can't allocate memory|out of memory|overflowed", text)
    )
    if not lacking:
        return None
    size = re.search(r"tried to allocate ([\d.]+ ?(?:[KMGT]iB|bytes))", text)
    amount = f" for {size[1]} at once" if size else ""
    return f"there is not enough memory{amount}; take smaller sizes, such as `length` or `batch_size`."


def require_finite(finite: bool, where: str = "") -> None:
    """Raise for predictions with NaN or infinity, as of damaged weights; ``where`` names the place."""
    if not finite:
        raise KinformerError(
            f"the model's predictions are not finite numbers{where}; its weights are damaged or diverged."
        )


def require_finite_number(option: str, value: float | None) -> None:
    """Raise a :class:`KinformerError` when the ``value`` of ``option`` is infinite or no number at all."""
    if isinstance(value, int):  # which may be too large for a float
        require_below_largest(marked(option), value)
    elif value is not None and not math.isfinite(value):
        raise KinformerError(f"{marked(option)} is {value:g} but must be a finite number.")


def require(option: str, value: float | None, least: float, most: float | None = None) -> None:
    """Raise a :class:`KinformerError` unless ``value`` is finite, ``least`` or more, and ``most`` at most."""
    require_finite_number(option, value)
    if value is not None and value < least:
        raise KinformerError(f"{marked(option)} is {value:g} but must be {least:g} or more.")
    if value is not None and most is not None and value > most:
        raise KinformerError(f"{marked(option)} is {value:g} but must be at most {most:,}.")


LARGEST = 2**63
"""The bound of whole numbers, which must fit into the integers of tensors."""


def require_below_largest(name: str, value: int) -> None:
    """Raise a :class:`KinformerError` when the whole number ``value`` of ``name`` is none of 64 bits."""
    if abs(value) >= LARGEST:
        raise KinformerError(f"{name} is {Decimal(value).normalize():.4g} but must be below 2^63.")


def require_seed(value: int | None) -> None:
    """Raise a :class:`KinformerError` where a seed of random numbers is negative or wider than 63 bits."""
    require("seed", value, 0)
    if value is not None:
        require_below_largest(marked("seed"), value)


def require_above(option: str, value: float | None, bound: float) -> None:
    """Raise a :class:`KinformerError` when the ``value`` of ``option`` is not above ``bound`` or no finite number."""
    require_finite_number(option, value)
    if value is not None and value <= bound:
        raise KinformerError(f"{marked(option)} is {value:g} but must be above {bound:g}.")


def require_share(option: str, value: float | None, zero: bool = False, one: bool = False) -> None:
    """Raise a :class:`KinformerError` unless ``value`` is above 0 (``zero``: or 0) and below 1 (``one``: or 1)."""
    if value is not None and not (0 < value < 1 or (zero and value == 0) or (one and value == 1)):
        least, most = "at least" if zero else "above", "at most" if one else "below"
        limits = "lie between 0 and 1" if zero and one else f"be {least} 0 and {most} 1"
        raise KinformerError(f"{marked(option)} is {value:g} but must {limits}.")


# How a count and its noun are written in a message.


def plural(count: int, noun: str) -> str:
    """Return ``count`` with its regular ``noun``, in the plural unless the count is 1."""
    if count != 1:
        noun = re.sub(r"(?<=[^aeou])y$", "ie", re.sub(r"(s|x|ch)$", r"\1e", noun)) + "s"
    return f"{count:,} {noun}"


# Checks that options and settings have the types of their dataclass, and numbers in range, wherever they come from.

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
    "convolution": (lambda value: value == 0 or value >= 2, "2 or more, or 0 for none"),
}
"""The range of a number by its name, in every config. Outside of it models are not built, or outputs are not finite."""


def require_ranges(values: Mapping[str, object], least: Mapping[str, float], above: Mapping[str, float]) -> None:
    """Raise where a number of a config is not finite, or outside the range of its name, ``least`` or ``above``."""
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
        if value < least.get(name, -math.inf):
            raise KinformerError(f"{name} must be {least[name]} or more, but is {value}.")
        if value <= above.get(name, -math.inf):
            raise KinformerError(f"{name} must be above {above[name]}, but is {value}.")


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
        """Raise for a number outside its limits or not finite, and for an empty path, which is the current folder."""
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
    """Raise where a field of ``options`` is not of its type in the dataclass ``declared``; ``names``: only these."""
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
        kinds = tuple(  # ``Mapping`` for ``Mapping[str, Any]``
            origin if (origin := typing.get_origin(kind)) in _NAMES else kind
            for kind in (typing.get_args(hint) if union else (hint,))
        )
        if all(kind in (*_NAMES, type(None)) or typing.get_origin(kind) is Literal for kind in kinds):
            plain[field.name] = kinds
    return plain


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
    """Return the text under every field of a dataclass and its bases, by name; without source code there is none."""
    docs: dict[str, str] = {}
    for part in filter(is_dataclass, reversed(cls.__mro__)):
        try:
            source = inspect.getsource(sys.modules[part.__module__])
        except (KeyError, OSError, TypeError):  # the class was made without a source
            continue
        for pair in pairwise(_classes(source).get(part.__qualname__, ())):
            match pair:
                case (ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text)))):
                    docs[name] = " ".join(text.split())
    return docs


@cache
def _classes(source: str) -> Mapping[str, Sequence[ast.stmt]]:
    """Return the statements of the classes in a module's source, by qualified name. ``inspect.getsource`` of a class
    parses the whole module each time, which took half of the start of a command."""
    bodies: dict[str, Sequence[ast.stmt]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                bodies[prefix + child.name] = child.body
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.stmt):
                visit(child, prefix)

    visit(ast.parse(source), "")
    return bodies
