"""Parsing of arguments into a command's ``Options``; what cannot be parsed is one sentence."""

from __future__ import annotations

import contextlib
import io
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import tyro

from kinformer.family.table import FAMILY
from kinformer.lab.cli import form
from kinformer.lab.cli.form import read, suggestion
from kinformer.lab.tasks.table import OptionKind
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

O = TypeVar("O")


def parse(
    options: type[O], kind: OptionKind | None, arguments: Sequence[str], *, prog: str, description: str
) -> O | None:
    """Return ``options`` filled from ``arguments`` and from the file of ``--config``; None after the help was printed.

    ``kind``: which of the tasks' own options there are too.
    """
    name = prog.removeprefix("kinformer ")
    shape = form.form_of(options, kind)
    written_options = list(arguments)
    before_dashes = written_options[: written_options.index("--")] if "--" in written_options else written_options
    if (path := _config(before_dashes)) is not None:
        defaults, written = read(path, form.flags(shape))
        shape, written_options = form.form_of(options, kind, defaults), written + written_options
    if {"-h", "--help"} & set(before_dashes):
        shape, written_options = form.form_of(options, kind, only=named_tasks(written_options)), ["--help"]
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            filled: DataclassInstance = tyro.cli(
                shape,
                prog=prog,
                description=description,
                args=written_options,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction),
            )
        return form.filled(options, filled)
    except SystemExit as end:
        if not end.code:
            return None
    if sentence_text := suggestion(arguments, form.flags(shape)):
        raise KinformerError(f"{name}: {sentence_text}")
    raise KinformerError(sentence(output.getvalue(), prog))


def named_tasks(arguments: Sequence[str]) -> list[str]:
    """Return the task that ``--task``, a member or a run folder among the arguments names, in a list, or an empty list.

    This does not import PyTorch.
    """
    for index, argument in enumerate(arguments):
        if argument == "--task" and index + 1 < len(arguments):
            return [arguments[index + 1]]
        if argument.startswith("--task="):
            return [argument.removeprefix("--task=")]
    for argument in arguments:
        if argument in FAMILY:
            return [FAMILY[argument].usual_task]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return [str(json.loads((Path(argument) / "config.json").read_text(encoding="utf-8"))["task"]["name"])]
    return []


def _config(arguments: Sequence[str]) -> str | None:
    """Return the file that ``--config`` names, None where the option is absent."""
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith("--config="):
            return argument.removeprefix("--config=")
    return None


def overrides(changes: Sequence[str]) -> dict[str, str]:
    """Return ``("path=value", ...)`` as a table; the value is all that follows the first equals sign."""
    for change in changes:
        if not re.match(r"[^=]+=", change):
            raise KinformerError(f"--set {change}: is not path=value; write for example layers.*.mixer.num_heads=8.")
    return dict(change.split("=", 1) for change in changes)


def sentence(box: str, prog: str) -> str:
    """Return the parser's message (framed as the terminal's encoding allows) as one sentence that says where help is.

    Tyro's only structured form of these messages is the private and unstable ``tyro._errors``, so this function reads
    the printed box. ``tests/cli/test_main.py`` holds it to the version in ``constraints.txt``; a box of another form
    would make the sentence longer, not lose it.
    """
    rows = [row.strip("│").rstrip() for row in box.strip("\n").splitlines()]
    rows = rows[1:-1] if box.startswith("╭") else rows[2:]
    message, *hints = re.split(r"\n[─-]{3,}\n", textwrap.dedent("\n".join(rows)).strip("\n"))
    if message.startswith("Missing from"):
        names = re.findall(r"^ {4}(\S.*)$", message, re.MULTILINE)
        sentence_text = "needs " + " and ".join(names)
    else:
        sentence_text = " ".join(message.split("\n\n")[0].split()).rstrip(".").removeprefix("Error parsing ")
        sentence_text = sentence_text.removeprefix("Options: ")
    if choice := re.fullmatch(r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*)\)", sentence_text):
        names = sorted(set(re.findall(r"'([^']*)'", choice[3])) - {"None"})
        sentence_text = f"{choice[2]}: {choice[1]} is not one of {', '.join(names)}"
    if lacking := re.fullmatch(r"Missing value for argument '(?:\(')?([^']*).*'\. Expected .*", sentence_text):
        sentence_text = f"{lacking[1]}: needs a value"
    near = [name for hint in hints if "meant" in hint for name in re.findall(r"^ {4}(--[\w-]+)", hint, re.MULTILINE)]
    remedy = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else f"see {prog} --help."
    return f"{prog.removeprefix('kinformer ')}: {sentence_text}; {remedy}"
