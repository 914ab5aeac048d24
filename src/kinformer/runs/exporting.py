"""Export of a run folder to a folder that the library transformers loads, or to a graph (``runs.graphs``)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kinformer.core.config import to_dict
from kinformer.core.model import CausalModel, SourceModel, WholeModel
from kinformer.family.table import member as member_called
from kinformer.interop.encoder import ids_of
from kinformer.interop.encoder_routes import labels_of
from kinformer.interop.routes import Padding
from kinformer.interop.speech_files import write_speech
from kinformer.interop.tokenizer_files import (
    Special,
    chat_templates,
    of_encoder,
    padding_of,
    write_chat_templates,
    write_tokenizer,
)
from kinformer.interop.writing import DTYPES, GENERATES, Form, appearing, form_of, require_new, settings_of, write_model
from kinformer.runs.graphs import FORMATS, ExportedGraph, export_graph
from kinformer.runs.run import BYTES, Run, open_run
from kinformer.runtime.errors import KinformerError, choose, marked, nearest, spelled
from kinformer.runtime.fields import require_path
from kinformer.runtime.words import plural
from kinformer.tasks.shared.text import ends_of, vocab_size_of
from kinformer.tasks.speech.generate import writing_of
from kinformer.training.best import best_of, best_weights

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class Exported:
    """The ``folder``, its ``model_type``, the classes of transformers that load it, and how much it holds.

    ``reason``: why the model is no architecture of transformers; empty if it is one.
    """

    folder: Path
    model_type: str
    model_class: str
    auto_class: str
    reason: str
    dtype: str
    parameters: int
    shards: int

    @property
    def native(self) -> bool:
        """Return whether transformers loads the folder without code of ours."""
        return not self.reason

    @property
    def facts(self) -> dict[str, object]:
        """The facts as data that JSON can hold."""
        names = ("model_type", "model_class", "auto_class", "native", "reason", "dtype", "parameters", "shards")
        return {"out": str(self.folder)} | {name: getattr(self, name) for name in names}


def export(
    folder: str | Path,
    out: str | Path,
    *,
    format: str = "hf",
    dtype: str = "float32",
    max_shard_size: str | int = "5GB",
    announce: Callable[[str], object] = lambda sentence: None,
) -> Exported | ExportedGraph:
    """Write the run in ``folder`` into the new folder ``out``; ``announce`` is called with what it will be and why."""
    require_path("out", out)
    if choose(format, ("hf", *FORMATS), "format") != "hf":
        usual = {"dtype": (dtype, "float32"), "max_shard_size": (max_shard_size, "5GB")}
        if changed := [name for name, (value, default) in usual.items() if value != default]:
            raise KinformerError(
                f"{marked(changed[0])}: is for `format` hf, but a graph is one file of float32; omit it."
            )
        return export_graph(_exportable(folder), Path(out), format, announce)
    if dtype not in DTYPES:
        raise KinformerError(f"`dtype` {dtype!r}: is no type of exported weights; {nearest(str(dtype), DTYPES)}")
    shard_bytes, run, out = size_in_bytes(max_shard_size), _exportable(folder), Path(out)
    try:
        has_tokenizer = run.vocabulary == BYTES or (run.folder / str(run.vocabulary)).is_file()
        source = _source(run) if has_tokenizer else None
        padding = padding_of(source) if has_tokenizer else None
        form = form_of(run.config, run.training.get("length"), padding)
    except KinformerError as error:
        raise KinformerError(f"{folder}: {error}") from None
    require_new(out)
    announce(sentence_of(form))
    if run.vocabulary is not None and not has_tokenizer:
        announce(f"{folder} has no {run.vocabulary}, so the folder has none either.")
    weights = best_weights(run.folder)[0]
    model = run.model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with appearing(out) as place:
        settings = settings_of(form, run.config, run.member, dtype) | _labels(run) | _prompt_ids(run, source)
        if form.use == "CTC":
            settings |= write_speech(place, *writing_of(run))
        shards = write_model(place, form, settings, weights, shard_bytes)
        if has_tokenizer:
            named = run.prompts.get("special_tokens", {})
            write_tokenizer(place, source, model.max_length, _special(run, form, padding), named)
            write_chat_templates(place, chat_templates(run.folder))
        (place / "README.md").write_text(card(run, form, parameters, dtype, out.name), encoding="utf-8")
    return Exported(out, form.model_type, form.model_class, form.auto_class, form.reason, dtype, parameters, shards)


def _exportable(folder: str | Path) -> Run:
    """Return the run in ``folder``; refuse one that is not complete without a datastore."""
    run = open_run(folder)
    if "retrieval" in run.data:
        raise KinformerError(f"{folder}: reads a datastore, which has no place in an exported folder; export its base.")
    return run


def size_in_bytes(size: str | int) -> int:
    """Return the bytes of a size such as ``5GB``, ``500 MB``, ``64KiB`` or a number of bytes."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([KMG]?I?)B?\s*", str(size).upper())
    if match is None or match[2] not in UNITS or (count := int(float(match[1]) * UNITS[match[2]])) < 1:
        raise KinformerError(f"`max_shard_size` {size}: is no size; write for example 5GB, 500MB or 64KiB.")
    return count


def sentence_of(form: Form) -> str:
    """Return what a folder in ``form`` will be."""
    if form.native is None:
        return (
            f"the folder is remote code of kinformer, as {form.reason}; load it with {form.auto_class} and "
            "trust_remote_code=True where kinformer is installed."
        )
    notes = "".join(f"; {note}" for note in (form.native.reordered, *form.native.notes) if note)
    what = f"the folder is a {form.model_type} ({form.model_class}), which {form.auto_class} loads by itself"
    return f"{what}{notes}."


def _source(run: Run) -> bytes | None:
    """Return the run's tokenizer.json; None for bytes."""
    return None if run.vocabulary == BYTES else (run.folder / str(run.vocabulary)).read_bytes()


def _labels(run: Run) -> dict[str, object]:
    """Return the names of the run's classes, if it has some."""
    names, head = (run.data.get("identity") or {}).get("classes"), getattr(run.config, "head", None)
    return labels_of(list(map(str, names))) if names and hasattr(head, "classes") else {}


def _prompt_ids(run: Run, source: bytes | None) -> dict[str, object]:
    """Return the ids of an imported decoder's tokens that begin and pad its texts, as ``config.json`` names them."""
    named = run.prompts.get("special_tokens")
    if not named or source is None or run.config.protocol is not CausalModel:
        return {}
    ids, size = ids_of(json.loads(source)), vocab_size_of(run.config)
    by_name = {f"{role}_id": ids.get(named.get(role), size) for role in ("bos_token", "pad_token")}
    return {name: number for name, number in by_name.items() if number < size}


def _special(run: Run, form: Form, padding: Padding | None) -> Special:
    """Return the special tokens of the folder's tokenizer."""
    tokens = to_dict(run.config.input)
    if run.config.protocol is WholeModel:
        by_id = form.model_type in ("roberta", "longformer")
        return of_encoder(tokens, padding.text if padding and padding.text else None if by_id else "sep_token")
    if run.config.protocol is SourceModel:
        roles = {"bos_token": (tokens["bos_token"], "<s>"), "eos_token": (tokens["eos_token"], "</s>")}
        return Special(roles, None, "eos_token", "bos_token")
    end, first = ends_of(run.config).eos, next(iter(run.prompts.get("prefix", ())), None)
    roles = {role: (token, "") for role, token in (("bos_token", first), ("eos_token", end)) if token is not None}
    return Special(roles, None if first is None else "bos_token", None, "eos_token")


CARD = """---
library_name: transformers
pipeline_tag: {pipeline}
tags:
- kinformer
- {member}
---

# {name}

{title} ({paper}): member `{member}` of Kinformer, recipe `{recipe}`, {parameters}, weights in {dtype}.
{growth}

Data: `{data}`. Training: {training}.

{measured}## Use

```python
from transformers import {imports}

model = {auto_class}.from_pretrained("{name}"{trust})
{use}
```

{form}

## Departures from the paper

{departures}

Written by `kinformer export` from a run of the task {task}.
"""
"""The model card."""
WHOLE = "It reads whole texts or images."
OF_TEXT = """tokenizer = AutoTokenizer.from_pretrained("{name}")
inputs = tokenizer("It was ", return_tensors="pt")
print({use})"""
OF_IMAGES = """processor = AutoImageProcessor.from_pretrained("{name}")
inputs = processor(image, return_tensors="pt")  # an image as PIL or NumPy has it
print({use})"""
OF_SOUND = """import torch

samples = torch.zeros(1, model.config.sampling_rate)  # a second of sound from -1 to 1
print([model.config.id2label[number] for number in model(samples).logits.argmax(-1)[0].tolist()])"""
OF_STEPS = """import torch

states, actions = torch.zeros(1, 1, {state_dim}), torch.zeros(1, 1, {action_dim})  # one step, yet without action
steps = {{"timesteps": torch.zeros(1, 1, dtype=torch.int64), "attention_mask": torch.ones(1, 1)}}
print(model(states=states, actions=actions, rewards=None, returns_to_go=torch.ones(1, 1, 1), **steps).action_preds)"""
GENERATED, LOGITS = "tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0])", "model(**inputs).logits"
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForSeq2SeqLM": "translation",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModel": "reinforcement-learning",
}
"""What a model card calls the use of a model."""


def card(run: Run, form: Form, parameters: int, dtype: str, name: str) -> str:
    """Return the model card: what the model is, what it was trained on, and what was measured."""
    record = member_called(run.member)
    sentence = sentence_of(form)
    preparer, use = _use(run, form, name)
    return CARD.format(
        member=run.member,
        name=name,
        title=record.title,
        paper=record.paper,
        recipe=run.recipe,
        parameters=plural(parameters, "parameter"),
        dtype=dtype,
        growth=f"Growth of its state with the tokens absorbed: {record.growth}." if record.causal else WHOLE,
        data=run.data.get("spec") or "unknown",
        training=_training(run) or "elsewhere; the weights were imported",
        measured=_measured(run),
        auto_class=form.auto_class,
        pipeline=PIPELINES[form.auto_class],
        imports=", ".join(one for one in (form.auto_class, preparer) if one),
        use=use,
        trust="" if form.native else ", trust_remote_code=True",
        form=sentence[0].upper() + sentence[1:],
        departures="\n".join(f"- {one}" for one in map(spelled, record.departures or ("none",))),
        task=run.task.name,
    )


def _use(run: Run, form: Form, name: str) -> tuple[str, str]:
    """Return the class of transformers that prepares inputs, empty if there is none, and the code that uses a model."""
    if form.auto_class == "AutoModelForImageClassification":
        return "AutoImageProcessor", OF_IMAGES.format(name=name, use=LOGITS)
    if form.auto_class == "AutoModelForCTC":
        return "", OF_SOUND
    if form.auto_class == "AutoModel":
        return "", OF_STEPS.format(**to_dict(run.config.input))
    return "AutoTokenizer", OF_TEXT.format(name=name, use=GENERATED if form.auto_class in GENERATES else LOGITS)


def _training(run: Run) -> str:
    """Return the settings of the run's training in a line; empty for one that was imported."""
    names = ("steps", "minutes", "length", "batch_size", "lr", "seed")
    return ", ".join(f"{name.replace('_', ' ')} {run.training[name]}" for name in names if run.training.get(name))


def _measured(run: Run) -> str:
    """Return the section with the metrics of the best validation; empty for a run that was never validated."""
    best = best_of(run.folder)
    if best is None:
        return ""
    metrics = {metric.name: metric for metric in run.task.metrics}
    lines = [
        f"- {metrics[name].text(value) if name in metrics else f'{name} {value:.4g}'}"
        for name, value in best[0].items()
    ]
    return "\n".join(["## Measured", "", f"On the run's validation data, after step {best[1]:,}:", "", *lines, "", ""])
