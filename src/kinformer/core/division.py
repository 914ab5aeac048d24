"""The division of a model's heads, hidden features and vocabulary into equal parts.

``MixerConfig.part`` and ``FeedForwardConfig.part`` return the config of one of ``parts`` equal parts: a config of fewer
heads, or of fewer hidden features. The sum of the parts' outputs is the output of the whole. The rows of a weight in a
part follow from the shapes of the whole and of the part, and from the blocks of joint products, such as queries, keys
and values side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from torch import nn

from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.core.config import Config

M = TypeVar("M", bound=nn.Module)


def in_blocks(module: M, *sizes: int) -> M:
    """Note that the rows of ``module``'s weights stand in blocks of these ``sizes``, each laid out by heads (or by
    hidden features); return it."""
    object.__setattr__(module, "blocks", sizes)
    return module


class Divisible:
    """Mixin of the config of a mixer or a feed-forward, which may be divided; ``indivisible`` is the reason why not.

    ``by_heads``: whether a part of a mixer is the same mixer with fewer heads.
    """

    indivisible: ClassVar[str] = "no config says how one part computes its share"
    by_heads: ClassVar[bool] = False

    def part(self, dim: int, parts: int) -> Self:
        """Return the config of one of ``parts`` equal parts, for a stream of width ``dim``."""
        config: Any = self
        if self.by_heads:
            return config.replace(**fewer_heads(config, dim, parts))
        raise undivided(config, self.indivisible)


class FollowsHeads:
    """Mixin of modules that hold something beside tensors which follows from the number of heads."""

    def follow(self, whole: Self, part: int) -> None:
        """Become part number ``part`` of ``whole``, such a module for all heads."""
        raise NotImplementedError


def undivided(config: Config, why: str) -> KinformerError:
    """Return the error for a ``config`` that cannot be divided, with the reason."""
    from kinformer.core.config import describe  # not above: it would make the longest chain of imports longer

    return KinformerError(f"{describe(config)} cannot be divided among processes: {why}; leave `parallel` tp out.")


def fewer_heads(config: Config, dim: int, parts: int) -> dict[str, object]:
    """Return the fields of ``config`` for the number and the width of heads, for one of ``parts`` parts. Raise for a
    pattern that differs between heads."""
    values: Any = config
    for name, why in (("span", "has costs of all heads"), ("differential", "takes differences over all heads")):
        if getattr(values, name, None) is not None:
            raise undivided(config, f"its {name} {why}")
    pattern = getattr(values, "pattern", None)
    if pattern is not None and pattern.build().num_heads is not None:
        raise undivided(config, f"its pattern {pattern.kind!r} is another one for every head")
    heads = divided(config, "num_heads", values.num_heads, parts)
    changes: dict[str, object] = {"num_heads": heads, "head_dim": values.head_dim or dim // values.num_heads}
    if getattr(values, "key_heads", None) is not None:
        changes["key_heads"] = divided(config, "key_heads", values.key_heads, parts)
    if hasattr(values, "projection"):
        changes["projection"] = values.projection.part(parts)
    return changes


def divided(config: Config, name: str, number: int, parts: int) -> int:
    """Return ``number``, the value of ``config``'s field ``name``, divided by ``parts``."""
    if number % parts:
        raise undivided(config, f"{name} = {number} is not a multiple of {parts}")
    return number // parts
