"""The server's paths: completions and chats in OpenAI's form, models, health, metrics, and a page to try it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kinformer.data import Tokenizer
from kinformer.runtime.errors import KinformerError
from kinformer.serving import answers, fields
from kinformer.serving.admission import BusyError
from kinformer.serving.answers import Answer, ChatAnswer
from kinformer.serving.chat import ChatTemplate
from kinformer.serving.engine import Engine
from kinformer.serving.fields import FieldError
from kinformer.serving.job import ClientLeftError, Job
from kinformer.serving.metrics import exposition
from kinformer.serving.text import Piece

MOST_BODY = 8 << 20
BODY_SECONDS = 60
"""Seconds that a client has to send a body."""
NEW_TOKENS, NEW_CHAT_TOKENS = 16, 256
"""Tokens that are drawn where a request does not say how many, as OpenAI's completions do; and in a chat."""
LARGE = 256
"""Tokens from which on a part of a stream is built outside of the event loop."""
PAGE = Path(__file__).parent / "assets" / "page.html"
LOCAL = ["127.0.0.1", "localhost", "[::1]", "::1"]
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@dataclass(frozen=True)
class Served:
    """A model as clients see it: its ``name``, when it was made (``created``, in seconds), the ``engine`` that
    continues texts, and the ``seed`` of requests that name none."""

    name: str
    created: int
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    alive: Callable[[], bool]
    seed: int | None

    @property
    def facts(self) -> dict[str, object]:
        """Return the entry of the model in the list of models."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "kinformer"}


def application(served: Served, local: bool) -> Starlette:
    """Return the application; a ``local`` one answers only those who call it by a name of this machine, so that no
    page of elsewhere can reach it by a name that leads here."""
    routes = [
        Route("/", _page),
        Route("/health", _health),
        Route("/metrics", _metrics),
        Route("/v1/models", _models),
        Route("/v1/models/{name:path}", _model),
        Route("/v1/completions", _completions, methods=["POST"]),
        Route("/v1/chat/completions", _chat, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL, www_redirect=False)] if local else [],
        exception_handlers={HTTPException: _http_error, KinformerError: _error},
    )
    app.state.served = served
    return app


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
            return answers.event(answer.chunk(piece))

        job, answer = self._job, self._answer
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            for opening in answer.opening():
                await write(answers.event(opening))
            async for piece in job.pieces(receive):
                large = len(piece.tokens) > LARGE  # as a prompt with its scores is
                await write(await run_in_threadpool(built, piece) if large else built(piece))
            if answer.body.include_usage:
                await write(answers.event(answer.usage_chunk(job.usage)))
        except ClientLeftError:
            return
        except KinformerError as error:
            await write(answers.event(answers.error(str(error), "server_error")))
        await write(answers.DONE, more=False)


async def _completions(request: Request) -> Response:
    served: Served = request.app.state.served
    job = await run_in_threadpool(_completion_job, served, await _body(request))
    return await _answered(request, job, Answer(job.body, served.tokenizer, job.choices))


def _completion_job(served: Served, data: bytes) -> Job:
    body = fields.read(fields.parse(data), fields.COMPLETION, served.seed)
    _require_model(served, body.model)
    return Job(served.engine, served.tokenizer, body, fields.prompts(body.fields), NEW_TOKENS)


async def _chat(request: Request) -> Response:
    served: Served = request.app.state.served
    job = await run_in_threadpool(_chat_job, served, await _body(request))
    return await _answered(request, job, ChatAnswer(job.body, served.tokenizer, job.choices))


def _chat_job(served: Served, data: bytes) -> Job:
    body = fields.read(fields.parse(data), fields.CHAT, served.seed)
    _require_model(served, body.model)
    if served.template is None:
        raise FieldError(
            "this server has no chat template, so it continues texts only; use /v1/completions, or start it with a "
            "`chat_template`.",
            "messages",
        )
    body = replace(body, stops=(*body.stops, *served.template.stops))
    prompt = served.template.prompt(fields.messages(body.fields))
    ids = served.tokenizer.encode(prompt).tolist()  # the template writes BOS itself, as in transformers
    return Job(served.engine, served.tokenizer, body, [ids], NEW_CHAT_TOKENS)


async def _answered(request: Request, job: Job, answer: Answer) -> Response:
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
    return await run_in_threadpool(lambda: JSON(answer.full(job.usage)))


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
        raise FieldError(
            f"model is {fields.short(name)}, but this server has {served.name!r} alone; request it.",
            "model",
            "model_not_found",
        )


async def _page(request: Request) -> Response:
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": POLICY})


async def _health(request: Request) -> Response:
    served: Served = request.app.state.served
    engine = served.engine
    alive = served.alive()
    facts = {
        "status": "ok" if alive else "the engine has ended; see the server's output",
        "model": served.name,
        "streams": engine.rows,
        "waiting": engine.waiting,
        "state_bytes": engine.state_bytes,
    }
    return JSON(facts, 200 if alive else 503)


async def _metrics(request: Request) -> Response:
    return PlainTextResponse(
        exposition(request.app.state.served.engine), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


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
