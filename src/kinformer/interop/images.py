"""The settings and tensors that all image encoders of the library transformers share.

How an image is prepared stands in a file of its own, ``preprocessor_config.json``; mean and standard deviation of the
channels become part of the model's input here, which takes pixels from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as excerpt
from typing import TYPE_CHECKING

from kinformer.interop.architecture import integer
from kinformer.interop.key_map import ConfigData, ConfigView, Layout, key
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

PREPROCESSOR = "preprocessor_config.json"


def patches(full: Mapping[str, object], place: Path, **settings: object) -> ConfigData:
    """Return the input ``patches``, as data, of a config; see :func:`normalisation`."""
    size, channels = _pair(full, place, "image_size"), integer(full, place, "num_channels")
    rows, columns = _pair(full, place, "patch_size")
    if rows != columns:
        raise KinformerError(f"{place}: patch_size is {rows} x {columns}, but only square patches can be imported.")
    return {"kind": "patches", "size": size, "channels": channels, "patch": rows} | settings


def notes(folder: Path) -> tuple[str, ...]:
    """Return notes for the user on the preparation of images."""
    if (folder / PREPROCESSOR).is_file():
        return ()
    return (f"it has no {PREPROCESSOR}, so pixels from 0 to 1 are read as they are, without mean and deviation",)


def classes(full: Mapping[str, object], place: Path) -> tuple[str, ...]:
    """Return the names of the classes, in order; transformers' own where the config has none."""
    names = full.get("id2label")
    if names is None:
        return tuple(
            f"LABEL_{number}" for number in range(integer({"num_labels": 2} | dict(full), place, "num_labels"))
        )
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        raise KinformerError(f"{place}: id2label does not name the classes 0, 1, 2, ...; restore it from a copy.")
    return tuple(str(names[str(number)]) for number in range(len(names)))


def count(full: Mapping[str, object], place: Path) -> int:
    """Return the number of classes of a classifier; classes that do not exclude each other are an error."""
    if full.get("problem_type") not in (None, "single_label_classification"):
        raise KinformerError(
            f"{place}: problem_type is {excerpt(full['problem_type'])}, but only classes that exclude each other, "
            "'single_label_classification', can be imported."
        )
    return len(classes(full, place))


class LeadingTokens(Layout):
    """Their tensors are one token each, [1, 1, dim]; ours are its rows."""

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        import torch

        return [torch.cat([tensor[0] for tensor in tensors])]

    def write(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        (tensor,) = tensors
        return [row[None] for row in tensor.split(1)]


class LeadingTable(Layout):
    """Their table is [1, rows, dim]."""

    def ours(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor[0]

    def theirs(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor[None]


class Kernel(Layout):
    """Their product of a patch is a convolution's kernel [dim, channels, rows, columns], ours [dim, all of them]."""

    def ours(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor.flatten(1) if tensor.dim() == 4 else tensor

    def theirs(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        patches = layer["input"]
        shape = (patches["channels"], patches["patch"], patches["patch"])
        return tensor.unflatten(1, shape) if tensor.dim() == 2 else tensor


TOKENS, TABLE, KERNEL = LeadingTokens(), LeadingTable(), Kernel()
PROJECTION = key("input.projection", "embeddings.patch_embeddings.projection", layout=KERNEL)


def preprocessor(patches: ConfigView, kind: str) -> dict[str, object]:
    """Return the ``preprocessor_config.json`` of the input ``patches``, as data, of an image processor ``kind``."""
    rows, columns = patches["size"]
    ones = [1.0] * patches["channels"]
    settings = {
        "image_processor_type": kind,
        "do_resize": True,
        "size": {"height": rows, "width": columns},
        "resample": 2,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": bool(patches["mean"] or patches["std"]),
    }
    if not settings["do_normalize"]:
        return settings
    mean = list(patches["mean"]) or [0.0 for _ in ones]
    return settings | {"image_mean": mean, "image_std": list(patches["std"]) or ones}


def _pair(full: Mapping[str, object], place: Path, name: str) -> list[int]:
    value = full.get(name)
    values = value if isinstance(value, list) else [value, value]
    if len(values) != 2:
        raise KinformerError(f"{place}: {name} is {value!r}, but must be one whole number, or rows and columns.")
    return [integer({name: item}, place, name) for item in values]


def normalisation(folder: Path, channels: int) -> ConfigData:
    """Return mean and standard deviation of the channels, where ``folder`` has a file that says them."""
    path = folder / PREPROCESSOR
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
