"""``kinformer launch -- train ...``: the line or the script that starts a training on many machines."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from kinformer.lab.cli.form import parse
from kinformer.lab.cli.options import CommonOptions
from kinformer.lab.cli.output import print_json
from kinformer.lab.cli.train import Train
from kinformer.runtime.errors import KinformerError, require

PORT = 29500
CORES = 8
"""The processor cores that a script requests for each process: one computes, the others load data and write
checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """Print the command or script that starts a training on many machines, by torchrun or by Slurm. Nothing starts."""

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- train ...")] = ()
    """The training, as you would type it on one machine, behind two dashes."""
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

    def __post_init__(self) -> None:
        require("nodes", self.nodes, 1)
        require("processes", self.processes, 1)
        require("restarts", self.restarts, 0)
        super().__post_init__()

    def run(self) -> int:
        """Print the line or script that starts the training, and return the exit status."""
        return run(self)


def run(options: Options) -> int:
    """Check the training's options, print the line or script that starts it, and return the exit status."""
    words = options.command[1:] if options.command[:1] == ("kinformer",) else options.command
    if words[:1] != ("train",):
        raise KinformerError("launch: needs the training behind two dashes, as in: kinformer launch -- train gpt ...")
    if any("\n" in word for word in words):
        raise KinformerError("launch: a word of the training holds a line break, which a script would cut; remove it.")
    training = parse(Train, "Options", words[1:], prog="kinformer train", description="")
    if training is None:
        return 0
    total = options.nodes * options.processes
    if training.devices not in (1, total):
        flag = f"`devices` {training.devices}" if training.parallel is None else f"`parallel` {training.parallel}"
        remedy = "leave `devices` out" if training.parallel is None else f"give sizes whose product is {total}"
        raise KinformerError(f"{flag}: {options.nodes} x {options.processes} are {total} processes; {remedy}.")
    if options.to == "torchrun" and options.nodes > 1 and not re.fullmatch(r"[\w.:\[\]-]+", options.host or ""):
        raise KinformerError("`host`: torchrun's line needs the first machine's name or address; give it.")
    script = torchrun_line(options, words) if options.to == "torchrun" else slurm_script(options, words, training)
    if options.json:
        print_json({"to": options.to, "script": script})
    else:
        print(script, end="")
    return 0


def torchrun_line(options: Options, words: tuple[str, ...]) -> str:
    """Return the line that a user types on every machine."""
    if options.nodes == 1:
        return _torchrun("--standalone", options, words) + "\n"
    rendezvous = f"--rdzv-id kinformer --rdzv-backend c10d --rdzv-endpoint {shlex.quote(options.host or '')}:{PORT}"
    return _torchrun(f"--nnodes {options.nodes} {rendezvous}", options, words) + "\n"


def slurm_script(options: Options, words: tuple[str, ...], training: Train) -> str:
    """Return a script for sbatch.

    Slurm queues the job again when a machine fails or the job is pre-empted. So the script adds ``--resume`` if the run
    folder exists, unless the user's words contain it.
    """
    gpus = f"#SBATCH --gpus-per-node={options.processes}\n" if training.device != "cpu" else ""
    rendezvous = f'--rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$host:{PORT}"'
    line = _torchrun(f'--nnodes "$SLURM_NNODES" {rendezvous}', options, words)
    config = shlex.quote(f"{training.out.rstrip('/')}/config.json")
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


def _torchrun(rendezvous: str, options: Options, words: tuple[str, ...]) -> str:
    """Return torchrun's line with the flags of the ``rendezvous`` and the user's ``words``."""
    return (
        f"torchrun {rendezvous} --nproc-per-node {options.processes} --max-restarts {options.restarts} \\\n"
        f"    -m kinformer {shlex.join(words)}"
    )
