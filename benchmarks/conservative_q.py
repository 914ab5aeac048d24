"""Is a sequence model better than model-free learning from the same episodes? Conservative Q-learning beside it.

Key-to-Door's random walks, and CartPole's episodes of a noisy controller, are those of key_to_door.py and returns.py,
with the same seeds, the same splits and the same episodes in which is acted; what Decision Transformer and cloned
behaviour reach stands in the result files of these two. The baseline is the one of Chen et al. 2021, conservative
Q-learning (Kumar et al. 2020, equation 4, over discrete actions), beside fitted Q-learning alone (its weight 0):

    loss = (Q(s, a) - r - gamma max_b Q'(s', b))^2 / 2 + weight * (log sum_b exp Q(s, b) - Q(s, a))

with the next action chosen by Q and valued by Q' (double Q-learning), which follows Q slowly. Q is a network of two
hidden layers of 128, as the clone's, over one state, or over all states and actions of the episode so far ("history"),
without which nobody can know in the third room whether the key was taken.

    python benchmarks/conservative_q.py --threads 1
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common import RESULTS, arguments, prepare, save, show
from kinformer.lab.control.acting import MEASURED_SEEDS, rollouts
from kinformer.lab.control.trajectories import Trajectories, open_trajectories, random_walks
from returns import RECORDED, record

WIDTH, ROWS, RATE, DISCOUNT, FOLLOWING = 128, 256, 1e-3, 0.99, 0.005
WEIGHTS, SEEDS, EPISODES, DOORS_EPISODES = (0.0, 1.0), 3, 20, 200


class Setting(NamedTuple):
    """Episodes to learn from, the environment in which is acted, and how many steps a policy sees."""

    name: str
    env: str
    walks: int | None
    seen_steps: int
    episodes: int


SETTINGS = (
    Setting("CartPole", "CartPole-v1", None, 1, EPISODES),
    *(
        Setting(f"Key-to-Door, {walks} walks, {what}", "key-to-door", walks, steps, DOORS_EPISODES)
        for walks in (1000, 10_000)
        for what, steps in (("one state", 1), ("history", 24))
    ),
)


class Transitions(NamedTuple):
    """Inputs of the network [steps, features] before and after, the action, the reward, and whether it was the last."""

    before: Tensor
    actions: Tensor
    rewards: Tensor
    after: Tensor
    ended: Tensor


class Inputs:
    """What the network reads of the last ``steps`` of episodes: normalised states, and the actions between them."""

    def __init__(self, data: Trajectories, steps: int) -> None:
        self.mean, self.std = data.normalisation
        self.steps, self.actions = steps, data.action_dim
        self.width = steps * (data.state_dim + self.actions)

    def rows(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Inputs [steps + 1 or steps, width] of one episode's ``observations`` and the ``actions`` between them."""
        states = (observations - self.mean) / self.std
        previous = np.concatenate([np.zeros((1, self.actions)), np.eye(self.actions)[actions]])[: len(states)]
        if self.steps == 1:
            previous = np.zeros_like(previous)
        both = np.concatenate([states, previous], axis=1)
        padded = np.concatenate([np.zeros((self.steps - 1, both.shape[1])), both])
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.steps, axis=0)
        return windows.transpose(0, 2, 1).reshape(len(states), -1).astype(np.float32)


def transitions(data: Trajectories, inputs: Inputs, most_steps: int) -> Transitions:
    """All of the training split. An episode that was cut at ``most_steps`` has not ended."""
    parts: list[tuple[np.ndarray, ...]] = []
    for episode in data.splits["train"]:
        steps = slice(data.starts[episode], data.starts[episode + 1])
        seen, actions = data.observations[steps], data.actions[steps]
        rows = inputs.rows(seen, actions[:-1])
        ended = np.zeros(len(rows), bool)
        ended[-1] = True
        after = np.concatenate([rows[1:], rows[-1:]])
        real = slice(None) if len(rows) < most_steps else slice(-1)  # what followed a cut episode nobody saw
        parts.append(tuple(each[real] for each in (rows, actions, data.rewards[steps], after, ended)))
    before, actions, rewards, after, ended = (
        torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True)
    )
    return Transitions(before, actions, rewards.float(), after, ended)


def network(inputs: Inputs) -> nn.Sequential:
    layers = (nn.Linear(inputs.width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(WIDTH, inputs.actions))


def learn(seen: Transitions, inputs: Inputs, weight: float, steps: int, seed: int) -> nn.Sequential:
    """Q after ``steps`` of batches that are drawn from all transitions."""
    torch.manual_seed(seed)
    values, target = network(inputs), network(inputs)
    target.load_state_dict(values.state_dict())
    optimiser = torch.optim.Adam(values.parameters(), RATE)
    for _ in range(steps):
        rows = torch.randint(len(seen.actions), (ROWS,))
        before, actions, rewards, after, ended = (each[rows] for each in seen)
        said = values(before)
        taken = said.gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            best = target(after).gather(1, values(after).argmax(1, keepdim=True))[:, 0]
            wanted = rewards + DISCOUNT * best * ~ended
        loss = (taken - wanted).square().mean() / 2 + weight * (said.logsumexp(1) - taken).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), values.parameters(), strict=True):
                slow.lerp_(fast, FOLLOWING)
    return values.eval()


class Greedy:
    """The action of the greatest value."""

    def __init__(self, values: nn.Sequential, inputs: Inputs) -> None:
        self.values, self.inputs = values, inputs

    def begin(self, episodes: np.ndarray) -> None:
        self.observations: list[np.ndarray] = []
        self.actions: list[np.ndarray] = []

    def act(self, observations: np.ndarray, target_returns: np.ndarray) -> np.ndarray:
        self.observations.append(observations)
        recent = self.observations[-self.inputs.steps :]
        acted = np.array(self.actions, np.int64).reshape(-1, len(observations))
        between = acted[len(acted) - len(recent) + 1 :]
        rows = [self.inputs.rows(np.stack(recent)[:, row], between[:, row])[-1:] for row in range(len(observations))]
        with torch.inference_mode():
            chosen = self.values(torch.from_numpy(np.concatenate(rows))).argmax(1).numpy()
        self.actions.append(chosen)
        return chosen

    def keep(self, rows: np.ndarray) -> None:
        self.observations = [each[rows] for each in self.observations]
        self.actions = [each[rows] for each in self.actions]


def episodes_of(setting: Setting, seed: int, folder: Path, options: Any) -> Trajectories:
    """The episodes that key_to_door.py and returns.py learn from."""
    if setting.walks is not None:
        return random_walks(setting.env, min(setting.walks, options.walks), seed)
    path = folder / f"{setting.env}.npz"
    if not path.exists():
        record(setting.env, path, options.recorded)
    return open_trajectories(str(path))


def others(setting: Setting) -> dict[str, list[float]]:
    """What Decision Transformer, asked for the highest return, and the clone reach with each seed, as committed."""
    if setting.walks is not None:
        runs = json.loads((RESULTS / "key_to_door.json").read_text(encoding="utf-8"))["runs"]
        runs = [run for run in runs if run["walks"] == setting.walks]
        return {"decision": [run["success"] for run in runs], "cloning": [run["cloning"] for run in runs]}
    runs = json.loads((RESULTS / "returns.json").read_text(encoding="utf-8"))["runs"]
    runs = [run for run in runs if run["env"] == setting.env]
    highest = [max(run["returns"], key=lambda row: row["target"])["mean"] for run in runs]
    return {"decision": highest, "cloning": [run["cloning"]["mean"] for run in runs]}


def measured(setting: Setting, folder: Path, options: Any) -> Iterator[dict[str, Any]]:
    """A run for every seed and weight."""
    for seed in range(options.seeds):
        data = episodes_of(setting, seed, folder, options)
        inputs = Inputs(data, setting.seen_steps)
        longest = 500 if setting.walks is None else int(data.lengths.max()) + 1
        seen = transitions(data, inputs, longest)
        for weight in WEIGHTS:
            policy = Greedy(learn(seen, inputs, weight, options.steps, seed), inputs)
            returns = rollouts(policy, setting.env, 0.0, options.episodes or setting.episodes, MEASURED_SEEDS).returns
            run = {"setting": setting.name, "weight": weight, "seed": seed, "return": float(returns.mean())}
            print(f"{setting.name}, weight {weight:g}, seed {seed}: {run['return']:.3f}", flush=True)
            yield run | {"transitions": len(seen.actions), "data_mean": float(data.returns.mean())}


def summary(setting: Setting, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean returns over the seeds."""
    row: dict[str, Any] = {"setting": setting.name}
    for weight, name in zip(WEIGHTS, ("fitted Q", "conservative Q"), strict=True):
        chosen = [run for run in runs if (run["setting"], run["weight"]) == (setting.name, weight)]
        row[name] = statistics.mean(run["return"] for run in chosen)
        row["data, mean"] = statistics.mean(run["data_mean"] for run in chosen)
    return row | {name: statistics.mean(values) for name, values in others(setting).items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="of training")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = prepare(parser)
    options.recorded, options.episodes, options.walks = RECORDED, None, 10_000
    if options.quick:
        options.steps, options.seeds, options.recorded, options.episodes, options.walks = 20, 1, 12, 4, 50
    with tempfile.TemporaryDirectory() as scratch:
        runs = [run for setting in SETTINGS for run in measured(setting, Path(scratch), options)]
    rows = [summary(setting, runs) for setting in SETTINGS]
    show("mean returns", tuple(rows[0]), [list(row.values()) for row in rows])
    save(options, "conservative_q", {"steps": options.steps, "summary": rows, "runs": runs})


if __name__ == "__main__":
    main()
