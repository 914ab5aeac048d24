"""The usage of a model's memory tables and experts: the weight of every value in all look-ups (Lample et al. 2019,
section 4.5).

z_i is the sum over all tokens of the weight of value i, divided by the sum over all values. ``used`` is the share of
the values with z_i > 0, and

    kl = log n + sum_i z_i log z_i        (0 where all values have equal weights)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import log

import torch
from torch import Tensor, nn

from kinformer.core.model import device_of
from kinformer.core.parts import Selection


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The usage of a table or mixture, ``part``, of ``values`` values or experts: the share ``used``, and ``kl``, the
    divergence from equal usage in nats."""

    part: str
    values: int
    used: float
    kl: float


class Usages:
    """The weights of a model's tables in all look-ups so far."""

    def __init__(self, model: nn.Module) -> None:
        self.tables = {
            name: part for name, part in model.named_modules() if isinstance(part, nn.EmbeddingBag | Selection)
        }
        sizes = {
            name: table.size if isinstance(table, Selection) else table.num_embeddings
            for name, table in self.tables.items()
        }
        zeros = partial(torch.zeros, dtype=torch.float64, device=device_of(model))
        self.weights = {name: zeros(size) for name, size in sizes.items()}

    def note(self, name: str, _: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
        """Add the look-ups of a table: its ``inputs`` are slots and their weights, of equal shapes."""
        slots, weights = inputs
        self.weights[name].index_add_(0, slots.flatten(), weights.detach().double().flatten())

    def read(self) -> tuple[Usage, ...]:
        """Return the usage of each table that was looked up."""
        usages = []
        for name, weights in self.weights.items():
            if not (total := float(weights.sum())):
                continue
            shares = weights[weights > 0] / total
            # log n + sum_i z_i log z_i, to which values that were never used add 0.
            kl = log(len(weights)) + float((shares * shares.log()).sum())
            part = name.removesuffix(".values").removesuffix(".selection").removeprefix("stack.")
            usages.append(Usage(part=part, values=len(weights), used=len(shares) / len(weights), kl=max(0.0, kl)))
        return tuple(usages)


@contextmanager
def record_usage(model: nn.Module) -> Iterator[Usages]:
    """Record every look-up (slots, weights) in the tables of ``model`` within the context."""
    usages = Usages(model)
    with ExitStack() as hooks:
        for name, table in usages.tables.items():
            hooks.enter_context(table.register_forward_pre_hook(partial(usages.note, name)))
        yield usages
