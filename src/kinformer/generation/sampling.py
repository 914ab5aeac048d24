"""From logits to tokens: greedy, temperature, top-k, nucleus and min-p sampling, and a penalty of repetition.

The logits of earlier tokens, prompt included, are divided by ``repetition_penalty`` where they are positive and
multiplied by it elsewhere (Keskar et al. 2019, "CTRL", section 4.1, as transformers applies it). The logits are then
divided by the temperature. Three filters follow, in this order: ``top_k`` keeps the most probable tokens, ``top_p``
keeps the fewest tokens whose probability reaches ``top_p`` (Holtzman et al. 2020, "The Curious Case of Neural Text
Degeneration"), and ``min_p`` keeps the tokens with at least ``min_p`` times the highest probability (Nguyen et al.
2024, "Turning Up the Heat").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import index
from typing import Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import Model
from kinformer.runtime.errors import KinformerError, marked, nearest, require_below_largest, require_seed, require_types

_BLOCK = 256

Noted = tuple[tuple[Tensor, ...], Tensor | None]
"""A snapshot of the noted tokens: recent tokens [batch, time], and a mask [batch, vocab] bool of earlier tokens."""


class SamplingOptions(TypedDict, total=False):
    """The keywords of :class:`Sampling`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings of sampling: ``temperature`` 0 is greedy, ``seed`` None is PyTorch's next number."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        require_types(self, Sampling)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if isinstance(value := getattr(self, name), int):  # which may be too large for a float
                require_below_largest(marked(name), value)
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise KinformerError(f"temperature is {self.temperature} but must be 0 (greedy) or a number above it.")
        if self.top_k is not None and self.top_k < 1:
            raise KinformerError(f"top_k is {self.top_k} but must be 1 or more; leave it out to allow every token.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise KinformerError(f"top_p is {self.top_p} but must be above 0 and at most 1.")
        if self.min_p is not None and not 0 < self.min_p <= 1:
            raise KinformerError(f"min_p is {self.min_p} but must be above 0 and at most 1.")
        if not (isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise KinformerError(
                f"repetition_penalty is {self.repetition_penalty} but must be a number above 0; 1 penalises nothing."
            )
        if self.seed is None:
            object.__setattr__(self, "seed", int(torch.randint(2**62, ())))
        require_seed(self.seed)


def sampling_of(options: SamplingOptions) -> Sampling:
    """Return the keywords of a call as :class:`Sampling`; the error for an unknown keyword names the nearest."""
    for name in options:
        if name not in SamplingOptions.__annotations__:
            raise KinformerError(
                f"{name!r} is not an option of generation; {nearest(name, sorted(SamplingOptions.__annotations__))}"
            )
    return Sampling(**options)


class UniformStreams:
    """Random numbers from [0, 1) for each row: a function of the seed, the index of the row's stream and the number of
    earlier draws.

    The numbers are made 256 at a time.
    """

    def __init__(self, seed: int | None, streams: Sequence[int]) -> None:
        self.seed, self.streams, self.drawn = seed, tuple(streams), 0
        self._block, self._number = torch.empty(0), -1

    def next(self, device: torch.device) -> Tensor:
        """Return the next number of each row's stream, [batch, 1] float64, at least 0 and below 1 by 2^-48."""
        block, index = divmod(self.drawn, _BLOCK)
        self.drawn += 1
        if block != self._number:
            self._number = block
            rows = [_uniforms(self.seed, stream, block) for stream in self.streams]
            self._block = torch.from_numpy(np.stack(rows, axis=1)[..., None]).to(device)
        return self._block[index]


class TokenSampler:
    """A sampler of one token for each row: a function of the row's logits, the seed, the index of its stream and the
    number of earlier draws.

    A row's tokens therefore do not depend on the other rows. Each draw takes one uniform number and inverts the
    cumulated probabilities.
    """

    def __init__(self, sampling: Sampling, streams: Sequence[int]) -> None:
        self.sampling = sampling
        self.streams = tuple(streams)
        self._uniforms = UniformStreams(sampling.seed, streams)
        self._noted: list[Tensor] = []
        self._present: Tensor | None = None

    def note(self, tokens: Tensor, valid: Tensor | None = None) -> None:
        """Note ``tokens`` [batch, time] of the text; ``valid`` [batch, time] bool marks the real tokens (None: all)."""
        if self.sampling.repetition_penalty != 1:
            self._noted.append(tokens if valid is None else tokens.masked_fill(~valid, -1))

    def snapshot(self) -> Noted:
        """Return the tokens noted so far, for :meth:`restore`."""
        return tuple(self._noted), self._present

    def restore(self, snapshot: Noted) -> None:
        """Forget the tokens noted since a snapshot; random numbers stay drawn."""
        self._noted, self._present = list(snapshot[0]), snapshot[1]

    def undraw(self, draws: int) -> None:
        """Give the random numbers of the last ``draws`` tokens back; greedy draws took none."""
        if self.sampling.temperature != 0:
            self._uniforms.drawn -= draws

    def fork(self, copies: int) -> TokenSampler:
        """Return a sampler of each row ``copies`` times; row r's copy j draws from stream ``r * copies + j`` on."""
        forked = TokenSampler(self.sampling, range(len(self.streams) * copies) if copies > 1 else self.streams)
        forked._uniforms.drawn = self._uniforms.drawn
        forked._noted = [tokens.repeat_interleave(copies, dim=0) for tokens in self._noted]
        forked._present = None if self._present is None else self._present.repeat_interleave(copies, dim=0)
        return forked

    def __call__(self, logits: Tensor) -> Tensor:
        """Return tokens [batch] int64 for ``logits`` [batch, vocab]."""
        if self._noted:
            # One more column takes the padding, which is noted as -1.
            present = logits.new_zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool)
            index = torch.cat(self._noted, dim=1).to(logits.device)
            present.scatter_(1, index.where(index >= 0, logits.shape[1]), True)
            self._present = present[:, :-1] if self._present is None else self._present | present[:, :-1]
            self._noted = []
        if self._present is not None:
            logits = penalise_repetition(logits, self._present, self.sampling.repetition_penalty)
        return draw(logits, self.sampling, lambda: self._uniforms.next(logits.device))


def penalise_repetition(logits: Tensor, present: Tensor, penalty: float) -> Tensor:
    """Return ``logits`` [..., vocab], with the penalty of repetition for the tokens ``present`` [..., vocab] bool."""
    return torch.where(present, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(logits: Tensor, sampling: Sampling, uniform: Callable[[], Tensor]) -> Tensor:
    """Return tokens [batch] int64 for ``logits`` [batch, vocab] by ``uniform``, [batch, 1] float64, unless greedy."""
    if sampling.temperature == 0:
        # PyTorch's argmax is slower in 16 bits. The cast changes no number.
        return (logits.float() if logits.element_size() < 4 else logits).argmax(dim=-1)
    probabilities, tokens = candidates(logits, sampling)
    mass = probabilities.cumsum(dim=-1)
    # Inversion: the first token whose cumulated mass exceeds u times the whole.
    chosen = torch.searchsorted(mass, uniform() * mass[:, -1:], right=True).clamp_max_(mass.shape[1] - 1)
    return (chosen if tokens is None else tokens.gather(1, chosen)).squeeze(1)


def _uniforms(seed: int | None, stream: int, block: int) -> np.ndarray:
    # Philox counts, so block and stream alone give the numbers, on every machine.
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(stream, block)))
    return np.random.Generator(bits).integers(1 << 48, size=_BLOCK) * 2.0**-48


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Return weights [batch, n] float64 (0 where excluded) and their tokens [batch, n]; None: all, in order."""
    tokens = None
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits, tokens = logits.topk(sampling.top_k, dim=-1)
    elif sampling.top_p is not None and sampling.top_p < 1:
        logits, tokens = logits.sort(dim=-1, descending=True)
    # In float64: a cumulated sum over a large vocabulary would lose the small probabilities in float32.
    logits = logits.double()
    highest = logits.amax(dim=-1, keepdim=True) if tokens is None else logits[:, :1]
    probabilities = ((logits - highest) / sampling.temperature).softmax(dim=-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        if tokens is None:
            probabilities, tokens = probabilities.sort(dim=-1, descending=True)
        # The fewest tokens that reach top_p: a token stays while those before it have less than top_p.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    if sampling.min_p is not None:
        least = sampling.min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities, tokens


# The end of generation: sequences of tokens, or strings in the text.

Watched = tuple[list[tuple[int, ...]], list[bool]]
"""A snapshot of the watch: the last tokens of each row, and whether the row has ended."""


class StopTokens:
    """A watch on each row for some token sequences, however steps cut them; ended rows repeat their last token."""

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
        """Return the tokens [batch] to report: ``tokens``, but the last token of its row in an ended row."""
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
        """Return a snapshot of the watch, for :meth:`restore`."""
        return list(self.tails), list(self.ended)

    def restore(self, row: int, snapshot: Watched) -> None:
        """Forget the tokens of ``row`` since a snapshot."""
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
    """A filter that passes text on until one of some stop strings appears in it.

    The end of the text waits while a stop string may begin there. The stop string and the text after it are dropped.
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
    """A decoder of tokens that come one by one, such as ``Tokenizer.stream`` returns."""

    def feed(self, token: int) -> str:
        """Return the text that ``token`` completes, possibly empty."""

    def finish(self) -> str:
        """Return the text that was still waiting."""


def ends_of_text(model: Model) -> tuple[int, ...]:
    """Return the ids at which texts of a causal ``model`` end; none where it was not trained with any."""
    return getattr(getattr(model.input, "config", None), "eos_tokens", ())


class StoppedText:
    """The text of tokens that come one by one, up to one of some stop strings or one of the tokens ``ends``, which has
    no text; ``stopped`` tells whether the text has ended.

    ``decoded`` is the number of characters of the tokens so far, waiting characters included.
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
