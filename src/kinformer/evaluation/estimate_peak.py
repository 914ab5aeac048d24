"""The memory of a training process at its highest moment: what it holds beyond weights, optimiser and activations.

Interpreter: Python, PyTorch and Kinformer themselves. Temporaries: what lives for a moment at the widest point of a
step, counted as it runs on shapes only. Allocator: what was freed and cannot be used again. glibc cuts every tensor
out of a free block that is larger than it by its alignment, so that blocks of like tensors do not fit again, and large
ones lie in pages of 2 MiB. Its share was measured (``benchmarks/estimate_peak.py``) and is the least certain term.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kinformer.evaluation.estimate import Estimate, horizon_of, is_even
from kinformer.evaluation.estimate_checkpoint import FLOAT, measure_held
from kinformer.evaluation.estimate_length import at_length
from kinformer.evaluation.estimate_parts import distinct, in_pieces, measure, without_data

INTERPRETER = 360 << 20
ALLOCATOR, ALLOCATOR_LARGE = 0.35, 0.55
"""Of activations and temporaries: what the allocator holds beyond them, where a layer's input is LARGE or is not."""
LARGE = 2 << 20


def peak(
    config: Any, found: Estimate, *, length: int, batch: int, objective: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Bytes of resident memory at the peak of ``kinformer train`` by what holds them, for the ``found`` estimate of the
    same config and sizes, on a CPU; ``objective``: what the objective has beside the model, if anything."""
    own = objective or {"weights": 0, "activations": 0}
    temporaries = _temporaries(config, length, batch)
    moving = found.memory["train"]["activations"] + temporaries + own["activations"]
    large = FLOAT * batch * length * config.dim >= LARGE
    return {
        "interpreter": INTERPRETER,
        "training": found.train_bytes,
        "temporaries": temporaries,
        "allocator": round((ALLOCATOR_LARGE if large else ALLOCATOR) * moving),
    } | ({"objective": sum(own.values())} if objective else {})


def _temporaries(config: Any, length: int, batch: int) -> int:
    """Bytes that are alive at the highest moment of a step beyond its activations: what autograd saves for it, or
    where layers are recomputed, what is held."""
    single = distinct(config)
    model = without_data(single)
    usual = measure_held if config.stack.recomputes else measure
    pieces = in_pieces(model, batch * length)
    held = partial(measure_held, single, batch, pieces=pieces, inside=True)
    measures = (partial(usual, single, batch, pieces=pieces), held)
    known, most = (at_length(each, length, horizon_of(model), is_even(model)) for each in measures)
    if config.stack.recomputes:
        return max(most.values()) - max(known.values())
    return max(0, max(most.values()) - sum(amount for (kind, _), amount in known.items() if kind == "saved"))
