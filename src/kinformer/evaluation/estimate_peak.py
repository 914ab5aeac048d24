"""The memory of a training process at its highest moment: what it holds beyond weights, optimiser and activations.

Interpreter: Python, PyTorch and Kinformer themselves. Temporaries: what lives for a moment at the widest point of a
step, counted as it runs on shapes only. Allocator: what was freed and cannot be used again. glibc cuts every tensor
out of a free block that is larger than it by its alignment, so that blocks of like tensors do not fit again; its share
was measured (``benchmarks/estimate_peak.py``) and is the least certain of all terms.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kinformer.evaluation.estimate import Estimate, Precision, horizon_of, is_even
from kinformer.evaluation.estimate_checkpoint import measure_held
from kinformer.evaluation.estimate_length import at_length
from kinformer.evaluation.estimate_parts import distinct, measure, without_data

INTERPRETER = 345 << 20
ALLOCATOR = 0.35


def peak(config: Any, found: Estimate, *, length: int, batch: int, precision: Precision = "fp32") -> dict[str, int]:
    """Bytes of resident memory at the peak of ``kinformer train`` by what holds them, for the ``found`` estimate of the
    same config and sizes, on a CPU."""
    temporaries = 0 if config.stack.recomputes else _temporaries(config, length, batch)
    moving = found.memory["train"]["activations"] + temporaries
    return {
        "interpreter": INTERPRETER,
        "training": found.train_bytes,
        "temporaries": temporaries,
        "allocator": round(ALLOCATOR * moving),
    }


def _temporaries(config: Any, length: int, batch: int) -> int:
    """Bytes that are alive at the highest moment of a step beyond what autograd saves for it."""
    single = distinct(config)
    model = without_data(single)
    measures = (partial(each, single, batch) for each in (measure, measure_held))
    saved, held = (at_length(each, length, horizon_of(model), is_even(model)) for each in measures)
    return max(0, max(held.values()) - sum(amount for (kind, _), amount in saved.items() if kind == "saved"))
