"""A run's curves in a tracker: TensorBoard, Weights & Biases, MLflow or Trackio, by one function each.

    python examples/track.py runs/gpt --to tensorboard          # once, of a run that is over
    python examples/track.py runs/gpt --to wandb --follow       # while it trains, from another terminal

``metrics.jsonl`` of the run folder is the truth and what is read here, so a tracker that fails never disturbs the
training, and a run can be told to several of them, also afterwards. Any function ``log(step, values)`` will do.
"""

import argparse
import json
import os
import time
from importlib.util import find_spec
from pathlib import Path


def tensorboard(folder):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tracked"))

    def log(step, values):
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def wandb(folder):
    os.environ.setdefault("WANDB_MODE", "offline")  # `wandb sync` sends it later
    import wandb

    run = wandb.init(project="kinformer", name=folder.name, dir=str(folder), config=settings(folder))
    return lambda step, values: run.log(values, step=step), run.finish


def mlflow(folder):
    place = f"sqlite:///{folder.resolve()}/mlflow.db"
    if find_spec("sqlalchemy") is None:  # mlflow-skinny comes without a database
        place = f"file:{folder.resolve()}/mlruns"
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", place))
    mlflow.start_run(run_name=folder.name)
    mlflow.log_params(settings(folder))
    return lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run


def trackio(folder):
    import trackio

    trackio.init(project="kinformer", name=folder.name, config=settings(folder))
    return lambda step, values: trackio.log(values, step=step), trackio.finish


TRACKERS = {tracker.__name__: tracker for tracker in (tensorboard, wandb, mlflow, trackio)}


def settings(folder):
    """The settings of training, as the run's config has them."""
    config = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in config["training"].items() if isinstance(value, str | int | float)}


def follow(folder, log, again=lambda: False, seconds=1.0):
    """Tell ``log(step, values)`` every line of the run's metrics; as long as ``again()``, also those to come. Returns
    how many."""
    told, rest = 0, ""
    with (folder / "metrics.jsonl").open(encoding="utf-8") as file:
        while True:
            goes_on = again()  # asked first: what was written before is then read
            *lines, rest = (rest + file.read()).split("\n")  # the last one may not be whole yet
            for line in lines:
                values = json.loads(line)
                log(values.pop("step"), values)
            told += len(lines)
            if not goes_on:
                return told
            time.sleep(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", choices=TRACKERS, default="tensorboard")
    parser.add_argument("--follow", action="store_true", help="until interrupted")
    options = parser.parse_args()
    log, close = TRACKERS[options.to](options.run)
    try:
        print(f"{follow(options.run, log, lambda: options.follow)} lines told to {options.to}")
    except KeyboardInterrupt:
        pass
    finally:
        close()


if __name__ == "__main__":
    main()
