"""Chats as prompts, by a Jinja template: the imported model's, or one that the operator gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kinformer.data.files import reading
from kinformer.runtime.errors import KinformerError
from kinformer.serving.fields import FieldError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 8 << 20
"""The most characters of a prompt, and of a text or a list that a template repeats."""
UNNAMED = {"bos_token": "", "eos_token": ""}
"""The special tokens of a run that names none, so that templates can add them to a text."""


class ChatTemplate:
    """The template in the file ``path``, which makes a prompt of ``messages``; ``stops`` end an answer.

    It renders what ``apply_chat_template`` of the library transformers renders, in Jinja's sandbox: with ``messages``,
    ``add_generation_prompt`` (true), ``tools`` and ``documents`` (None), the ``special_tokens`` by name
    (``bos_token``), ``raise_exception``, ``strftime_now``, a ``tojson`` that keeps letters and order, and the tags
    ``break``, ``continue`` and ``generation``.
    """

    def __init__(
        self, path: str | Path, stops: Sequence[str] = (), special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.stops = tuple(stops)
        self._special_tokens = special_tokens or UNNAMED
        with reading(path):
            source = Path(path).read_text(encoding="utf-8")
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # the parser also raises what Python's own parser does, and RecursionError
            raise KinformerError(f"{path}: is not a Jinja template ({_reason(error)}); mend it.") from None

    def prompt(self, messages: Sequence[Mapping[str, Any]], **names: object) -> str:
        """Return the prompt that the template makes of ``messages``; ``names``: what else it reads, such as ``tools``.

        Errors: :class:`FieldError` for messages that the template refuses or cannot render.
        """
        variables = (
            {"tools": None, "documents": None, "add_generation_prompt": True} | dict(self._special_tokens) | names
        )
        pieces, length = [], 0
        try:
            for piece in self._template.generate(messages=list(messages), **variables):
                length += len(piece)
                if length > MOST_CHARACTERS:
                    raise KinformerError(f"its prompt has more than {MOST_CHARACTERS} characters")
                pieces.append(piece)
        except Exception as error:  # a template may raise anything, as {{ 1 / 0 }} does
            raise FieldError(f"the chat template refuses these messages ({_reason(error)}).", "messages") from None
        return "".join(pieces)


def _reason(error: Exception) -> str:
    """Return what an error says, in one line."""
    text = " ".join(str(error).split())[:200].rstrip(".")
    return text if isinstance(error, KinformerError) or not text else f"{type(error).__name__}: {text}"


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox with what transformers gives to chat templates."""
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise KinformerError(
            "a chat template needs the package 'jinja2', which is not installed; pip install 'kinformer[serve]'."
        ) from error

    class Generation(Extension):
        """The tag ``generation`` around the model's part of a chat. The tag changes nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

        def _rendered(self, caller: Any) -> Any:
            return caller()

    class Sandbox(ImmutableSandboxedEnvironment):
        """A sandbox in which no text or list is repeated beyond all bounds."""

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
    raise KinformerError(str(message))
