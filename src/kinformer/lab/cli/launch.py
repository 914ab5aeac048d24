"""``kinformer launch -- train ...``: prints a line or a script that starts training on many machines."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
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
"""Cores that a script asks for beside each process: one computes, others load data and write checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """Print the command or script that starts a training on many machines, by torchrun or a scheduler. Nothing
    starts."""

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- train ...")] = ()
    """The training, as it would be typed on one machine, behind two dashes."""
    to: Literal["torchrun", "slurm", "kubernetes", "skypilot"] = "torchrun"
    """What starts it: a line to type on every machine, a script for sbatch, a PyTorchJob, a task of SkyPilot."""
    nodes: int = 1
    """Machines."""
    processes: int = 8
    """Processes on each machine, one for each GPU."""
    restarts: int = 3
    """How often all processes are started again, from the last checkpoint, when one dies."""
    host: str | None = None
    """With torchrun on several machines: name or address of the first one."""

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
        raise KinformerError("launch: a word of the training holds a line break, which scripts would cut; write it so.")
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
    start = Start(
        command=words,
        out=training.out,
        nodes=options.nodes,
        processes=options.processes,
        restarts=options.restarts,
        resumes=not training.resume,
        gpus=training.device != "cpu",
        host=options.host or "",
    )
    script = FORMS[options.to](start)
    if options.json:
        print_json({"to": options.to, "script": script})
    else:
        print(script, end="")
    return 0


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of ``command``, the words after ``kinformer``, whose run folder is ``out``: ``processes`` on each of
    ``nodes`` machines, started again up to ``restarts`` times when one dies. ``resumes``: a later start must add
    ``--resume``. ``gpus``: whether each process has one. ``host``: the first machine, as torchrun has it."""

    command: Sequence[str]
    out: str
    nodes: int
    processes: int
    restarts: int
    resumes: bool
    gpus: bool
    host: str = ""

    def torchrun(self, options: str) -> str:
        """Return torchrun's line with ``options`` of the rendezvous, and the command as it came."""
        return (
            f"torchrun {options} --nproc-per-node {self.processes} --max-restarts {self.restarts} \\\n"
            f"    -m kinformer {shlex.join(self.command)}"
        )

    @property
    def again(self) -> tuple[str, str]:
        """Return the line of a script that finds out whether the run exists already, and the word that resumes it."""
        if not self.resumes:
            return "", ""
        config = shlex.quote(f"{self.out.rstrip('/')}/config.json")
        return f"resume=$([ -e {config} ] && echo --resume)\n", " $resume"


def torchrun_line(start: Start) -> str:
    """Return the line that is typed on every machine."""
    if start.nodes == 1:
        return start.torchrun("--standalone") + "\n"
    rendezvous = f"--rdzv-id kinformer --rdzv-backend c10d --rdzv-endpoint {shlex.quote(start.host)}:{PORT}"
    return start.torchrun(f"--nnodes {start.nodes} {rendezvous}") + "\n"


def slurm_script(start: Start) -> str:
    """Return a script for sbatch; Slurm queues it again when a machine fails or the job is pre-empted."""
    finds, word = start.again
    gpus = f"#SBATCH --gpus-per-node={start.processes}\n" if start.gpus else ""
    rendezvous = '--rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$host:' + f'{PORT}"'
    line = start.torchrun(f'--nnodes "$SLURM_NNODES" {rendezvous}')
    return f"""#!/bin/bash
#SBATCH --job-name=kinformer
#SBATCH --nodes={start.nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --cpus-per-task={CORES * start.processes}
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{finds}
srun {line}{word}
"""


def kubernetes_manifest(start: Start) -> str:
    """Return a PyTorchJob of Kubeflow's training operator, which gives torchrun the rendezvous by its environment."""
    finds, word = start.again
    line = start.torchrun(f"--nnodes {start.nodes}").replace(" \\\n   ", "", 1)
    script = f"{finds}exec {line}{word}".replace("$(", "$$(")  # what Kubernetes would take for a variable
    resources = {"cpu": CORES * start.processes} | ({"nvidia.com/gpu": start.processes} if start.gpus else {})
    return f"""apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: kinformer
spec:
  elasticPolicy:
    rdzvBackend: c10d
    maxRestarts: {start.restarts}
  pytorchReplicaSpecs:
    Worker:
      replicas: {start.nodes}
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: IMAGE  # one with kinformer in it
              workingDir: /work
              command: [bash, -c]
              args: [{json.dumps(script)}]
              resources:
                limits: {json.dumps(resources)}
              volumeMounts:
                - {{name: work, mountPath: /work}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes:
            - name: work  # one file system for all machines
              persistentVolumeClaim: {{claimName: CLAIM}}
            - name: shm
              emptyDir: {{medium: Memory}}
"""


def skypilot_task(start: Start) -> str:
    """Return a task of SkyPilot; managed jobs start it again after a pre-emption."""
    finds, word = start.again
    rendezvous = '--rdzv-id "$SKYPILOT_TASK_ID" --rdzv-backend c10d --rdzv-endpoint "$host:' + f'{PORT}"'
    line = start.torchrun(f'--nnodes "$SKYPILOT_NUM_NODES" {rendezvous}')
    script = f'host=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n{finds}{line}{word}'
    needs = f"accelerators: H100:{start.processes}" if start.gpus else f"cpus: {CORES * start.processes}+"
    body = "\n".join(f"  {row}" for row in script.splitlines())
    return f"""name: kinformer
num_nodes: {start.nodes}
resources:
  {needs}
setup: pip install kinformer
run: |
{body}
"""


FORMS = {
    "torchrun": torchrun_line,
    "slurm": slurm_script,
    "kubernetes": kubernetes_manifest,
    "skypilot": skypilot_task,
}
