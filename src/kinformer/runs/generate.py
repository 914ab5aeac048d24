"""Generation with a trained run and what belongs to it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kinformer.core.model import CausalModel
from kinformer.generation.packed import pack
from kinformer.runs.language_model import language_model_of
from kinformer.runs.options import GenerateOptions
from kinformer.runs.run import Run, open_run
from kinformer.runs.stores import STORES
from kinformer.runtime.errors import KinformerError, marked
from kinformer.tasks.next_token.generate import Conversation
from kinformer.tasks.record import DRAWING
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.table import generation_options
from kinformer.tasks.task import Task


def generate(
    folder: str | Path,
    prompt: str | bytes | Iterable[bytes] | None,
    options: GenerateOptions,
    write: Callable[[str], None] | None = None,
) -> Any:
    """Return what the run's task generates from ``prompt``: a text, lines as they come, or None, as ``task.generation``
    says. ``write`` is called with every piece of a single sample as soon as it is drawn."""
    options.check_store()
    run = open_run(folder)
    run.task.check_generation(run)
    _check_prompt(run.task, prompt)
    subject, options = _prepared(run, options)
    return run.task.generate(subject, prompt, options, write)


def converse(folder: str | Path, options: GenerateOptions) -> Conversation:
    """Return a new conversation with the run in ``folder``.

    Errors: ``KinformerError`` for a run whose task draws no text freely.
    """
    options.check_store()
    run = open_run(folder)
    run.task.check_generation(run)
    if run.task.generation.prompt != "text" or "temperature" not in run.task.generation.reads:
        raise KinformerError(
            f"{run.folder}: is a run of the task {run.task.name}, which continues no text freely; give one of "
            "next-token."
        )
    if options.samples != 1:
        raise KinformerError(f"`samples` {options.samples}: a text that is continued in turns is one; leave it out.")
    return Conversation(*_prepared(run, options))


def _prepared(run: Run, options: GenerateOptions) -> tuple[LoadedRun, Any]:
    """Return the run's model, ready to generate, and the options with seed and temperature, as tasks read them."""
    task_options = generation_options(run.task, options.task_options, str(run.folder))
    check_drawing(run.task, options)
    options = replace(
        options,
        task_options=task_options,
        seed=secrets.randbits(32) if options.seed is None else options.seed,
        temperature=run.task.generation.temperature if options.temperature is None else options.temperature,
    )
    assert options.seed is not None
    device = options.prepare(options.seed)
    model = run.model(options.set).to(device, torch.bfloat16 if options.weights == "bf16" else None)
    packed = model if run.task.generation.prompt == "lines" else pack(model, options.samples)
    if options.package is not None:
        _attach_package(run, packed, options)
    model = STORES.attach(run, packed, options, options.samples)
    beside = language_model_of(task_options, device)
    return LoadedRun(run, model, draft=_draft(run, options, device), language_model=beside), options


def _draft(run: Run, options: GenerateOptions, device: torch.device) -> str | CausalModel | None:
    """Return what guesses the run's next tokens: None, "ngram", "mtp", or the model of another run of its tokens."""
    if options.draft in (None, "ngram", "mtp"):
        return options.draft
    other = open_run(options.draft)
    mine, others = run.tokenizer, other.tokenizer
    if other.task.name != run.task.name or others is None or mine is None or others.fingerprint != mine.fingerprint:
        raise KinformerError(
            f"`draft` {other.folder}: has another task or tokenizer than {run.folder}, and so other tokens; train the "
            "draft with both of that run."
        )
    model = other.model().to(device, torch.bfloat16 if options.weights == "bf16" else None)
    return pack(model, options.samples)


def _attach_package(run: Run, model: nn.Module, options: GenerateOptions) -> None:
    """Let ``model`` step by the package that the options name; refuse options that it was not made for."""
    from kinformer.runs.graphs import attach_package

    changed = {"set": bool(options.set), "samples": options.samples > 1, "weights": options.weights != "fp32"}
    changed |= {"device": next(model.parameters()).device.type != "cpu"}
    if names := [name for name, differs in changed.items() if differs]:
        raise KinformerError(
            f"{marked(names[0])}: does not go with `package`, which holds one sequence's step with the run's weights "
            "in float32, for a CPU; leave one of both out."
        )
    attach_package(run, model, options.package or "")


def _check_prompt(task: Task, prompt: str | bytes | Iterable[bytes] | None) -> None:
    prompted = task.generation.prompt is not None
    if not prompted and prompt is not None:
        raise KinformerError(f"`prompt`: the task {task.name} continues no text; leave it out.")
    if prompted and prompt is None:
        raise KinformerError("there must be one prompt; give `prompt` TEXT, `prompt` - or `prompt_file` PATH.")
    if prompted and not prompt:
        raise KinformerError("the prompt is empty; give at least one character with `prompt` or `prompt_file`.")


def check_drawing(task: Task, options: GenerateOptions) -> None:
    """Refuse the options of drawing that a task does not read."""
    usual = {option.name: option.default for option in fields(GenerateOptions)}
    for name in DRAWING:
        value = getattr(options, name)
        if name not in task.generation.reads and value != usual[name]:
            shown = " ".join(value) if isinstance(value, tuple) else value if isinstance(value, str) else f"{value:g}"
            reason = task.generation.unread or f"the task {task.name} does not read it"
            raise KinformerError(f"{marked(name)} {shown}: {reason}; leave it out.")
