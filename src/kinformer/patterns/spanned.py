"""A causal pattern cut to the window of each head, where spans are learnt."""

from __future__ import annotations

from kinformer.core.pattern import Band, Pattern
from kinformer.patterns.per_head import PerHead
from kinformer.runtime.errors import KinformerError


def spanned(pattern: Pattern, windows: tuple[int, ...]) -> Pattern:
    """Return the pairs of ``pattern`` in which head h looks 1 ... windows[h] positions back."""
    heads = [_within(pattern.at(head), window) for head, window in enumerate(windows)]
    return heads[0] if all(one == heads[0] for one in heads) else PerHead(tuple(heads))


def _within(pattern: Pattern, window: int) -> Pattern:
    if pattern.band is None:
        return pattern & Band(behind=window, ahead=-1)
    behind = window if pattern.behind is None else min(pattern.behind, window)
    if behind < 1:
        raise KinformerError(
            "with a span no token sees itself, but the pattern lets it see nothing else; use another pattern (causal)."
        )
    return Band(behind=behind, ahead=-1)
