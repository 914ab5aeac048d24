"""A training on a Ray cluster, or on this machine: Ray Train places the processes, Kinformer joins them.

    pip install "ray[train]"
    python examples/ray_train.py gpt runs/by-ray --workers 2 --steps 20
    python examples/ray_train.py gpt /shared/runs/by-ray --workers 16 --gpu --strategy fsdp --steps 100k

The run folder must lie where all machines see it. When a worker dies Ray starts all of them again, and they go on from
the last checkpoint.
"""

import argparse
import os
import socket
from pathlib import Path

import ray.train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer
from torch import distributed

import kinformer


def work(settings):
    """What every worker does. Ray has set torchrun's variables."""
    distributed.destroy_process_group()  # Ray's: Kinformer makes one that also joins processes of a CPU beside GPUs
    os.environ["MASTER_PORT"] = str(broadcast_from_rank_zero(free_port()))
    begun = (Path(settings["out"]) / "config.json").exists()
    run = kinformer.train(**settings, resume=begun, quiet=True)
    ray.train.report(dict(run.metrics))


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def train(member, out, workers, gpu=False, failures=3, **settings):
    """The metrics of a run in the folder ``out``; ``settings`` are those of ``kinformer.train``."""
    out = str(Path(out).resolve())
    restarts = ray.train.FailureConfig(max_failures=failures)
    trainer = TorchTrainer(
        work,
        train_loop_config={"member": member, "out": out, **settings},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=gpu),
        run_config=ray.train.RunConfig(storage_path=f"{out}-ray", failure_config=restarts),
    )
    trainer.fit()
    return dict(kinformer.open_run(out).metrics)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("member")
    parser.add_argument("out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=128)
    metrics = train(**vars(parser.parse_args()))
    print(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
