"""One writer a folder: a lock that the system releases when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kinformer.runtime.errors import KinformerError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for this process, so that no other writes there; readers may read.

    A missing folder is created, and removed again at the end if it is empty. The lock is one of the folder itself
    (flock), so it leaves no file behind. A file system without locks gives no protection.
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
    """Create ``folder`` and its missing parents; return those that were created, innermost first."""
    try:
        missing = [item for item in (folder, *folder.parents) if not item.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise KinformerError(f"{folder}: is a file; give a folder.") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise KinformerError(f"{folder}: cannot be made ({reason}); choose a folder with room and rights.") from error
    return missing


def take(handle: int, wait: bool = False) -> bool:
    """Lock the open file or folder ``handle`` until it is closed; return False where another
    process holds it, unless it may ``wait`` for that one."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
