"""The start of other Python processes, which must not run the files of the current folder. Free of PyTorch.

``python -c`` puts the current folder first on ``sys.path``, and multiprocessing starts its processes by ``python -c``.
A file ``queue.py`` of the current folder would then replace Python's own module. Python's option ``-P`` prevents this.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess


def safe_path() -> AbstractContextManager[None]:
    """Start the processes of multiprocessing as by ``python -P``; the environment is restored on leaving.
    multiprocessing accepts no options for the interpreter, so this function sets an environment variable. A process
    takes the parent's ``sys.path`` over before it unpickles its task, so it still finds the parent's modules."""
    return variable("PYTHONSAFEPATH", "1")


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def end_with_parent() -> None:
    """End this process of multiprocessing when its parent ends. The workers of a killed pool would wait for ever."""
    parent = multiprocessing.parent_process()

    def wait(parent: BaseProcess) -> None:
        parent.join()
        os._exit(1)

    if parent is not None:
        threading.Thread(target=wait, args=(parent,), daemon=True).start()
