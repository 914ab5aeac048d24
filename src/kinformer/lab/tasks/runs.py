"""Runs as tasks see them: the folder of a trained model, and the loaded model with its companions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data import Tokenizer


class TrainedRun(Protocol):
    """A run folder, as far as tasks read it."""

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
    def tokenizer(self) -> Tokenizer | None: ...


class LoadedRun(NamedTuple):
    """A run to measure or to generate with.

    ``model``: of the protocol that the task names, in eval mode; ``changes``: the changes of its config, as
    ``path=value``; ``lookup``: the datastore of its head, as values for JSON; ``draft``: the draft that guesses its
    next tokens (see ``generation.generate``); ``language_model``: the language model that guides its search.
    """

    run: TrainedRun
    model: Any
    changes: tuple[str, ...] = ()
    lookup: Mapping[str, Any] | None = None
    draft: object = None
    language_model: LoadedRun | None = None

    @property
    def title(self) -> str:
        """Return the folder, and in brackets the member and the changes."""
        return f"{self.run.folder} ({', '.join((self.run.member, *self.changes))})"
