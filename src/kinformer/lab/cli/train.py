"""The commands that train a member: train, and launch, which prints a script that trains on many machines."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from kinformer.family.table import member
from kinformer.lab.cli.form import CommonOptions, parse
from kinformer.lab.cli.output import BEGUN, print_json
from kinformer.lab.runs.options import TrainOptions
from kinformer.runtime.errors import KinformerError, plural, spelled


@dataclass(frozen=True, kw_only=True)
class Train(TrainOptions, CommonOptions):  # type: ignore[misc]  # each base checks its own LEAST
    """Train a member; with ``--resume``, missing options are taken from the run."""

    def run(self) -> int:
        """Train, print a summary, and return the exit status."""
        from kinformer.lab.runs.train import train
        from kinformer.lab.training.distributed import started_by_torchrun

        first = not started_by_torchrun() or os.environ["RANK"] == "0"
        try:
            summary = train(self, self.quiet, BEGUN.get())
        except KinformerError:
            if first:
                raise
            return 2
        except InterruptedError as ended:
            return int(ended.args[0])
        result = summary.result
        if first and self.json:
            print_json(summary.facts)
        elif first and not result.signal:
            speed = f"{result.seconds:.0f} s, {result.tokens_per_second:,.0f} tokens/s"
            print(f"{summary.folder}: {plural(result.steps, 'step')} in {speed}, {summary.best}")
            last = [spelled(f"{summary.verdict}.")] if summary.verdict else []
            if not self.quiet:
                folder, uses = shlex.quote(str(summary.folder)), ["kinformer evaluate {}", summary.use]
                last.append(f"Next: {' or '.join(use.format(folder) for use in uses if use)}")
            if last:
                print(*last)
        return 128 + result.signal if result.signal else 0


PORT = 29500
CORES = 8
"""The processor cores of each process in a script: one computes, the others load data and write checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Launch(CommonOptions):
    """Print the command or script that starts a training on many machines, by torchrun or by Slurm. Nothing starts."""

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="train ...")] = ()
    """The training, as you would type it on one machine, with its `out`, behind the options of launch."""
    to: Literal["torchrun", "slurm"] = "torchrun"
    """How it starts: a line of torchrun to type on every machine, or a script for sbatch."""
    nodes: int = 1
    """Machines."""
    processes: int = 8
    """Processes on each machine, one for each GPU."""
    restarts: int = 3
    """How often all processes restart from the last checkpoint when one dies."""
    host: str | None = None
    """With torchrun on several machines: name or address of the first machine."""

    LEAST = {"nodes": 1, "processes": 1, "restarts": 0}

    def run(self) -> int:
        """Check the training's options, print the line or script that starts it, and return the exit status."""
        words = self.command[1:] if self.command[:1] == ("kinformer",) else self.command
        if words[:1] != ("train",):
            raise KinformerError("launch: needs the training at its end, as in: kinformer launch train gpt ...")
        if any("\n" in word for word in words):
            raise KinformerError("launch: a word of the training holds a line break, which cuts a script; remove it.")
        training = parse(Train, "Options", words[1:], prog="kinformer train", description="")
        if training is None:
            return 0
        total = self.nodes * self.processes
        member(training.member), training.folder  # refuse an unknown member, then a missing folder
        training.require_processes(total, f"{self.nodes} x {self.processes} are {total} processes")
        if self.to == "torchrun" and self.nodes > 1 and not re.fullmatch(r"[\w.:\[\]-]+", self.host or ""):
            raise KinformerError("`host`: torchrun's line needs the first machine's name or address; give it.")
        if self.to == "slurm":
            script = slurm_script(self, words, training)
        elif self.nodes == 1:
            script = _torchrun("--standalone", self, words) + "\n"
        else:
            place = f"--rdzv-id kinformer --rdzv-backend c10d --rdzv-endpoint {shlex.quote(self.host or '')}:{PORT}"
            script = _torchrun(f"--nnodes {self.nodes} {place}", self, words) + "\n"
        if self.json:
            print_json({"to": self.to, "script": script})
        else:
            print(script, end="")
        return 0


def slurm_script(options: Launch, words: tuple[str, ...], training: Train) -> str:
    """Return a script for sbatch. Slurm queues the job again after a failure or a pre-emption, so the script adds
    ``--resume`` if the run folder exists, unless the user's words contain it."""
    gpus = f"#SBATCH --gpus-per-node={options.processes}\n" if training.device != "cpu" else ""
    rendezvous = f'--rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$host:{PORT}"'
    line = _torchrun(f'--nnodes "$SLURM_NNODES" {rendezvous}', options, words)
    config = shlex.quote(f"{str(training.folder)}/config.json")
    find, resume = ("", "") if training.resume else (f"resume=$([ -e {config} ] && echo --resume)\n", " $resume")
    return f"""#!/bin/bash
#SBATCH --job-name=kinformer
#SBATCH --nodes={options.nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --cpus-per-task={CORES * options.processes}
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{find}
srun {line}{resume}
"""


def _torchrun(rendezvous: str, options: Launch, words: tuple[str, ...]) -> str:
    """Return torchrun's line with the flags of the ``rendezvous`` and the user's ``words``."""
    return (
        f"torchrun {rendezvous} --nproc-per-node {options.processes} --max-restarts {options.restarts} \\\n"
        f"    -m kinformer {shlex.join(words)}"
    )
