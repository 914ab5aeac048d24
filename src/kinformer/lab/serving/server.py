"""A server for a trained run: the engine in a separate thread, HTTP in the caller's thread."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hmac import compare_digest
from json import dumps
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from kinformer.generation.sampling import ends_of_text
from kinformer.generation.session import require_ids
from kinformer.generation.weights import as_weights, pack
from kinformer.lab.data import Tokenizer
from kinformer.lab.data.labelled import TextItem
from kinformer.lab.data.tokenizer import prompt_ids
from kinformer.lab.runs.options import ServeOptions
from kinformer.lab.runs.run import open_run, require_continuing
from kinformer.lab.serving import answers, fields
from kinformer.lab.serving.answers import Answer, ChatAnswer
from kinformer.lab.serving.engine import BusyError, Engine, Limits
from kinformer.lab.serving.fields import ChatTemplate, FieldError
from kinformer.lab.serving.job import ClientLeftError, Job
from kinformer.lab.serving.requests import Piece
from kinformer.lab.tasks.texts import TextEmbedder
from kinformer.lab.training.checkpoint import place_of_best
from kinformer.lab.training.distributed import heeded
from kinformer.runtime.errors import KinformerError, as_flags, plural
from kinformer.runtime.progress import note

try:
    import uvicorn
    from anyio.to_thread import current_default_thread_limiter
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise KinformerError("serving needs starlette and uvicorn; pip install 'kinformer[serve]'.") from error

# The engine's numbers in the text format of Prometheus.

_ENDED = ("stop", "length", "cancelled", "failed")


def exposition(engine: Engine) -> str:
    """Return all metrics as text, each with its help and its type."""
    counts, limits = engine.counts, engine.limits
    ended = {f'{{reason="{reason}"}}': counts[reason] for reason in _ENDED}
    families = [
        ("kinformer_streams", "gauge", "Sequences that the server continues now.", {"": engine.rows}),
        ("kinformer_streams_limit", "gauge", "Sequences that may be continued.", {"": limits.max_streams}),
        ("kinformer_waiting_requests", "gauge", "Requests that wait for their turn.", {"": engine.waiting}),
        ("kinformer_state_bytes", "gauge", "Bytes that the state of all sequences holds.", {"": engine.state_bytes}),
        ("kinformer_prompt_tokens_total", "counter", "Tokens of prompts absorbed.", {"": counts["prompt"]}),
        ("kinformer_new_tokens_total", "counter", "Tokens drawn.", {"": counts["drawn"]}),
        ("kinformer_steps_total", "counter", "Steps of the batch.", {"": counts["steps"]}),
        ("kinformer_streams_ended_total", "counter", "Sequences that ended, by reason.", ended),
        ("kinformer_requests_refused_total", "counter", "Requests refused as busy.", {"": counts["refused"]}),
    ]
    if limits.max_state_bytes is not None:
        bound = {"": limits.max_state_bytes}
        families.append(("kinformer_state_bytes_limit", "gauge", "Bytes that it may hold.", bound))
    lines = []
    for name, kind, text, values in families:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{label} {value}" for label, value in values.items()]
    return "\n".join(lines) + "\n"


# The server's paths: completions and chats in OpenAI's form, models, health, metrics, and a page to try it.

MOST_BODY = 8 << 20
BODY_SECONDS = 60
"""Seconds that a client has to send a body."""
NEW_TOKENS, NEW_CHAT_TOKENS = 16, 256
"""The tokens drawn for a completion, as at OpenAI, and for a chat, if the request does not give a number."""
EMBEDDED = 16
"""The texts whose vectors are computed together."""
LARGE = 256
"""A part of a stream with more tokens is built outside of the event loop."""
THREADS = 4
"""The threads that read requests and build answers. The event loop waits up to 5 ms for each busy thread."""
PAGE = Path(__file__).parent / "assets" / "page.html"
OPEN = ("/", "/health")
LOCAL = ["127.0.0.1", "localhost", "[::1]", "::1"]
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Turns:
    """A lock that counts the requests that hold it or wait for it (``busy``)."""

    def __init__(self) -> None:
        self.busy, self._lock = 0, asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the other requests, then hold the lock."""
        self.busy += 1
        try:
            async with self._lock:
                yield
        finally:
            self.busy -= 1


@dataclass(frozen=True)
class Served:
    """A model as clients see it: its ``name``, the time when it was made (``created``, in seconds), the ``engine`` that
    continues texts, and the ``seed`` of requests without a seed."""

    name: str
    created: int
    engine: Engine
    embedder: TextEmbedder
    tokenizer: Tokenizer
    template: ChatTemplate | None
    alive: Callable[[], bool]
    seed: int | None
    embedding: Turns = field(default_factory=Turns)

    @property
    def facts(self) -> dict[str, object]:
        """Return the entry of the model in the list of models."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "kinformer"}


def application(served: Served, local: bool, key: str | None = None) -> Starlette:
    """Return the application. A ``local`` application answers only requests to a name of this machine, so that a
    foreign page cannot reach it by its own name with this machine's address (DNS rebinding). With a ``key``, only
    requests that send it are answered (:class:`RequireKey`)."""
    routes = [
        Route("/", _page),
        Route("/health", _health),
        Route("/metrics", _metrics),
        Route("/v1/models", _models),
        Route("/v1/models/{name:path}", _model),
        Route("/v1/completions", partial(_answered, make=_completion_job, kind=Answer), methods=["POST"]),
        Route("/v1/chat/completions", partial(_answered, make=_chat_job, kind=ChatAnswer), methods=["POST"]),
        Route("/v1/embeddings", _embeddings, methods=["POST"]),
    ]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL, www_redirect=False)] if local else []
    if key is not None:
        middleware.append(Middleware(RequireKey, key=key))
    errors: Any = {HTTPException: _http_error, KinformerError: _error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=errors)
    app.state.served = served
    return app


class RequireKey:
    """A middleware that answers 401 to requests without ``key`` in their header ``Authorization: Bearer KEY``. The
    paths :data:`OPEN` stay open: monitors ask for ``/health``, and a browser loads the page before the key is typed."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            # compare_digest takes the same time wherever two keys differ.
            if scheme.lower() != "bearer" or not compare_digest(key.strip().encode("latin-1"), self._key):
                sentence = "the request does not send this server's key; send the header Authorization: Bearer KEY."
                problem = answers.error(sentence, "invalid_request_error", code="invalid_api_key")
                await JSON(problem, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self.app(scope, receive, send)


class JSON(Response):
    """An answer in JSON, whatever characters it holds."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return answers.encoded(content)


class Events(Response):
    """An answer as server-sent events, which ends with ``[DONE]``, or with an error; the client's leaving ends it."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, answer: Answer) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._job, self._answer = job, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        def built(piece: Piece) -> bytes:
            return answers.event(answer.chunk(piece), answers.encoded_by_parts)

        job, answer = self._job, self._answer
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            for opening in answer.opening():
                await write(answers.event(opening))
            async for piece in job.pieces(receive):
                large = len(piece.tokens) > LARGE  # for example a prompt with its scores
                await write(await run_in_threadpool(built, piece) if large else answers.event(answer.chunk(piece)))
            if answer.body.include_usage:
                await write(answers.event(answer.usage_chunk(job.usage)))
        except ClientLeftError:
            return
        except KinformerError as error:
            await write(answers.event(answers.error(str(error), "server_error")))
        await write(answers.DONE, more=False)


def _completion_job(served: Served, data: bytes) -> Job:
    body = fields.read(fields.parse(data), fields.COMPLETION, served.seed)
    _require_model(served, body.model)
    return Job(served.engine, served.tokenizer, body, fields.prompts(body.fields), NEW_TOKENS)


def _chat_job(served: Served, data: bytes) -> Job:
    body = fields.read(fields.parse(data), fields.CHAT, served.seed)
    _require_model(served, body.model)
    if served.template is None:
        raise FieldError(
            "this server lacks a chat template; use /v1/completions, or start it with a `chat_template`.", "messages"
        )
    body = replace(body, stops=(*body.stops, *served.template.stops))
    tools = fields.tools(body.fields)
    if tools and not served.template.reads_tools:
        raise FieldError("this server's chat template does not read tools; leave tools out.", "tools")
    prompt = served.template.prompt(fields.messages(body.fields), tools=tools)
    ids = served.tokenizer.encode(prompt)  # the template writes BOS itself, as in transformers
    return Job(served.engine, served.tokenizer, body, [ids], NEW_CHAT_TOKENS)


async def _embeddings(request: Request) -> Response:
    served: Served = request.app.state.served
    data, waiting = await _body(request), served.engine.limits.max_waiting
    if served.embedding.busy > waiting:
        raise BusyError(f"{waiting} requests for embeddings wait, as many as this server takes; repeat it later.")
    async with served.embedding.turn():
        return await run_in_threadpool(lambda: _large(_embedded(served, data)))


def _embedded(served: Served, data: bytes) -> dict[str, object]:
    """Return the vectors of a request's inputs: the mean of the last hidden states, as ``kinformer embed`` makes it."""
    body = fields.read_embedding(fields.parse(data))
    _require_model(served, body.model)
    embedder = served.embedder
    texts = [
        prompt_ids(embedder.tokenizer, item) if isinstance(item, str) else np.array(item, np.int64)
        for item in body.inputs
    ]
    for place, ids in enumerate(texts):
        if not 0 < len(ids) <= embedder.length:
            tokens = plural(len(ids), "token")
            raise FieldError(
                f"input {place} has {tokens}, but must have 1 to {embedder.length}, as in training; send parts of it.",
                "input",
            )
        require_ids(served.engine.model, int(ids.min()), int(ids.max()))
    pairs = [(TextItem("", ""), ids) for ids in texts]
    parts = (pairs[start : start + EMBEDDED] for start in range(0, len(pairs), EMBEDDED))
    vectors = [item.vector for part in parts for item in embedder(part)]
    shown = [b64encode(vector.tobytes()).decode() if body.base64 else vector.tolist() for vector in vectors]
    entries = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(shown)]
    total = sum(map(len, texts))
    usage = {"prompt_tokens": total, "total_tokens": total}
    return {"object": "list", "data": entries, "model": body.model, "usage": usage}


async def _answered(request: Request, make: Callable[[Served, bytes], Job], kind: type[Answer]) -> Response:
    served: Served = request.app.state.served
    job = await run_in_threadpool(make, served, await _body(request))
    answer = kind(job.body, served.tokenizer, job.choices)
    job.submit()
    if answer.body.stream:
        return Events(job, answer)
    try:
        async for piece in job.pieces(request.receive):
            answer.take(piece)
    except ClientLeftError:
        return Response(status_code=499)
    except KinformerError as error:
        return JSON(answers.error(str(error), "server_error"), 500)
    return await run_in_threadpool(lambda: _large(answer.full(job.usage)))


def _large(content: object) -> Response:
    """Return an answer in JSON that may be large."""
    return Response(answers.encoded_by_parts(content), media_type=JSON.media_type)


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"the body is of the type {ascii(kind)}; send content-type application/json.")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > MOST_BODY:
                    raise HTTPException(413, f"the body has more than {MOST_BODY} bytes; send less.")
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {BODY_SECONDS} seconds; send it faster.") from None
    except ClientDisconnect:
        raise HTTPException(499, "the client left before it had sent the body.") from None
    return bytes(data)


def _require_model(served: Served, name: str) -> None:
    if name != served.name:
        sentence = f"model is {fields.short(name)}, but this server has {served.name!r} alone; request it."
        raise FieldError(sentence, "model", "model_not_found")


async def _page(request: Request) -> Response:
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": POLICY})


async def _health(request: Request) -> Response:
    served: Served = request.app.state.served
    engine, alive = served.engine, served.alive()
    facts = {
        "status": "ok" if alive else "the engine has ended; see the server's output",
        "model": served.name,
        "streams": engine.rows,
        "waiting": engine.waiting,
        "state_bytes": engine.state_bytes,
    }
    return JSON(facts, 200 if alive else 503)


async def _metrics(request: Request) -> Response:
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return PlainTextResponse(exposition(request.app.state.served.engine), media_type=kind)


async def _models(request: Request) -> Response:
    return JSON({"object": "list", "data": [request.app.state.served.facts]})


async def _model(request: Request) -> Response:
    _require_model(request.app.state.served, request.path_params["name"])
    return JSON(request.app.state.served.facts)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = {
        404: f"there is nothing at {request.url.path!r} here; see /v1/models, /v1/completions and /health.",
        405: f"{request.url.path} does not take {request.method}.",
    }.get(error.status_code, error.detail)
    return JSON(answers.error(sentence, "invalid_request_error"), error.status_code, error.headers)


async def _error(request: Request, error: Exception) -> Response:
    if isinstance(error, BusyError):
        return JSON(answers.error(str(error), "rate_limit_error", code="busy"), 429, {"retry-after": "1"})
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    status = 404 if code == "model_not_found" else 400
    return JSON(answers.error(str(error), "invalid_request_error", param, code), status)


_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accepting a connection that pass when other connections end."""
_GRACE = 5
"""Seconds in which connections must end after Ctrl-C."""


class Server:
    """A server for the run in ``folder``; it listens from the beginning, and answers while :meth:`run` runs."""

    def __init__(self, folder: str | Path, options: ServeOptions) -> None:
        run = open_run(folder)
        require_continuing(run, "kinformer generate")
        template, path = None, options.chat_template or run.chat_template
        if path is not None:
            template = ChatTemplate(Path(path), options.chat_stop, run.prompts.get("special_tokens"))
        elif options.chat_stop:
            raise KinformerError(f"`chat_stop`: {folder} lacks a chat template; give a `chat_template` too.")
        self.socket = _listening(options.host, options.port)
        device = options.prepare(0)
        model = as_weights(run.model(options.set).to(device), options.weights)
        if template is not None and template.end and not ends_of_text(model):
            template.stops += (template.end,)
        limits = Limits(
            max_streams=options.max_streams,
            max_state_bytes=options.max_state_bytes or half_of_memory(device),
            max_waiting=options.max_waiting,
            chunk=options.chunk,
        )
        self.engine = Engine(pack(model), limits)
        self._thread = threading.Thread(target=self.engine.run, name="kinformer engine", daemon=True)
        assert run.tokenizer is not None
        self.name = name = options.name or Path(folder).resolve().name
        created = int(os.path.getmtime(place_of_best(run.folder)))
        embedder = TextEmbedder(run, self.engine.model, "mean")
        alive = self._thread.is_alive
        served = Served(name, created, self.engine, embedder, run.tokenizer, template, alive, options.seed)
        host = self.socket.getsockname()[0]
        local, key = host in ("127.0.0.1", "::1"), options.api_key or os.environ.get("KINFORMER_API_KEY") or None
        if not (local or key or options.quiet):
            note("warning: every machine that reaches this address can use the model; give a key in KINFORMER_API_KEY.")
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(
            application(served, local, key),
            log_level="critical" if options.quiet else "warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE,
            lifespan="off",
            http=Connection,
            ws="none",
        )
        self._http = _Http(config, self.engine.close)

    def run(self) -> None:
        """Answer until :meth:`close`, or a signal in the main thread; then end the open requests."""
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
        # asyncio does it for sockets that name their protocol alone. Without it, parts of an answer wait 40 ms for the
        # client's confirmation of the part before.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    """A server that calls ``closing`` at the first signal, so that open streams do not delay its end."""

    def __init__(self, config: uvicorn.Config, closing: Callable[[], None]) -> None:
        super().__init__(config)
        self._closing = closing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and keep the log short while connections cannot be opened."""
        asyncio.get_running_loop().set_exception_handler(sparing(logging.getLogger("uvicorn.error").error))
        current_default_thread_limiter().total_tokens = THREADS
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        threading.Thread(target=self._closing, daemon=True).start()  # in a thread: a signal's handler must not wait
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
    """Return a handler of the event loop's errors that reports a lack of descriptors at most once a second: asyncio's
    own handler logs a traceback for each of the thousands of connections that may wait."""
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
    """Serve the run in ``folder`` until Ctrl-C; ``json``: print the address as one JSON object once it listens."""
    server = Server(folder, options)
    if json:
        print(dumps({"url": server.url, "model": server.name}), flush=True)
    elif not options.quiet:
        note(f"serving {folder} at {server.url} (the page), {server.url}/v1 (OpenAI's clients); Ctrl-C ends it.")
    server.run()


def half_of_memory(device: torch.device) -> int:
    """Return half of the bytes that ``device`` has: a bound of states that leaves room for the weights and prompts."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KinformerError(f"`host` {host}, `port` {port}: cannot listen ({reason}); try `port` 0.") from None
