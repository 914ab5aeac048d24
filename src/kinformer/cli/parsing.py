"""From arguments to a command's ``Options``; what cannot be parsed is one sentence."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from collections.abc import Sequence
from typing import TypeVar

import tyro

from kinformer.core.errors import KinformerError

O = TypeVar("O")


def parse(options: type[O], arguments: Sequence[str], *, prog: str, description: str) -> O | None:
    """``options`` filled from ``arguments``; None when help was asked for (and printed)."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(
                options,
                prog=prog,
                description=description,
                args=list(arguments),
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction),
            )
    except SystemExit as end:
        if not end.code:
            return None
    raise KinformerError(sentence(output.getvalue(), prog)) from None


def overrides(changes: Sequence[str]) -> dict[str, str]:
    """``("path=value", ...)`` as a table; the value is all that follows the first equals sign."""
    for change in changes:
        if not re.match(r"[^=]+=", change):
            raise KinformerError(f"--set {change}: is not path=value; write for example layers.*.mixer.num_heads=8.")
    return dict(change.split("=", 1) for change in changes)


def sentence(box: str, prog: str) -> str:
    """The parser's message (framed as the terminal's encoding allows) as one sentence that says where help is."""
    rows = [row.strip("│").rstrip() for row in box.strip("\n").splitlines()]
    rows = rows[1:-1] if box.startswith("╭") else rows[2:]
    message, *hints = re.split(r"\n[─-]{3,}\n", textwrap.dedent("\n".join(rows)).strip("\n"))
    if message.startswith("Missing from"):
        names = re.findall(r"^ {4}(\S.*)$", message, re.MULTILINE)
        said = "needs " + " and ".join(names)
    else:
        said = " ".join(message.split("\n\n")[0].split()).rstrip(".").removeprefix("Error parsing Options: ")
    near = [name for hint in hints if "meant" in hint for name in re.findall(r"^ {4}(--[\w-]+)", hint, re.MULTILINE)]
    remedy = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else f"see {prog} --help."
    return f"{prog.removeprefix('kinformer ')}: {said}; {remedy}"
