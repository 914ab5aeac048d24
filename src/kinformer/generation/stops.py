"""The end of generation: sequences of tokens, or strings in the text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import index
from typing import Protocol

from torch import Tensor

from kinformer.core.model import Model
from kinformer.runtime.errors import KinformerError

Watched = tuple[list[tuple[int, ...]], list[bool]]
"""A snapshot of what was watched: the last tokens of each row, and whether it has ended."""


class StopTokens:
    """A watch on each row for any of some token sequences, however steps cut
    them; ended rows repeat their last token."""

    def __init__(self, sequences: Sequence[Sequence[int]], batch: int) -> None:
        if not isinstance(sequences, list | tuple):
            raise KinformerError(f"stop is {sequences!r} but must be a list of sequences of token ids, as in [[10]].")
        self.sequences = [_ids(sequence) for sequence in sequences]
        if not all(self.sequences):
            raise KinformerError("a stop sequence is empty; give one token or more.")
        self._longest = max(map(len, self.sequences), default=0)
        self.tails: list[tuple[int, ...]] = [()] * batch
        self.ended = [False] * batch

    def __bool__(self) -> bool:
        return bool(self.sequences)

    @property
    def all_ended(self) -> bool:
        return bool(self.sequences) and all(self.ended)

    def watch(self, tokens: Tensor) -> Tensor:
        """Return ``tokens`` [batch] as they are reported: those of ended rows replaced by the row's last token."""
        fresh = tokens.tolist()
        reported = [
            tail[-1] if ended else token for token, tail, ended in zip(fresh, self.tails, self.ended, strict=True)
        ]
        for row, token in enumerate(reported):
            if not self.ended[row]:
                tail = self.tails[row] = (*self.tails[row], token)[-self._longest :]
                self.ended[row] = any(tail[-len(sequence) :] == sequence for sequence in self.sequences)
        return tokens if reported == fresh else tokens.new_tensor(reported)

    def snapshot(self) -> Watched:
        """Return what was watched so far, for :meth:`restore`."""
        return list(self.tails), list(self.ended)

    def restore(self, row: int, snapshot: Watched) -> None:
        """Forget what was watched in ``row`` since a snapshot."""
        self.tails[row], self.ended[row] = snapshot[0][row], snapshot[1][row]

    def fork(self, copies: int) -> StopTokens:
        """Return a watch on each row ``copies`` times."""
        forked = StopTokens(self.sequences, 0)
        forked.tails = [tail for tail in self.tails for _ in range(copies)]
        forked.ended = [ended for ended in self.ended for _ in range(copies)]
        return forked


def _ids(sequence: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(index(token) for token in sequence)
    except TypeError:
        raise KinformerError(
            f"stop holds {sequence!r} but must hold sequences of token ids; encode strings with the run's tokenizer."
        ) from None


class StopText:
    """A filter that passes text on until one of some strings appears in it; a possible beginning of one waits.

    The stop string itself is not passed on, and nothing after it.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise KinformerError("a stop string is empty; give one character or more.")
        self.strings = tuple(strings)
        self.stopped = False
        self._waiting = ""

    def feed(self, text: str) -> str:
        """Return the part of the text so far that can be shown now."""
        if self.stopped:
            return ""
        text = self._waiting + text
        starts = [index for string in self.strings if (index := text.find(string)) >= 0]
        if starts:
            self.stopped, self._waiting = True, ""
            return text[: min(starts)]
        shown = len(text) - self._beginning(text)
        self._waiting = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Return the text that was waiting when generation ended without a stop."""
        text, self._waiting = self._waiting, ""
        return text

    def _beginning(self, text: str) -> int:
        """Return the length of the longest end of ``text`` with which some stop string begins."""
        most = max((len(string) - 1 for string in self.strings), default=0)
        sizes = range(min(most, len(text)), 0, -1)
        return next((n for n in sizes if any(string.startswith(text[-n:]) for string in self.strings)), 0)


class Decoder(Protocol):
    """A decoder of tokens that come one by one, as ``Tokenizer.stream`` gives it."""

    def feed(self, token: int) -> str:
        """Return the text that ``token`` completes, possibly empty."""
        ...

    def finish(self) -> str:
        """Return the text that was still waiting."""
        ...


def ends_of_text(model: Model) -> tuple[int, ...]:
    """Return the ids at which texts of a causal ``model`` end; none where it was not trained with any."""
    return getattr(getattr(model.input, "config", None), "eos_tokens", ())


class StoppedText:
    """The text of tokens as they come, until one of some strings appears in it, or one of the tokens ``ends`` comes,
    which is no text; ``stopped`` says whether either has.

    ``decoded`` counts the characters that the tokens completed, those that wait included.
    """

    def __init__(self, decoder: Decoder, strings: Sequence[str], ends: Collection[int] = ()) -> None:
        self._decoder, self._stop, self._ends = decoder, StopText(strings), ends
        self._ended = False
        self.decoded = 0

    @property
    def stopped(self) -> bool:
        return self._ended or self._stop.stopped

    def feed(self, token: int) -> str:
        """Return the text that can be shown now, ``token`` included."""
        self._ended = self._ended or token in self._ends
        if self._ended:
            return ""
        text = self._decoder.feed(token)
        self.decoded += len(text)
        return self._stop.feed(text)

    def finish(self) -> str:
        """Return the text that was waiting when generation ended without a stop."""
        return self._stop.feed(self._decoder.finish()) + self._stop.finish()
