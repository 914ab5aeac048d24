"""The errors of Kinformer, as sentences for its users."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from difflib import get_close_matches

# The errors of Kinformer, as sentences for its users.
#
# Every message is one sentence with the value, the expectation, the place and the remedy. A message marks the names of
# options with backticks, as in "`max_bytes` is 0". A reader in Python sees ``max_bytes``, a reader of the command line
# ``--max-bytes`` (:func:`spelled`).

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


def close_names(word: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """Return the names that resemble ``word``, the nearest first."""
    # A word of more than 2.28 times the letters of a name cannot reach the cutoff; a word may have millions of letters.
    comparable = [name for name in names if len(word) < 2.3 * len(name)]
    return get_close_matches(word, comparable, n=limit, cutoff=0.61) if comparable else []


def nearest(word: str, names: Iterable[str], limit: int = 3) -> str:
    """Return the valid names nearest to ``word`` as text for a message, or all valid names if none is near."""
    names = sorted(set(names))
    if close := close_names(word, names, limit):
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
    """Raise for predictions with NaN or infinity, for example of a model with damaged weights; ``where`` names the
    place."""
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
    """Raise a :class:`KinformerError` when the ``value`` of ``option`` is below ``least``, above ``most`` or no finite
    number."""
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
    """Raise a :class:`KinformerError` unless the ``value`` of ``option`` is above 0 (with ``zero``: at least 0) and
    below 1 (with ``one``: at most 1)."""
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
