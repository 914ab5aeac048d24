"""What a training run begins with: a model that fits its task, and the weights of another run if one was named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.cli.parsing import overrides
from kinformer.cli.tasks import LISTOPS, MLM, NEXT_TOKEN, SPECIAL_TOKENS, TASKS, chosen_task
from kinformer.core.config import override, to_dict
from kinformer.core.errors import KinformerError
from kinformer.core.files import load_tensors, load_weights
from kinformer.data.corpus import STDLIB
from kinformer.family.build import configure, model_config
from kinformer.family.kinds import kinds
from kinformer.family.lift import check_lift, lift_config, lift_weights
from kinformer.family.runs import WEIGHTS, Run, open_run
from kinformer.family.table import member
from kinformer.training.settings import Settings

if TYPE_CHECKING:
    from kinformer.cli.train_options import Options
    from kinformer.core.model import ModelConfig

FIRST_CLASSES = 2
_HEAD = "head."


def task_for(options: Options) -> str:
    """The task, after refusing options that mean nothing to it."""
    task = chosen_task(options.task, member(options.member))
    unset = {field.name: field.default for field in fields(Settings)}
    for flags, tasks in (
        (("segments",), (NEXT_TOKEN,)),
        (("mask_share", "whole_words"), (MLM,)),
    ):
        for name in flags:
            if getattr(options, name) != unset[name] and task not in tasks:
                raise KinformerError(
                    f"--{name.replace('_', '-')}: is for the task {tasks[0]}, not for {task}; leave it out."
                )
    for flag, given in (("examples", options.examples), ("example-tokens", options.example_tokens)):
        if given is not None and task != LISTOPS:
            raise KinformerError(f"--{flag} {given}: is for the task {LISTOPS}, not for {task}; leave it out.")
    if options.objective not in (None, *TASKS[task].objectives):
        raise KinformerError(
            f"--objective {options.objective}: cannot be minimised for the task {task}; "
            f"choose {' or '.join(TASKS[task].objectives)}, or leave it out."
        )
    _check_source(options, task)
    return task


def _check_source(options: Options, task: str) -> None:
    """Refuse data and tokenizers that do not go with the task."""
    if task == LISTOPS:
        for flag, given in (
            (f"--data {options.data}", options.data != STDLIB),
            ("--holdout", options.holdout is not None),
            ("--tokenizer", options.tokenizer != "bytes"),
            ("--train-tokenizer", options.train_tokenizer is not None),
        ):
            if given:
                raise KinformerError(f"{flag}: ListOps brings its own data and symbols; leave it out.")
    elif task not in (NEXT_TOKEN, MLM):
        if options.data == STDLIB and not options.resume:
            raise KinformerError(f"--task {task}: needs labelled examples; give --data FOLDER, FILE.tsv or FILE.jsonl.")
        if options.train_tokenizer is not None:
            raise KinformerError(f"--train-tokenizer: is for text without labels, not for {task}; give --tokenizer.")


def base_of(options: Options) -> Run | None:
    """The run to begin with, if one was named: its model and tokenizer are taken over."""
    if options.init is None:
        return None
    base = open_run(options.init)
    if base.member != options.member and (member(base.member).causal or member(options.member).causal):
        raise KinformerError(
            f"--init {options.init}: is a run of {base.member!r}, not of {options.member!r}; train that."
        )
    for flag, given in (("tokenizer", options.tokenizer != "bytes"), ("train-tokenizer", options.train_tokenizer)):
        if given:
            raise KinformerError(f"--{flag}: --init {options.init} brings its own tokenizer; leave --{flag} out.")
    return base


def planned(
    options: Options, base: Run | None, task: str, ids: int | None, classes: Sequence[str] | None = None
) -> ModelConfig:
    """The model's config: the recipe's or the other run's, with the task's head and the changes that were asked for.

    ``ids`` is how many ids the data has, ``classes`` the names of the classes to tell; None while nobody knows yet.
    """
    if base is None:
        special = 0 if TASKS[task].causal else SPECIAL_TOKENS
        config = configure(options.member, options.recipe, None if ids is None else ids + special)
    else:
        config = model_config(base.model, f"{base.folder}: model")
        if base.member != options.member:
            config = lift_config(
                config,
                configure(options.member, options.recipe, getattr(config.input, "vocab_size", None)),
                base.folder,
            )
    config = override(_with_head(config, task, classes), overrides(options.set), kinds())
    if base is not None and not TASKS[task].causal:
        check_lift(base.config, config, base.folder)
    return config


def _with_head(config: Any, task: str, classes: Sequence[str] | None) -> Any:
    """``config`` with a head for the task, its own where that fits already."""
    wanted = TASKS[task].head
    if wanted is None:
        return config
    if wanted == "masked_language":
        from kinformer.heads.masked_language import MaskedLanguageHead

        return config if config.head.kind == wanted else config.replace(head=MaskedLanguageHead.Config())
    from kinformer.heads.classification import ClassificationHead

    count = len(classes) if classes is not None else FIRST_CLASSES
    own = config.head if config.head.kind == wanted else ClassificationHead.Config(classes=count)
    return config.replace(head=own.replace(classes=count))


def begin(model: Any, run: Run, init: str) -> None:
    """Give ``model`` the weights of the run in the folder ``init``; of an encoder without a head that differs, and with
    positions copied over and over where it is to read longer texts."""
    tensors, _ = load_tensors(Path(init) / WEIGHTS)
    if run.data.get("task", NEXT_TOKEN) != NEXT_TOKEN:
        if not _same_head(open_run(init), run):
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_HEAD)}
            tensors |= {name: tensor for name, tensor in model.state_dict().items() if name.startswith(_HEAD)}
        tensors = lift_weights(tensors, model, init)
    load_weights(model, tensors, init)


def _same_head(base: Run, run: Run) -> bool:
    """Whether both predict the same things with the same head."""
    names = [(each.data.get("identity") or {}).get("classes") for each in (base, run)]
    return names[0] == names[1] and base.model.get("head") == to_dict(run.config.head)  # type: ignore[attr-defined]
