"""The settings and tensors that all image encoders of the library transformers share.

How an image is prepared stands in a file of its own, ``preprocessor_config.json``; mean and standard deviation of the
channels become part of the model's input here, which takes pixels from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.interop.settings import whole
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import read_json
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from torch import Tensor

PREPROCESSOR = "preprocessor_config.json"
FUSED = ("query", "key", "value")


def patches(full: Mapping[str, Any], place: Path, **settings: Any) -> dict[str, Any]:
    """Return the input ``patches``, as data, of a config and of the preprocessor's beside it."""
    size, channels = _pair(full, place, "image_size"), whole(full, place, "num_channels")
    rows, columns = _pair(full, place, "patch_size")
    if rows != columns:
        raise KinformerError(f"{place}: patch_size is {rows} x {columns}, but only square patches can be imported.")
    normal = _normalisation(place.parent / PREPROCESSOR, channels)
    return {"kind": "patches", "size": size, "channels": channels, "patch": rows} | normal | settings


def notes(folder: Path) -> tuple[str, ...]:
    """Return notes for the user on the preparation of images."""
    if (folder / PREPROCESSOR).is_file():
        return ()
    return (f"it has no {PREPROCESSOR}, so pixels from 0 to 1 are read as they are, without mean and deviation",)


def classes(full: Mapping[str, Any], place: Path) -> tuple[str, ...]:
    """Return the names of the classes, in order; transformers' own where the config has none."""
    names = full.get("id2label")
    if names is None:
        return tuple(f"LABEL_{number}" for number in range(whole({"num_labels": 2} | dict(full), place, "num_labels")))
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        raise KinformerError(f"{place}: id2label does not name the classes 0, 1, 2, ...; restore it from a copy.")
    return tuple(str(names[str(number)]) for number in range(len(names)))


def plain(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors by their names without that of the model before them."""
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}


def fused(parts: Mapping[str, Mapping[str, Tensor]], folder: Path) -> dict[str, Tensor]:
    """Return queries, keys and values, which are three products there and one here, by the place of that."""
    import torch

    joined = {}
    for place, part in parts.items():
        if missing := [name for name in FUSED if name not in part]:
            raise KinformerError(f"{folder}: lacks the {missing[0]} of {place}; restore it from a copy.")
        joined[place] = torch.cat([part[name] for name in FUSED])
    return joined


def unknown(folder: Path, name: str, model: str) -> KinformerError:
    """Return the error for a tensor that no model of this kind has."""
    return KinformerError(f"{folder}: holds {name[:99]!r}, which no {model} for image classification has.")


def _pair(full: Mapping[str, Any], place: Path, name: str) -> list[int]:
    value = full.get(name)
    values = value if isinstance(value, list) else [value, value]
    if len(values) != 2:
        raise KinformerError(f"{place}: {name} is {value!r}, but must be one whole number, or rows and columns.")
    return [whole({name: item}, place, name) for item in values]


def _normalisation(path: Path, channels: int) -> dict[str, Any]:
    """Return mean and standard deviation of the channels, where there is a file that says them."""
    if not path.is_file():
        return {}
    config = read_json(path)
    if not isinstance(config, dict):
        raise KinformerError(f"{path}: is no table of settings; restore it from a copy.")
    if not config.get("do_rescale", True) or abs(config.get("rescale_factor", 1 / 255) - 1 / 255) > 1e-6:
        raise KinformerError(f"{path}: pixels are not brought to 0 to 1 there, which is all that can be imported.")
    if not config.get("do_normalize", True):
        return {}
    settings = {}
    for name in ("mean", "std"):
        values = config.get(f"image_{name}")
        if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
            raise KinformerError(f"{path}: image_{name} is {values!r}, but must be {plural(channels, 'number')}.")
        settings[name] = [float(value) for value in values]
    return settings
