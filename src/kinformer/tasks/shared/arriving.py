"""Items in batches: of what has come of a stream, and with others of like length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from queue import Empty, Queue
from threading import Thread
from typing import Any, TypeVar

from kinformer.runtime.progress import progressing

T = TypeVar("T")
R = TypeVar("R")
POOL = 16
"""Batches whose items are sorted by length together."""
_END = object()


def arriving(items: Iterator[T], limit: int) -> Iterator[list[T]]:
    """Yield the items in lists of at most ``limit``: of what is there, without waiting for more than one."""
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
    """Yield the items in lists of ``size``, the last of what is left."""
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
    """Yield what ``compute`` makes of the items, in their order; a batch holds items of like ``size``, and few are in
    memory at a time. A bar shows how many of ``total`` are done, unless ``quiet``."""
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
