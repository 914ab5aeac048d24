"""Run folders: ``config.json`` (what was trained, on what, how), ``model.safetensors`` (the best weights so far).

``config.json`` has the keys ``schema``, ``kinformer``, ``member``, ``recipe``, ``model`` (the model config as data),
``tokenizer`` ("bytes", or the name of a file in the folder), ``data`` (the corpus' spec and identity) and ``training``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.core.errors import KinformerError
from kinformer.core.files import load_tensors, load_weights, read_json, save_tensors, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.models.decoder import Decoder

SCHEMA = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What ``config.json`` says of a run."""

    folder: Path
    member: str
    recipe: str
    model: Mapping[str, Any]
    tokenizer: str = "bytes"
    data: Mapping[str, Any]
    training: Mapping[str, Any]

    def save(self) -> None:
        """Write ``config.json``."""
        from kinformer import __version__

        names = ("member", "recipe", "model", "tokenizer", "data", "training")
        write_json(
            self.folder / CONFIG,
            {"schema": SCHEMA, "kinformer": __version__} | {name: getattr(self, name) for name in names},
        )

    def build(self) -> Decoder:
        """The model, newly initialised."""
        from kinformer.family.build import model_config

        return model_config(self.model, f"{self.folder / CONFIG}: model").build()

    def load(self) -> Decoder:
        """The model with its best weights, in eval mode."""
        model = self.build()
        tensors, _ = load_tensors(self.folder / WEIGHTS)
        load_weights(model, tensors, self.folder / WEIGHTS)
        return model.eval()


def open_run(folder: str | Path) -> Run:
    """Read a run folder's config; anything that is not one is one clear sentence."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise KinformerError(
            f"{folder}: is no run folder (it has no {CONFIG}); train one with: kinformer train MEMBER --out DIR."
        )
    data = read_json(folder / CONFIG)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        schema = data.get("schema") if isinstance(data, dict) else None
        raise KinformerError(
            f"{folder / CONFIG}: has schema {schema!r}, but this version reads schema {SCHEMA}; use a matching version."
        )
    names = ("member", "recipe", "model", "tokenizer", "data", "training")
    if missing := [name for name in names if name not in data]:
        raise KinformerError(f"{folder / CONFIG}: lacks {', '.join(missing)}; restore it from a copy.")
    for name in names:
        expected = str if name in ("member", "recipe", "tokenizer") else dict
        if not isinstance(data[name], expected):
            kind = "text" if expected is str else "a table"
            raise KinformerError(f"{folder / CONFIG}: {name} is {data[name]!r}, not {kind}; restore it from a copy.")
    return Run(folder=folder, **{name: data[name] for name in names})


def load_model(folder: str | Path) -> Decoder:
    """The trained model of a run folder, in eval mode."""
    return open_run(folder).load()


def save_weights(folder: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write ``model.safetensors``."""
    save_tensors(folder / WEIGHTS, weights, metadata)
