"""A server for a trained run: the engine in a thread of its own, HTTP in the caller's."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from kinformer.generation.packed import pack
from kinformer.runs.continuing import require_continuing
from kinformer.runs.run import open_run
from kinformer.runtime.errors import KinformerError, as_flags
from kinformer.runtime.progress import note
from kinformer.serving.admission import Limits
from kinformer.serving.chat import ChatTemplate
from kinformer.serving.engine import Engine
from kinformer.serving.options import ServeOptions
from kinformer.training.best import place_of_best
from kinformer.training.interrupt import heeded

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise KinformerError(
        "serving needs the packages 'starlette' and 'uvicorn', which are not installed; run pip install "
        "'kinformer[serve]'."
    ) from error

_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accepting a connection that pass when others end."""
_GRACE = 5
"""Seconds that connections have to end in after Ctrl-C."""


class Server:
    """A server for the run in ``folder``; it listens from the beginning, and answers while :meth:`run` runs."""

    def __init__(self, folder: str | Path, options: ServeOptions) -> None:
        from kinformer.serving.app import Served, application

        run = open_run(folder)
        require_continuing(run, "kinformer generate")
        template, path = None, options.chat_template or run.chat_template
        if path is not None:
            template = ChatTemplate(path, options.chat_stop, run.prompts.get("special_tokens"))
        elif options.chat_stop:
            raise KinformerError(
                f"`chat_stop` ends answers of chats, but {folder} comes without a chat template; give a "
                "`chat_template` too."
            )
        self.socket = _listening(options.host, options.port)
        device = options.prepare(0)
        model = run.model(options.set).to(device, torch.bfloat16 if options.weights == "bf16" else None)
        limits = Limits(
            max_streams=options.max_streams,
            max_state_bytes=options.max_state_bytes,
            max_waiting=options.max_waiting,
            chunk=options.chunk,
        )
        self.engine = Engine(pack(model, options.max_streams), limits)
        self._thread = threading.Thread(target=self.engine.run, name="kinformer engine", daemon=True)
        assert run.tokenizer is not None
        self.name = name = options.name or Path(folder).resolve().name
        created = int(os.path.getmtime(place_of_best(run.folder)))
        served = Served(name, created, self.engine, run.tokenizer, template, self._thread.is_alive, options.seed)
        host = self.socket.getsockname()[0]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(
            application(served, host in ("127.0.0.1", "::1")),
            log_level="critical" if options.quiet else "warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE,
            lifespan="off",
            http=Connection,
            ws="none",
        )
        self._http = _Http(config, self.engine.close)

    def run(self) -> None:
        """Answer until :meth:`close`, or a signal in the main thread; then end what is being continued."""
        self._thread.start()
        try:
            with as_flags(False):  # clients send fields, also where a command started the server
                self._http.run(sockets=[self.socket])
        finally:
            self.engine.close()
            self._thread.join()
            self.socket.close()

    def close(self) -> None:
        """Let :meth:`run` return; any thread may call this."""
        self.engine.close()
        self._http.should_exit = True


class Connection(H11Protocol):
    """A connection that ends when its client takes too long to send the head of a request, or to read an answer."""

    head_seconds = 20.0
    unread_seconds = 60.0
    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(self.head_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(self.head_seconds, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head)
        _cancel(self._unread)
        super().connection_lost(exc)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _Http(uvicorn.Server):
    """A server that calls ``closing`` at the first signal, so that no stream holds it up."""

    def __init__(self, config: uvicorn.Config, closing: Callable[[], None]) -> None:
        super().__init__(config)
        self._closing = closing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and keep the log short while no connection can be opened."""
        asyncio.get_running_loop().set_exception_handler(sparing(logging.getLogger("uvicorn.error").error))
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        threading.Thread(target=self._closing, daemon=True).start()  # which may wait, as a signal's handler must not
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGHUP ends the server as SIGTERM does; a server that was started under nohup ignores SIGHUP."""
        with super().capture_signals():
            hears = threading.current_thread() is threading.main_thread() and signal.SIGHUP in heeded()
            before = signal.signal(signal.SIGHUP, self.handle_exit) if hears else None
            try:
                yield
            finally:
                if hears:  # before uvicorn repeats the signal, which then ends the process
                    signal.signal(signal.SIGHUP, before)


def sparing(say: Callable[[str], None]) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return a handler of the event loop's errors which says at most once a second that descriptors are lacking.

    asyncio's own handler logs a traceback for each of the thousands of connections that may wait.
    """
    last = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        if getattr(context.get("exception"), "errno", None) not in _LACKING:
            loop.default_exception_handler(context)
        elif loop.time() - last >= 1:
            last = loop.time()
            say("new connections wait, because the system has run out of descriptors or memory; raise `ulimit -n`.")

    return handle


def serve(folder: str | Path, options: ServeOptions, json: bool = False) -> None:
    """Serve the run in ``folder`` until Ctrl-C; ``json``: print where, as one JSON object, once it listens."""
    server = Server(folder, options)
    if json:
        print(dumps({"url": server.url, "model": server.name}), flush=True)
    elif not options.quiet:
        note(f"serving {folder} at {server.url} (the page), {server.url}/v1 (OpenAI's clients); Ctrl-C ends it.")
    server.run()


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``host`` and ``port``."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KinformerError(
            f"`host` {host}, `port` {port}: cannot be listened at ({reason}); `port` 0 takes a free one."
        ) from None
