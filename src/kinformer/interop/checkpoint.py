"""Hugging Face checkpoint folders: ``config.json``, safetensors in one file or several, ``tokenizer.json``.

Only JSON and safetensors are read, which hold data and no code; a pickled ``pytorch_model.bin`` is never opened. Each
architecture has one file, which ends with its ``ARCHITECTURES``; this file collects them and reads folders.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kinformer.interop import encoder_decoders, encoders, experts, gpt2, images, llama, recurrent
from kinformer.interop.architecture import Architecture, Tensors, add_ends
from kinformer.interop.key_map import ConfigView
from kinformer.interop.settings import (
    CONFIG,
    INDEX,
    TOKENIZER,
    WEIGHTS,
    Settings,
    bound_positions,
    class_names,
    read_table,
)
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors, read_json, reading
from kinformer.runtime.parsing import JsonObject

PAGES = (llama, recurrent, gpt2, experts, encoders, images, encoder_decoders)
"""The files of architectures, in the order in which the export tries them."""
ARCHITECTURES: dict[str, Architecture] = {kind: one for page in PAGES for kind, one in page.ARCHITECTURES.items()}
"""The architectures by ``model_type``."""
OURS = "kinformer"
"""The ``model_type`` of folders whose model is not an architecture of transformers."""
PARTS = {"qwen3_5": "qwen3_5_text", "gemma3": "gemma3_text"}
"""The ``model_type`` of a folder that also reads images, to the ``model_type`` of its language model."""
PART_PREFIX = re.compile(r"(?:model\.)?language_model\.(?:model\.)?")
OF_IMAGES = re.compile(r"(?:model\.)?(visual|vision_tower|multi_modal_projector)\..*")
OUTSIDE = ("tie_word_embeddings", "eos_token_id", "quantization_config")
"""Settings of the language model that may stand beside its table."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The contents of a folder in our terms: the member, the model config as data, weights under our names (float32).

    ``tokenizer`` is the path of its tokenizer.json, or None. ``notes`` say what was left out or added. ``classes``:
    the names of what an encoder predicts. ``length``: the longest text of training, where positions do not end there.
    """

    member: str
    model: ConfigView
    weights: Mapping[str, Tensor]
    tokenizer: Path | None
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    length: int | None = None


def read_checkpoint(folder: str | Path) -> Imported:
    """Read a checkpoint folder; nothing that our model would compute otherwise is skipped in silence."""
    folder = Path(folder)
    if not folder.is_dir():
        raise KinformerError(
            f"{folder}: is not a folder; give the folder that holds the checkpoint's {CONFIG}, which "
            "hf download MODEL fetches from the Hub."
        )
    with reading(folder, "cannot be imported: its settings or tensors do not have the values they should have"):
        return _imported(folder)


def _imported(folder: Path) -> Imported:
    place = folder / CONFIG
    config = read_table(place)
    kind, importable = config.get("model_type"), (*ARCHITECTURES, *PARTS, OURS)
    if not isinstance(kind, str) or kind not in importable:
        raise KinformerError(
            f"{place}: the model_type {reprlib.repr(kind)} cannot be imported; what can: {', '.join(importable)}."
        )
    if kind in PARTS:
        config = _language_settings(config, place)
    if config.get("quantization_config") is not None:
        raise KinformerError(f"{place}: the weights are quantised; import the checkpoint they were made from.")
    if kind == OURS:
        return _ours(config, folder)
    form = ARCHITECTURES[PARTS.get(kind, kind)]
    _, length, bounds = bound_positions(Settings({**form.defaults.defaults(), **config}, place))
    model, left_out = form.read_config(config, place), tuple[str, ...]()
    tensors = _weights(_tensors(folder), form.buffers, folder)
    if kind in PARTS:
        tensors, left_out = _language_tensors(tensors)
    model = form.with_tensors(model, tensors, config, folder)
    weights = form.read_tensors(tensors, model, folder, config)
    notes = left_out + form.notes(tensors, model, folder) + bounds
    if model["kind"] == "decoder" and "vocab_size" in model["input"]:
        notes += add_ends(model["input"], config, folder)
    lengths = [name for name in ("max_position_embeddings", "max_seq_len") if config.get(name) is not None]
    if length is None and lengths and model["position"] == "none":
        length = Settings(config, place).integer(lengths[0])
    return Imported(
        member=form.member,
        model=model,
        weights=weights,
        tokenizer=_tokenizer(folder),
        notes=notes,
        classes=_classes(config, model, folder),
        length=length,
    )


def _tokenizer(folder: Path) -> Path | None:
    """Return the path of the folder's tokenizer.json; None without one."""
    return folder / TOKENIZER if (folder / TOKENIZER).is_file() else None


def _language_settings(config: JsonObject, place: Path) -> JsonObject:
    """Return the settings of the language model of a folder that also reads images; they are a table in ``config``."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise KinformerError(f"{place}: text_config is not a table of settings; restore the file from a copy.")
    outside = {name: config[name] for name in OUTSIDE if config.get(name) is not None}
    return {**inner, **outside, "model_type": PARTS[config["model_type"]]}


def _language_tensors(tensors: Tensors) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the language model's ``tensors`` without their prefix, and a note on the tensors it leaves out."""
    part, left_out = {}, set()
    for name, tensor in tensors.items():
        if match := OF_IMAGES.fullmatch(name):
            left_out.add(match[1])
            continue
        plain = PART_PREFIX.sub("", name, count=1) if PART_PREFIX.match(name) else name
        part[plain if plain == name or plain.startswith("lm_head.") else f"model.{plain}"] = tensor
    notes = (f"{', '.join(sorted(left_out))} left out: the run reads tokens alone",) if left_out else ()
    return part, notes


def _ours(config: Mapping[str, object], folder: Path) -> Imported:
    """Return the contents of a folder that ``kinformer export`` wrote, without its code."""
    member, model = config.get("member"), config.get("composition")
    if not isinstance(member, str) or not isinstance(model, Mapping):
        raise KinformerError(f"{folder / CONFIG}: does not name a member and a composition; restore it from a copy.")
    halves = (torch.bfloat16, torch.float16)
    weights = {
        name.removeprefix("model."): one.float() if one.dtype in halves else one
        for name, one in _tensors(folder).items()
    }
    return Imported(
        member=member,
        model=model,
        weights=weights,
        tokenizer=_tokenizer(folder),
        classes=_classes(config, model, folder),
    )


def _classes(config: Mapping[str, object], model: ConfigView, folder: Path) -> tuple[str, ...]:
    """Return the names of what ``model`` predicts; numbered ones where ``config`` names none, or other ones."""
    count = (model.get("head") or {}).get("classes")
    if count is None:
        return ()
    names = class_names(config, folder / CONFIG)
    return names if len(names) == count else tuple(f"LABEL_{number}" for number in range(count))


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint under their own names."""
    if (folder / WEIGHTS).is_file():
        return load_tensors(folder / WEIGHTS)[0]
    if (folder / INDEX).is_file():
        return _shards(folder)
    if sorted(folder.glob("*.bin")):
        raise KinformerError(
            f"{folder}: holds pickled weights (.bin), which can run code and are never loaded; convert them to "
            f"safetensors (save_pretrained of a recent transformers does) and import that."
        )
    raise KinformerError(f"{folder}: holds neither {WEIGHTS} nor {INDEX}; give a complete checkpoint folder.")


def _shards(folder: Path) -> dict[str, Tensor]:
    """Return the tensors that the index names, each from its file in the folder and nowhere else."""
    index = read_json(folder / INDEX)
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict) or not file_of:
        raise KinformerError(f"{folder / INDEX}: does not have a weight_map; restore it from a copy.")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(map(str, file_of.values()))):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise KinformerError(f"{folder / INDEX}: names {file!r}, which is not a safetensors file of this folder.")
        shard = load_tensors(folder / file)[0]
        wanted = [name for name, holder in file_of.items() if holder == file]
        if missing := [name for name in wanted if name not in shard]:
            raise KinformerError(f"{folder / file}: lacks {missing[0]}, which the index puts there; restore it.")
        tensors |= {name: shard[name] for name in wanted}
    return tensors


def _weights(tensors: Mapping[str, Tensor], buffers: re.Pattern[str], folder: Path) -> dict[str, Tensor]:
    """Return all tensors but ``buffers`` in float32; no other may be masks or whole numbers."""
    weights = {name: tensor for name, tensor in tensors.items() if not buffers.fullmatch(name)}
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise KinformerError(
                f"{folder}: {name} is {weight.dtype}, but weights must be floating-point numbers; import an "
                "unquantised checkpoint."
            )
    return {name: weight.float() for name, weight in weights.items()}
