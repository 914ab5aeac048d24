"""Export of a run folder to a folder that the library transformers loads, or to a graph without Python."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from kinformer.core.config import to_dict
from kinformer.core.model import CausalModel, SourceModel, WholeModel
from kinformer.family.table import member as member_called
from kinformer.interop import graphs
from kinformer.interop.architecture import Padding
from kinformer.interop.settings import TOKENIZER, labels_of
from kinformer.interop.tokenizer_files import (
    Special,
    chat_templates,
    ids_of,
    of_encoder,
    padding_of,
    write_chat_templates,
    write_speech,
    write_tokenizer,
)
from kinformer.interop.writing import DTYPES, GENERATES, Form, appearing, form_of, require_new, settings_of, write_model
from kinformer.lab.runs.run import BYTES, Run, open_run
from kinformer.lab.tasks.speech import writing_of
from kinformer.lab.tasks.texts import ends_of, vocab_size_of
from kinformer.lab.training.checkpoint import best_of, best_weights
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError, choose, marked, nearest, plural, require_path, spelled
from kinformer.runtime.files import (
    require_weights,
    save_tensors,
    signed,
    write_json,
)

# A run as a graph without Python: a folder with an ONNX file, and with ``graph.json`` beside it.
#
# ``graph.json`` has the keys ``schema``, ``kinformer``, ``format``, ``member``, ``weights`` (the digest of the run's
# weights), ``tokenizer`` ("bytes", or the file in the folder), ``vocab_size``, ``max_length`` (null: unlimited),
# ``file`` (of the model) and ``state``: ``name``, ``dtype`` and ``shape`` of every leaf, in order. A new sequence
# begins with zeros of these shapes, where "batch" is the number of sequences and "past" is 0. There are also ``opset``,
# ``inputs`` and ``outputs``.

GRAPH = "graph.json"
SCHEMA = 1
FORMATS = {
    "onnx": "the folder is one ONNX graph for prompts and steps, which onnxruntime runs without kinformer or PyTorch.",
}
"""The formats of a graph, each with the sentence about its folder."""


@dataclass(frozen=True)
class ExportedGraph:
    """An exported graph: its ``folder``, ``format`` and ``file``, and the names of the ``leaves`` of the state.
    ``difference`` is the largest difference between the logits of onnxruntime and of the model, as a share of the
    largest logit."""

    folder: Path
    format: str
    file: str
    leaves: tuple[str, ...]
    parameters: int
    difference: float

    @property
    def facts(self) -> dict[str, object]:
        """The facts as data that JSON can hold."""
        names = ("format", "file", "parameters", "difference")
        return {"out": str(self.folder), "leaves": list(self.leaves)} | {name: getattr(self, name) for name in names}


def export_graph(run: Run, out: Path, format: str, announce: Callable[[str], object]) -> ExportedGraph:
    """Write ``run`` into the new folder ``out`` as a graph, and call ``announce`` with a sentence about the folder.

    Errors: ``KinformerError`` for a model that cannot become a graph, and for missing packages.
    """
    graphs.require_packages()
    try:
        graphs.require_graphable(run.config)
    except KinformerError as error:
        raise KinformerError(f"{run.folder}: {error}") from None
    require_new(out)
    announce(FORMATS[format])
    model = run.model()
    facts = _facts(run, model, format)
    with appearing(out) as place:
        try:
            described, difference = graphs.write_onnx(model, place, facts)
        except KinformerError as error:
            raise KinformerError(f"{run.folder}: {error}") from error
        if facts["tokenizer"] == TOKENIZER:
            shutil.copyfile(run.folder / str(run.vocabulary), place / TOKENIZER)
        write_json(place / GRAPH, signed(facts | described))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    names = tuple(leaf["name"] for leaf in described["state"])
    return ExportedGraph(out, format, described["file"], names, parameters, difference)


def _facts(run: Run, model: CausalModel, format: str) -> dict[str, object]:
    from kinformer import __version__

    has_file = run.vocabulary not in (None, BYTES) and (run.folder / str(run.vocabulary)).is_file()
    return {
        "schema": SCHEMA,
        "kinformer": __version__,
        "format": format,
        "member": run.member,
        "weights": run.weights_digest(),
        "tokenizer": TOKENIZER if has_file else BYTES if run.vocabulary == BYTES else None,
        "vocab_size": model.vocab_size,
        "max_length": model.max_length,
    }


UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class Exported:
    """An exported folder of transformers: its ``model_type``, the classes that load it, and its sizes. ``reason`` says
    why the model is not an architecture of transformers; it is empty for an architecture."""

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
    adapter: bool = False,
    announce: Callable[[str], object] = lambda sentence: None,
) -> Exported | ExportedGraph:
    """Write the run in ``folder`` into the new folder ``out``, and call ``announce`` with a sentence about ``out``."""
    require_path("out", out)
    if adapter and format != "hf":
        raise KinformerError(f"`adapter`: is for `format` hf, not for {format}; leave one out.")
    if choose(format, ("hf", *FORMATS), "format") != "hf":
        usual = {"dtype": (dtype, "float32"), "max_shard_size": (max_shard_size, "5GB")}
        if changed := [name for name, (value, default) in usual.items() if value != default]:
            raise KinformerError(f"{marked(changed[0])}: is for `format` hf; omit it: a graph is one file of float32.")
        return export_graph(_exportable(folder), Path(out), format, announce)
    if dtype not in DTYPES:
        raise KinformerError(f"`dtype` {dtype!r}: is not a type of exported weights; {nearest(str(dtype), DTYPES)}")
    shard_bytes, run, out = size_in_bytes(max_shard_size), _exportable(folder), Path(out)
    try:
        file = run.folder / str(run.vocabulary)
        has_tokenizer = run.vocabulary == BYTES or file.is_file()
        source = file.read_bytes() if has_tokenizer and run.vocabulary != BYTES else None
        padding = padding_of(source) if has_tokenizer else None
        form = form_of(run.config, run.training.get("length"), padding)
    except KinformerError as error:
        raise KinformerError(f"{folder}: {error}") from None
    require_new(out)
    sentence, base = sentence_of(form), None
    if adapter:
        base = Path(run.data.get("init", "")).name
        sentence = f"the folder is an adapter of {base}: peft.PeftModel.from_pretrained(model, {out.name!r}) adds it."
    announce(sentence)
    if run.vocabulary is not None and not has_tokenizer:
        announce(f"{folder} has no {run.vocabulary}, so the folder has none either.")
    weights = best_weights(run.folder)[0]
    model = run.model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with appearing(out) as place:
        settings = settings_of(form, run.config, run.member, dtype) | _labels(run)
        special = run.prompts.get("special_tokens")
        if special and source is not None and run.config.protocol is CausalModel:
            ids, size = ids_of(json.loads(source)), vocab_size_of(run.config)
            roles = {f"{role}_id": ids.get(special.get(role), size) for role in ("bos_token", "pad_token")}
            settings |= {name: number for name, number in roles.items() if number < size}
        settings |= {} if (pad := _class_padding(run)) is None else {"pad_token_id": pad}
        if form.use == "CTC":
            settings |= write_speech(place, *writing_of(run))
        if adapter:
            parameters, shards = write_adapter(place, run, form, weights, dtype), 1
        else:
            shards = write_model(place, form, settings, weights, shard_bytes)
        if has_tokenizer:
            named = run.prompts.get("special_tokens", {})
            write_tokenizer(place, source, model.max_length, _special(run, form, padding), named)
            write_chat_templates(place, chat_templates(run.folder))
        (place / "README.md").write_text(card(run, form, sentence, parameters, dtype, out.name, base), encoding="utf-8")
    return Exported(out, form.model_type, form.model_class, form.auto_class, form.reason, dtype, parameters, shards)


ADAPTER = "adapter_model.safetensors", "adapter_config.json"
LEAST_SHARE = 1e-4
"""Singular values of an update below this share of its largest are rounding, and are left out."""


def write_adapter(folder: Path, run: Run, form: Form, weights: Mapping[str, Tensor], dtype: str) -> int:
    """Write the difference of ``weights`` from the weights that ``run`` began with as an adapter for the library PEFT,
    and return its parameters. The layouts of transformers cut and join weights, so the factors of each difference come
    from its singular values."""
    if not run.training.get("lora"):
        raise KinformerError(f"`adapter`: {run.folder} was not trained with `lora`; leave it out.")
    base, begun_with = Path(run.data["init"]).name, best_weights(open_run(run.data["init"]).folder)[0]
    require_weights({name: tuple(weight.shape) for name, weight in weights.items()}, begun_with, run.data["init"])
    before, after = (
        form.native.tensors(one) if form.native else {f"model.{name}": weight for name, weight in one.items()}
        for one in (begun_with, weights)
    )
    transposed, factors = form.model_type == "gpt2", dict[str, tuple[torch.Tensor, torch.Tensor]]()
    for name, weight in after.items():
        change = weight.double() - before[name].double()
        if weight.ndim == 2 and change.any():
            change = change.T if transposed else change
            with private_numbers(0):
                u, s, v = torch.svd_lowrank(change, min(4 * run.training["lora"], *change.shape), niter=4)
            large = s > LEAST_SHARE * s[0]
            factors[name.removesuffix(".weight")] = ((v * s.sqrt())[:, large].T, (u * s.sqrt())[:, large])
    if not factors:
        raise KinformerError(f"`adapter`: training did not change the weights of {base}; train it longer.")
    rank = max(len(a) for a, _ in factors.values())
    tensors = {
        f"base_model.model.{name}.lora_{letter}.weight": pad(one, bounds).to(getattr(torch, dtype)).contiguous()
        for name, (a, b) in factors.items()
        for letter, one, bounds in (("A", a, (0, 0, 0, rank - len(a))), ("B", b, (0, rank - len(a))))
    }
    save_tensors(folder / ADAPTER[0], tensors, {"format": "pt"})
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0}
    about |= {"bias": "none", "fan_in_fan_out": transposed, "inference_mode": True, "base_model_name_or_path": base}
    write_json(folder / ADAPTER[1], about | {"target_modules": list(factors)})
    return sum(tensor.numel() for tensor in tensors.values())


def _exportable(folder: str | Path) -> Run:
    """Return the run in ``folder``; refuse a run that needs a datastore."""
    run = open_run(folder)
    if "retrieval" in run.data:
        raise KinformerError(f"{folder}: reads a datastore, which an exported folder cannot hold; export its base.")
    return run


def size_in_bytes(size: str | int) -> int:
    """Return the bytes of a size such as ``5GB``, ``500 MB``, ``64KiB`` or a number of bytes."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([KMG]?I?)B?\s*", str(size).upper())
    if match is None or match[2] not in UNITS or (count := int(float(match[1]) * UNITS[match[2]])) < 1:
        raise KinformerError(f"`max_shard_size` {size}: is not a size; write for example 5GB, 500MB or 64KiB.")
    return count


def sentence_of(form: Form) -> str:
    """Return a sentence about a folder in ``form``: the kind of folder, and the reason for this kind."""
    if form.native is None:
        return (
            f"the folder is remote code of kinformer, as {form.reason}; load it with {form.auto_class} and "
            "trust_remote_code=True where kinformer is installed."
        )
    notes = "".join(f"; {note}" for note in (form.native.reordered, *form.native.notes) if note)
    what = f"the folder is a {form.model_type} ({form.model_class}), which {form.auto_class} loads by itself"
    return f"{what}{notes}."


def _labels(run: Run) -> dict[str, object]:
    """Return the names of the run's classes; an empty dictionary for a run without classes."""
    names, head = (run.data.get("identity") or {}).get("classes"), getattr(run.config, "head", None)
    return labels_of(list(map(str, names))) if names and hasattr(head, "classes") else {}


def _class_padding(run: Run) -> int | None:
    """Return the id that pads the texts of a causal classifier, the first behind the tokenizer's: transformers reads
    the class at the last token that is not padding. None for other models, and for a vocabulary without a further
    id."""
    causal = run.config.protocol is CausalModel and hasattr(run.config.head, "classes") and run.tokenizer is not None
    size = run.tokenizer.vocab_size if causal and run.tokenizer is not None else 0
    return size if 0 < size < vocab_size_of(run.config) else None


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
    if (pad := _class_padding(run)) is not None:
        return Special(roles | {"pad_token": (pad, "[PAD]")}, None if first is None else "bos_token", None, "pad_token")
    return Special(roles, None if first is None else "bos_token", None, "eos_token")


CARD = """---
library_name: transformers
pipeline_tag: {pipeline}
tags:
- kinformer
- {member}
---

# {name}

{what}, {parameters}, weights in {dtype}.
{growth}

Data: `{data}`. Training: {training}.

{measured}## Use

```python
{peft}from transformers import {imports}

model = {model}
{use}
```

{form}
{departures}
Written by `kinformer export` from a run of the task {task}.
"""
"""The model card."""
DEPARTURES = """
## Departures from the paper

{}
"""
"""The section of a model whose weights began with a recipe of ours; another model's weights have another origin."""
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
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForSeq2SeqLM": "translation",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModel": "reinforcement-learning",
}
"""The name of a model's use in a model card."""


def card(run: Run, form: Form, sentence: str, parameters: int, dtype: str, name: str, base: str | None = None) -> str:
    """Return the model card: the ``sentence`` about its folder, the model, its training data and its measurements. An
    adapter is used with its ``base``."""
    record = member_called(run.member)
    lines = "\n".join(f"- {one}" for one in map(spelled, record.departures or ("none",)))
    preparer, use = _use(run, form, name)
    names = ("steps", "minutes", "length", "batch_size", "lr", "seed")
    settings = [name for name in names if run.training.get(name)]
    model = f'{form.auto_class}.from_pretrained("{base or name}"{"" if form.native else ", trust_remote_code=True"})'
    return CARD.format(
        member=run.member,
        name=name,
        what=_what(run),
        parameters=plural(parameters, "parameter"),
        dtype=dtype,
        growth=f"Growth of its state with the tokens absorbed: {record.growth}." if record.causal else WHOLE,
        data=",".join(Path(part).name for part in str(run.data.get("spec") or "unknown").split(",")),
        training=", ".join(f"{name.replace('_', ' ')} {run.training[name]}" for name in settings)
        or "elsewhere; the weights were imported",
        measured=_measured(run),
        peft="" if base is None else "from peft import PeftModel\n",
        model=model if base is None else f'PeftModel.from_pretrained({model}, "{name}")',
        pipeline=PIPELINES[form.auto_class],
        imports=", ".join(one for one in (form.auto_class, preparer) if one),
        use=use,
        form=sentence[0].upper() + sentence[1:],
        departures="" if "init" in run.data or _imported(run) else DEPARTURES.format(lines),
        task=run.task.name,
    )


def _what(run: Run) -> str:
    """Return a description of the model: the run that it was fine-tuned from, or its member and paper."""
    record = member_called(run.member)
    named = f"member `{run.member}` of Kinformer, recipe `{run.recipe}`"
    if _imported(run):
        return f"An imported model: member `{run.member}` of Kinformer"
    if "init" not in run.data:
        return f"{record.title} ({record.paper}): {named}"
    how = f"by low-rank updates (LoRA, rank {rank})" if (rank := run.training.get("lora")) else "in all of its weights"
    return f"`{Path(run.data['init']).name}`, fine-tuned {how} for the task {run.task.name}: {named}"


def _imported(run: Run) -> bool:
    return "imported" in best_weights(run.folder)[1]


def _use(run: Run, form: Form, name: str) -> tuple[str, str]:
    """Return the class of transformers that prepares inputs ("" without such a class), and code that uses the model."""
    if form.auto_class == "AutoModelForImageClassification":
        return "AutoImageProcessor", OF_IMAGES.format(name=name, use=LOGITS)
    if form.auto_class == "AutoModelForCTC":
        return "", OF_SOUND
    if form.auto_class == "AutoModel":
        return "", OF_STEPS.format(**to_dict(run.config.input))
    return "AutoTokenizer", OF_TEXT.format(name=name, use=GENERATED if form.auto_class in GENERATES else LOGITS)


def _measured(run: Run) -> str:
    """Return the section with the metrics of the best validation; empty for a run without a validation."""
    best = best_of(run.folder)
    if best is None:
        return ""
    metrics = {metric.name: metric for metric in run.task.metrics}
    shown = [metrics[name].text(value) if name in metrics else f"{name} {value:.4g}" for name, value in best[0].items()]
    lines = [f"- {text}" for text in shown]
    return "\n".join(["## Measured", "", f"On the run's validation data, after step {best[1]:,}:", "", *lines, "", ""])
