"""Which runs continue texts row by row, each independent of the others: what is served, and what a harness scores."""

from __future__ import annotations

from typing import Any

from kinformer.core.head import NeedsStore
from kinformer.runs.run import Run
from kinformer.runtime.errors import KinformerError


def require_continuing(run: Run, instead: str) -> None:
    """Raise unless ``run`` continues texts, and each by itself; ``instead`` says what else a run of another kind can be
    used with."""
    generation = run.task.generation
    run.task.check_generation(run)
    if generation.prompt != "text" or not generation.reads or run.tokenizer is None:
        raise KinformerError(
            f"{run.folder}: is a run of the task {run.task.name}, and only texts are continued here; give a run of "
            "next-token."
        )
    config: Any = run.config
    if isinstance(getattr(config, "head", None), NeedsStore):
        raise KinformerError(
            f"{run.folder}: is a run of {run.member!r}, which looks things up for all of its sequences together, so "
            f"that none can join; use {instead}."
        )
