"""Shared by all tasks: the parts of configs that they read, their generated output, and items in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from kinformer.runtime.progress import progressing

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.core.pattern import Raster
    from kinformer.core.stack import ModelConfig


# The parts of models' configs as tasks read them: the fields that all inputs of one kind have.
#
# A task takes models of certain protocols and inputs, so that it may read these fields, whose classes lie above the
# tasks. Free of PyTorch.


class TokenInput(Protocol):
    """An input of ids below ``vocab_size``."""

    vocab_size: int


class PixelInput(Protocol):
    """An input of pixels: an image value by value, or ``joint``, all channels of a pixel at one position."""

    height: int
    width: int
    channels: int
    joint: bool
    classes: int
    shifted: bool

    @property
    def raster(self) -> Raster: ...


class PatchInput(Protocol):
    """An input of patches or tiles, for images of ``size``: rows and columns of pixels. ``before``: how many tokens
    stand before the patches."""

    size: tuple[int, int]
    channels: int
    patch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    before: int
    length: int
    grid: tuple[int, int]

    def replace(self, *, size: tuple[int, ...]) -> Self: ...


class PatchModule(Protocol):
    """An input of patches as a module."""

    @property
    def config(self) -> PatchInput: ...

    def cut(self, values: Tensor) -> Tensor:
        """Return images [rows, channels, height, width] as patches [rows, patches, pixels]."""
        ...

    def grid(self, values: Tensor) -> tuple[int, int]:
        """Return the rows and columns of the patches of images."""
        ...

    def length(self, values: Tensor) -> int:
        """Return how many positions images become."""
        ...


class FrameInput(Protocol):
    """An input of sound: ``width`` frames of ``mels`` bands at a position, ``stride`` frames after the one before."""

    mels: int
    width: int
    stride: int


class StepInput(Protocol):
    """An input of returns, states and actions."""

    state_dim: int
    action_dim: int


class ObservationInput(Protocol):
    """An input of observations and what came of the action before."""

    observation_dim: int


def input_of(config: ModelConfig) -> Any:
    """Return the input of ``config``; the caller names the view that it reads it by."""
    return config.input


def encoder_of(config: ModelConfig) -> ModelConfig:
    """Return the encoder of ``config``, an encoder-decoder."""
    return part_of(config, "encoder")


def part_of(owner: object, name: str) -> Any:
    """Return the part ``name`` of a config or model, which only some have, such as the policy of a head."""
    return getattr(owner, name)


@dataclass(frozen=True)
class Made:
    """The output of tasks that generate something other than continued text.

    ``facts`` are for JSON, ``text`` is for people.
    """

    facts: Mapping[str, object]
    text: str
    interrupted: bool = False


# Items in batches: the arrived items of a stream, and items of similar length.

T = TypeVar("T")
R = TypeVar("R")
POOL = 16
"""Batches whose items are sorted by length together."""
_END = object()


def arriving(items: Iterator[T], limit: int) -> Iterator[list[T]]:
    """Yield the items in lists of at most ``limit``: a list holds the items already there, and waits for one at
    most."""
    queue: Queue[Any] = Queue(maxsize=4 * limit)

    def read() -> None:
        try:
            for item in items:
                queue.put((item, None))
            queue.put((_END, None))
        except BaseException as error:
            queue.put((_END, error))

    Thread(target=read, daemon=True).start()
    error: BaseException | None = None
    at_end = False
    while not at_end:
        batch: list[T] = []
        item, error = queue.get()
        while item is not _END:
            batch.append(item)
            if len(batch) == limit:
                break
            try:
                item, error = queue.get(timeout=0.01)
            except Empty:
                break
        at_end = item is _END
        if batch:
            yield batch
    if error is not None:
        raise error


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of ``size``; the last list has the rest."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def in_batches(
    items: Iterator[T],
    batch_size: int,
    size: Callable[[T], int],
    compute: Callable[[Sequence[T]], Sequence[R]],
    total: int | None = None,
    quiet: bool = True,
) -> Iterator[R]:
    """Yield the results of ``compute`` for the items, in their order; a batch holds items of like ``size``, and few are
    in memory at a time. A bar shows how many of ``total`` are done, unless ``quiet``."""
    done = 0
    with progressing(quiet or total is None, "predicting") as progress:
        for pool in arriving(items, batch_size * POOL):
            order = sorted(range(len(pool)), key=lambda index: size(pool[index]))
            results: list[R | None] = [None] * len(pool)
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                for index, result in zip(chosen, compute([pool[index] for index in chosen]), strict=True):
                    results[index] = result
                done += len(chosen)
                if progress is not None and total is not None:
                    progress(done, total)
            yield from results  # type: ignore[misc]
