"""The command line: ``kinformer COMMAND ...``.

Nothing but the chosen command's module is imported, and PyTorch only when that command runs. Exit codes: 0, 1 where a
command says so, 2 for a mistake of the user (one sentence on standard error), 130 after Ctrl-C, 141 when the reader of
the output was closed.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from kinformer import __version__
from kinformer.lab.cli.output import (
    BEGUN,
    age_of_process,
    describing_run,
    open_standard_streams,
    printing_notes,
    set_up,
    started,
)
from kinformer.runtime.errors import KinformerError, as_flags, memory_sentence, nearest, spelled
from kinformer.runtime.progress import abandon, tolerant


class Command(NamedTuple):
    """A module with a dataclass ``Options`` and a function ``run(options) -> int``; its ``TASK_OPTIONS``, if there are
    any, says which of the tasks' own options the command takes too. ``example`` ends the command's help."""

    module: str
    summary: str
    example: str


COMMANDS = {
    "list": Command(
        "kinformer.lab.cli.list_",
        "List the members of the family, the tasks, or the kinds of parts.",
        "kinformer list --json",
    ),
    "show": Command(
        "kinformer.lab.cli.show",
        "Show one member or run: paper, config, parameters, state size, attention pattern.",
        "kinformer show gpt --recipe tiny --set layers=3",
    ),
    "train": Command(
        "kinformer.lab.cli.train",
        "Train a member and write a run folder.",
        "kinformer train gpt --data book.txt --out runs/book --minutes 5",
    ),
    "launch": Command(
        "kinformer.lab.cli.launch",
        "Print the command or script that starts a training on many machines, by torchrun or a scheduler.",
        "kinformer launch --to slurm --nodes 2 --processes 8 -- train gpt --config many.toml",
    ),
    "evaluate": Command(
        "kinformer.lab.cli.evaluate",
        "Measure a run on held-out data, as its task says.",
        "kinformer evaluate runs/book --max-bytes 100k",
    ),
    "generate": Command(
        "kinformer.lab.cli.generate",
        "Continue a text with a trained run, token by token.",
        'kinformer generate runs/book --prompt "It was " --max-new-tokens 300',
    ),
    "chat": Command(
        "kinformer.lab.cli.chat",
        "Continue a text in turns: you write a line, the run writes the next.",
        'kinformer chat runs/book --before "ROMEO: " --after "\\nJULIET:" --stop ROMEO',
    ),
    "predict": Command(
        "kinformer.lab.cli.predict",
        "Predict classes, masked words, transcripts or translations with a trained run.",
        "kinformer predict runs/reviews reviews.csv --out predictions.csv",
    ),
    "embed": Command(
        "kinformer.lab.cli.embed",
        "Compute vectors of texts, images or sound with a trained run.",
        "kinformer embed runs/book sentences.txt --out vectors.npz",
    ),
    "serve": Command(
        "kinformer.lab.cli.serve",
        "Answer completions over HTTP, as OpenAI's clients request them.",
        "kinformer serve runs/book --port 8000",
    ),
    "trace": Command(
        "kinformer.lab.cli.trace",
        "Show what a trained run attends to in a text, as an interactive page.",
        'kinformer trace runs/book "It was the best of times" --out trace.html',
    ),
    "calibrate": Command(
        "kinformer.lab.cli.calibrate",
        "Find how early tokens may leave a run's layers at a bounded risk.",
        "kinformer calibrate runs/book --risk 0.05 --confidence 0.95",
    ),
    "estimate": Command(
        "kinformer.lab.cli.estimate",
        "Estimate parameters, FLOPs, memory and state size without running anything.",
        "kinformer estimate gpt --recipe paper --length 1024 --batch-size 8",
    ),
    "compare": Command(
        "kinformer.lab.cli.compare",
        "Train members under one budget, measure them in turns, and write one report.",
        "kinformer compare gpt linear-transformer:3,gpt:1 --data book.txt --steps 500 --seeds 3",
    ),
    "bench": Command(
        "kinformer.lab.cli.bench",
        "Time members at several lengths, in turns with plain attention.",
        "kinformer bench linear-transformer local --lengths 512,2048,8192",
    ),
    "draw": Command(
        "kinformer.lab.cli.draw",
        "Draw attention patterns and position encodings as a picture.",
        "kinformer draw longformer --out longformer.png",
    ),
    "index": Command(
        "kinformer.lab.cli.index",
        "Build a datastore of a run: its vector of each context, and the next token.",
        "kinformer index runs/book --data book.txt --datastore stores/book",
    ),
    "pack": Command(
        "kinformer.lab.cli.pack",
        "Turn text into token shards, for training on data of any size.",
        "kinformer pack texts --out shards --tokenizer tokenizer.json",
    ),
    "import": Command(
        "kinformer.lab.cli.import_",
        "Turn a Hugging Face checkpoint folder into a run folder.",
        "kinformer import checkpoints/gpt2 --out runs/gpt2",
    ),
    "export": Command(
        "kinformer.lab.cli.export",
        "Write a run as a folder that transformers loads, an ONNX file or a compiled step.",
        "kinformer export runs/book --out exported/book",
    ),
    "verify": Command(
        "kinformer.lab.cli.verify",
        "Hold a causal model to its laws: a run, a folder of transformers, or your module.",
        "kinformer verify runs/book",
    ),
    "completion": Command(
        "kinformer.lab.cli.completion",
        "Print a script that completes commands and options in your shell.",
        'eval "$(kinformer completion bash)"',
    ),
}

COMPUTING = (
    "train",
    "evaluate",
    "generate",
    "chat",
    "predict",
    "embed",
    "serve",
    "trace",
    "calibrate",
    "compare",
    "bench",
    "index",
)
"""Commands that run models for long."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (by default the process's) and return its exit code.

    Only without ``argv`` is the process the command's own, and set up to compute (``runtime.process``).
    """
    with started(is_command=argv is None), as_flags():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    BEGUN.set(time.monotonic() - (age_of_process() if argv is None else 0.0))
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch on Linux: large tensors fault in 2 MiB pages
    open_standard_streams()
    try:
        status = _dispatch(arguments, is_command=argv is None)
        sys.stdout.flush()
        return status
    except KinformerError as error:
        return _fail(str(error))
    except KeyboardInterrupt as error:
        return _fail(str(error), 130) if error.args else 130
    except BrokenPipeError:
        abandon(sys.stdout)
        return 141
    except (MemoryError, RuntimeError) as error:
        if (sentence := memory_sentence(error)) is None:
            raise
        return _fail(spelled(sentence))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        abandon(sys.stdout)
        return _fail(f"{where}{error.strerror or error}; free space or check the path and its permissions.")


def _dispatch(arguments: list[str], is_command: bool) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name in ("-V", "--version"):
        print(f"kinformer {__version__}")
        return 0
    if name not in COMMANDS:
        kind = "an option of kinformer itself" if name.startswith("-") else "a command"
        raise KinformerError(f"{name!r} is not {kind}; {nearest(name, COMMANDS)} See kinformer --help.")
    from kinformer.lab.cli.parsing import parse

    command = COMMANDS[name]
    module = import_module(command.module)
    task_options = getattr(module, "TASK_OPTIONS", None)
    options = parse(module.Options, task_options, rest, prog=f"kinformer {name}", description=command.summary)
    if options is None:
        if task_options is not None:
            print(_tasks_of_help(name, rest))
        print(f"example:\n  {command.example}")
        return 0
    try:
        with (
            printing_notes(options.quiet),
            set_up(name in COMPUTING, is_command, name != "serve"),
            describing_run(options),
        ):
            return module.run(options)
    except KinformerError as error:
        status = _fail(str(error))
        if options.verbose:
            traceback.print_exception(error, file=tolerant(sys.stderr))
        return status


def _tasks_of_help(name: str, arguments: Sequence[str]) -> str:
    """Return lines that say whose options the help of a command shows, and how to see those of other tasks."""
    from kinformer.lab.cli.parsing import named_tasks
    from kinformer.lab.tasks.table import ALL

    subject = "DIR" if name in ("evaluate", "generate", "predict") else "MEMBER"
    how = f"kinformer {name} {subject} --help" + ("" if subject == "DIR" else " or --task TASK --help")
    shown = "".join(f" are those of {task}" for task in named_tasks(arguments)) or f": see {how}"
    return f"options of a task{shown}\ntasks: {', '.join(ALL)}\n"


def overview() -> str:
    """Return the text of ``kinformer --help``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kinformer COMMAND [OPTIONS]",
            "",
            "The Transformer family in one command line.",
            "",
            "commands:",
            *lines,
            "",
            "kinformer COMMAND --help shows a command's options, kinformer --version the version.",
        ]
    )


def _fail(sentence: str, status: int = 2) -> int:
    print(f"kinformer: {sentence}", file=tolerant(sys.stderr))
    return status
