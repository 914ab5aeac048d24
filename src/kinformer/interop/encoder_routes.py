"""Export routes of encoders, of texts and of images. See ``interop.routes``.

The settings of the library transformers are computed for a model of ours, as data, and read again before they count.
Functions raise ``KeyError``, ``TypeError`` or ``AttributeError`` for a model that lacks what they look for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kinformer.interop import deit, swin, vit
from kinformer.interop.architecture import Settings
from kinformer.interop.checkpoint import FAMILIES
from kinformer.interop.encoders import ACTIVATIONS, write
from kinformer.interop.key_map import ConfigData, ConfigView
from kinformer.interop.routes import PLACE, Padding, Route, Weights, ends

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.interop.encoders import Family

THEIRS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
"""Our name of an activation to theirs."""


def labels(classes: int) -> Settings:
    """Return the names of ``classes``, of which a folder has some, as transformers calls them."""
    return labels_of([f"LABEL_{number}" for number in range(classes)])


def labels_of(names: list[str]) -> Settings:
    """Return the names of classes by their numbers, and the reverse."""
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _sizes(model: ConfigView) -> Settings:
    """Return the sizes of layers that are all alike."""
    layer = model["layers"][0]
    return {
        "hidden_size": model["dim"],
        "num_hidden_layers": len(model["layers"]),
        "num_attention_heads": layer["mixer"]["num_heads"],
        "intermediate_size": layer["feed_forward"]["hidden_dim"],
    }


def _sublayers(model: ConfigView) -> Settings:
    """Return the settings that the layers of all encoders share."""
    layer = model["layers"][0]
    return {
        "hidden_act": THEIRS[layer["feed_forward"]["activation"]],
        "hidden_dropout_prob": layer["dropout"],
        "attention_probs_dropout_prob": layer["mixer"]["dropout"],
        "layer_norm_eps": layer["norm"]["eps"],
    }


def _text(model: ConfigView, pad_token: int | None) -> Settings:
    """Return the settings that all encoders of texts share."""
    head = model["head"]
    settings = {
        "vocab_size": model["input"]["vocab_size"],
        **_sizes(model),
        **_sublayers(model),
        "max_position_embeddings": model["position"]["max_length"],
        "type_vocab_size": model["input"]["types"] or 1,
        "pad_token_id": pad_token,
        "tie_word_embeddings": head.get("tied", True),
    }
    if "classes" in head:
        settings |= labels(head["classes"]) | {"classifier_dropout": head["dropout"]}
    return settings


def _shifted(model: ConfigView, pad_token: int | None) -> Settings:
    """Return the settings of an encoder whose positions are counted from behind the padding token's number."""
    if pad_token is None:
        raise KeyError("pad_token")
    settings = _text(model, pad_token)
    return settings | {"max_position_embeddings": settings["max_position_embeddings"] + pad_token + 1}


def _longformer(model: ConfigView, pad_token: int | None) -> Settings:
    windows = [2 * layer["mixer"]["pattern"]["window"] for layer in model["layers"]]
    settings = _shifted(model, pad_token) | {"attention_window": windows}
    classifies = model["head"]["kind"] == "classification"
    return settings if model["global_tokens"] == classifies else settings | {"global_tokens": model["global_tokens"]}


def _big_bird(model: ConfigView, pad_token: int | None) -> Settings:
    mixer, end = model["layers"][0]["mixer"], model["input"]["eos_token"]
    settings = _text(model, 0 if pad_token is None else pad_token)
    settings |= {"use_bias": mixer["projection"]["bias"]} | ({} if end is None else {"sep_token_id": end})
    if mixer["pattern"]["kind"] == "full":
        return settings | {"attention_type": "original_full"}
    sizes = {"block_size": mixer["pattern"]["block"], "num_random_blocks": mixer["pattern"]["random"]}
    return settings | {"attention_type": "block_sparse", **sizes}


TEXT: dict[str, Callable[[ConfigView, int | None], Settings]] = {
    "bert": _text,
    "roberta": _shifted,
    "longformer": _longformer,
    "big_bird": _big_bird,
}
"""The ``model_type`` to its settings for an encoder of texts of ours and the id of the padding token."""
TEXT_CLASSES = {"bert": "Bert", "roberta": "Roberta", "longformer": "Longformer", "big_bird": "BigBird"}
HEAD_CLASSES = {
    "masked_language": "MaskedLM",
    "classification": "SequenceClassification",
    "token_classification": "TokenClassification",
}
HEAD_NAMES = {"masked_language": "lm_head.dense.weight"}
"""A tensor by which the import knows a head, where that is not the classifier's."""


def _text_settings(kind: str, model: ConfigView, length: int | None, padding: Padding | None) -> Settings:
    settings = TEXT[kind](model, None if padding is None else padding.id)
    return {**settings, **ends(model), "architectures": [_text_class(kind, model)[0]]}


def _text_class(kind: str, model: ConfigView) -> tuple[str, str]:
    end = HEAD_CLASSES[model["head"]["kind"]]
    return f"{TEXT_CLASSES[kind]}For{end}", f"AutoModelFor{end}"


def _read_text(family: Family, settings: Settings, ours: ConfigView) -> ConfigData:
    (name,) = settings["architectures"]
    head = next(kind for kind, end in HEAD_CLASSES.items() if name.endswith(f"For{end}"))
    model = family.model_config(settings, PLACE)
    model |= family.head(settings, PLACE, [HEAD_NAMES.get(head, "classifier.weight")])
    if settings["type_vocab_size"] == 1 and not ours["input"]["types"]:
        model["input"]["types"] = 0  # the vector of the only type is written as zero
    return model


def _write_text(family: Family, weights: Weights, model: ConfigView, settings: Settings) -> dict[str, Tensor]:
    return write(family.key_map(settings, PLACE, model["head"]["kind"]), weights, model)


def _text_notes(kind: str, model: ConfigView) -> list[str]:
    notes = []
    if kind in ("roberta", "longformer"):
        notes.append("padding is known there by its id, which may stand nowhere else in a text")
    if kind == "longformer" and model["global_tokens"] and model["head"]["kind"] != "classification":
        notes.append("give it a global_attention_mask that is 1 at the first token, which is global here")
    if kind == "big_bird" and model["layers"][0]["mixer"]["pattern"]["kind"] != "full":
        notes.append(
            "transformers draws its random blocks only while it trains (train()) and reads the first block instead "
            "where it does not, and it lets padding of a batch be global"
        )
    return notes


def _text_route(kind: str) -> Route:
    family = FAMILIES[kind]
    return Route(
        title=family.title,
        kind="encoder",
        reads="tokens",
        settings=partial(_text_settings, kind),
        read=partial(_read_text, family),
        write=partial(_write_text, family),
        classes=partial(_text_class, kind),
        notes=partial(_text_notes, kind),
    )


def _images(model: ConfigView) -> Settings:
    """Return the settings that all encoders of images share."""
    patches, (rows, columns) = model["input"], model["input"]["size"]
    return {
        "image_size": rows if rows == columns else [rows, columns],
        "patch_size": patches["patch"],
        "num_channels": patches["channels"],
        **labels(model["head"]["classes"]),
    }


def _vit(kind: str, model: ConfigView, length: int | None, padding: Padding | None) -> Settings:
    resize = model["input"]["resize"]
    return {
        **_images(model),
        **_sizes(model),
        **_sublayers(model),
        "qkv_bias": model["layers"][0]["mixer"]["projection"]["bias"],
        "architectures": [IMAGE_CLASSES[kind](model)],
        **({} if resize == "bicubic" else {"resize_positions": resize}),
    }


def _swin(kind: str, model: ConfigView, length: int | None, padding: Padding | None) -> Settings:
    layer, depths = model["layers"][0], list(model["stack"]["depths"])
    first = [sum(depths[:stage]) for stage in range(len(depths))]
    return {
        **_images(model),
        **_sublayers(model),
        "model_type": kind,
        "embed_dim": model["dim"],
        "depths": depths,
        "num_heads": [model["layers"][number]["mixer"]["num_heads"] for number in first],
        "window_size": layer["mixer"]["window"],
        "mlp_ratio": layer["feed_forward"]["hidden_dim"] / model["dim"],
        "qkv_bias": layer["mixer"]["bias"],
    }


def _deit_class(model: ConfigView) -> str:
    return next(name for name, kind in deit.HEADS.items() if kind == model["head"]["kind"])


IMAGE_CLASSES: dict[str, Callable[[ConfigView], str]] = {
    "vit": lambda model: "ViTForImageClassification",
    "deit": _deit_class,
    "swin": lambda model: "SwinForImageClassification",
    "swinv2": lambda model: "Swinv2ForImageClassification",
}


def _image_notes(model: ConfigView) -> list[str]:
    """Return what differs for images of another size."""
    if model["input"]["resize"] == "bicubic" or not model["input"]["positions"]:
        return []
    rows, columns = model["input"]["size"]
    return [f"positions of images of another size than {rows} x {columns} are resized bicubically there"]


def _image_route(kind: str) -> Route:
    reads = {"vit": vit.model_config, "deit": deit.model_config}.get(kind, swin.model_config)
    keys = {"vit": lambda model: vit.KEYS, "deit": deit.key_map}.get(kind)
    return Route(
        title={"vit": "ViT", "deit": "DeiT", "swin": "Swin", "swinv2": "Swin V2"}[kind],
        kind="encoder",
        reads="patches",
        settings=partial(_swin if kind.startswith("swin") else _vit, kind),
        read=lambda settings, model: reads(settings, PLACE),
        write=lambda weights, model, _: keys(model).write(weights, model) if keys else swin.write(weights, model),
        classes=lambda model: (IMAGE_CLASSES[kind](model), "AutoModelForImageClassification"),
        notes=_image_notes,
        processor="DeiTImageProcessor" if kind == "deit" else "ViTImageProcessor",
    )


ROUTES = {kind: _text_route(kind) for kind in TEXT} | {kind: _image_route(kind) for kind in IMAGE_CLASSES}
"""The ``model_type`` to its export route, in the order in which they are tried."""
