"""The command line: ``kinformer COMMAND ...``.

Nothing but the chosen command's module is imported, and PyTorch only when that command runs. Exit codes: 0, 1 where a
command says so, 2 for a mistake of the user (one sentence on standard error), 130 after Ctrl-C, 141 when the reader of
the output has gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, TextIO

from kinformer import __version__
from kinformer.cli.output import printing_notes
from kinformer.core.errors import KinformerError, nearest
from kinformer.core.progress import abandon, tolerant


class Command(NamedTuple):
    """A module with a dataclass ``Options`` and a function ``run(options) -> int``; its ``TASK_OPTIONS``, if there are
    any, says which of the tasks' own options the command takes too."""

    module: str
    summary: str


COMMANDS = {
    "list": Command("kinformer.cli.list_", "The family: every member with its paper, its state's growth and recipes."),
    "show": Command("kinformer.cli.show", "One member: paper, config, parameters, state size, attention pattern."),
    "train": Command("kinformer.cli.train", "Train a member and write a run folder."),
    "evaluate": Command("kinformer.cli.evaluate", "Measure a run on held-out data, as its task says."),
    "generate": Command("kinformer.cli.generate", "Continue a text with a trained run, token by token."),
    "estimate": Command("kinformer.cli.estimate", "Parameters, FLOPs, memory and state size before anything is run."),
    "draw": Command("kinformer.cli.draw", "Attention patterns and encodings of positions as a picture."),
    "index": Command("kinformer.cli.index", "A datastore of a run: what it made of each context, and the next token."),
    "import": Command("kinformer.cli.import_", "Turn a Hugging Face checkpoint folder into a run folder."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (by default the process's) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch on Linux: large tensors fault in 2 MiB pages
    _open_standard_streams()
    _tolerate(sys.stdout)
    _tolerate(sys.stderr)
    try:
        with printing_notes():
            status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except KinformerError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        abandon(sys.stdout)
        return 141
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        abandon(sys.stdout)
        return _fail(f"{place}{error.strerror or error}; free space or check the path and its permissions.")


def _dispatch(arguments: list[str]) -> int:
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
    from kinformer.cli.options import with_placeholders, with_task_options
    from kinformer.cli.parsing import parse

    command = COMMANDS[name]
    module: Any = import_module(command.module)
    group: Any = getattr(module, "TASK_OPTIONS", None)
    known = with_placeholders(module.Options)
    known = known if group is None else with_task_options(known, group)
    options = parse(known, rest, prog=f"kinformer {name}", description=command.summary)
    return 0 if options is None else module.run(options)


def overview() -> str:
    """The text of ``kinformer --help``."""
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
            "kinformer COMMAND --help tells a command's options, kinformer --version the version.",
        ]
    )


def _fail(sentence: str) -> int:
    print(f"kinformer: {sentence}", file=tolerant(sys.stderr))
    return 2


def _open_standard_streams() -> None:
    """Standard streams that were closed lead nowhere; else the next file that is opened would take their place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = (stream or tolerant(stream) for stream in (sys.stdout, sys.stderr))


def _tolerate(stream: TextIO) -> None:
    """Characters that the terminal cannot show become question marks instead of a crash."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
