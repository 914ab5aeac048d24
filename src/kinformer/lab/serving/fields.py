"""The fields of a request's JSON, as OpenAI's clients send them, checked one by one."""

from __future__ import annotations

import json
import reprlib
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import numpy as np

from kinformer.generation.sampling import Sampling
from kinformer.lab.data.files import plain_bytes
from kinformer.lab.serving.requests import Penalties
from kinformer.runtime.errors import LARGEST, KinformerError, is_of_kind, kind_name, nearest, plural
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment


MOST_STOPS, MOST_STOP_TOKENS, MOST_BIASES, MOST_LOGPROBS, MOST_TOKENS = 4, 64, 1024, 20, 1 << 20
MOST_INPUTS = 2048
"""The most texts of a request for embeddings, as at OpenAI."""
MOST_VALUES = 1 << 17
"""The most values, names and lists of a body: Python's JSON reader blocks all threads, a second for a million names."""
IGNORED = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
"""Fields without effect on the generated text."""
NEUTRAL: Mapping[str, object] = {
    "best_of": 1, "suffix": "", "response_format": {"type": "text"}, "tools": [], "tool_choice": "none",
    "functions": [], "parallel_tool_calls": True, "modalities": ["text"], "reasoning_effort": "none",
}  # fmt: skip
"""Unsupported fields, each with the one value that requests nothing and is accepted."""
SHARED = (
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stream", "stream_options", "stop", "seed",
    "return_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop_token_ids",
    "ignore_eos",
)  # fmt: skip
COMPLETION = (*SHARED, "prompt", "echo", "logprobs")
CHAT = (*SHARED, "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice")
EMBEDDING = ("model", "input", "encoding_format")


class FieldError(KinformerError):
    """A mistake in a request; ``param`` names the field, ``code`` the kind of mistake where clients know one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True, kw_only=True)
class Body:
    """The request of a completion or of a chat: the ``model``, how tokens are drawn, and the form of the answer. A
    request without a seed has a random seed in ``sampling``. ``fields`` are all fields of the request."""

    model: str
    sampling: Sampling
    penalties: Penalties
    max_tokens: int | None
    n: int
    stops: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    fields: Mapping[str, object]


def parse(data: bytes) -> JsonObject:
    """Return the fields in the JSON of ``data``."""
    if len(data) > MOST_VALUES and (count := _count_values(data)) > MOST_VALUES:
        raise FieldError(
            f"the body has {count:,} values, names and lists, but may have at most {MOST_VALUES:,}; send fewer, or ids "
            "as text."
        )
    try:
        fields = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_int=_whole)
    except UnicodeDecodeError as error:
        raise FieldError(f"the body is not UTF-8 ({error.reason} at byte {error.start}); send JSON in UTF-8.") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FieldError(f"the body is no JSON ({reason}); send an object of fields.") from None
    if not isinstance(fields, dict):
        raise FieldError("the body is JSON but no object; send an object of fields such as model and prompt.")
    return fields


def _count_values(data: bytes) -> int:
    """Return the number of commas, colons and opening brackets in the JSON of ``data``, texts left out. NumPy counts
    while other threads run, which a regular expression does not."""
    signs = np.frombuffer(data.replace(rb"\\", b"  ").replace(rb"\"", b"  "), np.uint8)
    inside = np.logical_xor.accumulate(signs == ord('"'))
    return sum(int(np.count_nonzero((signs == sign) & ~inside)) for sign in b",:[{")


def _whole(text: str) -> int:
    """Return a whole number. Other threads can run between two calls, but not inside the JSON reader."""
    return int(text)


def read(fields: Mapping[str, object], supported: tuple[str, ...], seed: int | None = None) -> Body:
    """Return the request in ``fields``; only the ``supported`` fields may request anything. A request without a seed
    gets ``seed``, or a random seed for None."""
    values = _supported(fields, supported)
    options = _mapping(values, "stream_options")
    stream = _value(values, "stream", bool, False)
    if options and not stream:
        raise FieldError("stream_options are given, but stream is false; leave them out.", "stream_options")
    chat, most = "messages" in supported, _count(values, "max_tokens", 0, None, MOST_TOKENS)
    tokens = values.get("stop_token_ids", [])
    if not isinstance(tokens, list) or not all(map(_is_id, tokens)) or len(tokens) > MOST_STOP_TOKENS:
        raise FieldError(f"stop_token_ids must be a list of at most {MOST_STOP_TOKENS} token ids.", "stop_token_ids")
    return Body(
        model=_value(values, "model", str, ""),
        sampling=_sampling(values, seed),
        penalties=Penalties(_penalty(values, "presence_penalty"), _penalty(values, "frequency_penalty"), _bias(values)),
        max_tokens=_count(values, "max_completion_tokens", 0, most, MOST_TOKENS),
        n=_count(values, "n", 1, 1) or 1,
        stops=_stops(values),
        stop_tokens=tuple(tokens),
        ignore_eos=_value(values, "ignore_eos", bool, False),
        logprobs=_chat_logprobs(values) if chat else _count(values, "logprobs", 0, None, MOST_LOGPROBS),
        echo=_value(values, "echo", bool, False),
        stream=stream,
        include_usage=_value(options, "include_usage", bool, False),
        return_token_ids=_value(values, "return_token_ids", bool, False),
        fields=values,
    )


def _supported(fields: Mapping[str, object], supported: tuple[str, ...]) -> dict[str, object]:
    """Return the fields that are not null, after checking that each is supported and that the model is among them."""
    values = {name: value for name, value in fields.items() if value is not None}
    for name, value in values.items():
        if name in supported or name in IGNORED:
            continue
        if name not in NEUTRAL:
            raise FieldError(f"{short(name)} is not a field of this request; {nearest(name, supported)}", name[:40])
        if value != NEUTRAL[name]:
            raise FieldError(f"{name} is {short(value)}, but this server does not support it; leave it out.", name)
    if "model" not in values:
        raise FieldError("the request names no model; give the field model (/v1/models lists what there is).", "model")
    return values


def prompts(fields: Mapping[str, object], name: str = "prompt") -> list[str | list[int]]:
    """Return the prompts in the field ``name``, each a text or a list of token ids."""
    prompt = fields.get(name)
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(map(_is_id, prompt)):
            return [prompt]
        if all(isinstance(item, str) or (isinstance(item, list) and all(map(_is_id, item))) for item in prompt):
            return prompt
    raise FieldError(f"{name} must be a text, a list of texts, a list of token ids, or a list of such lists.", name)


class EmbeddingBody(NamedTuple):
    """A request for embeddings: the ``model``, the ``inputs``, and whether vectors are sent as base64."""

    model: str
    inputs: list[str | list[int]]
    base64: bool


def read_embedding(fields: Mapping[str, object]) -> EmbeddingBody:
    """Return the request for embeddings in ``fields``."""
    values = _supported(fields, EMBEDDING)
    inputs = prompts(values, "input")
    if len(inputs) > MOST_INPUTS:
        raise FieldError(f"input holds {plural(len(inputs), 'text')}, but may hold at most {MOST_INPUTS:,}.", "input")
    form = _value(values, "encoding_format", Literal["float", "base64"], "float")
    return EmbeddingBody(_value(values, "model", str, ""), inputs, form == "base64")


def tools(fields: Mapping[str, object]) -> list[dict[str, object]] | None:
    """Return the tools that the model may call, for the chat template, or None; calls in answers are not parsed."""
    if _value(fields, "tool_choice", Literal["none", "auto"], "auto") == "none":
        return None
    items = fields.get("tools", [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise FieldError("tools must be a list of objects.", "tools")
    return items or None


def messages(fields: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the messages of a chat, each with a ``role`` and its ``content`` as one text, and its other keys."""
    items = fields.get("messages")
    if not isinstance(items, list) or not items:
        raise FieldError("messages must be a list of one message or more.", "messages")
    return [_message(item, place) for place, item in enumerate(items)]


def _message(item: object, place: int) -> dict[str, object]:
    where = f"messages[{place}]"
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise FieldError(f"{where} must be an object with role and content.", where)
    content = item.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] if isinstance(part.get("text"), str) else "" for part in content)
    if content is None and item.get("tool_calls"):
        content = ""  # as OpenAI's clients send an answer that only calls tools
    if not isinstance(content, str):
        raise FieldError(f"{where}.content must be text, or a list of parts of the type text.", where)
    return item | {"content": content} | ({"tool_calls": _tool_calls(item, where)} if "tool_calls" in item else {})


def _tool_calls(message: Mapping[str, object], where: str) -> list[dict[str, Any]]:
    """Return the calls of tools in a message, with arguments as an object, where OpenAI writes JSON in a text."""
    calls = message["tool_calls"] or []
    where = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise FieldError(f"{where} must be a list of objects.", where)
    parsed = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
            raise FieldError(f"{where} must hold objects with a function.", where)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise FieldError(f"the arguments of {where} are not JSON; send an object as JSON.", where) from None
        parsed.append(call | {"function": function | {"arguments": arguments}})
    return parsed


def _sampling(values: Mapping[str, object], seed: int | None) -> Sampling:
    top_k = _value(values, "top_k", int, None)
    return Sampling(
        temperature=_number(values, "temperature", 1.0),
        top_k=None if top_k in (0, -1) else top_k,  # as clients of other servers switch it off
        top_p=_number(values, "top_p", 1.0) if "top_p" in values else None,
        min_p=_number(values, "min_p", 0.0) or None,
        repetition_penalty=_number(values, "repetition_penalty", 1.0),
        seed=_count(values, "seed", 0, secrets.randbits(48) if seed is None else seed, LARGEST - 1),
    )


def _stops(values: Mapping[str, object]) -> tuple[str, ...]:
    stop = values.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
        raise FieldError("stop must be a non-empty text, or a list of non-empty texts.", "stop")
    if len(stops) > MOST_STOPS:
        raise FieldError(f"stop has {plural(len(stops), 'text')}, but may have at most {MOST_STOPS}.", "stop")
    return tuple(stops)


def _penalty(values: Mapping[str, object], name: str) -> float:
    penalty = _number(values, name, 0.0)
    if not -2 <= penalty <= 2:
        raise FieldError(f"{name} is {short(values[name])} but must be a number from -2 to 2.", name)
    return penalty


def _bias(values: Mapping[str, object]) -> tuple[tuple[int, float], ...]:
    """Return the bias of each token; JSON writes the ids as texts."""
    bias: Mapping[str, Any] = _mapping(values, "logit_bias")
    if len(bias) > MOST_BIASES:
        tokens = plural(len(bias), "token")
        raise FieldError(f"logit_bias has {tokens}, but may have at most {MOST_BIASES:,}.", "logit_bias")
    for token, change in bias.items():
        is_token = token.isascii() and token.isdigit() and len(token) < 10
        if not (is_token and is_of_kind(change, float) and -100 <= change <= 100):
            held = f"{short(token)}: {short(change)}"
            raise FieldError(f"logit_bias holds {held}, but must give ids a number from -100 to 100.", "logit_bias")
    return tuple((int(token), float(change)) for token, change in bias.items())


def _chat_logprobs(values: Mapping[str, object]) -> int | None:
    top = _count(values, "top_logprobs", 0, None, MOST_LOGPROBS)
    if not _value(values, "logprobs", bool, False):
        if top is not None:
            raise FieldError("top_logprobs is given, but logprobs is not true; set it.", "top_logprobs")
        return None
    return top or 0


def _mapping(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = values.get(name, {})
    if not isinstance(value, dict):
        raise FieldError(f"{name} is {short(value)} but must be an object.", name)
    return value


def _value(values: Mapping[str, object], name: str, kind: object, default: object) -> Any:
    if name not in values:
        return default
    if not is_of_kind(values[name], kind):
        raise FieldError(f"{name} is {short(values[name])} but must be {kind_name(kind)}.", name)
    return values[name]


def _number(values: Mapping[str, object], name: str, default: float) -> float:
    try:
        return float(_value(values, name, float, default))
    except OverflowError:
        raise FieldError(f"{name} is {short(values[name])} but must be a number below 1e308.", name) from None


def _count(
    values: Mapping[str, object], name: str, minimum: int, default: int | None, maximum: int = 1 << 40
) -> int | None:
    value = _value(values, name, int, default)
    if value is not None and not minimum <= value <= maximum:
        raise FieldError(f"{name} is {short(value)} but must be a whole number from {minimum} to {maximum}.", name)
    return value


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and abs(item) < 1 << 62


def short(value: object) -> str:
    """Return the beginning of ``value`` as text of at most 40 characters, however large the value is."""
    text = reprlib.repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


_OUTPUT: ContextVar[tuple[list[str], list[tuple[int, int]]]] = ContextVar("output")
"""The pieces of text that a template has written, and the ranges between the tags ``generation``."""
MOST_CHARACTERS = 8 << 20
"""The most characters of a prompt, and of a text or a list that a template repeats."""
UNNAMED = {"bos_token": "", "eos_token": ""}
"""The special tokens of a run without any: empty texts, so that templates can add them to a text."""


class ChatTemplate:
    """A Jinja template that makes a prompt of the messages of a chat: the file ``template``, if it is a path, or else
    its text. It comes from the imported model, from the operator or from Kinformer. ``stops``: texts that end an
    answer.

    The template renders the same text as ``apply_chat_template`` of the library transformers, in Jinja's sandbox. It
    can use ``messages``, ``add_generation_prompt`` (true), ``tools`` and ``documents`` (None), the ``special_tokens``
    by name (``bos_token``), ``raise_exception``, ``strftime_now``, a ``tojson`` that keeps letters and order, and the
    tags ``break``, ``continue`` and ``generation``.
    """

    def __init__(
        self, template: str | Path, stops: Sequence[str] = (), special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.stops = tuple(stops)
        self._special_tokens = special_tokens or UNNAMED
        self.source = str(template)
        data = plain_bytes(template) if isinstance(template, Path) else None
        environment = _environment()
        from jinja2.meta import find_undeclared_variables

        try:
            self.source = self.source if data is None else data.decode()
            self._template = environment.from_string(self.source)
            self.reads_tools = "tools" in find_undeclared_variables(environment.parse(self.source))
        except Exception as error:  # the parser also raises the errors of Python's parser, and RecursionError
            raise KinformerError(f"{template}: is not a Jinja template ({_reason(error)}); mend it.") from None

    def prompt(self, messages: Sequence[Mapping[str, Any]], **names: object) -> str:
        """Return the prompt that the template makes of ``messages`` and of other ``names``, such as ``tools``.

        Errors: :class:`FieldError` for messages that the template refuses or cannot render.
        """
        return self._render(messages, names)[0]

    def answers(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, and where the answers begin and end in it, in characters. The tags
        ``generation`` mark the answers; else an answer is the text that the conversation through it adds to the prompt
        before it.

        Errors: the errors of :meth:`prompt`, and ``KinformerError`` where the conversation does not begin with the
        prompt.
        """
        text, spans = self._render(messages, {"add_generation_prompt": False})
        for number, message in enumerate(messages) if not spans else ():
            if message["role"] == "assistant":
                before = self.prompt(messages[:number])
                through = self.prompt(messages[: number + 1], add_generation_prompt=False)
                if not (text.startswith(through) and through.startswith(before)):
                    raise KinformerError(
                        f"the chat template writes the text before message {number + 1} otherwise once later messages "
                        "are there; put {% generation %} and {% endgeneration %} around the answers in the template."
                    )
                spans.append((len(before), len(through)))
        return text, spans

    @property
    def end(self) -> str:
        """The text that ends an answer, such as ``<|im_end|>``, without blanks; empty if the template writes none."""
        messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "\ue000"})
        with suppress(KinformerError):
            return self.prompt(messages, add_generation_prompt=False).rpartition("\ue000")[2].strip()
        return ""

    def _render(
        self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, object]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of ``messages``, and the ranges of characters between the tags ``generation``."""
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens, **names}
        pieces, length = list[str](), 0
        spans = list[tuple[int, int]]()
        _OUTPUT.set((pieces, spans))
        try:
            for piece in self._template.generate(messages=list(messages), **variables):
                length += len(piece)
                if length > MOST_CHARACTERS:
                    raise KinformerError(f"its prompt has more than {MOST_CHARACTERS} characters")
                pieces.append(piece)
        except Exception as error:  # a template may raise anything, as {{ 1 / 0 }} does
            raise FieldError(f"the chat template refuses these messages ({_reason(error)}).", "messages") from None
        return "".join(pieces), spans


def _reason(error: Exception) -> str:
    """Return the message of an error, in one line."""
    text, kind = " ".join(str(error).split())[:200].rstrip("."), type(error).__name__
    if not text:
        return kind  # as of MemoryError
    return text if isinstance(error, KinformerError) else f"{kind}: {text}"


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox with the functions and tags that transformers gives to chat templates."""
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise KinformerError("a chat template needs the package 'jinja2'; pip install 'kinformer[serve]'.") from error

    class Generation(Extension):
        """The tag ``generation`` around the model's own turns. It renders its body unchanged and notes its range."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

        def _rendered(self, caller: Any) -> Any:
            text, (pieces, spans) = caller(), _OUTPUT.get()
            begin = sum(map(len, pieces))
            spans.append((begin, begin + len(text)))
            return text

    class Sandbox(ImmutableSandboxedEnvironment):
        """A sandbox that bounds the repetition of texts and lists."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for one, times in ((left, right), (right, left)):
                if operator == "*" and isinstance(one, str | list | tuple) and isinstance(times, int):
                    _bound(len(one) * times)
            if operator == "**" and isinstance(left, int) and isinstance(right, int):
                _bound(left.bit_length() * right)
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def _bound(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise KinformerError(f"it makes a value of {size} parts, more than {MOST_CHARACTERS}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise KinformerError(str(message) or "it gives no reason")
