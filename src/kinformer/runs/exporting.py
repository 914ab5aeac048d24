"""A run folder becomes a folder that the library transformers loads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinformer.family.table import member as member_called
from kinformer.interop.writing import (
    DTYPES,
    Form,
    appearing,
    form_of,
    require_new,
    settings_of,
    write_model,
    write_tokenizer,
)
from kinformer.runs.run import BYTES, Run, open_run
from kinformer.runtime.errors import KinformerError, nearest
from kinformer.runtime.fields import require_path
from kinformer.runtime.files import load_tensors
from kinformer.runtime.words import plural
from kinformer.training.best import WEIGHTS, best_of

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class Exported:
    """The ``folder``, its ``model_type``, the classes of transformers that load it, and how much it holds.

    ``reason``: why the model is no architecture of transformers; empty if it is one.
    """

    folder: Path
    model_type: str
    model_class: str
    auto_class: str
    reason: str
    dtype: str
    parameters: int
    shards: int

    @property
    def native(self) -> bool:
        """Return whether transformers loads the folder without code of ours."""
        return not self.reason

    @property
    def facts(self) -> dict[str, Any]:
        """The facts as data that JSON can hold."""
        names = ("model_type", "model_class", "auto_class", "native", "reason", "dtype", "parameters", "shards")
        return {"out": str(self.folder)} | {name: getattr(self, name) for name in names}


def export(
    folder: str | Path,
    out: str | Path,
    *,
    dtype: str = "float32",
    max_shard_size: str | int = "5GB",
    announce: Callable[[str], object] = lambda sentence: None,
) -> Exported:
    """Write the run in ``folder`` into the new folder ``out``; ``announce`` is called with what it will be and why."""
    require_path("out", out)
    if dtype not in DTYPES:
        raise KinformerError(f"`dtype` {dtype!r}: is no type of exported weights; {nearest(str(dtype), DTYPES)}")
    shard_bytes, run, out = size_in_bytes(max_shard_size), open_run(folder), Path(out)
    if "retrieval" in run.data:
        raise KinformerError(f"{folder}: reads a datastore, which has no place in an exported folder; export its base.")
    try:
        form = form_of(run.config, run.training.get("length"))
    except KinformerError as error:
        raise KinformerError(f"{folder}: {error}") from None
    require_new(out)
    announce(sentence_of(form))
    has_tokenizer = run.vocabulary == BYTES or (run.folder / str(run.vocabulary)).is_file()
    if not has_tokenizer:
        announce(f"{folder} has no {run.vocabulary}, so the folder has none either.")
    weights = load_tensors(run.folder / WEIGHTS)[0]
    model = run.model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with appearing(out) as place:
        shards = write_model(place, form, settings_of(form, run.config, run.member, dtype), weights, shard_bytes)
        if has_tokenizer:
            write_tokenizer(place, _source(run), model.max_length, getattr(run.config.input, "eos_token", None))
        (place / "README.md").write_text(card(run, form, parameters, dtype, out.name), encoding="utf-8")
    return Exported(out, form.model_type, form.model_class, form.auto_class, form.reason, dtype, parameters, shards)


def size_in_bytes(size: str | int) -> int:
    """Return the bytes of a size such as ``5GB``, ``500 MB``, ``64KiB`` or a number of bytes."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([KMG]?I?)B?\s*", str(size).upper())
    if match is None or match[2] not in UNITS or (count := int(float(match[1]) * UNITS[match[2]])) < 1:
        raise KinformerError(f"`max_shard_size` {size}: is no size; write for example 5GB, 500MB or 64KiB.")
    return count


def sentence_of(form: Form) -> str:
    """Return what a folder in ``form`` will be."""
    if form.native is None:
        return (
            f"the folder is remote code of kinformer, as {form.reason}; load it with {form.auto_class} and "
            "trust_remote_code=True where kinformer is installed."
        )
    permuted = "; the rows of queries and keys change their order" if form.native.is_permuted else ""
    return f"the folder is a {form.model_type} ({form.model_class}), which {form.auto_class} loads by itself{permuted}."


def _source(run: Run) -> bytes | None:
    """Return the run's tokenizer.json; None for bytes."""
    return None if run.vocabulary == BYTES else (run.folder / str(run.vocabulary)).read_bytes()


def card(run: Run, form: Form, parameters: int, dtype: str, name: str) -> str:
    """Return the model card: what the model is, what it was trained on, and what was measured."""
    record = member_called(run.member)
    best = best_of(run.folder)
    metrics, step = best if best is not None else ({}, 0)
    trust = "" if form.native else ", trust_remote_code=True"
    units = {metric.name: metric for metric in run.task.metrics}
    rows = [f"| {one.replace('_', ' ')} | {_measured(units.get(one), value)} |" for one, value in metrics.items()]
    settings = {
        key: run.training[key]
        for key in ("steps", "minutes", "length", "batch_size", "lr", "seed")
        if run.training.get(key) is not None
    }
    trained = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- kinformer",
        f"- {run.member}",
        "---",
        "",
        f"# {name}",
        "",
        f"{record.title} ({record.paper}): member `{run.member}` of Kinformer, recipe `{run.recipe}`, "
        f"{plural(parameters, 'parameter')}, weights in {dtype}. The state of a sequence grows as: {record.growth}.",
        "",
        f"Data: `{run.data.get('spec') or 'unknown'}`. Training: {trained or 'elsewhere; the weights were imported'}.",
        "",
        *(
            [
                "## Measured",
                "",
                f"On the validation data of the run, at step {step:,}:",
                "",
                "| metric | value |",
                "| --- | --- |",
                *rows,
                "",
            ]
            if rows
            else []
        ),
        "## Use",
        "",
        "```python",
        f"from transformers import {form.auto_class}, AutoTokenizer",
        "",
        f'model = {form.auto_class}.from_pretrained("{name}"{trust})',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        'inputs = tokenizer("It was ", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
        "```",
        "",
        sentence_of(form)[0].upper() + sentence_of(form)[1:],
        "",
        "## Departures from the paper",
        "",
        *(f"- {one}" for one in record.facts["departures"] or ("none",)),
        "",
        f"Written by `kinformer export` from a run of the task {run.task.name}.",
        "",
    ]
    return "\n".join(lines)


def _measured(metric: Any, value: float) -> str:
    return f"{value:.4g}" if metric is None else metric.text(value)
