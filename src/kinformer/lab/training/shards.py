"""Tensors that several processes write together, each its own part, in the safetensors format of PyTorch's distributed
checkpoint.

Every process writes its own file, ``shards/shard-00001-model-00001-of-00001.safetensors`` and so on. The metadata of a
file says where the rows of its tensors begin. Any number of processes can read the files with PyTorch's reader, and
each process reads only the rows that it needs. A plan beside the folder holds the sha256 of every file. Files are
trusted only after their heads agree: the parts of a tensor must follow each other from its first row to its last.
Nothing is a pickle.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinformer.lab.training.distributed import Group
from kinformer.runtime.compiling import is_sharded, local_part
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import reading, require_file, sha256_of, write_tensors
from kinformer.runtime.parsing import JsonObject, parse_json

SHARDS = "shards"
_NAME = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_OFFSETS, _BEGIN = "DCP_SHARDING_INFO", "saved_offsets"
_VERSION = {"DCP_VERSION": "1.0", "format": "pt"}
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """This process's part of tensors that a group of processes writes: ``rows`` has some rows of each, by name, and the
    number of the first; ``aliases``, the same in all processes, are second names of tensors."""

    rows: Mapping[str, tuple[Tensor, int]]
    aliases: Mapping[str, str]

    def staged(self, made: Collection[str] = ()) -> Part:
        """Return a copy in this process's memory; the rows of the names ``made`` are copies already."""
        copies = {name: (staged(rows), begin) for name, (rows, begin) in self.rows.items() if name not in made}
        return replace(self, rows={**self.rows, **copies})

    def write(self, folder: Path, rank: int) -> dict[str, str]:
        """Write the file of process ``rank`` into ``folder``/shards; return its name and its sha256."""
        place = folder / SHARDS / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        place.parent.mkdir(exist_ok=True)
        tensors = {path: tensor.cpu().contiguous() for path, (tensor, _) in self.rows.items()}
        begins = {path: {_BEGIN: [row, *[0] * rows.dim()][: rows.dim()]} for path, (rows, row) in self.rows.items()}
        write_tensors(place, tensors, {_OFFSETS: json.dumps(begins), **_VERSION})
        return {place.name: sha256_of(place)}


@dataclass(frozen=True)
class Shards:
    """The files of some tensors in ``folder``: the sha256 of each, and the ``aliases``, names of tensors that share
    the memory of another one. ``forms`` are the tensors without their data (on the device "meta"), by name."""

    folder: Path
    files: Mapping[str, str]
    aliases: Mapping[str, str]
    forms: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def plan(self) -> dict[str, object]:
        """Return the entry of the files in a plan."""
        return {"files": dict(self.files), "aliases": dict(self.aliases)}

    def group(self, name: str) -> dict[str, Tensor]:
        """Return the forms of the tensors called ``"name/..."``, without that prefix."""
        return {path.removeprefix(f"{name}/"): form for path, form in self.forms.items() if path.startswith(f"{name}/")}

    def fill(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Read ``"name/..."`` into ``tensors``, which may be sharded over processes: each reads its own part."""
        import torch.distributed.checkpoint as dcp

        targets = {f"{name}/{key}": tensor for key, tensor in tensors.items()}
        wanted: dict[str, Tensor] = {}
        for path, tensor in targets.items():
            wanted.setdefault(self.aliases.get(path, path), tensor)
        with reading(self.folder), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                dcp.load(dict(wanted), storage_reader=dcp.HuggingFaceStorageReader(str(self.folder)), no_dist=True)
            except dcp.api.CheckpointException as error:  # no Exception
                failures = [failure[0] for failure in error.failures.values()]
                cause = next((failure for failure in failures if isinstance(failure, Exception)), None)
                raise cause or OSError(0, str(error)) from None
        with torch.no_grad():
            for path, tensor in targets.items():
                if tensor is not (source := wanted[self.aliases.get(path, path)]):
                    tensor.copy_(source)

    def whole(self, name: str) -> dict[str, Tensor]:
        """Return the tensors ``"name/..."`` whole, in this process alone."""
        rooms = {path: torch.empty_like(form, device="cpu") for path, form in self.group(name).items()}
        self.fill(name, rooms)
        return rooms

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Raise a :class:`KinformerError` where a file is not the plan's; ``world`` processes share the files."""
        for name in sorted(self.files)[rank::world]:
            require_file(self.folder / name)
            if sha256_of(self.folder / name) != self.files[name]:
                raise KinformerError(f"{self.folder / name}: is damaged or not the checkpoint's; restore it")


def part_of(tensors: Mapping[str, Tensor], group: Group) -> Part:
    """Return this process's part of ``tensors``, sharded or the same in all processes of ``group``, which must call
    together. An unsharded tensor goes to the process with the fewest bytes of unsharded tensors so far."""
    aliases = group.on_first(lambda: _aliases(tensors))
    rows: dict[str, tuple[Tensor, int]] = {}
    dealt = [0] * group.world
    for name, tensor in tensors.items():
        if name in aliases:
            continue
        if is_sharded(tensor):
            begin, local = _begin(tensor), local_part(tensor)
            if begin is not None and (local.numel() or begin == 0):
                rows[name] = local.detach(), begin
        else:
            owner = dealt.index(min(dealt))
            dealt[owner] += tensor.nbytes
            if owner == group.rank:
                rows[name] = tensor.detach(), 0
    return Part(rows, aliases)


def staged(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` in this process's memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def open_shards(folder: Path, plan: JsonObject) -> Shards:
    """Return the shards in ``folder``/shards that ``plan`` names; one whose parts are not whole is an error."""
    place = folder / SHARDS
    files, aliases = plan["files"], plan["aliases"]
    for table in (files, aliases):
        if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
            raise ValueError("its shards are not a table of names")
    for name in files:
        if not _NAME.fullmatch(name):
            raise ValueError(f"it names {name!r}, which is not a shard")
    if strange := {path.name for path in place.glob("*.safetensors")} - files.keys():
        raise KinformerError(f"{place / min(strange)}: is not named by the checkpoint's plan; remove it")
    forms = _forms(place, files)
    for alias, name in aliases.items():
        if name not in forms or alias in forms:
            raise ValueError(f"its alias {alias!r} is of {name!r}, which it has not")
    return Shards(place, files, aliases, forms | {alias: forms[name] for alias, name in aliases.items()})


def _aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of tensors that lie in the memory of an earlier one, with its name."""
    owners: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        local = local_part(tensor)
        if local.numel():
            owner = owners.setdefault((local.data_ptr(), tensor.shape, tensor.dtype), name)
            if owner != name:
                aliases[name] = owner
    return aliases


def _begin(tensor: Any) -> int | None:
    """Return the number of the first row of this process's part; None where another process has the same."""
    at, mesh = tensor.device_mesh.get_coordinate(), tensor.device_mesh
    assert at is not None
    dims = {axis: placement.dim for axis, placement in enumerate(tensor.placements) if placement.is_shard()}
    if any(number for axis, number in enumerate(at) if axis not in dims):
        return None
    if not dims:
        return 0
    ((axis, dim),) = dims.items()
    assert dim == 0, "parts are rows"
    return min(at[axis] * -(-len(tensor) // mesh.size(axis)), len(tensor))


def _forms(place: Path, files: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the form of every tensor from the heads of ``files``, whose rows must follow each other without gaps."""
    from safetensors import safe_open

    parts: dict[str, list[tuple[int, tuple[int, ...], torch.dtype]]] = {}
    for name in sorted(files):
        require_file(place / name)
        with reading(place / name), safe_open(place / name, framework="pt") as file:
            begins = parse_json((file.metadata() or {})[_OFFSETS])
            for key in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(key)
                shape, offsets = tuple(part.get_shape()), begins[key][_BEGIN]
                if not isinstance(offsets, list) or len(offsets) != len(shape) or any(offsets[1:]):
                    raise ValueError(f"{key} begins at {offsets!r}")
                begin = offsets[0] if offsets else 0
                if type(begin) is not int or begin < 0:
                    raise ValueError(f"{key} begins at row {begin!r}")
                if (dtype := part.get_dtype()) not in _DTYPES:
                    raise ValueError(f"it holds numbers of type {dtype}")
                parts.setdefault(key, []).append((begin, shape, _DTYPES[dtype]))
    return {key: _joined(place, key, chunks) for key, chunks in parts.items()}


def _joined(place: Path, key: str, chunks: list[tuple[int, tuple[int, ...], torch.dtype]]) -> Tensor:
    full = sorted((chunk for chunk in chunks if 0 not in chunk[1][:1]), key=lambda chunk: chunk[0]) or chunks[:1]
    _, shape, dtype = full[0]
    rows = 0
    for begin, part, kind in full:
        if begin != rows or part[1:] != shape[1:] or kind != dtype or len(part) != len(shape):
            raise KinformerError(f"{place}: the parts of {key} do not follow each other; restore it from a copy")
        rows += part[0] if part else 1
    if not shape and rows != 1:
        raise KinformerError(f"{place}: the number {key} is there {rows} times; restore it from a copy")
    return torch.empty((rows, *shape[1:]) if shape else (), dtype=dtype, device="meta")
