"""Do returns follow those that are asked for? CartPole and Pendulum, from scripted controllers mixed with noise.

In every episode of the data the controller's action is replaced by a random one with a probability that is drawn for
the episode, so that returns are of all sizes. The agent is then asked for returns over the range of the data; what is
reported is the rank correlation (Spearman) of the mean returns with the targets. Run folders in --runs that exist
already go on where they were stopped. Needs gymnasium (extra rl):

    python benchmarks/returns.py --runs runs/returns
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from common import arguments, kinformer, prepare, save, show, train
from kinformer.lab.control.environments import Discrete, Environments

SEEDS, EPISODES, TARGETS, RECORDED = 3, 20, 7, 300
RECIPE = ("--recipe", "tiny", "--length", 30, "--batch-size", 64, "--lr", 2e-3)
ROWS = 50


def cartpole(seen: np.ndarray) -> np.ndarray:
    """Push to where the pole falls, and gently back to the middle."""
    position, speed, angle, turning = seen.T
    return (angle + 0.3 * turning + 0.03 * position + 0.08 * speed > 0).astype(np.int64)


def pendulum(seen: np.ndarray) -> np.ndarray:
    """Swing up by energy, and hold near the top."""
    cosine, sine, turning = seen.T
    angle, lacking = np.arctan2(sine, cosine), 10.0 * (1 - cosine) - turning**2 / 6 * 2
    swinging = np.sign(turning + (turning == 0)) * np.sign(lacking) * 2.0
    holding = -(10.0 * angle + 2.0 * turning)
    return np.clip(np.where(cosine > 0.9, holding, swinging), -2, 2)[:, None]


CONTROLLERS = {"CartPole-v1": cartpole, "Pendulum-v1": pendulum}


def record(env: str, path: Path, episodes: int, seed: int = 0) -> None:
    """Episodes of the noisy controller, as .npz."""
    draw, parts = np.random.default_rng(seed), []
    for first in range(0, episodes, ROWS):
        environment = Environments(env, min(ROWS, episodes - first), autoreset=True)
        noise = draw.random(environment.count)
        seen, rows = environment.reset(range(10_000 + first, 10_000 + first + environment.count)), []
        running = np.ones(environment.count, bool)
        while running.any():
            actions = CONTROLLERS[env](seen)
            space = environment.actions
            if isinstance(space, Discrete):
                other = draw.integers(space.n, size=environment.count)
            else:
                other = draw.uniform(space.low, space.high, (environment.count, space.dim))
            mixed = draw.random(environment.count) < noise
            actions = np.where(mixed if actions.ndim == 1 else mixed[:, None], other, actions)
            before = seen
            seen, rewards, terminated, truncated = environment.step(actions)
            rows.append((before, actions, rewards, running))
            running = running & ~(terminated | truncated)
        parts += _episodes(rows)
        environment.close()
    observations, actions, rewards = (np.concatenate(each) for each in zip(*parts, strict=True))
    ends = np.cumsum([len(part[2]) for part in parts])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, observations=observations, actions=actions, rewards=rewards, episode_ends=ends)


def _episodes(rows: list[tuple[np.ndarray, ...]]) -> list[tuple[np.ndarray, ...]]:
    observations, actions, rewards, running = (np.stack(each, axis=1) for each in zip(*rows, strict=True))
    return [tuple(each[row][real] for each in (observations, actions, rewards)) for row, real in enumerate(running)]


def follow(env: str, seed: int, folder: Path, options: Any) -> dict[str, Any]:
    """One run, trained unless it is there, and what it makes of each target."""
    data, out = folder / f"{env}.npz", folder / f"{env}-{seed}"
    threads = ("--threads", options.threads) if options.threads else ()
    if not data.exists():
        record(env, data, options.recorded)
    words = ("--data", data, "--env", env, "--seed", seed, "--steps", options.steps, *RECIPE, *options.further)
    train("decision", out, options.threads, *words)
    with np.load(data, allow_pickle=False) as arrays:
        episodes = np.split(arrays["rewards"], arrays["episode_ends"][:-1])
    returns = np.array([each.sum() for each in episodes])
    targets = np.linspace(*np.quantile(returns, (0.1, 0.98)), TARGETS).round(1)
    asked = ("--target", ",".join(map(str, targets)), "--episodes", options.episodes)
    found = kinformer("evaluate", out, f"--target={asked[1]}", *asked[2:], "--cloning-steps", options.cloning, *threads)
    run = {"env": env, "seed": seed, "rank_correlation": found.get("rank_correlation"), "steps": options.steps}
    run |= {name: found[name] for name in ("returns", "cloning", "data_best", "data_mean", "context_steps")}
    got = ", ".join(f"{row['target']:g}: {row['mean']:.0f}" for row in found["returns"])
    print(f"{env}, seed {seed}: rank correlation {told(run)} ({got})", flush=True)
    return run


def told(run: dict[str, object]) -> str:
    """Return the rank correlation of a run, none where its returns differ by less than their 95 % intervals."""
    return "none" if run["rank_correlation"] is None else f"{run['rank_correlation']:.3f}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--envs", nargs="+", default=list(CONTROLLERS), choices=list(CONTROLLERS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=1000, help="of training")
    parser.add_argument("--recorded", type=int, default=RECORDED, help="episodes of the data")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="that are acted for each target")
    parser.add_argument("--runs", type=Path, help="keep the data and the run folders here")
    parser.add_argument("further", nargs="*", metavar="-- OPTIONS", help="further options of kinformer train")
    options = prepare(parser)
    options.cloning = 2000
    if options.quick:
        options.seeds, options.steps, options.recorded, options.episodes, options.cloning = 1, 4, 6, 2, 4
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        runs = [follow(env, seed, folder, options) for env in options.envs for seed in range(options.seeds)]
    table = [[f"{run['env']}, seed {run['seed']}", told(run), run["data_mean"]] for run in runs]
    show("returns and targets", ("run", "rank correlation", "mean of the data"), table)
    save(options, "returns", {"recipe": list(RECIPE), "runs": runs})


if __name__ == "__main__":
    main()
