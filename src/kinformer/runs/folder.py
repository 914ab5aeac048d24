"""Writing in a run's folder: by one process at a time, which removes nothing there but what it made itself.

While a run is created, ``.config.json.partial`` stands in its folder; ``config.json`` is written last. So what a killed
creation leaves behind is distinguished from a user's own files, and is removed when the folder is locked next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kinformer.data.files import SPOOLED
from kinformer.runs.config_file import CONFIG
from kinformer.runs.run import TOKENIZER
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import partial_of, remove_partials, require_utf8
from kinformer.runtime.lock import locked
from kinformer.training.best import SHARDED, WEIGHTS
from kinformer.training.checkpoint import CHECKPOINTS, Checkpoints
from kinformer.training.logging import METRICS

_MADE_FIRST = (TOKENIZER, SPOOLED, WEIGHTS)
"""What creating or importing a run may write before its config."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process, and remove half-written files of dead processes."""
    require_utf8(folder)
    with locked(folder):
        _remove_leftovers(folder)
        yield


@contextmanager
def creating(folder: Path) -> Iterator[None]:
    """Create a run in ``folder``, which this process has locked; where that fails, remove all that was written."""
    require_empty(folder)
    try:
        with partial_of(folder / CONFIG).open("xb"):
            pass
        yield
    except BaseException:
        _remove_leftovers(folder)
        raise


def require_empty(folder: Path) -> None:
    """Refuse a folder that holds anything."""
    if (folder / CONFIG).exists():
        raise KinformerError(
            f"`out` {folder}: holds a run already; add `resume` to continue it, or give another folder."
        )
    if any(folder.iterdir()):
        raise KinformerError(f"`out` {folder}: is not empty; give a new folder.")


def _remove_leftovers(folder: Path) -> None:
    if partial_of(folder / CONFIG).exists() and not (folder / CONFIG).exists():
        for name in _MADE_FIRST:
            (folder / name).unlink(missing_ok=True)
    remove_partials(folder, (CONFIG, METRICS, *_MADE_FIRST))
    for name in (CHECKPOINTS, SHARDED):
        Checkpoints(folder / name, 1).clean()
