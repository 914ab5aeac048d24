"""Kinformer: the Transformer family in one library and one command line.

    import kinformer
    kinformer.members()                                      # the family
    model = kinformer.build("linear-transformer", recipe="tiny", vocab_size=256)
    logits, state = model(tokens)                            # tokens [batch, time] int64
    logits, state = model(tokens[:, -1:], state)             # continue with any chunk length
    model = kinformer.load("runs/linear")                    # a trained run, in eval mode
    new = kinformer.generate(model, prompt, max_new_tokens=100, temperature=0.8, seed=1)

Nothing here imports PyTorch before it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from kinformer.family.record import Member

__version__ = "0.1.0"
__all__ = ["build", "generate", "load", "members"]


def members() -> list[Member]:
    """The records of the family, in the order of the table, and then those of other packages."""
    from kinformer.family.table import members

    return members()


def build(
    name: str, *, recipe: str = "small", vocab_size: int | None = None, set: Mapping[str, Any] | None = None
) -> Any:
    """A new model of member ``name`` by ``recipe`` (tiny, small, paper, benchmark), with overrides in ``set``.

    A causal member is a ``Decoder``, ``logits, state = model(tokens, state)``; any other an ``Encoder``, ``logits =
    model(tokens, valid=, kinds=)``.
    """
    from kinformer.family.build import build

    return build(name, recipe, vocab_size, set)


def load(run: str | Path, *, set: Mapping[str, Any] | None = None) -> Any:
    """The model of a trained run folder, with its best weights, in eval mode.

    ``set`` overrides what leaves the weights as they are: ``{"layers.*.mixer.position.factor": 4, ...}``.
    """
    from kinformer.family.runs import load_model

    return load_model(run, set)


def generate(model: Any, prompt_tokens: Tensor, **options: Any) -> Tensor:
    """Continue ``prompt_tokens`` [batch, time] int64; returns the new tokens [batch, new] int64.

    Options: ``max_new_tokens``, ``temperature``, ``top_k``, ``top_p``, ``seed``, ``stop`` and ``valid`` as described by
    ``kinformer.generation.session.generate``.
    """
    from kinformer.generation.session import generate

    return generate(model, prompt_tokens, **options)
