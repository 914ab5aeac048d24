"""Folders that the library transformers loads: ``config.json``, safetensors in one file or several, the tokenizer.

A folder appears under its name when it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinformer.core.config import find, from_dict, to_dict
from kinformer.core.model import PROTOCOLS, CausalModel, SourceModel, WholeModel
from kinformer.core.stack import ModelConfig
from kinformer.heads.language import LanguageModelHead
from kinformer.interop.architecture import Architecture, Padding, Tensors
from kinformer.interop.checkpoint import ARCHITECTURES, OURS
from kinformer.interop.images import preprocessor
from kinformer.interop.key_map import ConfigView
from kinformer.interop.settings import CONFIG, GENERATION, INDEX, PREPROCESSOR, WEIGHTS, labels
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import partial_of, require_utf8, save_tensors, write_json
from kinformer.runtime.parsing import JsonObject

# The uses that transformers has classes for. A use ends the name of a class: "CausalLM" ends ``AutoModelForCausalLM``
# and our ``KinformerForCausalLM``.

GENERATE = ("CausalLM", "Seq2SeqLM")
"""The uses that generate."""


def use_of(config: ModelConfig) -> str | None:
    """Return the use of a model of ``config``; None where transformers does not have a class for it."""
    model: Any = config
    reads_ids = model.input.kind == "tokens"
    if model.input.kind == "frames":
        return "CTC" if model.head.kind == "ctc" else None
    if model.protocol is CausalModel:
        return "CausalLM" if reads_ids and not hasattr(model.head, "classes") else None
    if model.protocol is SourceModel:
        source = model.encoder.input
        return "Seq2SeqLM" if reads_ids and (source is None or source.kind == "tokens") else None
    if model.protocol is not WholeModel:
        return None
    if model.head.kind == "masked_language":
        return "MaskedLM" if reads_ids else None
    if not hasattr(model.head, "classes") or not (reads_ids or model.input.whole):
        return None
    if model.head.per_position:
        per_token = "QuestionAnswering" if model.head.kind == "span" else "TokenClassification"
        return per_token if reads_ids else None
    return "SequenceClassification" if reads_ids else "ImageClassification"


def auto_class_of(use: str) -> str:
    """Return the class of transformers that loads models of a ``use``."""
    return f"AutoModelFor{use}"


def model_class_of(use: str) -> str:
    """Return our class for a ``use``."""
    return f"KinformerFor{use}"


CLASSIFIERS = ("gpt2", "llama")
"""The decoders with a form for classifiers of texts. Tests compare their logits with ours."""

UNCOMPUTED = {"dropout", "initialisation", "impl", "std", "checkpoint", "chunks"}
UNCOMPUTED |= {"mask_token", "bos_token", "eos_token", "mean", "form", "balance", "stochastic_depth"}
"""Settings that change no output of a trained model; mean and std of images stand in a file beside ``config.json``."""


@dataclass(frozen=True)
class Native:
    """A model of ours as an architecture: its ``model_type``, the ``config.json`` and our ``model`` config, as data.

    ``original``: our config before features were reordered, or products changed; otherwise it is ``model``.
    ``notes``: what transformers does otherwise.
    """

    model_type: str
    config: JsonObject
    model: ConfigView
    original: ConfigView
    notes: tuple[str, ...] = ()
    classifies: bool = False

    @property
    def architecture(self) -> Architecture:
        """Return the architecture of the ``model_type``."""
        return ARCHITECTURES[self.model_type]

    @property
    def classes(self) -> tuple[str, str]:
        """Return the class of transformers, and the class that loads it."""
        model, auto = self.architecture.classes(self.model)
        if not self.classifies:
            return model, auto
        use = "SequenceClassification"
        return f"{model.removesuffix('LMHeadModel').removesuffix('ForCausalLM')}For{use}", auto_class_of(use)

    @property
    def reordered(self) -> str:
        """Return a sentence on what the export reorders; empty for nothing."""
        return "" if self.model is self.original else self.architecture.reordered

    @property
    def preprocessor(self) -> JsonObject | None:
        """Return the ``preprocessor_config.json`` of a model of images; None for other models."""
        kind = self.architecture.processor
        return None if kind is None else preprocessor(self.model["input"], kind)

    def tensors(self, weights: Tensors) -> dict[str, Tensor]:
        """Return the ``weights`` of our model under their names and in their layouts."""
        if self.model is not self.original:
            weights = self.architecture.reorder(weights, self.original)
        tensors = self.architecture.write_tensors(weights, self.model, self.config)
        if self.classifies:
            tensors["score.weight"] = tensors.pop("lm_head.weight")
        return tensors


def native_form(config: ModelConfig, length: int | None = None, padding: Padding | None = None) -> Native | str:
    """Return ``config`` as an architecture of transformers, or a sentence that says why it is not an architecture.

    ``length``: the number of positions in ``config.json``, for positions that do not end. ``padding``: the padding
    token, if there is one.
    """
    data = to_dict(_explicit(config))
    head = data.get("head", {})
    classifies = data["kind"] == "decoder" and head.get("kind") == "token_classification" and not head["bias"]
    if classifies:  # in transformers the matrix of the classes stands where the matrix of the tokens does
        data["head"] = to_dict(LanguageModelHead.Config(tied=False))
    differences: dict[str, list[tuple[str, object]]] = {}
    kinds = (data["kind"], data["input"]["kind"])
    tried = [name for name, one in ARCHITECTURES.items() if one.exported and (one.kind, one.reads) == kinds]
    if padding and padding.text == "<pad>":  # as RoBERTa spells it; its models are also BERTs
        tried.sort(key=lambda name: name != "roberta")
    for kind in tried:
        if classifies and kind not in CLASSIFIERS:
            continue
        form = ARCHITECTURES[kind]
        try:
            model = form.order(data)
            written = form.write_config(model, length, padding)
            read = from_dict(ModelConfig, form.reread(written, model), find())
        except (KinformerError, KeyError, TypeError, ValueError, AttributeError):
            continue
        ours, theirs = dict(_leaves(model)), dict(_leaves(to_dict(read)))
        differing = [name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name)]
        if not differing:
            native = Native(kind, written, model, data, tuple(form.differences(model)), classifies)
            written |= {"model_type": kind, "architectures": [native.classes[0]]}
            return native
        differing.sort(key=lambda name: not name.endswith("kind"))
        differences[form.title] = [(name, ours.get(name)) for name in differing]
    if not differences:
        mixers = [f"the mixer {layer['mixer']['kind']!r}" for layer in data["layers"] if "mixer" in layer]
        return f"no architecture written natively has {', '.join(dict.fromkeys(mixers)) or 'such layers'}"
    title = min(differences, key=lambda name: len(differences[name]))
    path, value = differences[title][0]
    return f"{title}, the nearest architecture written natively, does not have {path} = {value!r}"


def _explicit(config: ModelConfig) -> ModelConfig:
    """Return the config of a decoder whose layers name all sizes that follow from its width."""
    if config.protocol is not CausalModel:
        return config
    layers = [
        layer.replace(
            **{
                name: part.explicit(config.dim)
                for name in ("mixer", "feed_forward")
                if hasattr(part := getattr(layer, name, 0), "explicit")
            }
        )
        for layer in config.layers
    ]
    return config.replace(layers=tuple(layers))


def _leaves(node: object, path: str = "", dim: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the settings that an output depends on, by their paths."""
    if isinstance(node, Mapping):
        dim = node.get("dim", dim)
        for name, value in node.items():
            if name == "head_dim" and value is None:
                value = dim // node["num_heads"]
            if name == "bias_rate":
                value = bool(value)  # how fast it learns; whether experts have a bias shows
            if name not in UNCOMPUTED:
                yield from _leaves(value, f"{path}.{name}" if path else name, dim)
    elif isinstance(node, list | tuple):
        for index, item in enumerate(node):
            yield from _leaves(item, f"{path}.{index}", dim)
    else:
        yield path, node


# Folders.

CODE = "modeling_kinformer.py"
GENERATES = tuple(map(auto_class_of, GENERATE))
IMAGES = "ViTImageProcessor"
DTYPES = ("float32", "bfloat16", "float16")
REMOTE_CODE = '''"""A model of the package kinformer for the library transformers: pip install kinformer."""

from kinformer.interop.auto import KinformerConfig as Config
from kinformer.interop.auto import {model} as Model


class KinformerConfig(Config):
    def __init__(self, **settings):
        super().__init__(**settings)


class {model}(Model):
    config_class = KinformerConfig
'''
"""The code in a folder; the package has all that it does."""


@dataclass(frozen=True)
class Form:
    """The form of an exported model: ``native`` as an architecture of transformers, or None, and ``reason`` why not.

    ``model_class`` and ``auto_class``: what transformers calls the model, and the class that loads it.
    """

    native: Native | None
    reason: str
    model_class: str
    auto_class: str

    @property
    def use(self) -> str:
        """Return the use of the model, which ends the names of the classes."""
        return self.auto_class.removeprefix(auto_class_of(""))

    @property
    def model_type(self) -> str:
        """Return the ``model_type`` of the folder's config."""
        return OURS if self.native is None else self.native.model_type


def form_of(config: ModelConfig, length: int | None = None, padding: Padding | None = None) -> Form:
    """Return the form of an exported model of ``config``; ``length``: the longest text of training; ``padding``: the
    padding token."""
    native = native_form(config, length, padding)
    if isinstance(native, Native):
        return Form(native, "", *native.classes)
    use = use_of(config)
    if use is None:
        head = getattr(getattr(config, "head", None), "kind", None)
        raise KinformerError(
            f"its model is {PROTOCOLS[config.protocol]} with the input {config.input.kind!r} and the head {head!r}, "
            f"which is exported only as an architecture of transformers, but {native}."
        )
    return Form(None, native, model_class_of(use), auto_class_of(use))


def require_new(folder: Path) -> None:
    """Refuse a folder that holds anything, and a file."""
    require_utf8(folder)
    if folder.exists() and not folder.is_dir():
        raise KinformerError(f"`out` {folder}: is a file; give a new folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise KinformerError(f"`out` {folder}: is not empty; give a new folder.")


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``folder`` at the end; after an error nothing is left of it."""
    place = partial_of(folder)
    try:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        yield place
        if folder.is_dir():
            folder.rmdir()
        place.rename(folder)
    except OSError as error:
        raise KinformerError(
            f"`out` {folder}: cannot be written ({error.strerror or error}); free space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def write_model(
    folder: Path, form: Form, settings: JsonObject, weights: Mapping[str, Tensor], max_shard_bytes: int
) -> int:
    """Write a model with the ``config.json`` ``settings`` into ``folder``; return how many files of tensors.

    ``weights``: under our names, in float32; ``settings`` name the type in which they are written.
    """
    tensors = form.native.tensors(weights) if form.native else {f"model.{name}": one for name, one in weights.items()}
    count = _write_tensors(folder, _as_dtype(tensors, settings["dtype"]), max_shard_bytes)
    write_json(folder / CONFIG, settings)
    prepared = None if form.native is None else form.native.preprocessor
    if form.native is None and (size := settings["composition"]["input"].get("size")) is not None:
        # A model with code normalises images itself.
        prepared = preprocessor({"size": size, "channels": 3, "mean": (), "std": ()}, IMAGES)
    if prepared is not None:
        write_json(folder / PREPROCESSOR, prepared)
    if form.auto_class in GENERATES:
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
        tokens = {name: settings[name] for name in names if settings.get(name) is not None}
        begin = tokens.get("decoder_start_token_id")  # what our search never writes
        write_json(folder / GENERATION, tokens | ({} if begin is None else {"suppress_tokens": [begin]}))
    if form.native is None:
        write_code(folder, form.use)
    return count


def write_code(folder: Path, use: str) -> None:
    """Write the file of code that imports our class for a ``use``."""
    (folder / CODE).write_text(REMOTE_CODE.format(model=model_class_of(use)), encoding="utf-8")


def auto_map(use: str) -> dict[str, str]:
    """Return where transformers reads in a folder which classes the config and the model of a ``use`` have."""
    module = Path(CODE).stem
    return {"AutoConfig": f"{module}.KinformerConfig", auto_class_of(use): f"{module}.{model_class_of(use)}"}


def settings_of(form: Form, config: ModelConfig, member: str, dtype: str) -> JsonObject:
    """Return the ``config.json`` of a model of ``config``, which is a ``member`` of the family."""
    if form.native is not None:
        return {**form.native.config, "dtype": dtype}
    composition = to_dict(config)
    tokens = composition["input"]
    begin = tokens.get("bos_token")
    settings = {
        "model_type": form.model_type,
        "architectures": [form.model_class],
        "auto_map": auto_map(form.use),
        "member": member,
        "composition": composition,
        "dtype": dtype,
        "bos_token_id": begin,
        "eos_token_id": tokens.get("eos_token"),
        "pad_token_id": None,
    }
    if config.protocol is SourceModel:
        return settings | {"is_encoder_decoder": True, "decoder_start_token_id": begin, "pad_token_id": begin}
    classes = composition["head"].get("classes")
    return settings if classes is None else settings | labels(classes)


def _as_dtype(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Return ``tensors``, where float32 becomes ``dtype``."""
    kind = getattr(torch, dtype)
    changed = {name: one.to(kind) if one.dtype == torch.float32 else one for name, one in tensors.items()}
    for name, one in changed.items():
        if not torch.equal(one.isfinite(), tensors[name].isfinite()):
            raise KinformerError(f"`dtype` {dtype}: {name} has values beyond its range; choose bfloat16 or float32.")
    return changed


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], max_bytes: int) -> int:
    """Write ``tensors`` in files of at most ``max_bytes``, or one larger tensor each; return how many files."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        save_tensors(folder / WEIGHTS, shards[0], {"format": "pt"})
        return 1
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_tensors(folder / file, shard, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return len(shards)
