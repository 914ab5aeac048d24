"""Hugging Face checkpoint folders: ``config.json``, safetensors in one file or several, ``tokenizer.json``.

Only JSON and safetensors are read, which hold data and no code; a pickled ``pytorch_model.bin`` is never opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop import (
    decision,
    decoders,
    deepseek,
    deit,
    encoder_decoders,
    experts,
    fla,
    gpt2,
    hybrids,
    images,
    llama,
    marian,
    modernbert,
    swin,
    vit,
)
from kinformer.interop import encoders as encoder_keys
from kinformer.interop.architecture import Settings, add_ends, context_length
from kinformer.interop.encoders import BERT, BIG_BIRD, LONGFORMER, ROBERTA, Family, has_no_types, plainly
from kinformer.interop.hybrids import PARTS, settings, tensors_of
from kinformer.interop.key_map import ConfigData, ConfigView
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors, read_json, reading

if TYPE_CHECKING:
    from torch import Tensor

OURS = "kinformer"
"""The ``model_type`` of folders whose model is no architecture of transformers."""
CONFIG, WEIGHTS, INDEX, TOKENIZER = "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"


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


@dataclass(frozen=True, kw_only=True)
class _Format:
    """The conversion of checkpoints of one ``model_type``: config to model config, weights to our weights.

    ``with_tensors`` changes what follows from tensors. ``family`` is that of an encoder, whose head follows from its
    tensors. ``images``: whether the model reads images. ``untied``: whether tensors have an output matrix of their own
    although the config does not say so. ``notes``: notes for the user on the tensors. ``buffers`` names the tensors
    that are no weights, which old checkpoints hold in any dtype.
    """

    member: str
    model_config: Callable[[Settings, Path], ConfigData]
    convert: Callable[[Mapping[str, Tensor], ConfigView, Path], dict[str, Tensor]] | None = None
    with_tensors: Callable[[ConfigView, Mapping[str, Tensor]], ConfigData] = lambda model, _: dict(model)
    family: Family | None = None
    images: bool = False
    untied: Callable[[Mapping[str, Tensor]], bool] = lambda tensors: False
    notes: Callable[[Mapping[str, Tensor]], tuple[str, ...]] = lambda tensors: ()
    buffers: re.Pattern[str] = encoder_keys.BUFFERS


MASKS = re.compile(r"(.*\.)?attn\.(bias|masked_bias)")
"""Masks of old checkpoints of decoders, which may be no numbers at all."""
FAMILIES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "longformer": LONGFORMER,
    "big_bird": BIG_BIRD,
}
"""Encoders of texts, by ``model_type``."""
FORMATS = {
    **{
        kind: _Format(member=one.member, model_config=one.model_config, convert=one.convert, buffers=MASKS)
        for part in (gpt2, llama, decoders, experts, deepseek, fla)
        for kind, one in part.ARCHITECTURES.items()
    },
    **{
        kind: _Format(member=one.member, model_config=one.model_config, convert=one.convert, notes=hybrids.notes)
        for kind, one in hybrids.ARCHITECTURES.items()
    },
    **{
        kind: _Format(member=family.member, model_config=family.model_config, family=family)
        for kind, family in FAMILIES.items()
    },
    "modernbert": _Format(
        member=modernbert.MODERNBERT.member,
        model_config=modernbert.MODERNBERT.model_config,
        convert=modernbert.convert,
        notes=modernbert.notes,
    ),
    "marian": _Format(
        member="vanilla", model_config=marian.model_config, convert=marian.convert, with_tensors=marian.with_bias
    ),
    **{
        kind: _Format(
            member="vanilla",
            model_config=model_config,
            convert=encoder_decoders.convert,
            untied=encoder_decoders.untied,
        )
        for kind, model_config in (("t5", encoder_decoders.t5_config), ("mt5", encoder_decoders.mt5_config))
    },
    "bart": _Format(member="vanilla", model_config=encoder_decoders.bart_config, convert=encoder_decoders.convert),
    "decision_transformer": _Format(
        member=decision.DECISION.member,
        model_config=decision.DECISION.model_config,
        convert=decision.convert,
        notes=decision.notes,
        buffers=MASKS,
    ),
    "vit": _Format(member="vit", model_config=vit.model_config, convert=vit.convert, images=True),
    "deit": _Format(member="deit", model_config=deit.model_config, convert=deit.convert, images=True),
    **dict.fromkeys(
        ("swin", "swinv2"),
        _Format(member="swin", model_config=swin.model_config, convert=swin.convert, images=True, buffers=swin.BUFFERS),
    ),
}


def read_checkpoint(folder: str | Path) -> Imported:
    """Read a checkpoint folder.

    Errors: ``KinformerError`` for anything that is missing, damaged, of an unknown kind, or that our model would
    compute otherwise; nothing is skipped in silence.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise KinformerError(f"{folder}: is no folder; give the folder that holds the checkpoint's {CONFIG}.")
    with reading(folder, "cannot be imported: its settings or tensors are not what they should be"):
        return _imported(folder)


def _imported(folder: Path) -> Imported:
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise KinformerError(f"{folder / CONFIG}: is no table of settings; restore it from a copy.")
    kind = config.get("model_type")
    importable = (*FORMATS, *PARTS, OURS)
    if not isinstance(kind, str) or kind not in importable:
        raise KinformerError(
            f"{folder / CONFIG}: the model_type {kind!r} cannot be imported; what can: {', '.join(importable)}."
        )
    is_part = kind in PARTS
    if is_part:
        config = settings(config, folder / CONFIG)
        kind = config["model_type"]
    if config.get("quantization_config") is not None:
        raise KinformerError(
            f"{folder / CONFIG}: the weights are quantised; import the checkpoint they were made from."
        )
    if kind == OURS:
        return _ours(config, folder)
    form = FORMATS[kind]
    model, notes = form.model_config(config, folder / CONFIG), tuple[str, ...]()
    tensors, left_out = _weights(_tensors(folder), form.buffers, folder), tuple[str, ...]()
    if is_part:
        tensors, left_out = tensors_of(tensors)
    if form.family is not None:
        model, weights, notes = _text_encoder(form.family, tensors, config, folder)
    else:
        assert form.convert is not None
        if form.untied(tensors):
            model["head"]["tied"] = False
        model = form.with_tensors(model, tensors)
        weights, notes = form.convert(tensors, model, folder), left_out + form.notes(tensors)
    if model["kind"] == "decoder" and "vocab_size" in model["input"]:
        notes += add_ends(model["input"], config, folder)
    if form.images:
        model["input"] |= images.normalisation(folder, model["input"]["channels"])
        notes = images.notes(folder)
    tokenizer = folder / TOKENIZER
    return Imported(
        member=form.member,
        model=model,
        weights=weights,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        notes=notes,
        classes=_classes(config, model, folder),
        length=context_length(model, config, folder / CONFIG),
    )


def _text_encoder(
    family: Family, tensors: Mapping[str, Tensor], config: Mapping[str, object], folder: Path
) -> tuple[ConfigData, dict[str, Tensor], tuple[str, ...]]:
    """Return an encoder's model config, its weights and notes for the user; the head follows from its tensors."""
    place, tensors = folder / CONFIG, plainly(tensors)
    model = family.model_config(config, place) | family.head(config, place, tensors)
    model["input"] = model["input"] | family.special_tokens(config, place)
    if has_no_types(tensors):
        model["input"]["types"] = 0
    keys = family.key_map(config, place, model["head"]["kind"])
    weights = encoder_keys.read(keys, tensors, model, folder, family.title)
    return model, weights, encoder_keys.notes(keys, tensors, model) + family.notes(model)


def _ours(config: Mapping[str, object], folder: Path) -> Imported:
    """Return the contents of a folder that ``kinformer export`` wrote, without its code."""
    import torch

    member, model = config.get("member"), config.get("composition")
    if not isinstance(member, str) or not isinstance(model, Mapping):
        raise KinformerError(f"{folder / CONFIG}: names no member or no composition; restore it from a copy.")
    halves = (torch.bfloat16, torch.float16)
    weights = {
        name.removeprefix("model."): one.float() if one.dtype in halves else one
        for name, one in _tensors(folder).items()
    }
    tokenizer = folder / TOKENIZER
    return Imported(
        member=member,
        model=model,
        weights=weights,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        classes=_classes(config, model, folder),
    )


def _classes(config: Mapping[str, object], model: ConfigView, folder: Path) -> tuple[str, ...]:
    """Return the names of what ``model`` predicts; numbered ones where ``config`` names none, or other ones."""
    count = (model.get("head") or {}).get("classes")
    if count is None:
        return ()
    names = images.classes(config, folder / CONFIG)
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
        raise KinformerError(f"{folder / INDEX}: has no weight_map; restore it from a copy.")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(map(str, file_of.values()))):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise KinformerError(f"{folder / INDEX}: names {file!r}, which is no safetensors file of this folder.")
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
