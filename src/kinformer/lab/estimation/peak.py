"""The peak memory of a training process: the bytes beyond weights, optimiser and activations.

Interpreter: Python, PyTorch and Kinformer themselves. The part of their files that the system keeps in memory differs
by 80 MB between otherwise equal machines, so this module starts a process and measures it.

Temporaries: tensors that live for a moment at the widest point of a step, counted in a run on shapes only.

Allocator: freed memory that cannot be used again. glibc cuts a tensor out of a free block larger by the tensor's
alignment. The block of a freed tensor therefore does not fit the next tensor of the same size. Large tensors take whole
pages of 2 MiB. The allocator's share was measured (``benchmarks/estimate_peak.py``) and is the least certain term.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from kinformer.lab.estimation.estimate import FLOAT, Estimate, at_length, horizon_of, measure_live
from kinformer.lab.estimation.parts import ModelSpec, distinct, in_pieces, measure, without_data

INTERPRETER = 440 << 20
"""The bytes of an interpreter without a measurement: PyTorch's CPU build with Triton, on Linux."""
LOADED_LATER = 55 << 20
"""The bytes that a run loads beyond :data:`PROBE`: readers of data, compiled products, the run's records."""
PROBE = """
import torch, kinformer.lab.runs.train
layer = torch.nn.Linear(8, 8)
optimiser = torch.optim.AdamW(layer.parameters(), fused=True)
layer(torch.ones(1, 8)).sum().backward()
optimiser.step()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
ALLOCATOR, ALLOCATOR_LARGE = 0.45, 0.8
"""The allocator's share of activations and temporaries, where a layer's input is below LARGE bytes, and from LARGE
on."""
LARGE = 2 << 20


def peak(
    config: ModelSpec,
    estimated: Estimate,
    *,
    length: int,
    batch: int,
    objective: Mapping[str, int] | None = None,
    interpreter: int = INTERPRETER,
) -> dict[str, int]:
    """Return the bytes of resident memory at the peak of ``kinformer train`` on a CPU, by their holder.

    ``estimated``: the estimate of the same config and sizes. ``objective``: bytes that the objective holds beside the
    model, if any. ``interpreter``: bytes before the model is built, as :func:`interpreter_bytes` measures them.
    """
    objective_bytes = objective or {"weights": 0, "activations": 0}
    temporaries = _temporaries(config, length, batch)
    moving = estimated.memory["train"]["activations"] + temporaries + objective_bytes["activations"]
    large = FLOAT * batch * length * config.dim >= LARGE
    return {
        "interpreter": interpreter,
        "training": estimated.train_bytes,
        "temporaries": temporaries,
        "allocator": round((ALLOCATOR_LARGE if large else ALLOCATOR) * moving),
    } | ({"objective": sum(objective_bytes.values())} if objective else {})


@cache
def interpreter_bytes() -> int:
    """Return the bytes of a training process before its model is built, measured in a separate process (two seconds);
    :data:`INTERPRETER` where the system is not Linux."""
    folder = str(Path(__file__).parents[2])  # the folder of the package, which need not be installed
    code = f"import sys; sys.path.append({folder!r})\n{PROBE}"
    # -P: `python -c` imports from the current folder first, so it would run a file queue.py there.
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    return INTERPRETER if done.returncode else 1024 * int(done.stdout) + LOADED_LATER


def _temporaries(config: ModelSpec, length: int, batch: int) -> int:
    """Return the bytes alive at the peak of a step beyond its activations. The activations are the bytes that autograd
    saves, or, where layers are recomputed, the live bytes without the operators' temporary buffers."""
    single = distinct(config)
    model = without_data(single)
    usual = measure_live if config.stack.recomputes else measure
    pieces = in_pieces(model, batch * length)
    live = partial(measure_live, single, batch, pieces=pieces, inside=True)
    measures = (partial(usual, single, batch, pieces=pieces), live)
    usually, at_most = (at_length(item, length, horizon_of(model)) for item in measures)
    if config.stack.recomputes:
        return max(at_most.values()) - max(usually.values())
    return max(0, max(at_most.values()) - sum(amount for (kind, _), amount in usually.items() if kind == "saved"))
