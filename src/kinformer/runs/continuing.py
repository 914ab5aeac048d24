"""The check that a run continues texts row by row, each independent of the others: for serving, and for a harness."""

from __future__ import annotations

from kinformer.core.head import NeedsStore
from kinformer.runs.run import Run
from kinformer.runtime.errors import KinformerError


def require_continuing(run: Run, instead: str) -> None:
    """Raise unless ``run`` continues texts, each by itself; ``instead`` names what a run of another kind can be used
    with."""
    generation = run.task.generation
    run.task.check_generation(run)
    if generation.prompt != "text" or not generation.reads or run.tokenizer is None:
        raise KinformerError(
            f"{run.folder}: is a run of the task {run.task.name}, and only texts are continued here; give a run of "
            "next-token."
        )
    if isinstance(getattr(run.config, "head", None), NeedsStore):
        raise KinformerError(
            f"{run.folder}: is a run of {run.member!r}, which looks things up for all of its sequences together, so "
            f"that none can join; use {instead}."
        )
