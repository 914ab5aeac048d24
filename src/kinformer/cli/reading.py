"""What the commands that read a text with a run share: the model, the text, its windows, a bar."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kinformer.cli.parsing import overrides
from kinformer.cli.store import equipped, looks_up
from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.cli.evaluate_options import Options
    from kinformer.evaluation.bits import Progress
    from kinformer.evaluation.windows import Windows
    from kinformer.family.runs import Run
    from kinformer.models.decoder import Decoder

CARRIED = "carried"


class Reading(Protocol):
    """What options say of how a text is read."""

    @property
    def data(self) -> str | None: ...
    @property
    def context(self) -> str | None: ...
    @property
    def overlap(self) -> float: ...
    @property
    def lengths(self) -> str | None: ...


def opened(folder: str, options: Options) -> tuple[Run, Decoder]:
    """A run and its model, ready to be measured."""
    from kinformer.family.runs import open_run
    from kinformer.training.precision import use_fast_products

    run = open_run(folder)
    use_fast_products()
    model = run.load(overrides(options.set)).to(options.prepare(options.seed))
    return run, equipped(run, model, options) if looks_up(run.model) else model


def main_windows(run: Run, model: Decoder, options: Reading) -> Windows | None:
    """The windows to measure in, as asked for or as the run was trained; None where the state is carried."""
    from kinformer.evaluation.bits import streamable
    from kinformer.evaluation.windows import Windows

    asked = options.context
    endless = streamable(model)
    if asked == CARRIED and not endless:
        raise KinformerError(
            f"--context {CARRIED}: this model's state grows without bound, or its positions end; give --context N."
        )
    if asked == CARRIED or (asked is None and endless and run.training.get("segments")):
        if options.overlap and options.lengths is None:
            raise KinformerError(
                f"--overlap {options.overlap:g}: the state is carried here; give --context N or --lengths too."
            )
        return None
    if asked is not None:
        if not asked.isdigit():
            raise KinformerError(f"--context {asked}: is neither a number of tokens nor {CARRIED!r}.")
        return Windows(context=int(asked), overlap=options.overlap)
    length = run.training.get("length", model.max_length)
    if not isinstance(length, int):
        raise KinformerError(f"{run.folder}: does not say at what length it was trained; give --context N.")
    most = length if model.max_length is None else min(length, model.max_length)
    return Windows(context=most, overlap=options.overlap)


def check_positions(model: Decoder, windows: Windows | None) -> None:
    if windows is not None and model.max_length is not None and windows.context > model.max_length:
        raise KinformerError(
            f"a context of {windows.context} tokens is beyond this model's positions, which end at max_length = "
            f"{model.max_length}; give --context and --lengths no larger."
        )


@contextmanager
def source(options: Reading) -> Iterator[str | None]:
    """The data that was named, standard input as a file."""
    from kinformer.data import spool

    with tempfile.TemporaryDirectory() as folder:
        yield str(spool(sys.stdin.buffer, Path(folder))) if options.data == "-" else options.data


@contextmanager
def progressing(quiet: bool, label: str = "measuring") -> Iterator[Progress | None]:
    """A bar on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=total)
