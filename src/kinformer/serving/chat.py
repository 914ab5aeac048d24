"""Chats as prompts, by a Jinja template that the operator gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kinformer.data.files import reading
from kinformer.runtime.errors import KinformerError
from kinformer.serving.fields import FieldError


class ChatTemplate:
    """The template in the file ``path``, which makes a prompt of ``messages``; ``stops`` end an answer.

    It is rendered in Jinja's sandbox with ``messages``, ``add_generation_prompt`` (true), and the functions that
    templates of transformers' tokenizers use: ``raise_exception`` and the filter ``tojson``.
    """

    def __init__(self, path: str | Path, stops: Sequence[str] = ()) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise KinformerError(
                "a chat template needs the package 'jinja2', which is not installed; pip install 'kinformer[serve]'."
            ) from error
        self.stops = tuple(stops)
        self._error: type[Exception] = TemplateError
        with reading(path):
            source = Path(path).read_text(encoding="utf-8")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise KinformerError(f"{path}: is no Jinja template ({error}); mend it.") from None

    def prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the prompt that the template makes of ``messages``."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, bos_token="", eos_token="")
        except (self._error, KinformerError, TypeError, ValueError, OverflowError) as error:
            raise FieldError(f"the chat template refuses these messages ({error}).", "messages") from None


def _raise(message: str) -> NoReturn:
    raise KinformerError(message)
