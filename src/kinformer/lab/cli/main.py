"""The command line: ``kinformer COMMAND ...``.

Only the module of the chosen command is imported, and PyTorch only when that command runs. Exit codes: 0; 1 for a
command's negative result; 2 for a mistake of the user (one sentence on standard error); 130 after Ctrl-C; 141 after the
reader of the output was closed.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from kinformer import __version__
from kinformer.lab.cli.output import (
    BEGUN,
    age_of_process,
    open_standard_streams,
    printable,
    printing_notes,
    reporting,
    set_up,
    started,
)
from kinformer.runtime.errors import KinformerError, as_flags, memory_sentence, nearest, spelled
from kinformer.runtime.progress import abandon, tolerant

if TYPE_CHECKING:
    from kinformer.lab.tasks.table import OptionKind


class Command(NamedTuple):
    """A command, named by the place of its class: a dataclass of options with a method ``run() -> int``.

    example: the last line of the command's help.
    tasks: the class of tasks' own options that the command takes too.
    computes: whether the command runs models for a long time.
    """

    place: str
    summary: str
    example: str
    tasks: OptionKind | None = None
    computes: bool = False

    def options(self) -> type:
        """Import and return the class."""
        module, _, name = self.place.partition(":")
        return getattr(import_module(f"kinformer.lab.cli.{module}"), name)


COMMANDS = {
    "list": Command(
        "family:List", "List the members of the family, the tasks, or the kinds of parts.", "kinformer list --json"
    ),
    "show": Command(
        "family:Show",
        "Show one member or run: paper, config, parameters, state size, attention pattern.",
        "kinformer show gpt --recipe tiny --set layers=3",
    ),
    "train": Command(
        "train:Train",
        "Train a member and write a run folder.",
        "kinformer train gpt --data book.txt --out runs/book --minutes 5",
        "Options",
        computes=True,
    ),
    "launch": Command(
        "train:Launch",
        "Print the command or script that starts a training on many machines, by torchrun or a scheduler.",
        "kinformer launch --to slurm --nodes 2 --processes 8 train gpt --config many.toml",
    ),
    "evaluate": Command(
        "using:Evaluate",
        "Measure a run on held-out data, as its task says.",
        "kinformer evaluate runs/book --first 100k",
        "EvaluationOptions",
        computes=True,
    ),
    "generate": Command(
        "using:Generate",
        "Continue a text with a trained run, token by token.",
        'kinformer generate runs/book "It was " --max-new-tokens 300',
        "GenerationOptions",
        computes=True,
    ),
    "chat": Command(
        "using:Chat",
        "Continue a text in turns: you write a line, the run writes the next.",
        'kinformer chat runs/book --before "ROMEO: " --after "\\nJULIET:" --stop ROMEO',
        computes=True,
    ),
    "predict": Command(
        "using:Predict",
        "Predict classes, masked words, transcripts or translations with a trained run.",
        "kinformer predict runs/reviews reviews.csv --out predictions.csv",
        "PredictionOptions",
        computes=True,
    ),
    "embed": Command(
        "using:Embed",
        "Compute vectors of texts, images or sound with a trained run.",
        "kinformer embed runs/book sentences.txt --out vectors.npz",
        computes=True,
    ),
    "serve": Command(
        "using:Serve",
        "Answer completions over HTTP, as OpenAI's clients request them.",
        "kinformer serve runs/book --port 8000",
        computes=True,
    ),
    "trace": Command(
        "using:Trace",
        "Show the attention of a trained run to a text, as an interactive page.",
        'kinformer trace runs/book "It was the best of times" --out trace.html',
        computes=True,
    ),
    "calibrate": Command(
        "using:Calibrate",
        "Find how early tokens may leave a run's layers at a bounded risk.",
        "kinformer calibrate runs/book --risk 0.05 --confidence 0.95",
        computes=True,
    ),
    "estimate": Command(
        "studying:Estimate",
        "Estimate parameters, FLOPs, memory and state size without running anything.",
        "kinformer estimate gpt --recipe paper --length 1024 --batch-size 8",
    ),
    "compare": Command(
        "studying:Compare",
        "Train members under one budget, measure them in turns, and write one report.",
        "kinformer compare gpt linear-transformer:3,gpt:1 --data book.txt --steps 500 --seeds 3",
        "Options",
        computes=True,
    ),
    "bench": Command(
        "studying:Bench",
        "Time members at several lengths, in turns with plain attention.",
        "kinformer bench linear-transformer local --lengths 512,2048,8192",
        computes=True,
    ),
    "draw": Command(
        "family:Draw",
        "Draw attention patterns and position encodings as a picture.",
        "kinformer draw longformer --out longformer.png",
    ),
    "index": Command(
        "using:Index",
        "Build a datastore of a run: its vector of each context, and the next token.",
        "kinformer index runs/book --data book.txt --datastore stores/book",
        computes=True,
    ),
    "pack": Command(
        "exchange:Pack",
        "Turn text into token shards, for training on data of any size.",
        "kinformer pack texts --out shards --tokenizer tokenizer.json",
    ),
    "import": Command(
        "exchange:Import",
        "Turn a Hugging Face checkpoint folder into a run folder.",
        "kinformer import checkpoints/gpt2 --out runs/gpt2",
    ),
    "export": Command(
        "exchange:Export",
        "Write a run as a folder that transformers loads, or an ONNX file.",
        "kinformer export runs/book --out exported/book",
    ),
    "verify": Command(
        "exchange:Verify",
        "Hold a causal model to its laws: a run, a folder of transformers, or your module.",
        "kinformer verify runs/book",
    ),
    "completion": Command(
        "completion:Completion",
        "Print a script that completes commands and options in your shell.",
        'eval "$(kinformer completion bash)"',
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (by default the process's) and return its exit code. Without ``argv`` the process
    belongs to the command, so the settings of the process are changed for computing (``runtime.process``). With
    ``argv`` the caller's settings are restored."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    BEGUN.set(time.monotonic() - (age_of_process() if argv is None else 0.0))
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch on Linux: large tensors fault in 2 MiB pages
    with started(is_command=argv is None), as_flags():
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
    if name == "help":
        return _help(rest, is_command)
    if name not in COMMANDS:
        kind = "an option of kinformer itself" if name.startswith("-") else "a command"
        raise KinformerError(f"{name!r} is not {kind}; {nearest(name, COMMANDS)} See kinformer --help.")
    from kinformer.lab.cli.form import named_tasks, parse
    from kinformer.lab.tasks.table import ALL

    if name == "launch" and "--" not in rest:  # the options that follow are the training's
        at = next((place for place, word in enumerate(rest) if word in ("train", "kinformer")), len(rest))
        rest.insert(at, "--")
    command = COMMANDS[name]
    options: Any = parse(command.options(), command.tasks, rest, prog=f"kinformer {name}", description=command.summary)
    if options is None:
        if command.tasks is not None:
            of_run = name in ("evaluate", "generate", "predict")
            how = f"kinformer {name} DIR --help" if of_run else f"kinformer {name} MEMBER --help or --task TASK --help"
            shown = "".join(f": shown for {task}" for task in named_tasks(rest)) or f": see {how}"
            print(f"options of a task{shown}\ntasks: {', '.join(ALL)}\n")
        print(f"example:\n  {command.example}")
        return 0
    try:
        _check_members(name, options)
        with (
            printing_notes(options.quiet),
            set_up(command.computes, is_command, name != "serve"),
            reporting(options.verbose, getattr(options, "device", None)),
        ):
            return options.run()
    except KinformerError as error:
        status = _fail(str(error))
        if options.verbose:
            traceback.print_exception(error, file=tolerant(sys.stderr))
        return status


def _check_members(command: str, options: Any) -> None:
    """Refuse an unknown member before PyTorch is imported, which takes seconds."""
    from kinformer.family.table import member
    from kinformer.lab.comparison.options import parse_spec

    name = getattr(options, "member", "")  # show and estimate also take the folder of a run
    if name and "/" not in name and not os.path.isdir(name) and not getattr(options, "resume", False):
        member(name)
    if not getattr(options, "merge", ()):  # with which compare takes files
        for spec in getattr(options, "members", ()):
            (parse_spec if command == "compare" else member)(spec)  # compare takes hybrids and names of entrants, too


def _help(words: list[str], is_command: bool) -> int:
    """Print the help of all commands, of the command or task in ``words``, or the page of the member in ``words``."""
    from kinformer.family.table import FAMILY
    from kinformer.lab.tasks.table import ALL

    if not words or words[0] in COMMANDS:
        return _dispatch([*words, "--help"], is_command)
    if words[0] in ALL:
        return _dispatch(["train", "MEMBER", "--task", words[0], "--help"], is_command)
    if words[0] not in FAMILY:
        names = nearest(words[0], [*COMMANDS, *FAMILY, *ALL])
        raise KinformerError(f"help: {words[0]!r} is not a command, member or task; {names} See: kinformer list.")
    return _dispatch(["show", *words], is_command)


def overview() -> str:
    """Return the text of ``kinformer --help``."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        f"usage: kinformer COMMAND [OPTIONS]\n\nThe Transformer family in one command line.\n\ncommands:\n{lines}\n\n"
        "kinformer help COMMAND shows a command's options, kinformer help TASK a task's, kinformer help MEMBER a "
        "member, kinformer --version the version."
    )


def _fail(sentence: str, status: int = 2) -> int:
    print(f"kinformer: {printable(sentence)}", file=tolerant(sys.stderr))
    return status
