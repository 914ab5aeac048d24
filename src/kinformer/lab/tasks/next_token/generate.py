"""Texts continued token by token, and what that cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kinformer.core.model import CausalModel
from kinformer.generation.drafts import DraftedSession, Drafting
from kinformer.generation.generate import session_of
from kinformer.generation.sampling import StoppedText, ends_of_text
from kinformer.generation.session import Session
from kinformer.lab.data import Tokenizer
from kinformer.lab.data.tokenizer import prompt_ids
from kinformer.lab.evaluation.depths import Exited, noting_exits, saved
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.shared.options import tell_untrained
from kinformer.lab.tasks.shared.text import tokenizer_of
from kinformer.lab.tasks.task import GenerationSettings
from kinformer.runtime.errors import KinformerError

MOST_NEW = 256


@dataclass
class Sample:
    """One continuation: its ``tokens``, its ``text``, and whether it ``stopped`` at a stop text or at a token that ends
    a text."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stopped: bool = False


@dataclass
class Generated:
    """The ``samples`` and what they cost: prompt and new tokens (over all samples), seconds for each; ``interrupted``
    by Ctrl-C; ``exits``: where new tokens could leave early; ``drafting``: with a draft."""

    samples: list[Sample]
    prompt_tokens: int
    seed: int = 0
    state_bytes: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    exits: Exited | None = None
    drafting: Drafting | None = None

    @property
    def tokens_per_second(self) -> float:
        """Return new tokens per second, that of the first included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0


def continue_text(
    subject: LoadedRun, prompt: str | bytes, options: GenerationSettings, write: Callable[[str], None] | None
) -> Generated:
    """Continue ``prompt``; of one sample every piece of text is given to ``write`` as soon as it is drawn."""
    tokenizer = tokenizer_of(subject.run)
    tokens = prompt_ids(tokenizer, prompt)
    if not len(tokens):
        raise KinformerError("the prompt is empty; give at least one character with `prompt` or `prompt_file`.")
    session, new = _session(subject, options, len(tokens))
    ends = ends_of_text(subject.model)
    writers = [_Writer(tokenizer, tokens, options.stop, ends, None) for _ in range(options.samples)]
    tell_untrained(subject.run, len(tokens) + new - 1)
    if options.samples == 1:
        writers[0].write = write
    result = Generated([writer.sample for writer in writers], len(tokens))
    started_at, exits = time.perf_counter(), None
    try:
        session.feed(torch.from_numpy(np.asarray(tokens))[None])
        session = session if options.samples == 1 else session.fork(options.samples)
        result.prompt_seconds, started_at = time.perf_counter() - started_at, time.perf_counter()
        with noting_exits(subject.model) as leaving:
            _draw(session, writers, new, result)
        exits = leaving.result
    except KeyboardInterrupt:
        result.interrupted = True
    result.seconds = time.perf_counter() - started_at if result.new_tokens else 0.0
    for writer in writers:
        writer.finish()
    result.seed, result.state_bytes = session.seed, session.state_bytes
    if isinstance(session, DraftedSession):
        result.drafting = session.drafting  # tokens that were guessed wrong have left by exits, too
    elif exits is not None:
        result.exits = saved(subject.model, exits, len(tokens), options.samples)
    return result


class Conversation:
    """A text of a run that is continued in turns: every turn adds a text and draws its continuation. The state is
    carried, so that earlier turns are not read again."""

    def __init__(self, subject: LoadedRun, options: GenerationSettings) -> None:
        self.subject, self.options = subject, options
        self.session: Session | None = None

    def turn(self, text: str | bytes) -> Iterator[str]:
        """Return an iterator that draws the continuation of all so far and ``text``, and yields its pieces.

        Errors: ``KinformerError`` for an empty text, and where the model's positions end, before anything is drawn.
        """
        tokenizer = tokenizer_of(self.subject.run)
        tokens = prompt_ids(tokenizer, text) if self.session is None else tokenizer.encode(text)
        if not len(tokens):
            raise KinformerError("the text to continue is empty; give at least one character.")
        if self.session is None:
            self.session, new = _session(self.subject, self.options, len(tokens))
        else:
            new = _new_tokens(self.subject.model, self.options, self.session.length + len(tokens))
            self.session.require(new, [len(tokens)])
        self.session.feed(torch.from_numpy(np.asarray(tokens))[None])
        return self._pieces(self.session, tokens, new)

    def _pieces(self, session: Session, before: np.ndarray, new: int) -> Iterator[str]:
        pieces: list[str] = []
        ends = ends_of_text(self.subject.model)
        writer = _Writer(tokenizer_of(self.subject.run), before, self.options.stop, ends, pieces.append)
        for (token,) in session.stream(new):
            writer.feed(token)
            yield from pieces
            pieces.clear()
            if writer.sample.stopped:
                break
        writer.finish()
        yield from pieces


def _new_tokens(model: CausalModel, options: GenerationSettings, before: int) -> int:
    """Return how many tokens to draw after that many."""
    if options.max_new_tokens is not None:
        return options.max_new_tokens
    limit = MOST_NEW if model.max_length is None else model.max_length - before + 1
    return max(1, min(MOST_NEW, limit))


def _session(subject: LoadedRun, options: GenerationSettings, prompt: int) -> tuple[Session, int]:
    """Return a session for one row, and how many tokens to draw."""
    new = _new_tokens(subject.model, options, prompt)
    settings = {
        "chunk": options.chunk,
        "room": new,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "seed": options.seed,
    }
    session = session_of(subject.model, 1, subject.draft, options.draft_length, settings)
    session.require(new, [prompt])
    return session, new


def _draw(session: Session, writers: Sequence[_Writer], new: int, result: Generated) -> None:
    for row_tokens in session.stream(new):
        for writer, token in zip(writers, row_tokens, strict=True):
            if not writer.sample.stopped:
                result.new_tokens += 1
                writer.feed(token)
        if all(writer.sample.stopped for writer in writers):
            return


class _Writer:
    """A sample in the making behind the ids ``before``, and the function that its text is written by as it comes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: np.ndarray,
        stops: Sequence[str],
        ends: Sequence[int],
        write: Callable[[str], None] | None,
    ) -> None:
        self.write, self.sample = write, Sample()
        self._text = StoppedText(tokenizer.stream(before.tolist()), stops, ends)

    def feed(self, token: int) -> None:
        self.sample.tokens.append(token)
        self._add(self._text.feed(token))

    def finish(self) -> None:
        self._add(self._text.finish())

    def _add(self, text: str) -> None:
        self.sample.text += text
        self.sample.stopped = self._text.stopped
        if self.write is not None and text:
            self.write(text)
