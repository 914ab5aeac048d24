"""``kinformer launch -- train ...``: what starts a training on many machines, printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from kinformer.cli import train
from kinformer.cli.launching import FORMS, Start
from kinformer.cli.options import CommonOptions, require
from kinformer.cli.output import print_json
from kinformer.cli.parsing import parse
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """Print what starts a training on many machines: torchrun's line, or a scheduler's script. Nothing is started."""

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


def run(options: Options) -> int:
    """Check the training's options, and print what starts it."""
    words = options.command[1:] if options.command[:1] == ("kinformer",) else options.command
    if words[:1] != ("train",):
        raise KinformerError("launch: needs the training behind two dashes, as in: kinformer launch -- train gpt ...")
    if any("\n" in word for word in words):
        raise KinformerError("launch: a word of the training holds a line break, which scripts would cut; write it so.")
    training = parse(train.Options, "Options", words[1:], prog="kinformer train", description="")
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
