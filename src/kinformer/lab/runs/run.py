"""Run folders: ``config.json`` (the model, the data and the settings), ``model.safetensors`` (the best weights so far).

If several processes hold parts of the weights, the best weights are in ``best/``, as shards.

``config.json`` has the keys ``schema``, ``kinformer``, ``member``, ``recipe``, ``model`` (the model's config as data),
``tokenizer`` ("bytes", the name of a file in the folder, or null), ``task`` (its name and its own options), ``data``
(its name on the command line, and its identity), ``training`` (the settings) and ``checksum`` (of all other keys).
Some runs have further keys: ``tokenizer_fingerprint`` if the tokenizer is a file, ``prompts`` if the model was imported
with special tokens, and ``packages`` if other packages define the member or the task. The chat template of an imported
model is the file ``chat_template.jinja``; further chat templates are in ``additional_chat_templates``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from torch import Tensor

from kinformer.core.config import override
from kinformer.core.parts import NeedsStore
from kinformer.core.stack import ModelConfig
from kinformer.family.build import model_config, storable, weight_shapes
from kinformer.family.kinds import kinds
from kinformer.family.table import FAMILY
from kinformer.family.table import member as member_called
from kinformer.lab.data import Tokenizer
from kinformer.lab.data.files import SPOOLED
from kinformer.lab.tasks.table import ALL, options_for
from kinformer.lab.tasks.table import task as task_called
from kinformer.lab.tasks.task import Task
from kinformer.lab.training.checkpoint import (
    CHECKPOINTS,
    CONFIG,
    SHARDED,
    WEIGHTS,
    Checkpoints,
    best_of,
    best_weights,
    place_of_best,
)
from kinformer.lab.training.logging import EVENTS, METRICS
from kinformer.lab.training.settings import Settings
from kinformer.runtime import files
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError, require_path, require_types
from kinformer.runtime.parsing import JsonObject

# Reading of ``config.json``: its schema, keys and types are checked before any other code reads it.

SCHEMA = 2
_TYPES: Mapping[str, tuple[type, ...]] = {
    "member": (str,), "recipe": (str,), "model": (dict,), "tokenizer": (str, NoneType), "task": (dict,),
    "data": (dict,), "training": (dict,),
}  # fmt: skip
_FURTHER: Mapping[str, tuple[type, ...]] = {
    "tokenizer_fingerprint": (str,), "packages": (dict,), "prompts": (dict,), "checksum": (str,),
}  # fmt: skip
_PROMPTS: Mapping[str, tuple[type, ...]] = {"prefix": (list,), "special_tokens": (dict,)}
_DATA: Mapping[str, tuple[type, ...]] = {
    "spec": (str, NoneType), "holdout": (float, int, NoneType), "identity": (dict, NoneType), "init": (str,),
    "inherited": (dict,), "retrieval": (dict,),
}  # fmt: skip
_RETRIEVAL: Mapping[str, tuple[type, ...]] = {
    "datastore": (str,), "retriever": (str,), "neighbours": (int,), "probes": (int, NoneType),
}  # fmt: skip
_TYPE_NAMES = {str: "text", dict: "a table", list: "a list", NoneType: "null", int: "a whole number", float: "a number"}


def read_config(place: Path) -> JsonObject:
    """Return the table in the file ``place``."""
    folder = place.parent
    if not os.path.exists(place):  # Path.exists raises for a long name
        raise KinformerError(
            f"{folder}: is not a run folder (it has no {CONFIG}); train one with: kinformer train MEMBER --out DIR."
        )
    data = files.read_json(place)
    if isinstance(data, dict) and "model_type" in data and "schema" not in data:
        raise KinformerError(
            f"{folder}: is a checkpoint of another library; make it a run first: kinformer import {folder} --out DIR."
        )
    if not isinstance(data, dict) or "schema" not in data:
        raise KinformerError(f"{place}: is not the config of a run; restore it from a copy, or give another folder.")
    if data["schema"] != SCHEMA:
        raise KinformerError(
            f"{place}: has schema {data['schema']!r}, but this version reads schema {SCHEMA}; use the version of "
            "kinformer that wrote it, or train it again."
        )
    if missing := [name for name in _TYPES if name not in data]:
        raise KinformerError(f"{place}: lacks {', '.join(missing)}; restore it from a copy.")
    _check(data, {**_TYPES, **_FURTHER}, place, "")
    _check(data["data"], _DATA, place, "data.")
    prompts = data.get("prompts", {})
    _check(prompts, _PROMPTS, place, "prompts.")
    special = prompts.get("special_tokens", {})
    for name, values, kind in (("prefix", prompts.get("prefix", ()), int), ("special_tokens", special.values(), str)):
        if not all(type(value) is kind for value in values):
            expected = "a list of whole numbers" if kind is int else "a table of texts"
            raise KinformerError(f"{place}: prompts.{name} is {prompts[name]!r}, not {expected}; restore a copy.")
    _check(data["data"].get("retrieval", {}), _RETRIEVAL, place, "data.retrieval.")
    name = data["tokenizer"]
    if name is not None and (Path(name).name != name or name == ".."):
        raise KinformerError(f"{place}: tokenizer is {name!r}, not a file of this folder; restore it from a copy.")
    if not isinstance(data["task"].get("name"), str) or not isinstance(data["task"].get("options"), dict):
        raise KinformerError(f"{place}: task is {data['task']!r}, without a name or options; restore it from a copy.")
    return data


RETIRED = ("diloco_steps", "outer_lr", "outer_momentum")
"""Settings in the configs of earlier versions that no longer change anything."""


def settings_in(training: JsonObject) -> Settings:
    """Return the settings in a config, with the same checks as the settings on the command line."""
    training = {name: value for name, value in training.items() if name not in RETIRED}
    if unknown := sorted(map(str, training.keys() - {field.name for field in fields(Settings)})):
        raise KinformerError(f"training has the unknown setting {unknown[0]!r}; use a matching version.")
    return Settings(**training)


def _check(data: Mapping[str, object], types: Mapping[str, tuple[type, ...]], place: Path, prefix: str) -> None:
    for name, expected in types.items():
        if name in data and (not isinstance(data[name], expected) or isinstance(data[name], bool)):
            kind = " or ".join(_TYPE_NAMES[item] for item in expected)
            raise KinformerError(f"{place}: {prefix}{name} is {data[name]!r}, not {kind}; restore it from a copy.")


TOKENIZER, BYTES, CHAT_TEMPLATE = "tokenizer.json", "bytes", "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder: a trained model, or a model in training.

    member, recipe: the names of the member and its recipe.
    config: the config of the model.
    task, options: the task, and the task's own options.
    data: ``spec`` (the name of the data), ``holdout`` and ``identity``. Some runs also have ``init`` (the base run),
        ``inherited`` (the weights from the base run) and ``retrieval`` (the datastore).
    training: the settings; empty for an imported run.
    vocabulary: "bytes", the name of a tokenizer's file in the folder, or None where the task reads no text.
    prompts: the prompting of an imported model: ``prefix`` (the ids that begin every prompt, such as BOS) and
        ``special_tokens`` (texts of special tokens by their names in transformers); empty for other runs.
    tokenizer_fingerprint: the digest of the tokenizer's file; None until there is a file.
    by_user: the names of the ``options`` from the user's present call; the other options come from the folder.
    """

    folder: Path
    member: str
    recipe: str
    config: ModelConfig
    task: Task
    options: Any
    data: JsonObject
    training: JsonObject
    vocabulary: str | None = BYTES
    prompts: JsonObject = field(default_factory=dict)
    tokenizer_fingerprint: str | None = field(default=None, compare=False)
    by_user: frozenset[str] = field(default=frozenset(), compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; None for a task without text."""
        from kinformer.lab.data import ByteTokenizer, FileTokenizer

        if self.vocabulary is None:
            return None
        if self.vocabulary == BYTES:
            return ByteTokenizer()
        return FileTokenizer(self.folder / self.vocabulary, self.tokenizer_fingerprint, self.prompts.get("prefix", ()))

    @property
    def chat_template(self) -> Path | None:
        """The file of the chat template of an imported model; None without a chat template."""
        path = self.folder / CHAT_TEMPLATE
        return path if path.is_file() else None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the best validation, the deciding metric first; empty for a run without a validation."""
        best = best_of(self.folder)
        return {} if best is None else best[0]

    @property
    def figures(self) -> dict[str, float]:
        """The run's ``metrics`` under their former name."""
        return self.metrics

    def save(self) -> None:
        """Write the run's ``config.json``, signed."""
        from kinformer import __version__
        from kinformer.lab.data.tokenizer import file_fingerprint

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
        if self.prompts:
            data["prompts"] = self.prompts
        fingerprint, file = self.tokenizer_fingerprint, self.folder / str(self.vocabulary)
        if not fingerprint and self.vocabulary not in (None, BYTES) and file.is_file():
            fingerprint = file_fingerprint(file.read_bytes())
        if fingerprint:
            data["tokenizer_fingerprint"] = fingerprint
        files.write_json(self.folder / CONFIG, files.signed(data))

    def build(self) -> Any:
        """Return the model, newly initialised."""
        with files.reading(self.folder / CONFIG, "says a model that cannot be built here", "use a larger machine"):
            return self.config.build()

    def model(self, changes: Mapping[str, object] | None = None) -> Any:
        """Return the model with its best weights, in eval mode, without its datastore (see ``lab.datastore.attach``).
        ``changes`` are overrides of the config, such as another scaling of positions. They must keep the name and the
        shape of every weight."""
        config = self._changed(changes) if changes else self.config
        place, (tensors, _) = place_of_best(self.folder), best_weights(self.folder)
        with files.reading(self.folder / CONFIG, "says a model that cannot be built"):
            files.require_weights(weight_shapes(config), tensors, place)
            with private_numbers(0):  # the stored weights replace the random ones
                model = config.build()
        files.load_weights(model, tensors, place)
        return model.eval()

    def weights_digest(self) -> str:
        """Return the sha256 of the names, shapes, types and bytes of the weights that :meth:`model` reads."""
        tensors, metadata = best_weights(self.folder)
        return metadata.get(files.DIGEST) or files.digest(tensors)

    def _changed(self, changes: Mapping[str, object]) -> ModelConfig:
        changed = override(self.config, changes, kinds())
        before, after = weight_shapes(self.config), weight_shapes(changed)
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                shapes = " to ".join(str(shape) if shape else "none" for shape in (before.get(name), after.get(name)))
                raise KinformerError(
                    f"`set` {' '.join(changes)}: turns the weight {name} from {shapes}, but a trained model "
                    f"keeps the weights in {self.folder}; train a new run for that."
                )
        return changed


def open_run(folder: str | Path) -> Run:
    """Return the run in ``folder``, without reading its weights."""
    require_path("run", folder)
    folder = Path(folder)
    place = folder / CONFIG
    data = read_config(place)
    packages = data.get("packages", {})
    with files.reading(place):
        try:
            member_called(data["member"], packages.get("member"))
            task = task_called(data["task"]["name"], packages.get("task"))
            options = options_for(task, "Options", data["task"]["options"])
            require_types(options, task.Options)
            task.choose_objective(settings_in(data["training"]).objective)
        except (KinformerError, TypeError) as error:
            raise KinformerError(f"{place}: {error}") from None
        config = model_config(data["model"], f"{place}: model")
    files.require_signature(data, place)
    return Run(
        folder=folder,
        member=data["member"],
        recipe=data["recipe"],
        config=config,
        task=task,
        options=options,
        data=data["data"],
        training={name: value for name, value in data["training"].items() if name not in RETIRED},
        vocabulary=data["tokenizer"],
        prompts=data.get("prompts", {}),
        tokenizer_fingerprint=data.get("tokenizer_fingerprint"),
    )


def require_continuing(run: Run, instead: str) -> None:
    """Raise unless ``run`` continues texts in independent rows, as serving and the harness need; the message recommends
    ``instead``."""
    generation = run.task.generation
    run.task.check_generation(run)
    if generation.prompt != "text" or not generation.reads or run.tokenizer is None:
        raise KinformerError(
            f"{run.folder}: is a run of the task {run.task.name}, and only next-token continues texts here; give one."
        )
    if isinstance(getattr(run.config, "head", None), NeedsStore):
        raise KinformerError(f"{run.folder}: {run.member!r} looks things up for all sequences together; use {instead}.")


def save_weights(folder: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write ``model.safetensors``."""
    files.save_tensors(folder / WEIGHTS, weights, metadata)


# Writing in a run's folder: by one process at a time, which removes only its own files.
#
# While a run is created, ``.config.json.partial`` is in its folder, and ``config.json`` is written last. This marker
# tells the remains of a killed creation from a user's own files. The next process that locks the folder removes the
# remains.

FIELD, JOB = "texts", "job"
"""The texts of a field of examples, and the name of torchrun's job that trains the run."""
_MADE_FIRST = (TOKENIZER, CHAT_TEMPLATE, SPOOLED, FIELD, WEIGHTS)
"""The files that creating or importing a run may write before its config."""
WRITTEN = (*_MADE_FIRST, CONFIG, METRICS, EVENTS, CHECKPOINTS, "additional_chat_templates", JOB)
"""The files and folders of a training that has not yet saved weights."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process, and remove half-written files of dead processes."""
    files.require_utf8(folder)
    with files.locked(folder):
        _remove_leftovers(folder)
        yield


@contextmanager
def creating(folder: Path) -> Iterator[None]:
    """Create a run in ``folder``, which this process has locked; after a failure, remove its files."""
    require_empty(folder)
    try:
        with files.partial_of(folder / CONFIG).open("xb"):
            pass
        yield
    except BaseException:
        _remove_leftovers(folder)
        raise


def require_empty(folder: Path) -> None:
    """Refuse a folder with any contents."""
    if (folder / CONFIG).exists():
        raise KinformerError(f"`out` {folder}: holds a run already; add `resume`, or give another folder.")
    if any(folder.iterdir()):
        raise KinformerError(f"`out` {folder}: is not empty; give a new folder.")


def _remove_leftovers(folder: Path) -> None:
    if files.partial_of(folder / CONFIG).exists() and not (folder / CONFIG).exists():
        for name in _MADE_FIRST:
            (folder / name).unlink(missing_ok=True)
    files.remove_partials(folder, (CONFIG, METRICS, *_MADE_FIRST))
    for name in (CHECKPOINTS, SHARDED):
        Checkpoints(folder / name, 1).clean()
