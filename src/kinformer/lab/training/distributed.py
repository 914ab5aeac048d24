"""Several processes on PyTorch's own engines, DDP (Li et al. 2020) and FSDP2, started by torchrun or by Kinformer. One
process is the case ``world = 1``: it has the same rows, losses and files."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal, TypeVar, cast
from uuid import uuid4

import torch
from torch import Tensor, distributed, nn
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kinformer.core.contract import ReadsSource
from kinformer.core.model import modules_of
from kinformer.core.stack import Stack, sparse_tables, units_of
from kinformer.lab.children import safe_path
from kinformer.lab.training.data_module import DataModule, ObjectiveModule
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.process import begin_process

# Ctrl-C, a scheduler's SIGTERM and a terminal's SIGHUP end a run in good order: after the step, with a checkpoint.

Handler = Callable[[int, FrameType | None], object] | int | None

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_SECONDS = 1.0


class Interrupt:
    """A context manager that handles signals. It notes the first signal in ``signal`` and reports it unless ``quiet``;
    a second signal ends the process at once.

    A terminal that closes sends SIGHUP twice, so a second SIGHUP changes nothing. Under nohup SIGHUP stays ignored.
    A launcher repeats the signal that the terminal has already sent to all processes. With ``echoed`` a second signal
    within ``ECHO_SECONDS`` therefore counts as the first.
    """

    def __init__(self, echoed: bool = False, quiet: bool = True) -> None:
        self.signal, self.quiet = 0, quiet
        self._echo = ECHO_SECONDS if echoed else 0.0
        self._at = 0.0
        self._before: dict[int, Handler] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in heeded()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._at = number, time.monotonic()
            text = f"kinformer: {signal.Signals(number).name}: finishing this step, then saving.\n"
            if not self.quiet:  # straight to the descriptor: Python's own stream may be in the middle of a write
                with suppress(OSError):
                    os.write(2, text.encode())
        elif number != signal.SIGHUP and time.monotonic() - self._at >= self._echo:
            os._exit(128 + number)


def heeded() -> tuple[signal.Signals, ...]:
    """Return the signals that end this process: without SIGHUP where the process ignores it, as under nohup."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in SIGNALS if not (nohup and number == signal.SIGHUP))


# Processes that torchrun starts find each other in torchrun's store, with a prefix that every start has for itself.
#
# torchrun's store outlives a start, under its rendezvous "static" and "c10d" alike. Without the prefix the next
# processes would find the entries of dead processes, and would connect to an address at which nobody answers.

_PAUSE = 0.01


def job_id() -> str | None:
    """Return the name of torchrun's job (``--rdzv-id``), the same in all its starts; None for a job without a name."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def of_this_start(store: Store, rank: int, world: int) -> Store:
    """Return ``store`` with a prefix that process ``rank`` shares with the ``world`` processes of this start alone.

    The first process makes the prefix. Every other process asks for it with a new word, so that it cannot read an old
    answer, and confirms the answer, so that the first process knows which processes still wait.

    Errors: ``TimeoutError`` where a process does not come within PyTorch's time for a collective.
    """
    if rank:
        word = uuid4().hex
        store.set(f"ask/{rank}", word)
        store.wait([f"answer/{word}"], default_pg_timeout)
        name = store.get(f"answer/{word}").decode()
        store.set(f"heard/{name}/{rank}", "")
        return PrefixStore(name, store)
    name, missing = uuid4().hex, set(range(1, world))
    end = time.monotonic() + default_pg_timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"heard/{name}/{other}"]):
                missing.discard(other)
            elif store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", name)
        if time.monotonic() > end:
            raise TimeoutError(f"process {min(missing)} of {world} did not come")
        time.sleep(_PAUSE)
    return PrefixStore(name, store)


Strategy = Literal["ddp", "fsdp"]
T = TypeVar("T")
B = TypeVar("B")
SIGNALLED = tuple(128 + number for number in SIGNALS)


@dataclass(frozen=True)
class Group:
    """The processes that train one model together; this one has number ``rank`` of ``world``. ``tensor`` neighbours
    compute the same rows, each with a part of the heads. ``context`` such groups have the stretches of the same rows,
    in order of time, and with ``ring`` circulate keys and values. With the ``strategy`` fsdp, processes with other
    tokens share the weights."""

    device: torch.device
    rank: int = 0
    world: int = 1
    strategy: Strategy = "ddp"
    tensor: int = 1
    context: int = 1
    ring: bool = False
    channel: distributed.ProcessGroup | None = None
    """The process group for all exchanges outside of the engines; PyTorch's default group if None."""

    def with_new_channel(self) -> Group:
        """Return the same processes with another channel, for a thread beside training; all must call together."""
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
        """Decide whether the backward pass inside exchanges gradients: only the last accumulated part needs it."""
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
        """Return the first process's result of ``function`` to all, or raise its :class:`KinformerError` on all."""
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
        """Return every process's result of ``function``, in order, to all, or raise its :class:`KinformerError`."""
        if self.world == 1:
            return [function()]
        outcome: tuple[list[T], str | None]
        try:
            outcome = [function()], None
        except KinformerError as error:
            outcome = [], error.message
        outcomes = [outcome] * self.world
        distributed.all_gather_object(outcomes, outcome, group=self.channel)
        for _, message in outcomes:
            if message is not None:
                raise KinformerError(message)
        return [results[0] for results, _ in outcomes]

    def collect(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Return each process's ``tensors``, of any shapes, on the CPU of the first, in order of rank; else []."""
        tensors = [tensor.detach().cpu() for tensor in tensors]
        if self.world == 1:
            return [tensors]
        everyone: list[Any] = [None] * self.world if self.first else []
        # A copy of each: a pickled view holds all the memory that it is a view of.
        distributed.gather_object([tensor.clone() for tensor in tensors], everyone or None)
        return everyone


def started_by_torchrun() -> bool:
    """Return whether torchrun, or a launcher that sets its variables, started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def join(device: str, strategy: Strategy, tensor: int = 1, context: int = 1, ring: bool = False) -> Iterator[Group]:
    """Join the process group of the launcher's environment variables, and leave it cleanly at the end. Hold no model or
    optimiser outside of the block."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    local_device = torch.device(device, local) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(local_device)
    store: Store | None = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
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
    """Leave the process group, after freeing holders of communication buffers: otherwise the process aborts."""
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def launch(function: Callable[..., T], arguments: tuple[object, ...], processes: int) -> T:
    """Run ``function(*arguments)`` in ``processes`` new processes of this machine; return the result of the first one.

    A :class:`KinformerError` there is raised here. ``InterruptedError(128 + signal)`` says that a signal ended the
    processes. A function that obeys a signal must leave with ``SystemExit(128 + signal)``.
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
    """Restore the signals' handlers, Python's random numbers and the environment, which PyTorch's launcher changes."""
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
    """A filter that withholds the messages of PyTorch's launcher, which hold only the launcher's stack
    where a process was killed."""

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


# The engines behind a group of processes: DDP, FSDP2 and tensor parallelism, alone or one over the other.


def wrapped(step: ObjectiveModule, group: Group, keeps: bool = False) -> nn.Module:
    """Return ``step`` behind the engine of ``group``; ``keeps``: whether states are carried."""
    check_shared(step, group)
    if group.world == 1:
        return step
    if group.tensor == 1:
        _share_time(step, group, keeps)
        if group.strategy == "ddp":
            return nn.parallel.DistributedDataParallel(step)
    if group.tensor > 1:
        from kinformer.lab.training.tensor_parallel import parallelize

        # DTensor warns that norms and checkpoints are gathered along one axis after the other.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        sizes = (group.copies, group.tensor)
        mesh = init_device_mesh(group.device.type, sizes, mesh_dim_names=("replicas", "tp"))
        step.layouts = parallelize(step, mesh["tp"])
        _share_time(step, group, keeps)  # after the division, whose parts are new modules
        if group.copies == 1:
            return step
        if group.strategy == "ddp":
            step.replicas = mesh["replicas"].get_group()
            return step
        return _sharded(step, mesh["replicas"])
    return _sharded(step, init_device_mesh(group.device.type, (group.world,)))


def _share_time(step: ObjectiveModule, group: Group, keeps: bool) -> None:
    if group.context > 1:
        from kinformer.lab.training.context_parallel import groups_of, share_time

        processes = groups_of(group.replicas, group.context, group.tensor)
        share_time(step, processes, keeps, group.ring)


def _sharded(step: ObjectiveModule, mesh: DeviceMesh) -> nn.Module:
    """Cut the weights of ``step`` along ``mesh``, unit by unit, in place."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # Layers return slices of their state and never write into them, which is what this warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for unit in units_of(step.model):
        fully_shard(unit, mesh=mesh)
        if modules_of(unit, ReadsSource):  # whose weights project the source before the unit's forward
            register_fsdp_forward_method(unit, "initial_state")
    return cast(nn.Module, fully_shard(step, mesh=mesh))


def average_gradients(engine: nn.Module) -> None:
    """Replace gradients by their means over the replicas of a divided model, if no engine averages them."""
    replicas = getattr(engine, "replicas", None)
    if replicas is None:
        return
    count = distributed.get_world_size(replicas)
    gradients = [cast(Any, item.grad).to_local() for item in engine.parameters() if item.grad is not None]
    for work in [distributed.all_reduce(gradient, group=replicas, async_op=True) for gradient in gradients]:
        assert work is not None
        work.wait()
    torch._foreach_div_(gradients, count)


def check_divided(data: DataModule, objective: object, settings: Settings, group: Group) -> None:
    """Raise for runs of several processes that do more with the model than compute losses of its rows."""
    if group.context > 1:
        place = f"`parallel` {'ring' if group.ring else 'cp'}={group.context}"
        if not (data.by_time and getattr(objective, "by_token", False)):
            raise KinformerError(
                f"{place}: only rows of text can be cut along time, for losses of each token or label; train with the "
                "task next-token, mlm, classify or translate and its first objective, or leave it out."
            )
        check_length(settings, group)
        if settings.compile:
            raise KinformerError(f"{place}: `compile` does not see what processes send each other; leave one out.")
    if group.tensor == 1:
        return
    if type(data).begin is not DataModule.begin:
        raise KinformerError(f"`parallel` tp={group.tensor}: the whole model makes rows of this task; leave tp out.")
    if settings.compile:
        raise KinformerError(
            f"`parallel` tp={group.tensor}: `compile` does not see the processes' sums; leave one out."
        )


def check_length(settings: Settings, group: Group) -> None:
    """Raise for rows whose time cannot be cut into stretches of one length."""
    if settings.length % group.context:
        place = f"`parallel` {'ring' if group.ring else 'cp'}={group.context}"
        multiple = f"give a multiple of {group.context}"
        raise KinformerError(f"{place}: does not divide `length` {settings.length}; {multiple}.")


def check_shared(model: nn.Module, group: Group) -> None:
    """Raise for models that several processes cannot train together."""
    if group.world == 1:
        return
    if group.world % (group.tensor * group.context):
        sizes = f"tp={group.tensor}" if group.context == 1 else f"tp={group.tensor},cp={group.context}"
        raise KinformerError(f"`parallel` {sizes}: does not divide {group.world} processes; give a divisor.")
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise KinformerError(
            f"`devices` {group.world}: the norm 'batch' sees the tokens of one process only; train in one process, or "
            "with `set` layers.*.feed_forward.norm=layer."
        )
    if group.strategy == "fsdp" and any(not stack.shardable for stack in model.modules() if isinstance(stack, Stack)):
        raise KinformerError(
            "`strategy` fsdp: a stack that computes layers again from their outputs needs whole weights then; train "
            "with `strategy` ddp, or with `set` stack=sequential."
        )
    if sparse_tables(model) and (group.strategy == "fsdp" or group.device.type != "cpu"):
        where = "`strategy` fsdp" if group.strategy == "fsdp" else f"`devices` {group.world} on GPUs"
        raise KinformerError(
            f"{where}: a table with sparse gradients cannot be shared; train in one process, with `strategy` ddp on a "
            "CPU, or with `set` layers.N.feed_forward.sparse=false."
        )
