"""A run that goes on: as it was begun, but for what may change."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.cli import retrieval
from kinformer.cli.runs import tokenizer_of
from kinformer.cli.tasks import ids_of, task_of
from kinformer.cli.train_begin import planned, task_for
from kinformer.cli.train_data import data_of, spec_of
from kinformer.core.config import to_dict
from kinformer.core.errors import KinformerError
from kinformer.data import FileTokenizer, Tokenizer
from kinformer.data.corpus import STDLIB
from kinformer.family.runs import CONFIG, Run, open_run
from kinformer.training.settings import Settings

if TYPE_CHECKING:
    from kinformer.cli.train_options import Options
    from kinformer.core.model import ModelConfig

MAY_CHANGE = {
    "steps", "minutes", "validate_every", "checkpoint_every", "checkpoint_minutes", "keep", "log_every", "accumulate",
    "compile",
}  # fmt: skip


def resumed(options: Options) -> tuple[Run, Settings]:
    """The run in the folder ``options.out`` and its settings, with what was given and may change.

    Errors: ``KinformerError`` for options or data unlike those that it was begun with.
    """
    run = open_run(Path(options.out))
    if run.member != options.member:
        raise KinformerError(
            f"{run.folder}: holds a run of {run.member!r}, but {options.member!r} is to be trained; give another --out."
        )
    settings = _merged(run, options)
    task: Any = task_of(run)
    if options.task not in (None, task):
        raise _otherwise(run, f"--task {options.task}")
    task_for(replace(options, task=task))
    _check_unchanged(run, options)
    spec = run.data["spec"] if options.data == STDLIB else spec_of(options.data, run.folder)
    data = dict(run.data) | {"spec": spec} | retrieval.resumed(run, options)
    run = replace(run, data=data, training=vars(settings))
    found, begun_with = data_of(run).fingerprint, run.data["identity"].get("fingerprint")
    if found != begun_with:
        raise KinformerError(
            f"{spec}: is not the data that the run in {run.folder} was begun with ({found} instead of {begun_with}); "
            "give that data, or another --out."
        )
    run.save()
    return run, settings


def _merged(run: Run, options: Options) -> Settings:
    """The run's own settings, with those that were given and may change."""
    stored = dict(run.training)
    if unknown := sorted(stored.keys() - {field.name for field in fields(Settings)}):
        raise KinformerError(f"{run.folder / CONFIG}: has the unknown setting {unknown[0]!r}; use a matching version.")
    given = {field.name: getattr(options, field.name) for field in fields(Settings)}
    given = {field.name: given[field.name] for field in fields(Settings) if given[field.name] != field.default}
    for name, value in given.items():
        if name not in MAY_CHANGE and value != stored.get(name):
            flag = name.replace("_", "-")
            raise KinformerError(
                f"--{flag} {value}: the run in {run.folder} was begun with {stored.get(name)}, and a resumed run goes "
                f"on as it was; leave --{flag} out, or give another --out."
            )
    if "steps" in given or "minutes" in given:
        stored |= {"steps": None, "minutes": None}
    return Settings(**stored | given)


def _check_unchanged(run: Run, options: Options) -> None:
    """Refuse a recipe, overrides, a tokenizer or a holdout unlike the run's own."""
    own = tokenizer_of(run)
    changed = None
    if options.recipe not in ("small", run.recipe):
        changed = f"--recipe {options.recipe}"
    elif options.set and to_dict(_replanned(run, options, own)) != run.model:
        changed = f"--set {options.set[0]}"
    elif options.tokenizer != "bytes" and FileTokenizer(options.tokenizer).fingerprint != own.fingerprint:
        changed = f"--tokenizer {options.tokenizer}"
    elif options.holdout not in (None, run.data.get("holdout")):
        changed = f"--holdout {options.holdout}"
    elif options.examples not in (None, run.data.get("examples")):
        changed = f"--examples {options.examples}"
    elif options.example_tokens not in (None, run.data.get("example_tokens")):
        changed = f"--example-tokens {options.example_tokens}"
    if changed:
        raise _otherwise(run, changed)


def _replanned(run: Run, options: Options, tokenizer: Tokenizer) -> ModelConfig:
    """What the run's model would be by these options."""
    task, init = task_of(run), run.data.get("init")
    classes = (run.data.get("identity") or {}).get("classes")
    options = replace(options, recipe=run.recipe)
    return planned(options, open_run(init) if init else None, task, ids_of(task, tokenizer), classes)


def _otherwise(run: Run, changed: str) -> KinformerError:
    return KinformerError(
        f"{changed}: the run in {run.folder} was begun otherwise, and a resumed run goes on as it was; "
        "leave it out, or give another --out."
    )
