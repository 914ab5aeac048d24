"""Run folders: ``config.json`` (what was trained, on what, how), ``model.safetensors`` (the best weights so far).

Where several processes hold parts of the weights, the best ones are in ``best/``, as shards.

``config.json`` has the keys ``schema``, ``kinformer``, ``member``, ``recipe``, ``model`` (the model's config as data),
``tokenizer`` ("bytes", the name of a file in the folder, or null), ``task`` (its name and its own options), ``data``
(how it was named, and its identity), ``training`` (the settings) and ``checksum`` (of all other keys); besides
``tokenizer_fingerprint`` where the tokenizer is a file, ``prompts`` where the model was imported with special tokens,
and ``packages``, where other packages' the member and the task are. The chat template of an imported model is the file
``chat_template.jinja``; its further ones are in ``additional_chat_templates``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.core.overrides import override
from kinformer.family.build import model_config, storable, weight_shapes
from kinformer.family.kinds import kinds
from kinformer.family.table import FAMILY
from kinformer.family.table import member as member_called
from kinformer.runs.config_file import CONFIG, SCHEMA, read_config, settings_in
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.fields import require_path, require_types
from kinformer.runtime.files import (
    DIGEST,
    digest,
    load_weights,
    reading,
    require_signature,
    require_weights,
    save_tensors,
    signed,
    write_json,
)
from kinformer.runtime.parsing import JsonObject
from kinformer.tasks.table import ALL, training_options
from kinformer.tasks.table import task as task_called
from kinformer.training.best import WEIGHTS, best_of, best_weights, place_of_best

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.core.model_config import ModelConfig
    from kinformer.data import Tokenizer
    from kinformer.tasks.task import Task

TOKENIZER, BYTES, CHAT_TEMPLATE = "tokenizer.json", "bytes", "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model, or one in training, in its folder.

    member, recipe: what it is of the family.
    config: the model's.
    task, options: what it is trained for, and the task's own options.
    data: ``spec`` (the data as it was named), ``holdout``, ``identity``; and where there are some, ``init`` (the run it
        began with), ``inherited`` (what of its weights is that run's) and ``retrieval`` (its datastore).
    training: the settings; empty of an imported run.
    vocabulary: "bytes", the name of a tokenizer's file in the folder, or None where the task reads no text.
    prompts: how an imported model is prompted: ``prefix`` (the ids that begin every prompt, such as BOS) and
        ``special_tokens`` (their texts by the names that transformers gives them); empty of other runs.
    tokenizer_fingerprint: what identifies that file; None until there is one.
    by_user: the names of the ``options`` that the user gives in this call; the others come from the folder.
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
        """The run's tokenizer, None for a task whose data are not text."""
        from kinformer.data import ByteTokenizer, FileTokenizer

        if self.vocabulary is None:
            return None
        if self.vocabulary == BYTES:
            return ByteTokenizer()
        return FileTokenizer(self.folder / self.vocabulary, self.tokenizer_fingerprint, self.prompts.get("prefix", ()))

    @property
    def chat_template(self) -> Path | None:
        """The file of the chat template that an imported model came with, None if there is none."""
        path = self.folder / CHAT_TEMPLATE
        return path if path.is_file() else None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the best validation, the deciding one first; empty for a run that was never validated."""
        best = best_of(self.folder)
        return {} if best is None else best[0]

    @property
    def figures(self) -> dict[str, float]:
        """The run's ``metrics`` under their former name."""
        return self.metrics

    def save(self) -> None:
        """Write the run's ``config.json``, signed."""
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
        if self.prompts:
            data["prompts"] = self.prompts
        if fingerprint := self.tokenizer_fingerprint or self._fingerprint():
            data["tokenizer_fingerprint"] = fingerprint
        write_json(self.folder / CONFIG, signed(data))

    def _fingerprint(self) -> str | None:
        """Return the fingerprint of the tokenizer's file as it is now, None if there is none."""
        from kinformer.data.tokenizer import file_fingerprint

        if self.vocabulary in (None, BYTES) or not (self.folder / self.vocabulary).is_file():
            return None
        return file_fingerprint((self.folder / self.vocabulary).read_bytes())

    def build(self) -> Any:
        """Return the model, newly initialised."""
        with reading(self.folder / CONFIG, "says a model that cannot be built here", "use a larger machine"):
            return self.config.build()

    def model(self, changes: Mapping[str, object] | None = None) -> Any:
        """Return the model with its best weights, in eval mode, without its datastore (see ``datastore.attach``).

        ``changes`` are overrides of its config, such as another scaling of its positions; they must leave the name and
        the shape of every weight as they are.
        """
        config = self._changed(changes) if changes else self.config
        place, (tensors, _) = place_of_best(self.folder), best_weights(self.folder)
        with reading(self.folder / CONFIG, "says a model that cannot be built"):
            require_weights(weight_shapes(config), tensors, place)
            with private_numbers(0):  # the stored weights replace the random ones
                model = config.build()
        load_weights(model, tensors, place)
        return model.eval()

    def weights_digest(self) -> str:
        """Return the sha256 of the names, shapes, types and bytes of the weights that :meth:`model` reads."""
        tensors, metadata = best_weights(self.folder)
        return metadata.get(DIGEST) or digest(tensors)

    def _changed(self, changes: Mapping[str, object]) -> ModelConfig:
        changed = override(self.config, changes, kinds())
        before, after = weight_shapes(self.config), weight_shapes(changed)
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                shapes = " to ".join(str(shape) if shape else "none" for shape in (before.get(name), after.get(name)))
                raise KinformerError(
                    f"`set` {' '.join(changes)}: turns the weight {name} from {shapes}, but a trained model's weights "
                    f"stay as they are in {self.folder}; train a new run for that."
                )
        return changed


def open_run(folder: str | Path) -> Run:
    """Return the run in a folder.

    Errors: ``KinformerError`` for a folder that holds no run, or a damaged one.
    """
    require_path("run", folder)
    folder = Path(folder)
    place = folder / CONFIG
    data = read_config(place)
    packages = data.get("packages", {})
    with reading(place):
        try:
            member_called(data["member"], packages.get("member"))
            task = task_called(data["task"]["name"], packages.get("task"))
            options = training_options(task, data["task"]["options"])
            require_types(options, task.Options)
            task.choose_objective(settings_in(data["training"]).objective)
        except (KinformerError, TypeError) as error:
            raise KinformerError(f"{place}: {error}") from None
        config = model_config(data["model"], f"{place}: model")
    require_signature(data, place)
    return Run(
        folder=folder,
        member=data["member"],
        recipe=data["recipe"],
        config=config,
        task=task,
        options=options,
        data=data["data"],
        training=data["training"],
        vocabulary=data["tokenizer"],
        prompts=data.get("prompts", {}),
        tokenizer_fingerprint=data.get("tokenizer_fingerprint"),
    )


def save_weights(folder: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write ``model.safetensors``."""
    save_tensors(folder / WEIGHTS, weights, metadata)
