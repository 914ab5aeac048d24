"""``kinformer trace DIR [TEXT]``: the attention of a trained run on a text, as an interactive page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kinformer.lab.cli.options import Printing, RunFolder
from kinformer.lab.cli.output import print_json
from kinformer.lab.runs.trace_options import TraceOptions
from kinformer.runtime.errors import KinformerError

Text = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]


@dataclass(frozen=True, kw_only=True)
class Trace(TraceOptions, Printing):
    """Trace a run on a text: attention weights of every layer and head, buckets, spans, exits, hidden states."""

    folder: RunFolder
    """The run folder."""
    text: Text = None
    """The text; - reads standard input."""
    file: str | None = None
    """A file with the text."""
    out: str | None = None
    """The file to write: .html, an interactive page, or .npz, all tensors; if not given, RUN.html in this folder, or
    no file with --json."""

    def run(self) -> int:
        """Trace the text, write the page or the arrays, and print a line about each mixer."""
        from kinformer.lab.runs.trace import check, facts_of, lines_of, trace, write

        default = None if self.json else f"{Path(self.folder).name}.html"
        out = self.out or default
        if out is not None:
            check(Path(out))
        traced = trace(self.folder, self._text(), self)
        if out is not None:
            write(traced, Path(out))
        if self.json:
            print_json({"out": out} | facts_of(traced))
        else:
            print(f"{out}: {traced.title}", *lines_of(traced), sep="\n  ")
        return 0

    def _text(self) -> str:
        if (self.text is None) == (self.file is None):
            raise KinformerError("there must be one text to trace; give TEXT, - for standard input, or --file PATH.")
        if self.file is not None:
            from kinformer.lab.data.files import plain_bytes, reading_corpus

            with reading_corpus(self.file):
                return plain_bytes(Path(self.file)).decode("utf-8")
        return sys.stdin.read() if self.text == "-" else str(self.text)
