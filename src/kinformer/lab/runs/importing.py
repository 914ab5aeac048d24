"""A checkpoint folder of another library becomes a run folder."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinformer.core.model import CausalModel
from kinformer.core.stack import ModelConfig
from kinformer.family.build import model_config
from kinformer.family.table import member as member_called
from kinformer.interop import Imported, read_checkpoint
from kinformer.interop.checkpoint import ARCHITECTURES, OURS
from kinformer.interop.proof import LIMIT, Plain, Theirs, Verdict, beside, judge
from kinformer.interop.tokenizer_files import Prompting, prompting_of, write_chat_templates
from kinformer.interop.writing import form_of
from kinformer.lab.runs.exporting import export
from kinformer.lab.runs.run import CONFIG, TOKENIZER, Run, creating, open_run, require_empty, save_weights, writing
from kinformer.lab.tasks.table import task_of
from kinformer.lab.tasks.texts import vocab_size_of
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError, plural, require, require_above, require_path, spelled
from kinformer.runtime.files import load_weights, read_json, write_atomic
from kinformer.runtime.plugins import current_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ImportedRun:
    """An imported run: its number of parameters, whether the folder had a tokenizer, and notes for the user."""

    run: Run
    parameters: int
    tokenizer: bool
    notes: tuple[str, ...]

    @property
    def facts(self) -> dict[str, object]:
        """The imported run's facts as data that JSON can hold."""
        run = {"out": str(self.run.folder), "member": self.run.member, "recipe": self.run.recipe}
        return {**run, "parameters": self.parameters, "tokenizer": self.tokenizer}


def import_checkpoint(folder: str | Path, out: str | Path, name: str = "imported") -> ImportedRun:
    """Turn the checkpoint in ``folder`` into the run folder ``out``; ``name`` becomes the name of the recipe."""
    require_path("folder", folder)
    require_path("out", out)
    out = Path(out)
    with writing(out):
        require_empty(out)
        imported = read_checkpoint(folder)
        member_called(imported.member)
        config = model_config(imported.model, f"{folder}: model")
        parameters = _checked(imported, config, str(folder))
        prompting = Prompting() if imported.tokenizer is None else prompting_of(Path(folder))
        with creating(out):
            run = _write(imported, config, prompting, out, name)
    notes = [spelled(f"{folder}: {note}.") for note in imported.notes]
    if prompting.behind and config.protocol is CausalModel:
        ids = ", ".join(map(str, prompting.behind))
        notes.append(f"{folder}: its {TOKENIZER} ends every text with the ids {ids}, which prompts here do not get.")
    if imported.tokenizer is None and reads_ids(config):
        calls = "kinformer.load"
        calls += " and kinformer.generate" if config.protocol is CausalModel else ""
        notes.append(
            f"{folder} has no {TOKENIZER}, so the run takes token ids only ({calls}); put the model's {TOKENIZER} into "
            f"{out} to work with text."
        )
    return ImportedRun(run, parameters, imported.tokenizer is not None, tuple(notes))


def _checked(imported: Imported, config: ModelConfig, place: str) -> int:
    """Check that config and weights fit together, without allocating a model, and return the number of parameters."""
    try:
        with unallocated():
            model = config.build()
    except KinformerError as error:
        raise KinformerError(f"{place}: {error}") from error
    expected = model.state_dict()
    if missing := sorted(expected.keys() - imported.weights.keys()):
        others = f" and {plural(len(missing) - 1, 'other weight')}" if missing[1:] else ""
        raise KinformerError(
            f"{place}: lacks {missing[0]}{others}, so it holds a part of a model; import the whole model with its head."
        )
    for name, weight in expected.items():
        if (shape := imported.weights[name].shape) != weight.shape:
            raise KinformerError(
                f"{place}: {name} is {list(shape)}, which is not what config.json says ({list(weight.shape)}); restore "
                "both from a copy."
            )
    load_weights(model, {name: weight.to("meta") for name, weight in imported.weights.items()}, place)
    return sum(parameter.numel() for parameter in model.parameters())


def _write(imported: Imported, config: ModelConfig, prompting: Prompting, out: Path, name: str) -> Run:
    if imported.tokenizer is not None:
        read_json(imported.tokenizer)
        write_atomic(out / TOKENIZER, partial(shutil.copyfile, imported.tokenizer))
        write_chat_templates(out, prompting.chat_templates)
    save_weights(out, imported.weights, {"imported": "1"})
    begins = config.protocol is CausalModel and all(token < vocab_size_of(config) for token in prompting.before)
    prompts = {"prefix": list(prompting.before) if begins else [], "special_tokens": dict(prompting.special_tokens)}
    task, identity = task_of(config), {"classes": list(imported.classes)} if imported.classes else {}
    run = Run(
        folder=out,
        member=imported.member,
        recipe=name,
        config=config,
        task=task,
        options=task.Options(),
        data={"spec": task.data.default, "holdout": None, "identity": identity},
        training={} if imported.length is None else {"length": imported.length},
        vocabulary=TOKENIZER if reads_ids(config) else None,
        prompts={name: value for name, value in prompts.items() if value},
    )
    run.save()
    return run


def reads_ids(config: ModelConfig) -> bool:
    """Return whether a model of ``config`` reads token ids, which a tokenizer makes from text."""
    return hasattr(config.input, "vocab_size")


# Verification of causal models: of a run and its export, of a folder of transformers and its import, of a user's model.


@dataclass(frozen=True)
class Proof:
    """The verdicts about a ``subject`` of a ``kind``: on the laws of causal models, and beside transformers."""

    subject: str
    kind: str
    laws: tuple[Verdict, ...]
    beside: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Return whether every law holds."""
        return all(one.holds is not False for one in (*self.laws, *self.beside))

    @property
    def facts(self) -> dict[str, object]:
        """The verdicts as data that JSON can hold."""
        tables = {name: [asdict(one) | {"badge": one.badge} for one in getattr(self, name)] for name in TABLES}
        facts = {"subject": self.subject, "kind": self.kind, "holds": self.holds, "notes": list(self.notes)}
        return facts | tables


TABLES = ("laws", "beside")


def verify(subject: str | Path, *, trust_remote_code: bool = False, length: int = 24, limit: float = LIMIT) -> Proof:
    """Hold ``subject`` to the laws of causal models; the public form is :func:`kinformer.verify`."""
    require_path("subject", subject)
    require("length", length, 2, 64)
    require_above("limit", limit, 0)
    require("limit", limit, 0, 1)
    text = str(subject)
    if not Path(text).exists() and ":" in text:
        return Proof(text, "module", tuple(judge(Plain(_object(text)), length, limit)))
    config = read_json(Path(text) / CONFIG) if (Path(text) / CONFIG).exists() else None
    if isinstance(config, dict) and "model_type" in config:
        return _folder_proof(Path(text), config, trust_remote_code, length, limit)
    return _run_proof(Path(text), length, limit)


def _run_proof(folder: Path, length: int, limit: float) -> Proof:
    """Return the proof of a run: the verdicts on its laws, and on its export beside the run."""
    run = open_run(folder)
    if run.config.protocol is not CausalModel or not hasattr(run.config.input, "vocab_size"):
        raise KinformerError(f"{folder}: is a run whose model does not continue tokens; only such can be verified.")
    ours = Plain(run.model())
    laws = tuple(judge(ours, length, limit))
    form = form_of(run.config)
    names = form.native.tensors if form.native else _prefixed
    with tempfile.TemporaryDirectory() as place, _quiet():
        export(folder, Path(place) / "exported")
        theirs = Theirs(_loaded(Path(place) / "exported", True))
        verdicts = tuple(beside(ours, theirs, names, limit))
    return Proof(str(folder), f"run, exported as {form.model_type}", laws, verdicts)


def _folder_proof(folder: Path, config: Mapping[str, object], trust: bool, length: int, limit: float) -> Proof:
    """Return the proof of a folder of transformers: verdicts on its model's laws, and on the imported model."""
    kind = str(config["model_type"])
    with _quiet():
        loaded = _loaded(folder, trust)
    if not getattr(loaded.config.get_text_config(), "vocab_size", None):
        raise KinformerError(f"{folder / CONFIG}: lacks a vocab_size; give a folder with a causal language model.")
    theirs = Theirs(loaded)
    laws = tuple(judge(theirs, length, limit))
    form = ARCHITECTURES.get(kind)
    if kind != OURS and (form is None or not form.exported or form.auto_class != "AutoModelForCausalLM"):
        note = f"the model_type {kind!r} is not imported as a decoder, so nothing is compared beside it."
        return Proof(str(folder), kind, laws, notes=(note,))
    imported = read_checkpoint(folder)
    with private_numbers(0):  # the stored weights replace the random ones
        model = model_config(imported.model, f"{folder}: model").build()
    model.load_state_dict(dict(imported.weights))
    names: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = _prefixed
    if form is not None:
        names = partial(form.write_tensors, model=imported.model, settings=dict(config))
    return Proof(str(folder), kind, laws, tuple(beside(Plain(model), theirs, names, limit)))


def _prefixed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": one for name, one in weights.items()}


def _loaded(folder: Path, trust: bool) -> PreTrainedModel:
    """Return the causal model of transformers in ``folder``, in float32."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise KinformerError(f"verify needs transformers ({error}); pip install 'kinformer[transformers]'.") from error
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=trust, dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
    except Exception as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason, remedy = "it needs its own code", "add `trust_remote_code` if you have read it"
        else:
            remedy = "give a folder with a causal language model in safetensors"
        raise KinformerError(f"{folder}: transformers cannot load it ({reason[:200].rstrip('.')}); {remedy}.") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _object(name: str) -> object:
    """Return the object ``module:object``; a class or a function is called without arguments."""
    module, _, attribute = name.partition(":")
    try:
        with current_folder():
            value = getattr(importlib.import_module(module), attribute)
            return value() if isinstance(value, type) or type(value).__name__ == "function" else value
    except Exception as error:
        raise KinformerError(
            f"{name}: is neither a folder nor an object that can be imported ({type(error).__name__}: {error}); give a "
            "run, a folder of transformers, or module:object of a causal model."
        ) from None
