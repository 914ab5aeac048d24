"""A search for the learning rate and the width of a member by Optuna, which ends trials that fall behind.

    pip install optuna
    python examples/optuna_sweep.py --member gated-deltanet --data book.txt --steps 400 --trials 20

A trial trains in rungs: to a quarter of the steps, to half of them, and so on, going on from its own checkpoint each
time; the schedule is constant, so that rungs are parts of one training. Start the script several times with one
--storage to search in several processes; a study that was stopped goes on.
"""

import argparse
from pathlib import Path

import optuna

import kinformer


def objective(trial, member, out, steps, rungs=4, **settings):
    """Bits per byte on the validation split, the least of all rungs."""
    rate = trial.suggest_float("lr", 1e-4, 3e-2, log=True)
    changes = {"dim": trial.suggest_categorical("dim", [32, 64])}
    folder = Path(out) / f"trial-{trial.number}"
    for rung in range(1, rungs + 1):
        begun = (folder / "config.json").is_file()
        end = max(1, steps * rung // rungs)
        run = kinformer.train(
            member,
            out=folder,
            resume=begun,
            steps=end,
            lr=rate,
            schedule="constant",
            set=changes,
            quiet=True,
            **settings,
        )
        bits = run.metrics["bits_per_byte"]
        trial.report(bits, end)
        if trial.should_prune():
            raise optuna.TrialPruned
    return bits


def search(member, out, trials, steps, storage=None, **settings):
    """The study after so many more trials."""
    study = optuna.create_study(
        study_name=f"kinformer-{member}",
        storage=storage,
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    study.optimize(lambda trial: objective(trial, member, out, steps, **settings), n_trials=trials)
    return study


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--member", default="gpt")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--storage", help="such as sqlite:///study.db")
    parser.add_argument("--out", default="optuna")
    study = search(**vars(parser.parse_args()))
    pruned = sum(trial.state is optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{len(study.trials)} trials, {pruned} of them ended early")
    print(f"best: {study.best_value:.4f} bits per byte with {study.best_params} (trial-{study.best_trial.number})")


if __name__ == "__main__":
    main()
