"""A session: a model, the state of some sequences, and the next token of each.

A session that can rewind keeps the state at a *mark* and the text since the mark. The tensors of a state do not change,
and later steps of a reserved state write behind its slots, so the earlier state is still valid. After a rewind, the
text that stays is absorbed with the next chunk. By partition invariance, the result is the same as if the removed text
had never been read, for every mechanism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from kinformer.core.model import CausalModel, Model, device_of
from kinformer.core.state import ReservedState, State, map_tensors, nbytes, rebuilt, reclaimed, repeat_rows, reserve
from kinformer.generation.recording import (
    CAPTURES,
    RecordedStep,
    Recording,
    UnrecordableError,
    logits_after,
    logits_alone,
    record,
    recordings_of,
)
from kinformer.generation.sampling import Noted, SamplingOptions, StopTokens, TokenSampler, Watched, sampling_of
from kinformer.runtime.compiling import trusted_arguments
from kinformer.runtime.errors import KinformerError, plural, require
from kinformer.runtime.process import FEW, few_rows
from kinformer.runtime.progress import note_once

# The requirements of generation: on the model, and on the prompt.


def require_continuing(model: object) -> None:
    """Raise unless ``model`` can continue texts: a causal model in eval mode."""
    if not isinstance(model, nn.Module):
        raise KinformerError(f"model is {model!r} but must be a model; kinformer.load gives the model of a run.")
    if not hasattr(model, "initial_state"):
        raise KinformerError(
            f"a model of type {type(model).__name__} reads whole texts and continues none; give a causal one."
        )
    if model.training:
        raise KinformerError("the model is in training mode, with its random masks; call model.eval() first.")


def require_positions(model: CausalModel, needed: int) -> None:
    """Raise unless the positions of ``model`` suffice for ``needed`` tokens of a row."""
    limit = model.max_length
    if limit is not None and needed > limit:
        raise KinformerError(
            f"{plural(needed, 'token')} are to be absorbed, but this model's positions end at max_length = "
            f"{limit}; shorten the prompt, ask for fewer new tokens, or take a member whose positions do not end."
        )


def require_ids(model: CausalModel, low: int, high: int) -> None:
    """Raise unless ``model`` knows the tokens ``low`` and ``high``, the least and the greatest of a prompt."""
    if low < 0 or high >= model.vocab_size:
        raise KinformerError(
            f"the prompt holds token {low if low < 0 else high}, but this model knows 0 to "
            f"{model.vocab_size - 1}; encode it with the tokenizer that the model was trained with."
        )


# The recent text of a session, and the marks to which the session can go back, at no cost: values never change, and
# reserved parts are reclaimed.

HeadInputs = Tensor | tuple[Tensor, ...]
"""The inputs of the head, from ``CausalModel.head_inputs``: a tensor or a NamedTuple of tensors [batch, time, ...]."""

Snapshot = tuple[Noted, Watched]
"""The state of a session's sampler, and the state of its stops."""

_APART = 32
"""Least number of tokens between two marks: to absorb so many again takes about the time of one step."""


@dataclass
class Entry:
    """A piece of the text: ``tokens`` [batch, time], the mask ``valid`` [batch, time] of its real tokens (None: all),
    and their ``counts`` by row. ``before`` is the snapshot of sampler and stops before the piece (None in a session
    that cannot go back)."""

    tokens: Tensor
    valid: Tensor | None
    counts: list[int]
    before: Snapshot | None

    def split(self, counts: Sequence[int]) -> tuple[Entry, Entry]:
        """Return two entries: the entry without the last ``counts`` tokens of each row, and these tokens."""
        left = [count - last for count, last in zip(self.counts, counts, strict=True)]
        if self.valid is None and len(set(left)) == 1:
            cut = left[0]
            return (
                replace(self, tokens=self.tokens[:, :cut], counts=left),
                replace(self, tokens=self.tokens[:, cut:], counts=list(counts)),
            )
        valid = torch.ones_like(self.tokens, dtype=torch.bool) if self.valid is None else self.valid
        first = valid.cumsum(dim=1) <= torch.tensor(left, device=valid.device)[:, None]
        return replace(self, valid=valid & first, counts=left), replace(self, valid=valid & ~first, counts=list(counts))

    def fork(self, copies: int) -> Entry:
        """Return the entry with each row ``copies`` times."""
        return Entry(*(repeated(item, copies) for item in (self.tokens, self.valid, self.counts, self.before)))


def repeated(item: Any, copies: int) -> Any:
    """Return a tensor, a list with an item per row, or a tuple of these or None, with each row ``copies`` times."""
    if isinstance(item, Tensor):
        return item.repeat_interleave(copies, dim=0)
    if isinstance(item, list):
        return [row for row in item for _ in range(copies)]
    if item is None:
        return None
    return rebuilt(item, [repeated(part, copies) for part in item])


def joined(entries: Sequence[Entry]) -> tuple[Tensor, Tensor | None]:
    """Return the tokens [batch, time] of all entries, and the mask [batch, time] of the real tokens, None for all."""
    if len(entries) == 1:
        return entries[0].tokens, entries[0].valid
    tokens = torch.cat([entry.tokens for entry in entries], dim=1)
    if all(entry.valid is None for entry in entries):
        return tokens, None
    valid = [torch.ones_like(e.tokens, dtype=torch.bool) if e.valid is None else e.valid for e in entries]
    return tokens, torch.cat(valid, dim=1)


@dataclass
class Mark:
    """A ``state`` (None: new), the ``logits`` and head inputs (``ends``) there, and the ``entries`` that follow."""

    state: State
    logits: Tensor | None
    ends: HeadInputs | None
    entries: list[Entry]

    def fork(self, copies: int) -> Mark:
        """Return the mark with each row ``copies`` times."""
        state = None if self.state is None else repeat_rows(reclaimed(self.state), copies)
        entries = [entry.fork(copies) for entry in self.entries]
        return Mark(state, repeated(self.logits, copies), repeated(self.ends, copies), entries)


class History:
    """The marks of a session that can go back by ``bound`` tokens of each row; the oldest lies as far back."""

    def __init__(self, bound: int, batch: int) -> None:
        self.bound, self.batch = bound, batch
        self.marks: list[Mark] = []

    @property
    def rewindable(self) -> list[int]:
        """Return how many tokens each row can go back."""
        return [min(self.bound, count) for count in self._since(self.marks[0])] if self.marks else [0] * self.batch

    def is_due(self, pending: Sequence[Entry]) -> bool:
        """Return whether a mark is to be made before ``pending`` is absorbed."""
        if not self.marks:
            return True
        absorbed = min(self._since(self.marks[-1])) - sum(min(entry.counts) for entry in pending)
        return absorbed >= max(self.bound, _APART)

    def mark(self, state: State, logits: Tensor | None, ends: HeadInputs | None, pending: Sequence[Entry]) -> None:
        """Make a mark at ``state``, which has not absorbed ``pending`` yet."""
        self.marks.append(Mark(state, logits, ends, list(pending)))
        self._forget()

    def note(self, entry: Entry) -> None:
        """Note text that follows the earlier text."""
        for mark in self.marks:
            mark.entries.append(entry)
        self._forget()

    def drop(self, counts: Sequence[int]) -> list[Entry]:
        """Drop the last ``counts`` tokens of each row and the marks within; return the dropped entries, last first."""
        while any(map(int.__lt__, self._since(self.marks[-1]), counts)):
            self.marks.pop()
        retained: list[Entry] = []
        dropped: list[Entry] = []
        left = list(counts)
        for entry in reversed(self.marks[-1].entries):
            gone = [min(pair) for pair in zip(left, entry.counts, strict=True)]
            left = [rest - count for rest, count in zip(left, gone, strict=True)]
            dropped.append(replace(entry, counts=gone))
            retained.insert(0, entry.split(gone)[0] if any(gone) else entry)
        retained = [entry for entry in retained if any(entry.counts)]
        for mark in self.marks:
            mark.entries[len(mark.entries) - len(dropped) :] = retained
        return dropped

    def fork(self, copies: int) -> History:
        """Return the history with each row ``copies`` times; the session's state must be reclaimed afterwards."""
        forked = History(self.bound, self.batch * copies)
        forked.marks = [mark.fork(copies) for mark in self.marks]
        return forked

    def _since(self, mark: Mark) -> list[int]:
        """Return how many tokens of each row follow ``mark``."""
        return list(map(sum, zip([0] * self.batch, *(entry.counts for entry in mark.entries), strict=True)))

    def _forget(self) -> None:
        """Forget marks that lie further back than any rewinding."""
        while len(self.marks) > 1 and min(self._since(self.marks[1])) >= self.bound:
            del self.marks[0]


LONG = 48
"""Expected number of tokens from which a recording is tried early. A recording takes the time of some seven steps, and
some twenty recorded steps save this time."""
EARLY, LATE = 1, 24
"""Steps before a recording is tried: where ``LONG`` or more tokens are expected, and where fewer are."""
_LOOKS_EVERY = 16


class Steps:
    """The steps of a session, of ``time`` tokens: in Python, and in long generation by a recorded step.

    ``room`` is the expected number of steps of ``model``. With ``recorded``, a step is recorded where possible.
    """

    absorb = staticmethod(logits_alone)

    def __init__(self, model: CausalModel, room: int, recorded: bool, time: int = 1) -> None:
        self.model, self.recorded, self.time = model, recorded, time
        self._dtype = _dtype(model)
        self.made, self.record_at = 0, EARLY if room >= LONG else LATE
        self.running: RecordedStep | None = None
        self._looks_back: bool | None = None
        self._recording: Recording | None = None

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the logits [batch, vocab] after ``tokens`` [batch, 1], which the model drew, and the state there.

        While a recording runs, it holds the state. The returned state is then a placeholder, which :meth:`settled`
        replaces by the real state.
        """
        self.made += 1
        if self._looks_back is None:
            self._looks_back = _has_slots(state)
        with few_rows(tokens.device, tokens.shape[0] < FEW or self._looks_back):
            if self.running is None or not self.running.goes_on:
                self.require_dtype()
                state = self.settled(state)
                with trusted_arguments():
                    self.running = self._recorded(tokens, state)
                    if self.running is None:
                        return logits_after(self.model, tokens, state)
            return self.running.outputs(tokens)[0], self.running.state

    def require_dtype(self) -> None:
        """Raise where the dtype of the weights has changed since the session began: its state has the old dtype."""
        if (now := _dtype(self.model)) != self._dtype:
            raise KinformerError(
                f"the model's weights are {now}, but this session began with {self._dtype}, which its state has; begin "
                "a new session after you convert a model."
            )

    def settled(self, state: State) -> State:
        """Return the state after all steps; ``state`` is the state that the last step returned."""
        if self.running is not None:
            state, self.running = self.running.release(), None
        return state

    def _recorded(self, tokens: Tensor, state: State) -> RecordedStep | None:
        """Return a recorded step that begins at ``state``; None where no recording fits or pays yet."""
        if not self.recorded:
            return None
        try:
            for recording in self._earlier():
                if (running := recording.begin(state, self.time)) is not None:
                    self._recording = recording
                    return running
            if self.made > self.record_at:
                self._recording = record(self.model, tokens, state, self.absorb)
                recordings_of(self.model).keep(self._recording)
                return self._recording.begin(state, self.time)
        except UnrecordableError as refused:
            if refused.steps is None and tokens.device.type in CAPTURES:
                note_once(f"the steps of generation run in Python here, not as a graph of the GPU: {refused}.")
            self.record_at = self.made + (refused.steps or 7 * self.made) - 1
        return None

    def _earlier(self) -> Sequence[Recording]:
        """Return recordings that may fit: this session's last, or every ``_LOOKS_EVERY`` steps all of the model."""
        if self._recording is not None and not self._recording.holds():
            self._recording, self.record_at = None, self.made + _LOOKS_EVERY
        if self._recording is not None:
            return (self._recording,)
        looks = self.made <= 2 or self.made % _LOOKS_EVERY == 1 or self.made > self.record_at
        return recordings_of(self.model) if looks else ()


def _dtype(model: Model) -> torch.dtype | None:
    """Return the dtype of the first floating-point weight."""
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), None)


def _has_slots(state: State) -> bool:
    """Return whether the state has slots of past tokens, separate for each row."""
    if isinstance(state, Tensor):
        return False
    return isinstance(state, ReservedState) or bool(getattr(state, "slots", ())) or any(map(_has_slots, state))


_MOST_RESERVED = 4096
_CHECKED_EVERY = 256


class Session:
    """A session of ``batch`` sequences that grow in parallel: :meth:`feed` text of any length, then :meth:`step` token
    by token.

    A step draws a token from the logits after the absorbed tokens. The next step absorbs this token, so the last token
    is never absorbed. ``stop`` holds token sequences that end a row. ``chunk`` is the number of prompt tokens that the
    model reads at a time. ``room`` is the expected number of further tokens (a hint). The rest is :class:`Sampling`.

    With ``recorded``, the steps of long generation are recorded where possible (see ``generation.recording``) and then
    take less time; the drawn tokens are the same. ``rewind`` is the most tokens that :meth:`rewind` can take back.
    """

    def __init__(
        self,
        model: CausalModel,
        batch: int = 1,
        *,
        stop: Sequence[Sequence[int]] = (),
        chunk: int = 1024,
        room: int = 256,
        recorded: bool = True,
        rewind: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        for name, value in (("batch", batch), ("chunk", chunk)):
            if value < 1:
                raise KinformerError(f"{name} is {value} but must be 1 or more.")
        require("rewind", rewind, 0)
        require_continuing(model)
        self.model, self.chunk, self.room = model, chunk, min(room, _MOST_RESERVED)
        self._device = device_of(model)
        self._sampler = TokenSampler(sampling_of(sampling), range(batch))
        self._stops = StopTokens(stop, batch)
        self._lengths = [0] * batch
        self._steps = 0
        self._state: State = None
        self._stepping = Steps(model, room, recorded)
        self._logits: Tensor | None = None
        self._ends: HeadInputs | None = None
        self._pending: list[Entry] = []
        self._history = History(rewind, batch) if rewind else None

    @property
    def batch(self) -> int:
        return len(self._lengths)

    @property
    def seed(self) -> int:
        """Return the seed of all draws, also where the caller gave none."""
        assert self._sampler.sampling.seed is not None
        return self._sampler.sampling.seed

    @property
    def length(self) -> int:
        """Return the number of tokens of the longest row, drawn ones included."""
        return max(self._lengths)

    @property
    def finished(self) -> bool:
        """Return whether every row has met a stop sequence."""
        return self._stops.all_ended

    @property
    def state_bytes(self) -> int:
        """Return the bytes that the state holds now for all rows, reserved room included."""
        return 0 if self._state is None else nbytes(self._state)

    @property
    def rewindable(self) -> int:
        """Return by how many tokens every row can go back now."""
        return min(self._limits())

    def require(self, draws: int, counts: Sequence[int] = ()) -> None:
        """Raise unless the model's positions suffice for ``counts`` more tokens per row and then ``draws`` draws."""
        needed = max(map(sum, zip(self._lengths, counts or [0] * self.batch, strict=True))) + draws - 1
        require_positions(self.model, needed)

    def feed(self, tokens: Tensor, valid: Tensor | None = None) -> None:
        """Absorb ``tokens`` [batch, time] int64; ``valid`` [batch, time] bool marks the real tokens (None: all)."""
        counts = self._counts(tokens, valid)
        self.require(1, counts)
        self._stepping.require_dtype()
        with torch.inference_mode():
            tokens = tokens.to(self._device)
            valid = None if valid is None or valid.all() else valid.to(self._device)
            entry = Entry(tokens, valid, counts, self._snapshot())
            parts = [entry]
            if self._history is not None and max(counts) > self._history.bound:
                parts = list(entry.split([min(count, self._history.bound) for count in counts]))
            for part in parts:
                self._note(part)
                self._absorb_pending()
            self._require_finite()

    def step(self) -> Tensor:
        """Draw the next token of each row, [batch] int64; an ended row repeats its last token."""
        if 0 in self._lengths:
            raise KinformerError(
                f"row {self._lengths.index(0)} of this session is empty, so nothing can be drawn; feed the row one "
                "token or more first."
            )
        self.require(1)
        with torch.inference_mode():
            if self._pending:
                self._absorb_pending(by_step=True)
            self._steps += 1
            if self._steps % _CHECKED_EVERY == 0:
                self._require_finite()
            return self._drawn(self._logits).clone()

    def rewind(self, tokens: int | Sequence[int] = 1) -> None:
        """Take back the last ``tokens`` of every row (one number, or a number for each row), as if they had never been
        there.

        Nothing is computed now: the next step absorbs the remaining text after the last mark. Random numbers stay
        drawn, so that the next step is another draw.

        Errors: ``KinformerError`` for more than :attr:`rewindable` tokens of a row.
        """
        counts = [tokens] * self.batch if isinstance(tokens, int) else list(tokens)
        limits = self._limits()
        if len(counts) != self.batch or any(not 0 <= n <= limit for n, limit in zip(counts, limits, strict=True)):
            raise KinformerError(
                f"{tokens} tokens are to be taken back, but the rows of this session can go back by {limits}; begin it "
                "with a larger `rewind`."
            )
        if any(counts):
            self._take_back(counts)

    def _limits(self) -> list[int]:
        """Return by how many tokens each row can go back."""
        return [0] * self.batch if self._history is None else self._history.rewindable

    def _take_back(self, counts: Sequence[int]) -> None:
        """Take back the last ``counts`` tokens of each row."""
        assert self._history is not None
        dropped = self._history.drop(counts)
        for entry in dropped:
            assert entry.before is not None
            for row, count in enumerate(entry.counts):
                if count:
                    self._stops.restore(row, entry.before[1])
        self._return()
        first = dropped[-1].before
        assert first is not None
        self._sampler.restore(first[0])
        for entry in self._pending:
            self._sampler.note(entry.tokens, entry.valid)
        self._lengths = [length - count for length, count in zip(self._lengths, counts, strict=True)]

    def stream(self, max_new_tokens: int | None = None) -> Iterator[list[int]]:
        """Yield each step's tokens, one per row, before the next step is computed; end when every row has met a stop
        sequence, or after ``max_new_tokens`` steps."""
        if max_new_tokens is not None:
            self.require(max_new_tokens)
        drawn = 0
        while not self.finished and (max_new_tokens is None or drawn < max_new_tokens):
            yield self.step().tolist()
            drawn += 1

    def fork(self, copies: int = 1) -> Session:
        """Return an independent session with each row ``copies`` times, one after the other; both sessions stay usable.

        A single copy draws the same tokens as this session. Of several copies, copy j of row r draws from stream
        ``r * copies + j``.
        """
        sampling = self._sampler.sampling
        forked = Session(
            self.model, self.batch * copies, chunk=self.chunk, room=self.room, recorded=self._stepping.recorded,
            seed=sampling.seed,
        )  # fmt: skip
        self._copy_into(forked, copies)
        return forked

    def _copy_into(self, forked: Session, copies: int) -> None:
        forked._sampler, forked._stops = self._sampler.fork(copies), self._stops.fork(copies)
        forked._lengths = repeated(self._lengths, copies)
        with torch.inference_mode():
            self._state = self._stepping.settled(self._state)
            if self._state is not None:
                forked._state = repeat_rows(self._state, copies)
            forked._logits, forked._ends = repeated(self._logits, copies), repeated(self._ends, copies)
            forked._pending = [entry.fork(copies) for entry in self._pending]
            if self._history is not None:
                forked._history = self._history.fork(copies)
                self._state = None if self._state is None else reclaimed(self._state)

    def _snapshot(self) -> Snapshot | None:
        """Return a snapshot of sampler and stops; None in a session that cannot go back."""
        return None if self._history is None else (self._sampler.snapshot(), self._stops.snapshot())

    def _note(self, entry: Entry) -> None:
        """Add ``entry`` to the text, to be absorbed next."""
        self._sampler.note(entry.tokens, entry.valid)
        self._pending.append(entry)
        if self._history is not None:
            self._history.note(entry)
        self._lengths = [length + count for length, count in zip(self._lengths, entry.counts, strict=True)]

    def _drawn(self, logits: Tensor | None) -> Tensor:
        """Draw the tokens [batch] from ``logits``, add them to the text, and return them."""
        assert logits is not None
        before = self._snapshot()
        tokens = self._sampler(logits)
        tokens = self._stops.watch(tokens) if self._stops else tokens
        self._note(Entry(tokens[:, None], None, [1] * self.batch, before))
        return tokens

    def mark(self) -> None:
        """Make a mark before the pending tokens; a session that goes back absorbs again only the tokens after it."""
        if self._history is not None:
            self._state = self._stepping.settled(self._state)
            self._history.mark(self._state, self._logits, self._ends, self._pending)

    def _return(self) -> None:
        """Go back to the last mark; the text after the mark becomes pending again."""
        assert self._history is not None
        mark = self._history.marks[-1]
        self._stepping.settled(None)
        self._state = mark.state = None if mark.state is None else reclaimed(mark.state)
        self._logits, self._ends, self._pending = mark.logits, mark.ends, list(mark.entries)

    def _absorb_pending(self, by_step: bool = False) -> None:
        """Absorb the pending tokens; with ``by_step``, a single token takes the path of a step."""
        if self._history is not None and self._history.is_due(self._pending):
            self.mark()
        tokens, valid = joined(self._pending)
        self._pending = []
        if by_step and self._state is not None and valid is None and tokens.shape[1] == 1:
            self._logits, self._state = self._stepping.step(tokens, self._state)
            self._ends = None
            return
        self._state = self._stepping.settled(self._state)
        if self._state is None:
            self._state = reserve(self.model.initial_state(self.batch), tokens.shape[1] + self.room)
        for start in range(0, tokens.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            self._absorb(tokens[:, part], None if valid is None else valid[:, part])

    def _absorb(self, tokens: Tensor, valid: Tensor | None) -> None:
        """Absorb one chunk; keep the logits after each row's last token (unchanged where a row has none)."""
        if valid is None:
            with few_rows(tokens.device, tokens.numel() < FEW):
                inputs, self._state = self.model.head_inputs(tokens, self._state)
                self._ends = map_tensors(lambda x: x[:, -1:], inputs)
                self._logits = self.model.logits(self._ends)[:, 0]
            return
        inputs, self._state = self.model.head_inputs(tokens, self._state, valid=valid)
        numbers = torch.arange(1, tokens.shape[1] + 1, device=valid.device) * valid
        last = (numbers.amax(dim=1) - 1).clamp_min(0)
        rows = torch.arange(len(last), device=last.device)
        self._ends = map_tensors(lambda x: x[rows, last][:, None], inputs)
        logits = self.model.logits(self._ends)[:, 0]
        before = torch.zeros_like(logits) if self._logits is None else self._logits
        self._logits = torch.where(valid.any(dim=1, keepdim=True), logits, before)

    def _counts(self, tokens: Tensor, valid: Tensor | None) -> list[int]:
        """Return the number of new tokens of each row; raise for wrong shapes and ids and for empty rows."""
        if tokens.dim() != 2 or tokens.shape[0] != self.batch or (valid is not None and valid.shape != tokens.shape):
            shapes = f"{tuple(tokens.shape)}" + ("" if valid is None else f" with valid {tuple(valid.shape)}")
            raise KinformerError(f"tokens must be [batch = {self.batch}, time], but have the shape {shapes}.")
        counts = [tokens.shape[1]] * self.batch if valid is None else valid.sum(dim=1).tolist()
        empty = [row for row, (old, new) in enumerate(zip(self._lengths, counts, strict=True)) if old + new == 0]
        if empty:
            raise KinformerError(f"the prompt of row {empty[0]} is empty; give one token or more.")
        real = tokens if valid is None else tokens[valid]
        if real.numel():
            require_ids(self.model, int(real.min()), int(real.max()))
        return counts

    def _require_finite(self) -> None:
        if self._logits is not None and not bool(self._logits.isfinite().all()):
            raise KinformerError(
                f"the model's predictions after {plural(self.length, 'token')} are not finite numbers; its weights "
                "are damaged or diverged, or need a wider type (fp32)."
            )
