"""How many rows may be continued at a time, and how large their state may become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kinformer.runtime.errors import KinformerError, require
from kinformer.runtime.fields import Checked
from kinformer.runtime.words import plural
from kinformer.serving.request import Request


@dataclass(frozen=True, kw_only=True)
class Limits(Checked):
    """The bounds of an engine.

    max_streams: rows at a time, a request of n copies being n of them.
    max_state_bytes: of the state that all rows may come to hold together; None for no bound.
    max_waiting: requests that wait for their turn; further ones are refused.
    chunk: tokens of prompts that are absorbed between two steps.
    """

    max_streams: int = 64
    max_state_bytes: int | None = None
    max_waiting: int = 64
    chunk: int = 256

    def __post_init__(self) -> None:
        for name in ("max_streams", "max_state_bytes", "chunk"):
            require(name, getattr(self, name), 1)
        require("max_waiting", self.max_waiting, 0)
        super().__post_init__()


class BusyError(KinformerError):
    """A refusal of a request that may be repeated later, as all rows are taken and enough requests wait."""


class Admission:
    """The rows that are admitted; ``row_bytes(length)`` is the size of a row's state in a batch whose longest row has
    ``length`` tokens."""

    def __init__(self, limits: Limits, row_bytes: Callable[[int], int]) -> None:
        self.limits, self._row_bytes = limits, row_bytes
        self._lengths: Counter[int] = Counter()

    @property
    def rows(self) -> int:
        """Return the number of rows that are admitted."""
        return self._lengths.total()

    def require_rows(self, prompts: int, copies: int) -> None:
        """Raise where ``prompts`` of ``copies`` each can never be accepted at a time."""
        limits = self.limits
        if copies > limits.max_streams:
            raise KinformerError(
                f"n is {copies:,}, but this server continues at most {plural(limits.max_streams, 'sequence')} at a "
                "time (its max_streams); lower n."
            )
        if prompts > limits.max_streams + limits.max_waiting:
            raise KinformerError(
                f"prompt holds {plural(prompts, 'text')}, but this server accepts at most "
                f"{limits.max_streams + limits.max_waiting:,} at a time (its max_streams and max_waiting); send fewer "
                "in a request."
            )

    def require_possible(self, request: Request) -> None:
        """Raise where the request does not even fit by itself."""
        self.require_rows(1, request.copies)
        limits, needed = self.limits, request.copies * self._row_bytes(request.length)
        if limits.max_state_bytes is not None and needed > limits.max_state_bytes:
            raise KinformerError(
                f"{plural(request.copies, 'continuation')} of up to {plural(request.length, 'token')} need a state of "
                f"up to {plural(needed, 'byte')}, but this server holds at most {limits.max_state_bytes:,} "
                "(its max_state_bytes); lower max_tokens or n, or shorten the prompt."
            )

    def fits(self, request: Request) -> bool:
        """Return whether the request fits beside those that are admitted."""
        rows, limits = self.rows + request.copies, self.limits
        if limits.max_state_bytes is None or rows > limits.max_streams:
            return rows <= limits.max_streams
        return rows * self._row_bytes(max([request.length, *self._lengths])) <= limits.max_state_bytes

    def enter(self, request: Request) -> None:
        """Admit all rows of the request."""
        self._lengths[request.length] += request.copies

    def leave(self, request: Request, rows: int = 1) -> None:
        """Release some rows of the request."""
        self._lengths[request.length] -= rows
        self._lengths += Counter()  # forget lengths without rows
