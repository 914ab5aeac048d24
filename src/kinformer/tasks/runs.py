"""A run as tasks see it: the folder of a trained model, and the model with what belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from kinformer.core.model_config import ModelConfig


class TrainedRun(Protocol):
    """What a task asks of a run folder."""

    @property
    def folder(self) -> Path: ...
    @property
    def member(self) -> str: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def data(self) -> Mapping[str, Any]: ...
    @property
    def options(self) -> Any: ...
    @property
    def training(self) -> Mapping[str, Any]: ...
    @property
    def tokenizer(self) -> Any: ...


class LoadedRun(NamedTuple):
    """A run to measure or to generate with: its model in eval mode, what was changed of its config, as ``path=value``,
    what its head looks things up in, as JSON, what guesses its next tokens (see ``generation.generate``), and the
    language model beside it."""

    run: TrainedRun
    model: Any
    changes: tuple[str, ...] = ()
    lookup: Mapping[str, Any] | None = None
    draft: Any = None
    language_model: LoadedRun | None = None

    @property
    def title(self) -> str:
        """The folder, and in brackets the member and what was changed of it."""
        return f"{self.run.folder} ({', '.join((self.run.member, *self.changes))})"
