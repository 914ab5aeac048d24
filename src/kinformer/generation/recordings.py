"""The recordings of a model's steps: they are stored with it, freed with it, and valid as long as it is unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as hooks

_MOST = 4
"""Recordings that a model keeps, one for each batch size and reserved room."""


class Recordings(list[Any]):
    """The last recordings of a model's steps. Copies of the model and files of it have none."""

    def __deepcopy__(self, memo: object) -> Recordings:
        return Recordings()

    def __reduce__(self) -> tuple[type[Recordings], tuple[()]]:
        return Recordings, ()

    def keep(self, recording: object) -> None:
        self.insert(0, recording)
        del self[_MOST:]


def recordings_of(model: nn.Module) -> Recordings:
    """Return the recordings of ``model``, stored in an attribute, so that garbage collection frees them together."""
    retained: Recordings = vars(model).setdefault("_recordings", Recordings())
    retained[:] = [recording for recording in retained if recording.holds()]
    return retained


class Unchanged:
    """A check whether some modules are unchanged: the same submodules, parameters and buffers with the same values, in
    the same mode, without hooks. Other attributes of modules are not compared.

    A look takes some ten microseconds, since loops run in C: a step's lists and objects are made once.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        modules = dict.fromkeys(module for part in parts for module in part.modules())
        self._states = [module.__dict__ for module in modules]
        self._hooks = [state[name] for state in self._states for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._hooks += [hooks._global_forward_hooks, hooks._global_forward_pre_hooks]
        self._tables = [state[name] for state in self._states for name in ("_modules", "_parameters", "_buffers")]
        self._items = self._present()
        self._tensors = [item for item in self._items if isinstance(item, Tensor)]
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._then = self._facts()

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        items = self._present()
        if any(self._hooks) or len(items) != len(self._items) or not all(map(is_, items, self._items)):
            return False
        return self._facts() == self._then

    def _present(self) -> list[object]:
        return list(chain.from_iterable(table.values() for table in self._tables))

    def _facts(self) -> list[object]:
        modes = [(state["training"], state.get("forward")) for state in self._states]
        return [*modes, *map(Tensor.data_ptr, self._tensors), *[tensor._version for tensor in self._versioned]]
