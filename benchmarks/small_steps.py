"""How long is a training step of the small model that `--minutes 1` chooses, and what is each of its ways worth?

    as it is              as `kinformer train` computes it: 4 x 128 tokens, 4 layers of dim 128, 4,096 words, Muon
    attention in tiles    short causal rows as long ones are attended to (kernels/attention)
    GELU by tanh          the activation of the recipe of gpt, which `--minutes` replaces by GELU itself
    no iterations         Muon's update without its iterations, which shows what they take

The floor is the step's operations in products at the rate of a product of 512 x 512 matrices, measured in turn.
All are trained from the same weights on the same rows, in turns, in processor time, which other work of the machine
is not counted in. The first losses are equal to 0.1 %, or they are not timed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from common import arguments, medians, of_width, prepare, save, show, text_bytes
from kinformer.kernels import attention
from kinformer.lab.runs.create import open_planner
from kinformer.lab.runs.minutes import measured_update
from kinformer.lab.runs.options import TrainOptions
from kinformer.lab.training import optimisers
from kinformer.runtime.process import begin_process

GPT = {"position": "none", "layers.*.mixer.position": "rope", "layers.*.feed_forward.activation": "gelu"}
MEMBERS = {"gpt": GPT, "linear-transformer": {}}
WARM_UP = 3
SIDE = 512


@contextmanager
def in_tiles() -> Iterator[None]:
    """Attend to short rows in tiles."""
    tables = {name: entry._replace(short_pairs=0, short_narrow_pairs=0) for name, entry in attention.TABLE.items()}
    with mock.patch.object(attention, "TABLE", tables):
        yield


@contextmanager
def by_tanh() -> Iterator[None]:
    """Approximate every GELU by tanh."""
    with mock.patch.object(functional, "gelu", lambda x, approximate: _GELU(x, approximate="tanh")):
        yield


_GELU = functional.gelu


@contextmanager
def without_iterations() -> Iterator[None]:
    """Move the matrices by their momenta."""
    with mock.patch.object(optimisers, "orthogonalised", lambda x, *_: x):
        yield


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


WAYS: Mapping[str, Callable[[], object]] = {
    "as it is": as_it_is,
    "attention in tiles": in_tiles,
    "GELU by tanh": by_tanh,
    "no iterations": without_iterations,
}


class Training:
    """A training of ``member`` on the text; a call makes one step in the given way and returns the loss before it."""

    def __init__(self, member: str, precision: str, data: Path, way: Callable[[], object]) -> None:
        options = TrainOptions(
            member=member, data=str(data), out=str(data.parent / "run"), steps=1000, train_tokenizer=4096, length=128,
            batch_size=4, optimizer="muon", lr=5e-3, precision=precision, set=of_width(128) | MEMBERS[member],
        )  # fmt: skip
        planner, options = open_planner(options)
        self.update, _ = measured_update(planner.plan(options), planner.task, "cpu")
        self.way, self.step = way, 0

    def __call__(self) -> float:
        with self.way():  # type: ignore[attr-defined]
            loss = self.update(self.step, 5e-3, 0.1).loss
        self.step += 1
        return float(loss)


def product(precision: str) -> Callable[[], torch.Tensor]:
    """A product of ``2 * SIDE**3`` operations in the type of the steps' products."""
    x = torch.randn(SIDE, SIDE, dtype=torch.bfloat16 if precision == "bf16-mixed" else torch.float32)
    return lambda: x @ x


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", help="the text (Python's own sources)")
    options = prepare(parser)
    begin_process()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.txt"
        data.write_bytes(bytes(text_bytes(options.data, 1_200_000).tolist()).decode(errors="ignore").encode())
        for member in MEMBERS:
            for precision in ("bf16-mixed", "fp32"):
                trained = {name: Training(member, precision, data, way) for name, way in WAYS.items()}
                first = [step() for step in trained.values()]
                if not all(math.isclose(loss, first[0], rel_tol=1e-3) for loss in first):
                    raise SystemExit(f"{member}, {precision}: the first losses are {first}; not timed.")
                with FlopCounterMode(display=False) as counter:
                    trained["as it is"]()
                steps = {name: partial(step) for name, step in trained.items()} | {"floor": product(precision)}
                found = medians(steps, options.rounds or 60, WARM_UP)
                found["floor"] *= counter.get_total_flops() / (2 * SIDE**3)
                operations = {"gigaflop": counter.get_total_flops() / 1e9}
                rows.append({"member": member, "precision": precision} | operations | found)
                show("processor ms of a step", list(rows[0]), [list(row.values()) for row in rows[-1:]])
    facts = {"rows": 4, "length": 128, "dim": 128, "vocab": 4096, "milliseconds": rows}
    save(options, "small_steps", facts)


if __name__ == "__main__":
    main()
