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
from kinformer.core.files import DIGEST, digest, load_tensors, load_weights, read_json, save_tensors, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.core.model import ModelConfig

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

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        from kinformer.family.build import model_config

        return model_config(self.model, f"{self.folder / CONFIG}: model")

    def build(self) -> Any:
        """The model, newly initialised."""
        return self.config.build()

    def load(self, changes: Mapping[str, Any] | None = None) -> Any:
        """The model with its best weights, in eval mode.

        ``changes`` are overrides of its config, such as another scaling of its positions; they must leave the name and
        the shape of every weight as they are.
        """
        model = self._changed(changes).build() if changes else self.build()
        tensors, _ = load_tensors(self.folder / WEIGHTS)
        load_weights(model, tensors, self.folder / WEIGHTS)
        return model.eval()

    def weights_digest(self) -> str:
        """What the weights that :meth:`load` reads are told by: sha256 of their names, shapes, types and bytes."""
        tensors, metadata = load_tensors(self.folder / WEIGHTS)
        return metadata.get(DIGEST) or digest(tensors)

    def _changed(self, changes: Mapping[str, Any]) -> ModelConfig:
        from kinformer.core.config import override
        from kinformer.family.kinds import kinds

        changed = override(self.config, changes, kinds())
        before, after = weight_shapes(self.config), weight_shapes(changed)
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                shapes = " to ".join(str(shape) if shape else "none" for shape in (before.get(name), after.get(name)))
                raise KinformerError(
                    f"--set {' '.join(changes)}: turns the weight {name} from {shapes}, but a trained model's weights "
                    f"stay as they are in {self.folder}; train a new run for that."
                )
        return changed


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of everything that a model of ``config`` stores; nothing is allocated."""
    import torch

    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in config.build().state_dict().items()}


def open_run(folder: str | Path) -> Run:
    """Read a run folder's config; anything that is not one is one clear sentence."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise KinformerError(
            f"{folder}: is no run folder (it has no {CONFIG}); train one with: kinformer train MEMBER --out DIR."
        )
    data = read_json(folder / CONFIG)
    if isinstance(data, dict) and "model_type" in data and "schema" not in data:
        raise KinformerError(
            f"{folder}: is a checkpoint of another library; make it a run first: kinformer import {folder} --out DIR."
        )
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


def load_model(folder: str | Path, changes: Mapping[str, Any] | None = None) -> Any:
    """The trained model of a run folder, in eval mode, with ``changes`` that leave its weights as they are."""
    return open_run(folder).load(changes)


def save_weights(folder: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write ``model.safetensors``."""
    save_tensors(folder / WEIGHTS, weights, metadata)
