"""The recordings of a model's steps: they are stored with it, freed with it, and valid as long as it is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Protocol

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from kinformer.core.model import Model
from kinformer.core.state import State

_LIMIT = 4
"""Recordings that a model keeps, one for each batch size and reserved room."""


class RunningSteps(Protocol):
    """A recording at work, and the state that it steps."""

    @property
    def goes_on(self) -> bool:
        """Return whether another step can be made: there is room for a token, and the model is unchanged."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, vocab] after ``tokens`` [batch, 1], which the state absorbs."""
        ...

    def release(self) -> State:
        """Return the state, for steps in Python; this object must not be used any more."""
        ...


class StepRecording(Protocol):
    """A recording of a model's step."""

    @property
    def holds(self) -> Callable[[], bool]:
        """Return a check whether the model is unchanged since the recording."""
        ...

    def begin(self, state: State) -> RunningSteps | None:
        """Return steps from ``state`` on; None where the recording is not for such a state."""
        ...


class Recordings(list[StepRecording]):
    """The last recordings of a model's steps. Copies of the model and files of it have none."""

    def __deepcopy__(self, memo: object) -> Recordings:
        return Recordings()

    def __reduce__(self) -> tuple[type[Recordings], tuple[()]]:
        return Recordings, ()

    def keep(self, recording: StepRecording) -> None:
        self.insert(0, recording)
        del self[_LIMIT:]


def recordings_of(model: Model | nn.Module) -> Recordings:
    """Return the recordings of ``model``, stored in an attribute, so that garbage collection frees them together."""
    retained: Recordings = vars(model).setdefault("_recordings", Recordings())
    retained[:] = [recording for recording in retained if recording.holds()]
    return retained


class Unchanged:
    """A check whether some modules are unchanged: the same submodules, parameters and buffers with the same values, in
    the same mode, without hooks. Other attributes of modules are not compared.

    A look takes some ten microseconds, since loops run in C: a step's lists and objects are made once.
    """

    def __init__(self, parts: Sequence[Model | nn.Module]) -> None:
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
