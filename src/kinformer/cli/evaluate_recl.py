"""``kinformer evaluate DIR... --recl``: how far back each of a group of runs makes use of what it reads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.cli.evaluate_lengths import Length, trained_at
from kinformer.cli.evaluate_report import short_names
from kinformer.cli.options import require
from kinformer.cli.output import print_json, print_table
from kinformer.cli.reading import opened, progressing, source
from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    import numpy as np

    from kinformer.cli.evaluate_options import Options
    from kinformer.cli.runs import HeldOut
    from kinformer.evaluation.recl import Losses, Recl
    from kinformer.family.runs import Run

STEPS = 8


def run(options: Options, lengths: Sequence[Length]) -> int:
    """Measure the group at every context and print."""
    import numpy as np

    from kinformer.evaluation.recl import check, recl
    from kinformer.family.runs import open_run

    require("--positions", options.positions, 1)
    runs = [open_run(folder) for folder in options.folders]
    contexts = _contexts(runs, lengths)
    check(contexts, options.hardest)
    with source(options) as data:
        held = _same_data(runs, data, options)
        losses = np.stack([_losses(folder, held, contexts, options) for folder in options.folders])
    found = recl(losses, contexts, hardest=options.hardest)
    _print(options, runs, held, (contexts, losses, found))
    return 0


def _contexts(runs: Sequence[Run], lengths: Sequence[Length]) -> list[int]:
    """As asked for, or eight equal steps up to twice the (first run's) training length."""
    if lengths:
        return sorted({length.tokens(runs[0]) for length in lengths})
    trained = trained_at(runs[0])
    if trained is None:
        raise KinformerError(f"{runs[0].folder}: does not say its training length; give --lengths 64,128,192,256.")
    return sorted({max(1, 2 * trained * step // STEPS) for step in range(1, STEPS + 1)})


def _same_data(runs: Sequence[Run], data: str | None, options: Options) -> HeldOut:
    """The data that all are measured on, the first run's if none was named; all must read it alike."""
    from kinformer.cli.runs import held_out, tokenizer_of

    for other in runs[1:]:
        if tokenizer_of(other).fingerprint != tokenizer_of(runs[0]).fingerprint:
            raise KinformerError(
                f"--recl compares losses token by token, but {other.folder} and {runs[0].folder} have unlike "
                "tokenizers; measure them apart."
            )
    held = held_out(runs[0], data, options.split, options.max_bytes)
    if held.note:
        print(f"kinformer: note: {held.note}", file=sys.stderr)
    return held


def _losses(folder: str, held: HeldOut, contexts: Sequence[int], options: Options) -> Losses:
    from kinformer.evaluation.recl import context_losses, spread_positions

    _, model = opened(folder, options)
    positions = spread_positions(held.split, contexts[-1], options.positions)
    with progressing(options.json) as progress:
        return context_losses(model, held.split, contexts, positions, chunk=options.chunk, progress=progress)


def _print(
    options: Options, runs: Sequence[Run], held: HeldOut, results: tuple[list[int], np.ndarray, Sequence[Recl]]
) -> None:
    contexts, losses, found = results
    names = short_names([each.folder for each in runs])
    if options.json:
        print_json(_told(options, runs, held, results))
    else:
        tokens = losses.shape[2]
        print(
            f"relative effective context length on {held.corpus.name} {held.corpus.version}, {held.split.name} split: "
            f"the hardest {options.hardest:.0%} of {tokens} tokens\n"
        )
        steps = [f"{one} to {two}" for one, two in zip(contexts, contexts[1:])]
        rows = [
            [name, f"{'at least ' if each.at_least else ''}{each.length}", *(f"{gain:.1%}" for gain in each.gains)]
            for name, each in zip(names, found, strict=True)
        ]
        headers = ("run", "RECL", *steps)
        print_table(headers, rows, numbers=range(1, len(headers)))
    if options.plot is not None:
        from kinformer.evaluation.plot_recl import plot

        plot(names, contexts, found, Path(options.plot))
        print(f"kinformer: drew {options.plot}", file=sys.stderr)


def _told(
    options: Options, runs: Sequence[Run], held: HeldOut, results: tuple[list[int], np.ndarray, Sequence[Recl]]
) -> dict[str, Any]:
    """For JSON."""
    contexts, losses, found = results
    return {
        "data": held.identity,
        "contexts": contexts,
        "tokens": losses.shape[2],
        "hardest": options.hardest,
        "runs": [
            {
                "run": str(run.folder),
                "member": run.member,
                "recl": each.length,
                "at_least": each.at_least,
                "gains": list(each.gains),
                "mean_nats": loss.mean(axis=1).tolist(),
            }
            for run, each, loss in zip(runs, found, losses, strict=True)
        ],
    }
