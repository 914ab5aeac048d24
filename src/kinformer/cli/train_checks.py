"""Whether a model, its data and the settings of a training run go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kinformer.core.errors import KinformerError
from kinformer.core.pattern import Pattern
from kinformer.data import Corpus, Labelled
from kinformer.training.distributed import Group, check_shared
from kinformer.training.objectives import objective_of
from kinformer.training.settings import Settings

if TYPE_CHECKING:
    pass


def check_model(config: Any, ids: int, settings: Settings, group: Group) -> None:
    """Refuse a model that cannot take the ids, the length or the kind of the data, the objective, several processes."""
    if config.input.vocab_size < ids:
        raise KinformerError(
            f"--set input.vocab_size={config.input.vocab_size}: the tokenizer has {ids} tokens, and the model "
            "needs as many; leave it out, or choose another tokenizer."
        )
    with torch.device("meta"):
        model = config.build()
        objective_of(settings.objective, model)
    check_shared(model, group)
    _check_domain(model)
    longest = model.max_length
    if settings.segments:
        _check_endless(model, longest)
    if longest is not None and settings.length > longest:
        raise KinformerError(
            f"--length {settings.length}: this model's positions end at {longest}; give --length {longest} or less, or "
            f"--set position.max_length={settings.length}."
        )


def check_special(config: Any, ids: int) -> None:
    """Refuse an encoder whose special tokens stand for something else in data that has no such tokens itself."""
    for name in ("mask_token", "bos_token", "eos_token"):
        token = getattr(config.input, name, None)
        if token is not None and token < ids:
            raise KinformerError(
                f"{name} is {token}, but the data has {ids} ids of its own below that; begin with another run, or give "
                f"--set input.{name}={ids} or higher, below vocab_size."
            )


def check_data(corpus: Corpus | Labelled, settings: Settings) -> None:
    """Refuse data that is too short."""
    if isinstance(corpus, Labelled):
        return
    rows = settings.batch_size if settings.segments else 1
    corpus.splits["train"].require(rows * settings.length + 1, f"training with --length {settings.length}")
    corpus.splits["validation"].require(2, "validation")


def _check_domain(model: nn.Module) -> None:
    """What is trained on here is one sequence of tokens, cut anywhere: it has no rows of pixels."""
    for module in model.modules():
        pattern = getattr(module, "pattern", None)
        if isinstance(pattern, Pattern) and pattern.domain != "sequence":
            raise KinformerError(
                f"--data: is a sequence of tokens, but this model's attention pattern is for an {pattern.domain}; "
                'choose one for sequences, as --set \'layers.*.mixer.pattern={"kind": "local"}\' or another recipe.'
            )


def _check_endless(model: nn.Module, longest: int | None) -> None:
    """A state that is carried through the whole corpus must not grow with it."""
    if longest is not None:
        raise KinformerError(
            f"--segments: the state goes on without end, but this model's positions end at {longest}; choose another "
            "member, or another position such as --set position=sinusoidal."
        )
    if any(getattr(module, "growth", "") == "linear" for module in model.modules()):
        raise KinformerError(
            "--segments: the state goes on without end, but this model's grows with every token; choose another "
            'member, or bound it, as --set \'layers.*.mixer.pattern={"kind": "local", "window": 256}\' does.'
        )
