"""Files that survive a crash: atomic writes, and tensors whose every byte is checked when they are read.

Tensors are kept as safetensors, never as pickles; the sha256 of their names, shapes, types and bytes stands in the
file's metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor, nn

DIGEST = "kinformer.sha256"


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it to the disk and rename it into place.

    A crash at any moment leaves either the old file or the new one, whole. A full disk is one clear sentence.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise KinformerError(
            f"{path}: could not be written ({reason}); free space or choose another folder."
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, data: Any) -> None:
    """``data`` as indented JSON, atomically."""
    text = json.dumps(data, indent=2) + "\n"
    write_atomic(path, lambda target: target.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """The JSON value in ``path``; a missing or damaged file is one clear sentence."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KinformerError(f"{path}: there is no such file; check the folder's name.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KinformerError(f"{path}: is not readable JSON ({error}); restore it from a copy.") from None


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write ``tensors`` (on any device, sharing no memory) to ``path``, atomically; returns their digest."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    extra = dict(metadata or {}) | {DIGEST: digest(tensors)}

    def write(target: Path) -> None:
        try:
            save_file(tensors, target, extra)
        except SafetensorError as error:
            raise OSError(0, str(error)) from error

    write_atomic(path, write)
    return extra[DIGEST]


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of ``path``; a missing, truncated or altered file is one clear sentence."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError:
        raise KinformerError(f"{path}: there is no such file; check the folder's name.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise KinformerError(f"{path}: is truncated or damaged ({error}); restore it from a copy.") from None
    if DIGEST in metadata and metadata[DIGEST] != digest(tensors):
        raise KinformerError(f"{path}: is damaged (its tensors do not match their checksum); restore it from a copy.")
    return tensors, metadata


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], place: Path | str) -> None:
    """Copy ``tensors`` into ``model``; names or shapes that differ are one clear sentence."""
    own = model.state_dict()
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        example = f"lacks {missing[0]}" if missing else f"holds {extra[0]}"
        raise KinformerError(f"{place}: belongs to another model (it {example}); use its own run folder.")
    for name, tensor in own.items():
        if tensors[name].shape != tensor.shape:
            shapes = f"{tuple(tensors[name].shape)}, here {tuple(tensor.shape)}"
            raise KinformerError(f"{place}: belongs to another model ({name} is {shapes}); use its own run folder.")
    model.load_state_dict(dict(tensors))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes, in order of the names."""
    import torch

    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        if tensor.numel():
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
