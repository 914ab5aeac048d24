"""Resuming a run with its own options, except for those that may change."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path

from kinformer.core.model_config import ModelConfig
from kinformer.data import FileTokenizer
from kinformer.runs.config_file import settings_in
from kinformer.runs.options import TrainOptions
from kinformer.runs.planning import check_source, data_of, named_data, plan_config
from kinformer.runs.run import BYTES, Run, open_run
from kinformer.runs.stores import STORES
from kinformer.runtime.errors import KinformerError, marked
from kinformer.runtime.progress import note
from kinformer.tasks.table import task as task_called
from kinformer.tasks.table import training_options
from kinformer.tasks.task import Data
from kinformer.training.settings import Settings
from kinformer.training.stage_tables import checked_stages
from kinformer.training.stages import stages_of

MAY_CHANGE = {
    "steps", "minutes", "validate_every", "patience", "checkpoint_every", "checkpoint_minutes", "keep", "log_every",
    "accumulate", "async_saves", "average", "compile", "lr",
}  # fmt: skip


def resume(options: TrainOptions) -> tuple[Run, Settings]:
    """Return the run in the folder ``options.out`` and its settings, with the new options that may change.

    Errors: ``KinformerError`` for options or data other than it was begun with.
    """
    run = open_run(Path(options.out))
    if run.member.lower() != options.member.lower():
        raise KinformerError(
            f"{run.folder}: holds a run of {run.member!r}, but {options.member!r} is to be trained; give another `out`."
        )
    options = replace(options, member=run.member)
    settings = _merged(run, options)
    for stage in stages_of(settings):
        stage.settings.rows(options.replicas)
    _check_unchanged(run, options)
    spec = run.data.get("spec") if options.data is None else named_data(options, run.task, run.folder)
    facts = dict(run.data) | {"spec": spec} | STORES.resume(run, options)
    run = replace(run, data=facts, training=vars(settings), by_user=frozenset(options.task_options))
    data = data_of(run)
    if data.fingerprint != (begun_with := (run.data.get("identity") or {}).get("fingerprint")):
        raise KinformerError(
            f"{spec}: is not the data that the run in {run.folder} was begun with ({data.fingerprint} instead of "
            f"{begun_with}); give that data, or another `out`."
        )
    if options.set and _config_again(run, options, data) != run.config:
        path, value = next(iter(options.set.items()))
        raise _otherwise(run, f"`set` {path}={value}")
    run.save()
    return run, settings


def _merged(run: Run, options: TrainOptions) -> Settings:
    """Return the run's settings with the new ones, which must be of those that may change."""
    stored = dict(vars(settings_in(run.training)))
    setting_names = {field.name for field in fields(Settings)}
    values = {field.name: getattr(options, field.name) for field in fields(TrainOptions) if field.name in setting_names}
    defaults = {field.name: field.default for field in fields(TrainOptions)}
    values = {name: value for name, value in values.items() if value != defaults[name]}
    for name, value in values.items():
        value = checked_stages(value) if name == "stages" else value
        if name not in MAY_CHANGE and value != stored.get(name):
            flag = marked(name)
            raise KinformerError(
                f"{flag}={value}: the run in {run.folder} was begun with {stored.get(name)}, and a resumed run goes "
                f"on as it was; leave {flag} out, or give another `out`."
            )
    if (before := stored.get("lr")) != (rate := values.get("lr", before)):
        note(f"note: the highest learning rate is {rate:g} from here on, and was {before:g}; the schedule goes on.")
    if "steps" in values or "minutes" in values:
        stored |= {"steps": None, "minutes": None}
    return Settings(**stored | values)


def _check_unchanged(run: Run, options: TrainOptions) -> None:
    """Refuse a task, its options, a recipe, a tokenizer or a holdout other than the run's own."""
    if options.task not in (None, run.task.name):
        task_called(str(options.task))
        raise _otherwise(run, f"`task` {options.task}")
    training_options(run.task, options.task_options)
    before = asdict(run.options)
    for name, value in options.task_options.items():
        if value != before[name]:
            raise _otherwise(run, f"{marked(name)}={value}")
    check_source(options, run.task)
    if options.recipe not in (None, "small", run.recipe):
        raise _otherwise(run, f"`recipe` {options.recipe}")
    if options.tokenizer not in (None, BYTES) and (
        run.tokenizer is None or FileTokenizer(options.tokenizer).fingerprint != run.tokenizer.fingerprint
    ):
        raise _otherwise(run, f"`tokenizer` {options.tokenizer}")
    if options.holdout not in (None, run.data.get("holdout")):
        raise _otherwise(run, f"`holdout` {options.holdout}")


def _config_again(run: Run, options: TrainOptions, data: Data) -> ModelConfig:
    """Return the config that the run's model would have by these options."""
    init = run.data.get("init")
    return plan_config(replace(options, recipe=run.recipe), open_run(init) if init else None, run.task, data)


def _otherwise(run: Run, changed: str) -> KinformerError:
    return KinformerError(
        f"{changed}: the run in {run.folder} was begun otherwise, and a resumed run goes on as it was; "
        "leave it out, or give another `out`."
    )
