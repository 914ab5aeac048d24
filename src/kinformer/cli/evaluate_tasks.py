"""``kinformer evaluate DIR`` for encoders: how many hidden tokens they find, how many classes they tell."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from kinformer.cli.evaluate_options import Options
from kinformer.cli.output import print_json, print_table
from kinformer.cli.reading import opened, progressing, source
from kinformer.cli.runs import held_out, note_of, tokenizer_of
from kinformer.cli.tasks import LISTOPS, MLM, NEXT_TOKEN, edges_of, masking_of, open_data, task_of
from kinformer.core.errors import KinformerError, choose

if TYPE_CHECKING:
    from kinformer.data import Corpus, Examples, Labelled
    from kinformer.data.masked_text import MaskedText
    from kinformer.family.runs import Run

_MEANT = {"folders", "set", "data", "split", "max_bytes", "chunk", "json", "seed", "device", "threads"}
DEFAULT_LENGTH = 512


def run(options: Options) -> int:
    """Measure and print; all folders must hold runs of encoders."""
    from kinformer.family.runs import open_run

    runs = [open_run(folder) for folder in options.folders]
    for each in runs:
        if task_of(each) == NEXT_TOKEN:
            raise KinformerError(f"{each.folder}: predicts next tokens, unlike the other runs; measure it by itself.")
    for field in fields(Options):
        if field.name not in _MEANT and getattr(options, field.name) != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            raise KinformerError(f"{flag}: is for models of the next token, not for {runs[0].folder}; leave it out.")
    with source(options) as data:
        told = [_measured(each, data, options) for each in runs]
    if options.json:
        print_json(told[0] if len(told) == 1 else {"runs": told})
    return 0


def _measured(run: Run, data: str | None, options: Options) -> dict[str, Any]:
    _, model = opened(str(run.folder), options)
    head = {"run": str(run.folder), "member": run.member, "task": task_of(run), "set": list(options.set)}
    measured = (_masked if task_of(run) == MLM else _labels)(run, model, data, options)
    return head | measured


def _masked(run: Run, model: Any, data: str | None, options: Options) -> dict[str, Any]:
    from kinformer.data.bigrams import Bigrams
    from kinformer.data.masked_text import MaskedText
    from kinformer.evaluation.masked import measure_masked

    held = held_out(run, data, options.split, options.max_bytes)
    _note(held.note)
    training = run.training
    share, whole_words = training.get("mask_share", 0.15), training.get("whole_words", False)
    masking = masking_of(model.config, tokenizer_of(run), share, whole_words)
    length = _length(run, model)
    text = MaskedText(held.split, length, masking, edges_of(model.config), options.seed)
    begun = time.perf_counter()
    with progressing(options.json) as progress:
        counts = Bigrams(held.corpus.splits["train"])
        measured = measure_masked(model, text, counts, max(1, options.chunk // length), progress)
    unit = "byte" if held.split.encoded_from is None else "token"
    if not options.json:
        _print_head(run, options, held.corpus)
        print(
            f"{measured.bits:.4f} bits per masked {unit}, {measured.accuracy:.1%} found: {measured.masked:,} masked in "
            f"windows of {length} tokens{', whole words' if whole_words else ''}"
        )
        print(f"{measured.unigram_bits:.4f} by their frequency in the training split")
        print(f"{measured.bigram_bits:.4f} by their frequency after the true {unit} before them")
    return {
        "data": held.identity,
        f"bits_per_masked_{unit}": measured.bits,
        "accuracy": measured.accuracy,
        "unigram_bits": measured.unigram_bits,
        "bigram_bits": measured.bigram_bits,
        "masked": measured.masked,
        "mask_share": share,
        "whole_words": whole_words,
        "length": length,
        "windows": measured.windows,
        "seconds": time.perf_counter() - begun,
    } | _global_input(run, model, text, options)


def _global_input(run: Run, model: Any, text: MaskedText, options: Options) -> dict[str, Any]:
    """What the tokens beside the document are worth, if there are any."""
    from kinformer.evaluation.global_input import has_global_input, measure_global_input

    if not has_global_input(model):
        return {}
    rows = run.training.get("batch_size", max(1, options.chunk // text.length))
    with progressing(options.json) as progress:
        found = measure_global_input(model, text, rows, progress)
    if not options.json:
        print(f"{found.zeroed:.4f} with the vectors of the global tokens zeroed, {found.without:.4f} without these")
        if run.training.get("objective") == "mlm-cpc":
            print(
                f"{found.told:.1%} of {found.units:,} hidden units told by their global tokens (by chance: "
                f"{found.chance:.1%})"
            )
    return {"global_input": asdict(found)}


def _labels(run: Run, model: Any, data: str | None, options: Options) -> dict[str, Any]:
    from kinformer.data import Buckets
    from kinformer.evaluation.labels import measure_labels

    if options.max_bytes is not None:
        raise KinformerError(f"--max-bytes {options.max_bytes}: is for text, not for examples; leave it out.")
    found, examples, classes = _examples(run, data, options)
    length = _length(run, model)
    rows = Buckets(examples, max(1, options.chunk // length), length, 0, edges_of(model.config))
    begun = time.perf_counter()
    with progressing(options.json) as progress:
        measured = measure_labels(model, rows, len(classes), progress)
    counts = [
        {"class": name, "examples": there, "told": told, "correct": correct}
        for name, there, told, correct in zip(classes, measured.examples, measured.told, measured.correct, strict=True)
    ]
    if not options.json:
        _print_head(run, options, found)
        print(
            f"accuracy {measured.accuracy:.1%}, {measured.bits:.4f} bits per label: {len(examples):,} examples, "
            f"{measured.guessing:.1%} are of the most frequent class"
        )
        print()
        headers = ("class", "examples", "told", "correct")
        print_table(headers, [list(each.values()) for each in counts], numbers=range(1, 4))
    return {
        "data": found.identity | {"split": options.split, "same_as_run": _same(run, found)},
        "accuracy": measured.accuracy,
        "guessing": measured.guessing,
        "bits_per_label": measured.bits,
        "examples": len(examples),
        "length": length,
        "classes": counts,
        "seconds": time.perf_counter() - begun,
    }


def _same(run: Run, found: Corpus | Labelled) -> bool:
    return found.fingerprint == (run.data.get("identity") or {}).get("fingerprint")


def _examples(run: Run, data: str | None, options: Options) -> tuple[Labelled, Examples, Sequence[str]]:
    """The data, the part to measure on with the numbers that the run gave to its classes, and the names of those."""
    task = task_of(run)
    if task == LISTOPS and data is not None:
        raise KinformerError(f"--data {data}: ListOps brings its own data; leave it out.")
    spec = data if data is not None else run.data.get("spec")
    if not isinstance(spec, str):
        raise KinformerError(f"{run.folder}: does not say what data it was trained on; give --data PATH.")
    found: Any = open_data(dict(run.data) | {"spec": spec}, task, tokenizer_of(run))
    identity = run.data.get("identity") or {}
    _note("" if _same(run, found) else note_of(found, data is not None, identity.get("fingerprint")))
    known = identity.get("classes")
    if not isinstance(known, list):
        raise KinformerError(f"{run.folder}: does not say which classes it tells; measure the run that was trained.")
    part = found.splits[choose(options.split, found.splits, "--split")]
    return found, _renumbered(found, part, known, run), known


def _renumbered(found: Labelled, part: Examples, known: Sequence[str], run: Run) -> Examples:
    import numpy as np

    if strange := [name for name in found.classes if name not in known]:
        raise KinformerError(
            f"{found.name}: has the class {strange[0]!r}, which {run.folder} was not trained to tell; it tells "
            f"{', '.join(known)}."
        )
    number = np.array([known.index(name) for name in found.classes], np.int64)
    return replace(part, labels=number[part.labels])


def _length(run: Run, model: Any) -> int:
    """The length that the run was trained at."""
    length = run.training.get("length", model.max_length or DEFAULT_LENGTH)
    return length if model.max_length is None else min(length, model.max_length)


def _print_head(run: Run, options: Options, data: Corpus | Labelled) -> None:
    model = ", ".join((run.member, *options.set))
    print(f"{run.folder} ({model}) on {data.name} {data.version}, {options.split} split")


def _note(note: str) -> None:
    if note:
        print(f"kinformer: note: {note}", file=sys.stderr)
