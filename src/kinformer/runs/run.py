"""Run folders: ``config.json`` (what was trained, on what, how), ``model.safetensors`` (the best weights so far).

``config.json`` has the keys ``schema``, ``kinformer``, ``member``, ``recipe``, ``model`` (the model's config as data),
``tokenizer`` ("bytes", the name of a file in the folder, or null), ``task`` (its name and its own options), ``data``
(how it was named, and its identity) and ``training`` (the settings); and ``packages``, where other packages' the
member and the task are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.core.config import override
from kinformer.core.errors import KinformerError
from kinformer.core.files import DIGEST, digest, load_tensors, load_weights, read_json, save_tensors, write_json
from kinformer.family.build import model_config, storable
from kinformer.family.kinds import kinds
from kinformer.family.table import FAMILY
from kinformer.family.table import member as member_called
from kinformer.tasks.table import ALL, training_options
from kinformer.tasks.table import task as task_called
from kinformer.training.best import WEIGHTS, best_of

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.core.model_config import ModelConfig
    from kinformer.data import Tokenizer
    from kinformer.tasks.task import Task

SCHEMA = 2
CONFIG, BYTES = "config.json", "bytes"
_KEYS = ("member", "recipe", "model", "tokenizer", "task", "data", "training")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model, or one in training, in its folder.

    member, recipe: what it is of the family.
    config: the model's.
    task, options: what it is trained for, and the task's own options.
    data: ``spec`` (the data as it was named), ``holdout``, ``identity``; and where there are some, ``init`` (the run it
        began with) and ``retrieval`` (its datastore).
    training: the settings; empty of an imported run.
    vocabulary: "bytes", the name of a tokenizer's file in the folder, or None where the task reads no text.
    """

    folder: Path
    member: str
    recipe: str
    config: ModelConfig
    task: Task
    options: Any
    data: Mapping[str, Any]
    training: Mapping[str, Any]
    vocabulary: str | None = BYTES

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """What makes ids of text."""
        from kinformer.data import ByteTokenizer, FileTokenizer

        if self.vocabulary is None:
            return None
        return ByteTokenizer() if self.vocabulary == BYTES else FileTokenizer(self.folder / self.vocabulary)

    @property
    def figures(self) -> dict[str, float]:
        """The best validation's, the one that decided first; empty of a run that was never validated."""
        found = best_of(self.folder)
        return {} if found is None else found[0]

    def save(self) -> None:
        """Write ``config.json``."""
        from kinformer import __version__

        data = {
            "schema": SCHEMA,
            "kinformer": __version__,
            "member": self.member,
            "recipe": self.recipe,
            "model": storable(self.config),
            "tokenizer": self.vocabulary,
            "task": {"name": self.task.name, "options": asdict(self.options)},
            "data": self.data,
            "training": self.training,
        }
        added = {"member": FAMILY.package(self.member), "task": ALL.package(self.task.name)}
        if packages := {name: package for name, package in added.items() if package is not None}:
            data["packages"] = packages
        write_json(self.folder / CONFIG, data)

    def build(self) -> Any:
        """The model, newly initialised."""
        return self.config.build()

    def model(self, changes: Mapping[str, Any] | None = None) -> Any:
        """The model with its best weights, in eval mode, without what belongs to it (see ``runs.store``).

        ``changes`` are overrides of its config, such as another scaling of its positions; they must leave the name and
        the shape of every weight as they are.
        """
        model = (self._changed(changes) if changes else self.config).build()
        tensors, _ = load_tensors(self.folder / WEIGHTS)
        load_weights(model, tensors, self.folder / WEIGHTS)
        return model.eval()

    def weights_digest(self) -> str:
        """What identifies the weights that :meth:`model` reads: sha256 of their names, shapes, types and bytes."""
        tensors, metadata = load_tensors(self.folder / WEIGHTS)
        return metadata.get(DIGEST) or digest(tensors)

    def _changed(self, changes: Mapping[str, Any]) -> ModelConfig:
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
    data = _read(folder)
    path = folder / CONFIG
    packages = data.get("packages", {})
    try:
        if package := packages.get("member"):
            member_called(data["member"], package)
        task = task_called(data["task"]["name"], packages.get("task"))
        options = training_options(task, data["task"]["options"])
    except (KinformerError, TypeError) as error:
        raise KinformerError(f"{path}: {error}") from None
    return Run(
        folder=folder,
        member=data["member"],
        recipe=data["recipe"],
        config=model_config(data["model"], f"{path}: model"),
        task=task,
        options=options,
        data=data["data"],
        training=data["training"],
        vocabulary=data["tokenizer"],
    )


def _read(folder: Path) -> dict[str, Any]:
    """``config.json``, with the right keys and types."""
    path = folder / CONFIG
    if not path.is_file():
        raise KinformerError(
            f"{folder}: is no run folder (it has no {CONFIG}); train one with: kinformer train MEMBER --out DIR."
        )
    data = read_json(path)
    if isinstance(data, dict) and "model_type" in data and "schema" not in data:
        raise KinformerError(
            f"{folder}: is a checkpoint of another library; make it a run first: kinformer import {folder} --out DIR."
        )
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == 1:
        raise KinformerError(
            f"{path}: has schema 1, as kinformer 0.1 wrote it, but this version reads schema {SCHEMA}; train it "
            "again, or read it with kinformer 0.1."
        )
    if schema != SCHEMA:
        raise KinformerError(
            f"{path}: has schema {schema!r}, but this version reads schema {SCHEMA}; use a matching version."
        )
    if missing := [name for name in _KEYS if name not in data]:
        raise KinformerError(f"{path}: lacks {', '.join(missing)}; restore it from a copy.")
    for name in _KEYS:
        expected: Any = str if name in ("member", "recipe") else (str, type(None)) if name == "tokenizer" else dict
        if not isinstance(data[name], expected):
            kind = "a table" if expected is dict else "text"
            raise KinformerError(f"{path}: {name} is {data[name]!r}, not {kind}; restore it from a copy.")
    if not isinstance(data["task"].get("name"), str) or not isinstance(data["task"].get("options"), dict):
        raise KinformerError(f"{path}: task is {data['task']!r}, without a name or options; restore it from a copy.")
    return data


def save_weights(folder: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write ``model.safetensors``."""
    save_tensors(folder / WEIGHTS, weights, metadata)
