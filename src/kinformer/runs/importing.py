"""A checkpoint folder of another library becomes a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.core.model import CausalModel
from kinformer.family.build import model_config
from kinformer.family.table import member as member_called
from kinformer.interop import read_checkpoint
from kinformer.interop.tokenizer_files import Prompting, prompting_of, write_chat_templates
from kinformer.runs.folder import creating, require_empty, writing
from kinformer.runs.run import TOKENIZER, Run, save_weights
from kinformer.runtime.errors import KinformerError, spelled
from kinformer.runtime.fields import require_path
from kinformer.runtime.files import load_weights, read_json, write_atomic
from kinformer.runtime.unallocated import unallocated
from kinformer.tasks.shared.text import vocab_size_of
from kinformer.tasks.table import task_of

if TYPE_CHECKING:
    from kinformer.core.model_config import ModelConfig
    from kinformer.interop import Imported


@dataclass(frozen=True)
class ImportedRun:
    """The run, how many parameters its model has, whether it came with a tokenizer, and what is to be known of it."""

    run: Run
    parameters: int
    tokenizer: bool
    notes: tuple[str, ...]

    @property
    def facts(self) -> dict[str, object]:
        """The imported run's facts as data that JSON can hold."""
        run = self.run
        return {
            "out": str(run.folder),
            "member": run.member,
            "recipe": run.recipe,
            "parameters": self.parameters,
            "tokenizer": self.tokenizer,
        }


def import_checkpoint(folder: str | Path, out: str | Path, name: str = "imported") -> ImportedRun:
    """Turn the checkpoint in ``folder`` into the run folder ``out``, whose recipe is called ``name``."""
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
    """The number of parameters, after making sure that config and weights belong together; allocates nothing."""
    try:
        with unallocated():
            model = config.build()
    except KinformerError as error:
        raise KinformerError(f"{place}: {error}") from error
    load_weights(model, {name: weight.to("meta") for name, weight in imported.weights.items()}, place)
    return sum(parameter.numel() for parameter in model.parameters())


def _write(imported: Imported, config: ModelConfig, prompting: Prompting, out: Path, name: str) -> Run:
    if imported.tokenizer is not None:
        read_json(imported.tokenizer)
        write_atomic(out / TOKENIZER, partial(_copy, imported.tokenizer))
        write_chat_templates(out, prompting.chat_templates)
    save_weights(out, imported.weights, {"imported": "1"})
    task = task_of(config)
    run = Run(
        folder=out,
        member=imported.member,
        recipe=name,
        config=config,
        task=task,
        options=task.Options(),
        data={
            "spec": task.data.default,
            "holdout": None,
            "identity": {"classes": list(imported.classes)} if imported.classes else {},
        },
        training={} if imported.length is None else {"length": imported.length},
        vocabulary=TOKENIZER if reads_ids(config) else None,
        prompts=_prompts(prompting, config),
    )
    run.save()
    return run


def _prompts(prompting: Prompting, config: ModelConfig) -> dict[str, object]:
    """Return the entry ``prompts`` of an imported run; an encoder has the ends of its texts in its config."""
    begins = config.protocol is CausalModel and all(token < vocab_size_of(config) for token in prompting.before)
    prompts = {"prefix": list(prompting.before) if begins else [], "special_tokens": dict(prompting.special_tokens)}
    return {name: value for name, value in prompts.items() if value}


def reads_ids(config: ModelConfig) -> bool:
    """Whether a model of ``config`` reads ids, which a tokenizer makes of text."""
    return hasattr(config.input, "vocab_size")


def _copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())
