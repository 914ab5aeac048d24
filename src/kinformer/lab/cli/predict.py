"""``kinformer predict DIR [FILE|FOLDER|-]``: a trained run's predictions, one line for every item."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kinformer.lab.cli.options import Changes, Hidden, Inputs, Printing, RunFolder, options_as
from kinformer.lab.runs.options import PredictOptions
from kinformer.runtime.errors import KinformerError

TASK_OPTIONS = "PredictionOptions"


@dataclass(frozen=True, kw_only=True)
class Options(PredictOptions, Printing):
    """Predict: classes of texts or images, masked tokens, transcripts, translations, answers, actions."""

    folder: RunFolder
    """The run folder."""
    inputs: Inputs = "-"
    """What to predict from: a file (lines, .tsv, .csv, .jsonl), a folder (of texts, images or sound), or - for lines on
    standard input."""
    set: Changes = ()  # type: ignore[assignment]
    """A change that leaves the weights as they are, as in --set layers.*.mixer.position.scaling=yarn."""
    out: str | None = None
    """Write the predictions to this file: JSON lines, CSV or TSV, by its ending (.jsonl, .csv, .tsv)."""
    json: bool = False
    """Print a JSON object for every item, one on a line."""
    task_options: Hidden = field(default_factory=dict)


def run(options: Options) -> int:
    """Predict, and write every prediction as it comes."""
    from kinformer.lab.runs.inference import predictions
    from kinformer.runtime.tables import check_table, writing_table

    refuse_terminal(options.inputs)
    if options.out is not None:
        check_table("out", options.out)
        refuse_same("out", options.out, options.inputs)
    with ExitStack() as files:
        write = None
        for predicted in predictions(options.folder, options.inputs, options_as(PredictOptions, options)):
            if options.out is not None:
                write = write or files.enter_context(writing_table(options.out))
                write(predicted.row)
            elif options.json:
                print(json.dumps(predicted.row, ensure_ascii=False), flush=True)
            else:
                print(" ".join(predicted.line.splitlines()), flush=True)
    return 0


def refuse_terminal(inputs: str) -> None:
    """Refuse to read items from a terminal, as a command without a file would."""
    if inputs == "-" and getattr(sys.stdin, "isatty", bool)():
        raise KinformerError("there must be something to predict from; give a FILE, a FOLDER, or lines by a pipe.")


def refuse_same(option: str, out: str, inputs: str) -> None:
    """Refuse to write over the file that is read."""
    if inputs != "-" and Path(out).expanduser().resolve() == Path(inputs).expanduser().resolve():
        raise KinformerError(f"`{option}` {out}: is the file that is read; give another.")
