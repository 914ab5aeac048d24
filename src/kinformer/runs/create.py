"""Creation of a run: its folder, a model that fits its task and data, its data and its settings."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from kinformer.core.model import CausalModel
from kinformer.core.model_config import ModelConfig
from kinformer.core.overrides import override
from kinformer.data import FileTokenizer, open_corpus
from kinformer.family.build import storable
from kinformer.family.kinds import kinds
from kinformer.runs.folder import creating, require_empty
from kinformer.runs.inheriting import inherited_by
from kinformer.runs.ladder import Ladder
from kinformer.runs.minutes import Chooser, decides, with_vocabulary
from kinformer.runs.options import TrainOptions
from kinformer.runs.planning import base_of, check_source, named_data, plan_config, planner_for, recipe_config
from kinformer.runs.rows import staged_rows
from kinformer.runs.run import BYTES, TOKENIZER, Run
from kinformer.runs.staging import stage_plan
from kinformer.runs.stores import STORES
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import tolerant
from kinformer.runtime.unallocated import unallocated
from kinformer.tasks.table import task_for, training_options
from kinformer.tasks.task import Task, TrainingPlan
from kinformer.training.diloco import check_rounds
from kinformer.training.distributed import Group, started_by_torchrun
from kinformer.training.division import divide
from kinformer.training.engines import check_length, check_shared
from kinformer.training.objective import Objective
from kinformer.training.settings import Settings
from kinformer.training.stages import stages_of


def create(options: TrainOptions, device: str, started_at: float, quiet: bool = True) -> tuple[Run, Settings]:
    """Create a run in a new folder, which the caller has locked, and return it with its settings. ``device`` is a type
    of device; minutes count from ``started_at``.

    Errors: ``KinformerError`` for options that do not go together; nothing is left behind then.
    """
    folder = Path(options.out)
    require_empty(folder)
    base = base_of(options)
    task = task_for(options.task, recipe_config(options, base, None), options.member)
    training_options(task, options.task_options)
    check_source(options, task)
    plan_config(options, base, task, None)
    with creating(folder):
        spec, requested = named_data(options, task, folder), options
        train = cache(lambda: open_corpus(spec, holdout=options.holdout).splits["train"])
        options = with_vocabulary(requested, task, train)
        planner = planner_for(options, task, spec, base)

        def plan_of(options: TrainOptions) -> TrainingPlan:
            return checked(planner.plan(options), task, group_of(options, device))

        if decides(options):
            kind = Chooser if task.data.running_text else Ladder
            chooser = kind(requested, options, task, plan_of, _open_recipe(options, base), device, started_at)
            options = _completed(chooser, quiet)
        plan = plan_of(options)
        tokenizer = plan.tokenizer
        retrieval = STORES.choose(options, plan.config)
        if isinstance(tokenizer, FileTokenizer):
            tokenizer.save(folder / TOKENIZER)
        inherits_prompts = base is not None and tokenizer is not None and tokenizer is base.tokenizer
        if base is not None and inherits_prompts:
            from kinformer.interop.tokenizer_files import chat_templates, write_chat_templates

            write_chat_templates(folder, chat_templates(base.folder))
        init = _named(base, task, options)
        column = {"text_field": options.text_field} if task.data.columns and options.text_field else {}
        run = Run(
            folder=folder,
            member=options.member,
            recipe=options.recipe or "small" if base is None or base.member != options.member else base.recipe,
            config=plan.config,
            task=task,
            options=plan.options,
            data={"spec": spec, "holdout": options.holdout, "identity": plan.data.identity} | column | retrieval | init,
            training=vars(plan.settings),
            by_user=frozenset(options.task_options),
            vocabulary=None if tokenizer is None else TOKENIZER if isinstance(tokenizer, FileTokenizer) else BYTES,
            prompts=_prompts(base, plan.config) if base is not None and inherits_prompts else {},
        )
        for stage in stages_of(plan.settings):
            staged_rows(run, plan, stage, device, quiet)
        run = run if base is None else _inheriting(run, base)
        run.save()
    return run, plan.settings


def _named(base: Run | None, task: Task, options: TrainOptions) -> dict[str, str]:
    """Return the entry ``init`` of a run's data. A base whose ids are not those of the task's data (of text where these
    are not, or the other way round) is refused."""
    if base is None:
        return {}
    if hasattr(base.config.input, "vocab_size") and base.task.data.tokenized != task.data.tokenized:
        raise KinformerError(
            f"`init` {options.init}: is a run of the task {base.task.name}, whose ids mean other things than those of "
            f"{task.name}; begin with a run of {task.name}, or with none."
        )
    return {"init": str(base.folder.resolve())}


def _prompts(base: Run, config: ModelConfig) -> dict[str, object]:
    """Return the entry ``prompts`` of ``base`` for a model of ``config``. Only a causal model has a prefix."""
    causal = config.protocol is CausalModel
    return {name: value for name, value in base.prompts.items() if causal or name != "prefix"}


def _inheriting(run: Run, base: Run) -> Run:
    """Return the run with an entry in its data that says which weights come from ``base``."""
    facts = {"member": base.member} | inherited_by(run, base).facts
    return replace(run, data=dict(run.data) | {"inherited": facts})


def _completed(chooser: Chooser | Ladder, quiet: bool) -> TrainOptions:
    """Return the options that the ``chooser`` chose, which are printed unless ``quiet``."""
    chosen = chooser.choose()
    if not quiet:
        print(chosen.text, file=tolerant(sys.stderr), flush=True)
    return chosen.options


def _open_recipe(options: TrainOptions, base: Run | None) -> ModelConfig | None:
    """Return the config that the minutes may change; None if a recipe, layers or a model to begin with was given."""
    named = base is not None or options.recipe is not None or "layers" in options.set
    return None if named else recipe_config(options, base, None)


def checked(plan: TrainingPlan, task: Task, group: Group) -> TrainingPlan:
    """Return ``plan``; refuse it where its model does not go with the data, the length, the objective, or several
    processes, in any of its stages."""
    for stage in stages_of(plan.settings) if plan.settings.stages else ():
        try:
            check_length(stage.settings, group)
            _check_sizes(stage_plan(plan, stage), task, group)
        except KinformerError as error:
            raise KinformerError(f"stage {stage.number + 1}: {error.message}") from None
    return _check_sizes(plan, task, group)


def _check_sizes(plan: TrainingPlan, task: Task, group: Group) -> TrainingPlan:
    plan.settings.rows(group.replicas)
    with unallocated():
        model = plan.config.build()
        objective = task.objective(plan.settings.objective, model)
    _require_trained(plan, task, model, objective)
    check_shared(model, group)
    check_rounds(plan.settings, model, group)
    if group.context > 1:
        from kinformer.training.context_parallel import check_time

        check_time(model, group.ring)
    if group.tensor > 1:
        divide(model, 0, group.tensor)  # refuses what cannot be divided
    task.check(plan, model)
    longest = getattr(model, "max_length", None)
    if longest is not None and plan.settings.length > longest:
        raise KinformerError(
            f"`length` {plan.settings.length}: this model's positions end at {longest}; give `length` {longest} or less"
            f"{_longer(plan.config, plan.settings.length)}."
        )
    return plan


def _require_trained(plan: TrainingPlan, task: Task, model: nn.Module, objective: Objective) -> None:
    """Refuse exits with weights of their own, and predictions of further tokens, that ``objective`` leaves as they
    begin."""
    if getattr(model, "ahead", None) is not None and not getattr(objective, "trains_ahead", False):
        raise KinformerError(
            f"`objective` {plan.settings.objective}: leaves the weights of `set` ahead as they begin; give `objective` "
            "multi-token for the task next-token, or leave ahead out."
        )
    if not getattr(getattr(model, "stack", None), "learns", False) or getattr(objective, "trains_exits", False):
        return
    remedy = "give `objective` exits"
    if "exits" not in task.objectives:
        remedy = f"{task.name} has none that trains them: give `set` stack=sequential"
    raise KinformerError(
        f"`objective` {plan.settings.objective}: leaves the weights of the stack's exits as they begin; {remedy}."
    )


def _longer(config: ModelConfig, length: int) -> str:
    """Return the changes after which a model of ``config`` reads ``length`` positions, for a message; "" for none."""
    changes: dict[str, int] = {}
    for path in ("position.max_length", "layers.*.mixer.max_length", "layers.*.mixer.position.max_length"):
        with suppress(KinformerError):
            longer = override(config, changes | {path: length}, kinds())
            if storable(longer) != storable(override(config, changes, kinds())):
                changes[path] = length
    with unallocated(), suppress(KinformerError):
        if (override(config, changes, kinds()).build().max_length or length) >= length:
            return ", or " + " ".join(f"`set` {path}={value}" for path, value in changes.items())
    return ""


def group_of(options: TrainOptions, device: str) -> Group:
    """Return the group of processes that will train on the type of ``device``, as its first process sees it."""
    world = max(options.devices, int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1)
    return Group(
        torch.device("cuda" if device == "cuda" else "cpu"),
        world=world,
        strategy=options.strategy,
        tensor=options.shared.tensor,
        context=options.shared.context,
        ring=options.shared.ring,
    )
