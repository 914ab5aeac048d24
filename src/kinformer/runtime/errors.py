"""How Kinformer speaks to its users when something is wrong.

Every message is one sentence that holds the value, what was expected, the place and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches


class KinformerError(ValueError):
    """Something that a user can cause and mend; the command line prints it and exits with 2."""


def nearest(word: str, names: Iterable[str], limit: int = 3) -> str:
    """The valid names nearest to ``word`` as text for a message, or all of them when none is near."""
    names = sorted(names)
    close = get_close_matches(word, names, n=limit, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "valid names are " + ", ".join(names) + "." if names else "there are no valid names here."


def choose(word: str, names: Iterable[str], place: str) -> str:
    """Return ``word`` if it is one of ``names``, else raise a :class:`KinformerError` that names the nearest."""
    names = list(names)
    if word not in names:
        raise KinformerError(f"{place}: {word!r} is unknown; {nearest(word, names)}")
    return word


def flag_of(name: str) -> str:
    """How an option is called in messages: ``batch_size`` is ``--batch-size``."""
    return f"--{name.replace('_', '-')}"


def require_finite(finite: bool, where: str = "") -> None:
    """Refuse what a model with damaged weights predicts; ``where`` it did."""
    if not finite:
        raise KinformerError(
            f"the model's predictions are not finite numbers{where}; its weights are damaged or diverged."
        )


def require_finite_number(flag: str, value: float | None) -> None:
    """Raise a :class:`KinformerError` when an option's ``value`` is infinite or no number at all."""
    if value is not None and not math.isfinite(value):
        raise KinformerError(f"{flag} is {value:g} but must be a finite number.")


def require(flag: str, value: float | None, least: float) -> None:
    """Raise a :class:`KinformerError` when an option's ``value`` is below ``least`` or no finite number."""
    require_finite_number(flag, value)
    if value is not None and value < least:
        raise KinformerError(f"{flag} is {value:g} but must be {least:g} or more.")


def require_above(flag: str, value: float | None, bound: float) -> None:
    """Raise a :class:`KinformerError` when an option's ``value`` is not above ``bound`` or no finite number."""
    require_finite_number(flag, value)
    if value is not None and value <= bound:
        raise KinformerError(f"{flag} is {value:g} but must be above {bound:g}.")


def require_share(flag: str, value: float | None, zero: bool = False) -> None:
    """Raise a :class:`KinformerError` when an option's ``value`` is no share of something: above 0 (or, with ``zero``,
    at least 0) and below 1."""
    if value is not None and not (0 < value < 1 or (zero and value == 0)):
        least = "at least" if zero else "above"
        raise KinformerError(f"{flag} is {value:g} but must be {least} 0 and below 1.")
