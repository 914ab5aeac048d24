"""A server for a trained run: the engine in a thread of its own, HTTP in the caller's."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from types import FrameType

import torch

from kinformer.generation.packed import pack
from kinformer.runs.continuing import require_continuing
from kinformer.runs.run import open_run
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.progress import note
from kinformer.serving.admission import Limits
from kinformer.serving.chat import ChatTemplate
from kinformer.serving.engine import Engine
from kinformer.serving.options import ServeOptions
from kinformer.training.best import place_of_best
from kinformer.training.interrupt import heeded

try:
    import uvicorn
except ImportError as error:
    raise KinformerError(
        "serving needs the packages 'starlette' and 'uvicorn', which are not installed; run pip install "
        "'kinformer[serve]'."
    ) from error

_GRACE = 5
"""Seconds that connections have to end in after Ctrl-C."""


class Server:
    """A server for the run in ``folder``; it listens from the beginning, and answers while :meth:`run` runs."""

    def __init__(self, folder: str | Path, options: ServeOptions) -> None:
        from kinformer.serving.app import Served, application

        run = open_run(folder)
        require_continuing(run, "kinformer generate")
        template = None
        if options.chat_template is not None:
            template = ChatTemplate(options.chat_template, options.chat_stop)
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
        )
        self._http = _Http(config, self.engine.close)

    def run(self) -> None:
        """Answer until :meth:`close`, or a signal in the main thread; then end what is being continued."""
        self._thread.start()
        try:
            self._http.run(sockets=[self.socket])
        finally:
            self.engine.close()
            self._thread.join()
            self.socket.close()

    def close(self) -> None:
        """Let :meth:`run` return; any thread may call this."""
        self.engine.close()
        self._http.should_exit = True


class _Http(uvicorn.Server):
    """A server that calls ``closing`` at the first signal, so that no stream holds it up."""

    def __init__(self, config: uvicorn.Config, closing: Callable[[], None]) -> None:
        super().__init__(config)
        self._closing = closing

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
