"""What models are trained for: a page a task, and the table of them.

``kinformer.lab.tasks()`` gives the table. Importing this folder puts it in the place of that function, so it can be called
too.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinformer.lab.tasks.task import Task


class _Callable(ModuleType):
    def __call__(self) -> list[Task]:
        """Return the records of all tasks, in the order of the table."""
        from kinformer.lab.tasks.table import tasks

        return tasks()


sys.modules[__name__].__class__ = _Callable
