"""What generation requires of a model and of what it is to continue."""

from __future__ import annotations

from torch import nn

from kinformer.core.model import CausalModel
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


def require_continuing(model: object) -> None:
    """Raise unless ``model`` can continue texts: a causal model in eval mode."""
    if not isinstance(model, nn.Module):
        raise KinformerError(f"model is {model!r} but must be a model; kinformer.load gives that of a run.")
    if not hasattr(model, "initial_state"):
        raise KinformerError(
            f"a model of type {type(model).__name__} reads whole texts and continues none; give a causal one."
        )
    if model.training:
        raise KinformerError("the model is in training mode, with its random masks; call model.eval() first.")


def require_positions(model: CausalModel, needed: int) -> None:
    """Raise unless the positions of ``model`` suffice for ``needed`` tokens of a row."""
    limit = model.max_length
    if limit is not None and needed > limit:
        raise KinformerError(
            f"{plural(needed, 'token')} are to be absorbed, but this model's positions end at max_length = "
            f"{limit}; shorten the prompt, ask for fewer new tokens, or take a member whose positions do not end."
        )


def require_ids(model: CausalModel, low: int, high: int) -> None:
    """Raise unless ``model`` knows the tokens ``low`` and ``high``, the least and the greatest of a prompt."""
    if low < 0 or high >= model.vocab_size:
        raise KinformerError(
            f"the prompt holds token {low if low < 0 else high}, but this model knows 0 to "
            f"{model.vocab_size - 1}; encode it with the tokenizer that the model was trained with."
        )
