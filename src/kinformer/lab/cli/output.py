"""The output of commands: JSON, text, tables (framed on a terminal, plain in a pipe) and notes."""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path

from kinformer import __version__
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import plural
from kinformer.runtime.parsing import dump_json
from kinformer.runtime.progress import LOGGER, tolerant

BEGUN: ContextVar[float | None] = ContextVar("begun", default=None)
"""The time at which the command began, by ``time.monotonic()``."""


def age_of_process() -> float:
    """Return the seconds since the start of this process on Linux; 0 on systems that do not tell."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def print_json(data: object) -> None:
    """Print ``data`` as indented JSON."""
    print(dump_json(data, indent=2))


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return ``text`` of others with its control characters, which a terminal would obey, spelled out."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def shown(text: str) -> str:
    """Return the text of a model: for a terminal :func:`printable`, without the CR of lines, for a pipe unchanged."""
    return printable(text.replace("\r", "")) if sys.stdout.isatty() else text


@contextmanager
def printing_notes(quiet: bool = False) -> Iterator[None]:
    """Print the library's notes on standard error within the context; with ``quiet`` drop the notes."""
    if quiet:
        yield
        return
    handler, level = _Notes(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


@contextmanager
def reporting(verbose: bool, device: str | None) -> Iterator[None]:
    """With ``verbose``, print versions and ``device`` on standard error, at the end the command's time and memory."""
    if not verbose:
        yield
        return
    started_at, out = time.monotonic(), tolerant(sys.stderr)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "safetensors"))  # without imports
    if device is not None:
        packages += f", device {device}"
    print(f"kinformer {__version__}, Python {platform.python_version()}, {packages}", file=out, flush=True)
    yield
    torch = sys.modules.get("torch")
    threads = "" if torch is None else f" with {plural(torch.get_num_threads(), 'thread')}"
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used, peak = usage.ru_utime + usage.ru_stime, size(usage.ru_maxrss * 1024)
    took = f"{time.monotonic() - started_at:.1f} s{threads}, {used:.1f} s of processor time, at most {peak} of memory"
    print(f"kinformer: {took}", file=out, flush=True)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"kinformer: {printable(record.getMessage())}", file=tolerant(sys.stderr), flush=True)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[int] = ()) -> None:
    """Print a table; the columns in ``numeric`` are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_framed(headers, cells, numeric)
        return
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    for row in [list(headers), *cells]:
        pairs = enumerate(zip(row, widths, strict=True))
        aligned = (cell.rjust(width) if index in numeric else cell.ljust(width) for index, (cell, width) in pairs)
        print("  ".join(aligned).rstrip())


def _print_framed(headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in numeric else "left", overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


# The process of a command: its standard streams, its garbage collection, and its settings for computing.


@contextmanager
def started(is_command: bool) -> Iterator[None]:
    """Turn garbage collection off until :func:`set_up`, because imports make no garbage. This is for a command in a
    separate process alone; a caller's process keeps its setting."""
    if not is_command:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if "triton" in sys.modules:
            # Triton 3.9 prints a page of leaks at exit for each of its objects that Python does not collect, which it
            # does not do with frozen objects. Without Triton the search would cost a short command its time.
            gc.unfreeze()


def set_up(computes: bool, is_command: bool, fast_products: bool = True) -> AbstractContextManager[None]:
    """Set up the process for a command that computes.

    is_command: whether the process belongs to the command. Otherwise the returned context restores the caller's
        settings.
    fast_products: whether large products may use oneDNN.

    After this call garbage is collected, but without a search of the objects that exist now: such a search takes two
    fifths of a short command's time (``benchmarks/first_seconds.py``). So commands that compute first load the parts of
    models.
    """
    if computes:
        from kinformer.runtime.process import begin_process, preserved

        if is_command:
            from kinformer.family.kinds import kinds

            begin_process(fast_products)
            kinds()
    if is_command:
        gc.freeze()
        gc.enable()
    return preserved() if computes else nullcontext()


def open_standard_streams() -> None:
    """Open closed standard streams on the null device; otherwise the next open file would take their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = (stream or tolerant(stream) for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a question mark for a character that the terminal cannot show
            stream.reconfigure(errors="replace")
