"""Files that survive a crash: atomic writes, checksums, and one writer a folder."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import parse_json, with_finite_numbers

if TYPE_CHECKING:
    from torch import Tensor, nn


# Files that survive a crash: atomic writes, and contents whose every byte is checked when they are read.
#
# Tensors are stored as safetensors, never as pickles. The file's metadata holds the sha256 of their names, shapes,
# types and bytes, and the sha256 of the rest of the metadata. Signed JSON carries the sha256 of its other keys. Every
# error of reading a file is one sentence that names the file.

DIGEST, METADATA_DIGEST = "kinformer.sha256", "kinformer.metadata.sha256"
CHECKSUM = "checksum"
_MOST_READS = 50
_SAFETENSORS_PARTIAL = ".tmp??????"
"""The temporary file that safetensors fills and then renames."""
_BLOCK, _WHOLE_BLOCKS, _SAMPLED_BLOCKS = 1 << 20, 256, 64


def partial_of(path: Path) -> Path:
    """Return where ``path`` is filled before it appears under its name."""
    return path.with_name(f".{path.name}.partial")


def remove_partials(folder: Path, names: Iterable[str]) -> None:
    """Remove the partial files that writers of ``names`` (which may be patterns) left in ``folder`` when they died.

    Only for a folder that the caller has locked.
    """
    partial = [pattern for name in names for pattern in (f".{name}.partial", f".{name}.*.partial")]
    for pattern in (*partial, _SAFETENSORS_PARTIAL):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it to the disk and rename it into place.

    A crash at any moment leaves either the whole old file or the whole new file. A full disk is reported in one
    sentence. The file has the permissions of the umask, whatever permissions ``write`` sets.
    """
    temporary = partial_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        write(temporary)
        with temporary.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) != mode:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
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


@contextmanager
def reading(path: Path | str, what: str = "is damaged", remedy: str = "restore it from a copy") -> Iterator[None]:
    """Report any error of the context in the contents of ``path`` as a :class:`KinformerError` of one sentence."""
    try:
        yield
    except (KinformerError, ImportError):  # a broken installation is not the file's fault
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise KinformerError(f"{path}: {what} ({reason.rstrip('.')}); {remedy}.") from None


def absolute(path: str | Path) -> Path:
    """Return the absolute path of a file or folder, which need not exist; a link to itself stays unresolved."""
    return Path(os.path.realpath(Path(path).expanduser()))


def default_cache() -> Path:
    """Return the folder of caches: ``$XDG_CACHE_HOME/kinformer``, or ``~/.cache/kinformer``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kinformer"


def require_file(path: Path) -> None:
    """Raise for a missing file, and for anything but a regular file: a FIFO would block its reader for ever."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise KinformerError(f"{path}: the file does not exist; check its name and folder.") from None
    except (OSError, ValueError) as error:
        raise KinformerError(f"{path}: cannot be read ({error}); check the path and its permissions.") from None
    if not stat.S_ISREG(mode):
        raise KinformerError(f"{path}: is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}; give a file.")


def require_utf8(path: Path) -> None:
    """Raise for a path of weights outside UTF-8, because safetensors cannot open it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise KinformerError(
            f"{path}: its name is not UTF-8, but files of weights need UTF-8 names; rename it."
        ) from None


def write_json(path: Path, data: object) -> None:
    """Write ``data`` as indented JSON, atomically, with null in place of NaN and infinity."""
    text = json.dumps(with_finite_numbers(data), indent=2) + "\n"
    write_atomic(path, lambda target: target.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """Return the JSON value in ``path``; the error for a missing or damaged file is one sentence."""
    require_file(path)
    with reading(path, "is not readable JSON"):
        return parse_json(path.read_bytes())


def signed(data: Mapping[str, object]) -> dict[str, object]:
    """Return ``data`` with one more key, the checksum of all other keys as :func:`write_json` writes them."""
    data = with_finite_numbers(data)
    return {**data, CHECKSUM: json_digest(data)}


def require_signature(data: object, path: Path, required: bool = False) -> None:
    """Raise where ``data`` does not match its checksum from :func:`signed`, or lacks one that is ``required``."""
    if not isinstance(data, dict) or (required and CHECKSUM not in data):
        lacks = "does not have a checksum" if isinstance(data, dict) else f"is {type(data).__name__}, not a table"
        raise KinformerError(f"{path}: is damaged or by another version (it {lacks}); delete it, or restore a copy.")
    rest = dict(data)
    if CHECKSUM in rest and rest.pop(CHECKSUM) != json_digest(rest):
        raise KinformerError(
            f"{path}: has been altered (it does not match its checksum); restore it from a copy, or remove its key "
            f"{CHECKSUM!r} if the change is intended."
        )


def json_digest(data: object) -> str:
    """Return the sha256 of ``data`` as JSON; it does not depend on the order of keys."""
    plain = json.loads(json.dumps(data))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's contents."""
    with reading(path, "cannot be read", "check its permissions"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(path: Path) -> str:
    """Return size and crc32 of a file; above 256 MiB only 64 blocks of 1 MiB, evenly spread, are read."""
    require_file(path)
    with reading(path, "cannot be read", "check its permissions"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        blocks = -(-size // _BLOCK)
        starts = range(0, size, _BLOCK)
        if blocks > _WHOLE_BLOCKS:
            starts = [(size - _BLOCK) * n // (_SAMPLED_BLOCKS - 1) for n in range(_SAMPLED_BLOCKS)]  # type: ignore[assignment]
        crc = 0
        for start in starts:
            file.seek(start)
            crc = zlib.crc32(file.read(_BLOCK), crc)
    return f"{size}:{crc:08x}"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write ``tensors`` (on any device, sharing no memory) to ``path``, atomically; return their digest."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    extra = dict(metadata or {}) | {DIGEST: digest(tensors)}
    extra[METADATA_DIGEST] = json_digest(extra)
    write_tensors(path, tensors, extra)
    return extra[DIGEST]


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write contiguous ``tensors`` on the CPU, sharing no memory, to ``path``, atomically."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(target: Path) -> None:
        try:
            save_file(tensors, target, metadata)
        except SafetensorError as error:
            raise OSError(0 if target.parent.exists() else errno.ENOENT, str(error)) from error

    write_atomic(path, write)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of ``path``; the error for a missing, truncated or altered file is one
    sentence.

    The library opens a file once for its head and again for its tensors. Where another process replaces the file in
    between, the file is read again.
    """
    require_utf8(path)
    for _ in range(_MOST_READS - 1):
        require_file(path)
        with reading(path), path.open("rb") as file:  # while a file is open no other one gets its number
            before = _identity(file.fileno())
            try:
                result = _load_tensors(path)
            except KinformerError:
                if _identity(path) == before:
                    raise
            else:  # a checksum that holds says as much as the file's number
                if DIGEST in result[1] or _identity(path) == before:
                    return result
    return _load_tensors(path)


def _identity(place: Path | int) -> tuple[int, ...] | None:
    """Return a value that changes when the file is replaced or written to."""
    try:
        status = os.stat(place)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import safe_open

    require_file(path)
    with reading(path, "is truncated or damaged"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        if DIGEST in metadata and metadata[DIGEST] != digest(tensors):
            raise ValueError("its tensors do not match their checksum")
        rest = {name: value for name, value in metadata.items() if name != METADATA_DIGEST}
        if (DIGEST in metadata or len(rest) < len(metadata)) and metadata.get(METADATA_DIGEST) != json_digest(rest):
            raise ValueError("its metadata do not match their checksum")
    return tensors, metadata


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], place: Path | str) -> None:
    """Copy ``tensors`` into ``model``; the error for different names or shapes is one sentence."""
    weights = model.state_dict()
    require_weights({name: tuple(tensor.shape) for name, tensor in weights.items()}, tensors, place)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not tensors[name].is_floating_point():
            raise KinformerError(
                f"{place}: {name} is {tensors[name].dtype}, but weights are floating-point numbers; restore the file "
                "from a copy."
            )
    model.load_state_dict(dict(tensors))


def require_weights(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], place: Path | str) -> None:
    """Raise where ``tensors`` do not have the names and shapes of the ``expected`` weights of the model."""
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        example = f"lacks {missing[0]}" if missing else f"holds {extra[0]}"
        raise KinformerError(f"{place}: belongs to another model (it {example}); use its own run folder.")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            shapes = f"{tuple(tensors[name].shape)}, here {shape}"
            raise KinformerError(f"{place}: belongs to another model ({name} is {shapes}); use its own run folder.")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 over names, types, shapes and bytes, in order of the names."""
    import torch

    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        if tensor.numel():
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


# One writer a folder: a lock that the system releases when the process ends, also in a crash.


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for this process; another writer gets an error, and readers may read.

    A missing folder is created, and removed again at the end if it is empty. The folder itself is locked (flock), so a
    lock file is not needed. A file system without locks does not protect the folder.
    """
    created = _make(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not take(handle) or not is_here(folder, os.fstat(handle)):
            raise KinformerError(f"{folder}: another process is writing there; wait for it, or give another folder.")
        try:
            yield
        finally:
            if is_here(folder, os.fstat(handle)):
                with suppress(OSError):
                    for item in created:
                        item.rmdir()
    finally:
        os.close(handle)


def is_here(folder: Path, status: os.stat_result) -> bool:
    """Return whether ``folder`` is still the folder that had this ``status``."""
    try:
        return os.path.samestat(folder.stat(), status)
    except OSError:
        return False


def _make(folder: Path) -> list[Path]:
    """Create ``folder`` and its missing parents; return the created folders, innermost first."""
    try:
        missing = [item for item in (folder, *folder.parents) if not item.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise KinformerError(f"{folder}: is a file; give a folder.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KinformerError(f"{folder}: cannot be made ({reason}); choose a folder with room and rights.") from error
    return missing


def take(handle: int, wait: bool = False) -> bool:
    """Lock the open ``handle`` until it is closed; return False, or ``wait``, where another process has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
