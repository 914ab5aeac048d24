"""What models are trained for: a page a task, and the table of them.

``kinformer.tasks()`` gives the table. Importing this folder puts it in the place of that function, so it can be called
too.
"""

import sys
from types import ModuleType


class _Callable(ModuleType):
    def __call__(self) -> list:
        """Return the records of all tasks, in the order of the table."""
        from kinformer.tasks.table import tasks

        return tasks()


sys.modules[__name__].__class__ = _Callable
