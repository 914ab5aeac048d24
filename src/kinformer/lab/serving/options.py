"""The options of serving a run: keywords in Python, flags on the command line. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kinformer.lab.runs.options import RunOptions
from kinformer.runtime.errors import KinformerError, require, require_seed


@dataclass(frozen=True, kw_only=True)
class ServeOptions(RunOptions):
    """The options of a server for a trained run."""

    host: str = "127.0.0.1"
    """Where to listen: this machine alone, or 0.0.0.0 for all of its networks. The server is without a password."""
    port: int = 8000
    """The port; 0 takes a free one."""
    name: str | None = None
    """What clients call the model; the folder's name if not given."""
    max_streams: int = 64
    """Sequences to continue at a time, as one batch."""
    max_state_bytes: int | None = None
    """Bytes that the state of all sequences together may come to hold; no bound if not given."""
    max_waiting: int = 64
    """Requests that may wait for their turn; further ones are refused (429)."""
    chunk: int = 256
    """Tokens of prompts to absorb between two steps."""
    chat_template: str | None = None
    """A Jinja template that turns the messages of a chat into a prompt; an imported model's own if not given."""
    chat_stop: tuple[str, ...] = ()
    """End the answer of a chat before this text; may be given again."""
    seed: int | None = None
    """The seed of requests that name none; a new one for each if not given."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights in memory."""
    quiet: bool = False
    """Print nothing but errors."""

    def __post_init__(self) -> None:
        for name in ("max_streams", "max_state_bytes", "chunk"):
            require(name, getattr(self, name), 1)
        for name in ("port", "max_waiting"):
            require(name, getattr(self, name), 0)
        require_seed(self.seed)
        if self.port > 65535:
            raise KinformerError(f"`port` is {self.port} but must be at most 65535.")
        if not all(self.chat_stop):
            raise KinformerError("`chat_stop` is empty; give one character or more, or leave it out.")
        super().__post_init__()
