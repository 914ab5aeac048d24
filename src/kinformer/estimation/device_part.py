"""A device's part of a model and of its rows: its memory, what it exchanges and computes, for any number of rows.

See :mod:`kinformer.estimation.cluster`.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, NamedTuple

from kinformer.core.contract import ReadsSource
from kinformer.core.model import modules_of
from kinformer.core.stack import units_of
from kinformer.estimation.estimate import Estimate, Precision, estimate, horizon_of
from kinformer.estimation.length import at_length
from kinformer.estimation.mesh import Mesh, Payload, module_bytes, sharded_bytes
from kinformer.estimation.parts import Costs, ModelSpec, outputs
from kinformer.estimation.stretches import FLOAT, PaperStretches, share_on_paper
from kinformer.runtime.unallocated import unallocated
from kinformer.training.division import Division, divide, output_product
from kinformer.training.vocabulary import VocabularyPart

PREFETCHED = 2
"""Units whose weights FSDP has whole at a time: the one that computes, and the next."""


class PartConfig:
    """A model config whose model is one of ``parts`` parts of the model of ``config``, and computes one of
    ``stretches`` where there are some."""

    def __init__(self, config: ModelSpec, parts: int, stretches: PaperStretches | None = None) -> None:
        self.config, self.parts, self.stretches = config, parts, stretches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def replace(self, **changes: object) -> PartConfig:
        return PartConfig(self.config.replace(**changes), self.parts, self.stretches)

    def divided(self) -> tuple[Any, Division | None]:
        """Return the model, and how it is divided."""
        model = self.config.build()
        division = divide(model, 0, self.parts) if self.parts > 1 else None
        if division is not None and division.vocabulary and (product := output_product(model)) is not None:
            product[1].vocabulary_part = VocabularyPart(0, model.vocab_size // self.parts, None)
        if self.stretches is not None:
            share_on_paper(model, self.stretches)
        return model, division

    def build(self) -> Any:
        return self.divided()[0]


class Shared(NamedTuple):
    """How a row is shared: by ``tensor`` parts of the model and ``context`` stretches of time, in a ``ring`` or not."""

    tensor: int
    context: int = 1
    ring: bool = False


class Part:
    """The work in training of a device that has a share of every row, for any number of rows.

    Errors: ``KinformerError`` where rows of the model cannot be ``shared`` so.
    """

    def __init__(self, config: ModelSpec, shared: Shared, length: int, optimizer: str, precision: Precision) -> None:
        narrow = FLOAT if precision == "fp32" else FLOAT // 2
        self.stretches = PaperStretches(shared.context, shared.ring, narrow) if shared.context > 1 else None
        self.config = PartConfig(config, shared.tensor, self.stretches)
        self.length, self.precision, self.narrow = length // shared.context, precision, narrow
        with unallocated():
            self.model, self.division = self.config.divided()
        self._estimate = partial(estimate, self.config, length=self.length, optimizer=optimizer, precision=precision)

    @cached_property
    def _one(self) -> Estimate:
        return self._estimate(batch=1)

    @cached_property
    def _two(self) -> Estimate:
        return self._estimate(batch=2)

    def of_rows(self, name: str, rows: int) -> int:
        """Return the activations' bytes (``activations``) or the ``flops_step`` of this many rows."""
        # Activations and FLOPs are a constant and a number for every row.
        one, two = (_amount(item, name) for item in (self._one, self._two))
        return one + (rows - 1) * (two - one)

    @cached_property
    def units(self) -> list[int]:
        """Return the bytes of the weights of every unit."""
        return [module_bytes(unit) for unit in units_of(self.model)]

    def memory(self, mesh: Mesh, rows: int) -> dict[str, int]:
        """Return the bytes of a device's memory, by what it is for."""
        train = self._one.memory["train"]
        shares = mesh.copies if mesh.strategy == "fsdp" else 1
        sharded = sharded_bytes(self.model, shares)
        memory = {
            "weights": sharded,
            "gradients": sharded,
            "optimizer": round(train["optimizer"] * sharded / max(1, train["weights"])),
            "activations": self.of_rows("activations", rows),
        }
        if mesh.strategy == "diloco":
            memory["outer"] = 2 * sharded  # the shared weights, and their momentum
        if shares > 1:
            rest = module_bytes(self.model) - sum(self.units)
            largest = max(self.units, default=0)
            memory["gathered"] = rest + PREFETCHED * largest + largest  # and the gradients of one unit
        return memory

    def payload(self, mesh: Mesh, rows: int, accumulate: int = 1) -> Payload:
        """Return the bytes of the collectives of a step of ``accumulate`` parts of ``rows`` rows a replica."""
        whole = module_bytes(self.model)
        tensor = accumulate * self._exchanged(rows) if self.division is not None else 0
        within = Payload(tensor=tensor, context=accumulate * rows * self._sent)
        if mesh.copies == 1:
            return within
        if mesh.strategy != "fsdp":
            return within._replace(all_reduce=whole // mesh.rounds)
        padded = mesh.copies * sharded_bytes(self.model, mesh.copies)
        units = mesh.copies * sum(sharded_bytes(unit, mesh.copies) for unit in units_of(self.model))
        return within._replace(all_gather=accumulate * (padded + units), reduce_scatter=padded)

    @cached_property
    def _sent(self) -> int:
        """Return the bytes that a device sends of a row's stretch, in both passes."""
        if self.stretches is None:
            return 0
        return at_length(self._sent_at, self.length, horizon_of(self.model))["sent", "model"]

    def _sent_at(self, length: int) -> Costs:
        assert self.stretches is not None
        before = self.stretches.sent
        outputs(self.model, self.model.input.example(1, length, "meta"))
        return {("sent", "model"): self.stretches.sent - before}

    def _exchanged(self, rows: int) -> int:
        assert self.division is not None
        tokens, width = rows * self.length, self.config.dim
        # Outputs are in the type of products, gradients of inputs in that of the norms before.
        exchanged = self._sums(encodes=True) * tokens * width * (self.narrow + FLOAT)
        exchanged += len(modules_of(self.model, ReadsSource)) * tokens * width * FLOAT  # gradients of the source
        if self.division.vocabulary:
            exchanged += tokens * width * (FLOAT + FLOAT) + 3 * tokens * FLOAT
        parameters = dict(self.model.named_parameters())
        return exchanged + FLOAT * sum(parameters[name].numel() for name in self.division.partial & parameters.keys())

    def inference(self) -> dict[str, int]:
        """Return the bytes of ``weights``, and of the ``state`` of a row of the length."""
        return self._one.memory["inference_fp32" if self.precision == "fp32" else "inference_bf16"]

    def token_flops(self) -> float:
        """Return the FLOPs of a generated token, as a mean over the length."""
        return self._one.flops_inference / self.length

    def token_payload(self) -> int:
        """Return the bytes of the collectives of a generated token."""
        if self.division is None:
            return 0
        logits = self.model.vocab_size // 2 if self.division.vocabulary else 0  # a gather is half of an all-reduce
        return self.narrow * (self._sums(encodes=False) * self.config.dim + logits)

    def _sums(self, encodes: bool) -> int:
        """Return how many outputs are added up in a forward pass; ``encodes``: the source's among them."""
        assert self.division is not None
        total = 0
        for path in (*self.division.mixers, *self.division.feed_forwards):
            encoder, _, place = path.partition("stack.layers.")
            config = self.config.encoder if encoder else self.config
            if encodes or not encoder:
                total += config.stack.uses(len(config.layers)).count(int(place.partition(".")[0]))
        return total


def _amount(costs: Estimate, name: str) -> int:
    return costs.memory["train"]["activations"] if name == "activations" else costs.flops_step
