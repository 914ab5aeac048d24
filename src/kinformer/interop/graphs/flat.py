"""A causal model as a function of flat tensors, which graphs are made of: tokens and a state's leaves in, logits and
the leaves behind the tokens out."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kinformer.core.config import Config, field_types
from kinformer.core.model import PROTOCOLS, CausalModel
from kinformer.core.stack import ModelConfig
from kinformer.core.state import BATCH, PAST, leaves_of, map_tensors, named_leaves, unflattened
from kinformer.runtime.compiling import Operator, substituting
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import HostDriven, trusted_arguments

TIME = "time"
ROWS, TOKENS, SLOTS = 5, 11, 13
"""Sizes of a graph's examples. A size that a model has elsewhere, too, or 0 or 1, could be taken for a constant."""

TALKATIVE = ("torch", "onnxscript", "onnx_ir")
"""The loggers of packages that note what a user cannot change."""


class FlatStep(nn.Module):
    """The function (tokens [batch, time] int64, leaf, leaf, ...) -> (logits [batch, time, vocab], leaf, leaf, ...).

    ``model`` computes by its references, which consist of operators that any runtime has, and by ``operators`` in
    place of kernels. No argument is checked.
    """

    def __init__(self, model: CausalModel, operators: Mapping[str, Operator]) -> None:
        super().__init__()
        self.leaves = leaves_of(model)
        self.operators = operators
        self.model = _by_references(model)
        self._like = map_tensors(lambda leaf: leaf.to("meta"), model.initial_state(1))

    def forward(self, tokens: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Return logits, and the leaves behind the tokens."""
        with trusted_arguments(), substituting(self.operators):
            logits, state = self.model(tokens, unflattened(self._like, leaves))
        return (logits, *(leaf for _, leaf in named_leaves(state)))


def require_graphable(config: ModelConfig) -> None:
    """Raise unless a model of ``config`` continues sequences of tokens, and takes no step that its data decide.

    Errors: ``KinformerError``, with what the model is.
    """
    if config.protocol is not CausalModel or config.input.kind != "tokens":
        raise KinformerError(
            f"its model is {PROTOCOLS[config.protocol]} with the input {config.input.kind!r}, but a graph continues "
            "sequences of tokens; export a run of a causal model of tokens."
        )


def captured(step: FlatStep, rows: int | None = None, tokens: int | None = None) -> torch.export.ExportedProgram:
    """Return the graph of ``step``; ``rows`` and ``tokens`` are its batch and time, None for any.

    Errors: ``KinformerError`` for a model that is no graph, with the place where it is none.
    """
    _require_no_host(step.model)
    names = {name for name, size in ((BATCH, rows), (TIME, tokens)) if size is None}
    names |= {PAST for leaf in step.leaves if leaf.grows}
    open_axes = {name: torch.export.Dim(name, min=int(name != PAST)) for name in names}
    batch, time = rows or ROWS, tokens or TOKENS
    examples = (torch.zeros(batch, time, dtype=torch.int64), *(leaf.zeros(batch, SLOTS) for leaf in step.leaves))
    shapes = ((BATCH, TIME), *(leaf.shape for leaf in step.leaves))
    dynamic = [{axis: open_axes[name] for axis, name in enumerate(shape) if name in open_axes} for shape in shapes]
    try:
        with torch.no_grad(), without_notes():
            return torch.export.export(step, examples, dynamic_shapes=(dynamic[0], tuple(dynamic[1:])), strict=False)
    except Exception as error:
        raise KinformerError(
            f"torch.export makes no graph of this model, as {_reason(error)}; export another member, or this one with "
            "`format` hf."
        ) from error


def _require_no_host(model: Any) -> None:
    """Raise for a part of ``model`` whose steps follow numbers that the host reads."""
    for module in model.modules():
        reads = module.host_reads if isinstance(module, HostDriven) else ""
        if reads:
            raise KinformerError(
                f"its part {module.config.kind!r} is no graph, which makes the same steps for all numbers, as the "
                f"host follows some of its numbers ({reads}); export another member, or this one with `format` hf."
            )


def _reason(error: Exception) -> str:
    """Return what ``error`` of PyTorch says, in a clause."""
    name = type(error).__name__
    fixed = dict.fromkeys(re.findall(r"You marked (\w+) as dynamic but your code specialized it", str(error)))
    if fixed:
        return (
            f"its operators depend on {' and '.join(fixed)} on the host, so that a graph would hold for one size only"
        )
    if "DataDependent" in name or "data-dependent" in str(error):
        return "what it computes next depends on numbers that it has computed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"it says: {lines[0].rstrip('.')} ({name})" if lines else f"it raises {name}"


@contextmanager
def without_notes() -> Iterator[None]:
    """Hide the warnings and notes of PyTorch and of the converter about their own graphs."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, TALKATIVE)}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


def _by_references(model: Any) -> Any:
    """Return a model of the same weights, in eval mode, that computes everything by its references."""
    with private_numbers(0):  # the stored weights replace the random ones
        other = _by_reference(model.config).build()
    other.load_state_dict(model.state_dict())
    return other.eval()


def _by_reference(config: object) -> Any:
    """Return ``config`` with every ``impl`` in it set to "reference"."""
    if isinstance(config, tuple):
        return tuple(map(_by_reference, config))
    if not isinstance(config, Config):
        return config
    values = {name: getattr(config, name) for name in field_types(type(config))}
    changed = {name: "reference" if name == "impl" else _by_reference(value) for name, value in values.items()}
    return config.replace(**{name: value for name, value in changed.items() if value is not values[name]})
