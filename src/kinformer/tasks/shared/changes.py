"""The random changes of training data that the option ``augment`` names. Free of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

from kinformer.runtime.errors import choose

NOTHING = "none"


def changes_of(augment: str, valid_names: Iterable[str]) -> tuple[str, ...]:
    """Return the names in ``augment``, such as ``crop,flip``; refuse those that are none of ``valid_names``."""
    names = () if augment == NOTHING else tuple(augment.split(","))
    for name in names:
        choose(name, (*valid_names, NOTHING), "`augment`")
    return names
