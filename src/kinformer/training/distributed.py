"""Several processes on PyTorch's own engine: DDP (Li et al. 2020) and FSDP2, started by torchrun or by ourselves.

Everything is arranged so that one process is the case ``world = 1``: same rows, same losses, same files.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, distributed, nn

from kinformer.runtime.children import safe_path
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.process import begin_process
from kinformer.training.interrupt import SIGNALS, heeded
from kinformer.training.rendezvous import of_this_start, torchruns_store

Strategy = Literal["ddp", "fsdp", "diloco"]
T = TypeVar("T")
B = TypeVar("B")
SIGNALLED = tuple(128 + number for number in SIGNALS)


@dataclass(frozen=True)
class Group:
    """The processes that train one model together; this one has number ``rank`` of ``world``.

    ``tensor`` neighbours compute the same rows, each with a part of the heads; ``context`` of such groups have the
    stretches of the same rows, in order of time, and with ``ring`` pass keys and values on; the ``strategy`` says what
    is shared by those that compute other tokens.
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    strategy: Strategy = "ddp"
    tensor: int = 1
    context: int = 1
    ring: bool = False
    channel: distributed.ProcessGroup | None = None
    """The process group by which they exchange what no engine does; PyTorch's default one if None."""

    def with_new_channel(self) -> Group:
        """Return the same processes with a channel of their own, for a thread beside training; all must call it
        together."""
        return self if self.world == 1 else replace(self, channel=distributed.new_group(backend="gloo"))

    @property
    def replicas(self) -> int:
        """Return how many shares of a batch's rows there are."""
        return self.world // (self.tensor * self.context)

    @property
    def replica(self) -> int:
        """Return the number of the rows' share that this process computes."""
        return self.rank // (self.tensor * self.context)

    @property
    def stretch(self) -> int:
        """Return the number of the stretch of its rows that this process computes, of ``context``."""
        return self.rank // self.tensor % self.context

    @property
    def copies(self) -> int:
        """Return how many processes, or groups that divide one model, compute other tokens."""
        return self.replicas * self.context

    @property
    def first(self) -> bool:
        """Return whether this process writes the files."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Return whether every process holds a part of the weights only."""
        return self.tensor > 1 or (self.world > 1 and self.strategy == "fsdp")

    def exchange(self, engine: nn.Module, wanted: bool) -> AbstractContextManager[None]:
        """Decide whether the backward pass inside exchanges gradients: only the last of accumulated parts needs to."""
        if self.copies > 1 and self.strategy == "fsdp":
            sharded: Any = engine
            sharded.set_requires_gradient_sync(wanted)
        elif self.copies > 1 and self.strategy == "ddp" and self.tensor == 1 and not wanted:
            return cast(nn.parallel.DistributedDataParallel, engine).no_sync()
        return nullcontext()

    def stretch_of(self, batch: B) -> B:
        """Return this process's stretch of the rows of ``batch``."""
        texts: Any = batch
        return batch if self.context == 1 else texts.stretch(self.stretch, self.context)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over processes."""
        return self.sum(values) / self.world

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over processes."""
        if self.world > 1:
            values = values.clone()
            distributed.all_reduce(values, group=self.channel)
        return values

    def largest(self, *numbers: float) -> list[float]:
        """Return the largest of each number over processes."""
        if self.world == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        distributed.all_reduce(values, distributed.ReduceOp.MAX, group=self.channel)
        return values.tolist()

    def on_first(self, function: Callable[[], T]) -> T:
        """Return the result of ``function`` on the first process to all of
        them, or raise its :class:`KinformerError`."""
        if self.world == 1:
            return function()
        outcome: list[tuple[list[T], str | None]] = [([], None)]
        if self.first:
            try:
                outcome = [([function()], None)]
            except KinformerError as error:
                outcome = [([], error.message)]
        distributed.broadcast_object_list(outcome, group=self.channel)
        results, message = outcome[0]
        if message is not None:
            raise KinformerError(message)
        return results[0]

    def on_all(self, function: Callable[[], T]) -> list[T]:
        """Return the results of ``function`` on every process, in order of rank, to all of them, or raise the first
        one's :class:`KinformerError`."""
        outcome: tuple[list[T], str | None]
        try:
            outcome = [function()], None
        except KinformerError as error:
            if self.world == 1:
                raise
            outcome = [], error.message
        outcomes = [outcome] * self.world
        if self.world > 1:
            distributed.all_gather_object(outcomes, outcome, group=self.channel)
        for _, message in outcomes:
            if message is not None:
                raise KinformerError(message)
        return [results[0] for results, _ in outcomes]

    def collect(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Return each process's ``tensors`` (as many, of any shapes) on the CPU of
        the first, in order of rank; else []."""
        tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
        if self.world == 1:
            return [tensors]
        forms: list[list[tuple[torch.Size, torch.dtype]]] = [[]] * self.world
        distributed.all_gather_object(forms, [(tensor.shape, tensor.dtype) for tensor in tensors])
        if not self.first:
            for tensor in tensors:
                distributed.send(tensor, 0)
            return []
        received = [[torch.empty(shape, dtype=dtype) for shape, dtype in form] for form in forms[1:]]
        for rank, parts in enumerate(received, start=1):
            for tensor in parts:
                distributed.recv(tensor, rank)
        return [tensors, *received]


def started_by_torchrun() -> bool:
    """Return whether this process is one of several that torchrun (or another
    launcher that sets its variables) started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def join(device: str, strategy: Strategy, tensor: int = 1, context: int = 1, ring: bool = False) -> Iterator[Group]:
    """Join the group that the launcher's environment variables describe, and leave it in good order at the end.

    Hold no model or optimiser outside of the block.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    local_device = torch.device(device, local) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(local_device)
    store = torchruns_store()
    if store is not None:
        store = of_this_start(store, rank, world)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, rank=rank, world_size=world, store=store)
    try:
        yield Group(local_device, rank, world, strategy, tensor, context, ring)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        shutdown()


def shutdown() -> None:
    """Leave the process group: holders of communication buffers are freed first, since exits abort otherwise."""
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def launch(function: Callable[..., T], arguments: tuple[object, ...], processes: int) -> T:
    """Run ``function(*arguments)`` in ``processes`` new processes of this machine; return the result of the first one.

    A :class:`KinformerError` there is raised here. ``InterruptedError(128 + signal)`` says that a signal ended them; a
    function that obeys a signal has to leave with ``SystemExit(128 + signal)``, since its result is not awaited then.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    # By default PyTorch's launcher also handles a SIGHUP that nohup lets it ignore, and its processes then heed SIGHUP.
    handled = (*(number.name for number in heeded()), "SIGQUIT")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=f"kinformer-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle=",".join(handled),
    )
    withheld = _Withheld()
    try:
        with withheld, safe_path(), _caller_restored():
            outcome = elastic_launch(config, _guarded)(function, arguments)[0]
    except SignalException as ended:
        raise InterruptedError(128 + int(ended.sigval)) from None
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode in SIGNALLED:
            raise InterruptedError(failure.exitcode) from None
        if failure.exitcode < 0:
            killed = KinformerError(
                f"process {rank} of {processes} was killed by {signal.Signals(-failure.exitcode).name} (SIGKILL often "
                "means that memory ran out); continue from the last checkpoint with `resume`."
            )
            killed.add_note(withheld.text)
            raise killed from failed
        withheld.release()
        raise KinformerError(
            f"process {rank} of {processes} ended with exit code {failure.exitcode} (its own message stands above); "
            "continue from the last checkpoint with `resume`."
        ) from None
    if isinstance(outcome, KinformerError):
        raise outcome
    return outcome


@contextmanager
def _caller_restored() -> Iterator[None]:
    """Restore the signals' handlers and Python's random numbers, which PyTorch's launcher changes for good, and remove
    its variable."""
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGQUIT)}
    numbers = random.getstate()
    try:
        yield
    finally:
        random.setstate(numbers)
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


class _Withheld(logging.Filter):
    """A filter that withholds the messages of PyTorch's launcher, which for a killed process hold only its own
    stack."""

    def __init__(self) -> None:
        super().__init__()
        names = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
        self._loggers = [logging.getLogger(name) for name in names]
        self._records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self._records.append(record)
        return False

    def __enter__(self) -> None:
        for logger in self._loggers:
            logger.addFilter(self)

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.removeFilter(self)

    @property
    def text(self) -> str:
        """Return the withheld messages, one per line."""
        return "\n".join(record.getMessage() for record in self._records)

    def release(self) -> None:
        """Log the messages that were withheld."""
        for record in self._records:
            logging.getLogger(record.name).handle(record)


def _guarded(function: Callable[..., T], arguments: tuple[object, ...]) -> T | KinformerError:
    begin_process()
    try:
        return function(*arguments)
    except KinformerError as error:
        return KinformerError(error.message)
