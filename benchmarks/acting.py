"""How fast does an agent act that carries its state, beside one that reads the last 64 steps again at every step?

Both act in the same rows of an environment, in turns: a round is some steps of each, in a new order every time, and the
figure is the median ratio of their processor times. Before that, what both say of an episode's first 64 steps must
agree. The window is full when the timing begins:

    python benchmarks/acting.py
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import numpy as np
import torch

from common import arguments, prepare, products, save, show
from kinformer.core.config import override
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.lab.control.acting import ActionSampler
from kinformer.lab.control.environments import Environments
from kinformer.lab.control.online import ControlAgent
from kinformer.lab.control.options import ControlOptions, open_environment
from kinformer.lab.tasks.control import fitted

ENV, WINDOW, STEPS, ROUNDS, AGREES = "masked-cartpole", 64, 4, 9, 1e-3
WINDOWED = {"layers.*.mixer.pattern": {"kind": "local", "window": WINDOW}}
WINDOWED |= {"position": {"kind": "none"}, "layers.*.mixer.position": {"kind": "rope"}}
MEMBERS: dict[str, dict[str, Any]] = {
    "gtrxl": {"layers.*.mixer.segment": 32, "layers.*.mixer.memory": 32},
    "transformer-xl": {"layers.*.mixer.segment": 32, "layers.*.mixer.memory": 32},
    "linear-transformer": {},
    "gpt": WINDOWED,
}


class Acting:
    """An agent in rows of its own, which go on whatever they do."""

    def __init__(self, model: Any, rows: int, window: int | None) -> None:
        self.environment = Environments(ENV, rows, autoreset=True)
        self.agent = ControlAgent(model, ActionSampler(self.environment.actions, 1.0, 0), window)
        self.observations = self.environment.reset(range(rows))
        self.agent.begin(np.arange(rows))
        self.seconds: list[float] = []

    def act(self, steps: int) -> None:
        for _ in range(steps):
            actions = self.agent.act(self.observations, np.zeros(len(self.observations)))
            self.observations = self.environment.step(actions)[0]

    def round(self, steps: int) -> None:
        begun = time.process_time()
        self.act(steps)
        self.seconds.append((time.process_time() - begun) / steps)


def gap(model: Any, rows: int) -> float:
    """The largest difference of what is said after 64 steps, carried and read at once, relative to its size."""
    seen, state = model.input.example(rows, WINDOW), None
    seen = torch.randn(seen.shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole, _ = model(seen)
        for step in range(WINDOW):
            said, state = model(seen[:, step : step + 1], state)
    return float((said[:, 0] - whole[:, -1]).abs().max() / whole[:, -1].abs().max())


def compared(member: str, rows: int, options: Any) -> dict[str, Any]:
    """Steps a second by both ways, and their ratio."""
    data = open_environment(ControlOptions(env=ENV))
    config = configure(member, options.recipe)
    model = override(override(config, fitted(config, data), kinds()), MEMBERS[member], kinds()).build().eval()
    if (difference := gap(model, rows)) > AGREES:
        raise SystemExit(f"{member}: carried and recomputed differ by {difference:.1e} of their size")
    ways = [Acting(model, rows, None), Acting(model, rows, WINDOW)]
    for way in ways:
        way.act(WINDOW)
    shuffle = random.Random(0).shuffle
    for _ in range(options.rounds or ROUNDS):
        order = list(ways)
        shuffle(order)
        for way in order:
            way.round(STEPS)
    carried, again = (np.array(way.seconds) for way in ways)
    found = {
        "member": member, "rows": rows, "ratio": float(np.median(again / carried)), "difference": difference,
        "carried_steps_per_second": rows / statistics.median(carried),
        "recomputed_steps_per_second": rows / statistics.median(again),
        "state_bytes_per_row": ways[0].agent.state_bytes // rows,
    }  # fmt: skip
    print(f"{member}, {rows} rows: {found['ratio']:.1f} times as fast", flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--members", nargs="+", default=list(MEMBERS), choices=list(MEMBERS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--recipe", default="small")
    options = prepare(parser)
    if options.quick:
        options.rows, options.rounds, options.recipe = [2], 1, "tiny"
    with products(fast=True):
        found = [compared(member, rows, options) for member in options.members for rows in options.rows]
    header = ("member", "rows", "steps/s, carried", f"steps/s, {WINDOW} read again", "ratio of processor time")
    names = ("rows", "carried_steps_per_second", "recomputed_steps_per_second", "ratio")
    show(f"acting, recipe {options.recipe}", header, [[row["member"], *(row[name] for name in names)] for row in found])
    save(options, "acting", {"env": ENV, "window": WINDOW, "recipe": options.recipe, "found": found})


if __name__ == "__main__":
    main()
