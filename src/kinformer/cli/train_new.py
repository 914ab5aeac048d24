"""A new run: its folder, and what it is trained on and how, by the options of ``kinformer train``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kinformer.cli import retrieval
from kinformer.cli.runs import tokenizer_of
from kinformer.cli.tasks import LISTOPS, TASKS, ids_of, open_data
from kinformer.cli.train_begin import base_of, planned, task_for
from kinformer.cli.train_checks import check_data, check_model, check_special
from kinformer.cli.train_data import TOKENIZER, rows_of, spec_of, tokenizer_for
from kinformer.core.config import to_dict
from kinformer.core.errors import KinformerError
from kinformer.data import FileTokenizer
from kinformer.data.listops import BOUNDS, NUMBER
from kinformer.family.runs import CONFIG, Run
from kinformer.family.table import member
from kinformer.training.distributed import Group, started_by_torchrun
from kinformer.training.settings import DEFAULT_STEPS, Settings

if TYPE_CHECKING:
    from kinformer.cli.train_options import Options

TOKENS = "{}-{}".format(*BOUNDS)


def begun(options: Options, device: str) -> tuple[Run, Settings]:
    """A run in a new folder, which holds its config then, and its settings; ``device`` is the type of one.

    Errors: ``KinformerError`` for options that do not go together; no new folder is left behind then.
    """
    folder = Path(options.out)
    _require_empty(folder)
    settings, task = _settings(options), task_for(options)
    if settings.steps is None and settings.minutes is None:
        settings = replace(settings, steps=DEFAULT_STEPS)
    if settings.objective is None:
        settings = replace(settings, objective=_objective(options, task))
    base = base_of(options)
    planned(options, base, task, None)
    with _tidy(folder):
        spec = task if task == LISTOPS else spec_of(options.data, folder)
        tokenizer = tokenizer_for(options, spec) if base is None else tokenizer_of(base)
        source = {"spec": spec, "holdout": options.holdout, "task": task}
        if task == LISTOPS:
            source |= {"examples": options.examples or NUMBER, "example_tokens": options.example_tokens or TOKENS}
        data = open_data(source, task, tokenizer)
        ids = ids_of(task, tokenizer)
        model = planned(options, base, task, ids, getattr(data, "classes", None))
        source |= retrieval.chosen(options, to_dict(model))
        check_model(model, ids, settings, _group(options, device))
        if task == LISTOPS or not isinstance(tokenizer, FileTokenizer):
            check_special(model, ids)
        if isinstance(tokenizer, FileTokenizer):
            tokenizer.save(folder / TOKENIZER)
        run = Run(
            folder=folder,
            member=options.member,
            recipe=options.recipe if base is None or base.member != options.member else base.recipe,
            model=to_dict(model),
            tokenizer=TOKENIZER if isinstance(tokenizer, FileTokenizer) else "bytes",
            data=source | {"identity": data.identity} | ({} if base is None else {"init": str(base.folder.resolve())}),
            training=vars(settings),
        )
        check_data(data, settings)
        rows_of(run, settings, data, device)
        run.save()
    return run, settings


def _settings(options: Options) -> Settings:
    return Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})


def _objective(options: Options, task: str) -> Any:
    """What the member minimises for a task, or what is usual there."""
    own, fitting = member(options.member).objective, TASKS[task].objectives
    return own if own in fitting else fitting[0]


def _group(options: Options, device: str) -> Group:
    """The processes that are going to train, as the first of them."""
    world = max(options.devices, int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1)
    return Group(torch.device("cuda" if device == "cuda" else "cpu"), world=world, strategy=options.strategy)


def _require_empty(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise KinformerError(f"--out {folder}: is a file; give a folder.")
    if (folder / CONFIG).exists():
        raise KinformerError(
            f"--out {folder}: holds a run already; add --resume to continue it, or give another folder."
        )
    if folder.exists() and any(folder.iterdir()):
        raise KinformerError(f"--out {folder}: is not empty; give a new folder.")


@contextmanager
def _tidy(folder: Path) -> Iterator[None]:
    """Leave no new folder behind when what follows fails before anything is trained."""
    new = not folder.exists()
    try:
        yield
    except BaseException:
        if folder.exists():
            for path in folder.iterdir():
                path.unlink()
            if new:
                folder.rmdir()
        raise
