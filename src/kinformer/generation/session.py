"""A session: a model, the state of some sequences, and the next token of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Unpack

import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State
from kinformer.generation.checks import require_continuing, require_ids, require_positions
from kinformer.generation.history import Entry, HeadInputs, History, Snapshot, joined, repeated
from kinformer.generation.sampling import SamplingOptions, TokenSampler, sampling_of
from kinformer.generation.steps import Steps
from kinformer.generation.stops import StopTokens
from kinformer.runtime.errors import KinformerError, require
from kinformer.runtime.matmul import FEW, few_rows
from kinformer.runtime.words import plural

_MOST_RESERVED = 4096
_CHECKED_EVERY = 256


class Session:
    """A session of ``batch`` sequences that grow in parallel: :meth:`feed` text of any length, then :meth:`step` token
    by token.

    A step draws from the logits of what was absorbed before, so a token is drawn before it is absorbed itself, and the
    last one never is. ``stop`` holds token sequences that end a row, ``chunk`` is how many tokens of a prompt the model
    sees at a time, ``room`` how many more are expected (a hint); the rest is :class:`Sampling`.

    With ``recorded`` steps of long generation are recorded where that can be (see ``generation.recorded``), and then
    take less time; what is drawn is the same. ``rewind`` is by how many tokens :meth:`rewind` is to go back at most.
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
        """Return the seed of all draws, also when the caller named none."""
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
        return 0 if self._state is None else states.nbytes(self._state)

    @property
    def rewindable(self) -> int:
        """Return by how many tokens every row can go back now."""
        return min(self._limits())

    def require(self, draws: int, counts: Sequence[int] = ()) -> None:
        """Raise unless the model's positions suffice for ``counts`` more tokens per row and then ``draws`` draws."""
        needed = max(map(sum, zip(self._lengths, counts or [0] * self.batch, strict=True))) + draws - 1
        require_positions(self.model, needed)

    def feed(self, tokens: Tensor, valid: Tensor | None = None) -> None:
        """Absorb ``tokens`` [batch, time] int64, of which only those marked in ``valid`` [batch, time] count."""
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
        """Draw the next token of each row, [batch] int64; a row that has ended repeats its last token."""
        if 0 in self._lengths:
            raise KinformerError(
                f"row {self._lengths.index(0)} of this session holds no token, so that nothing can be drawn; feed the "
                "row one token or more first."
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
        """Take back the last ``tokens`` of every row, one number or one for each, as if they had never been there.

        Costs nothing now; the next step or text is absorbed with what stays of the text behind the last mark. Random
        numbers that were drawn stay drawn, so that the next step is another draw.

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
        """Yield each step's tokens, one per row, before the next are computed;
        end with the last row's stop sequence."""
        if max_new_tokens is not None:
            self.require(max_new_tokens)
        drawn = 0
        while not self.finished and (max_new_tokens is None or drawn < max_new_tokens):
            yield self.step().tolist()
            drawn += 1

    def fork(self, copies: int = 1) -> Session:
        """Return an independent session with each row ``copies`` times, one after the other; both may go on.

        One copy draws what this session would; of several, row r's copy j draws from stream ``r * copies + j``.
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
                forked._state = states.repeat_rows(self._state, copies)
            forked._logits, forked._ends = repeated(self._logits, copies), repeated(self._ends, copies)
            forked._pending = [entry.fork(copies) for entry in self._pending]
            if self._history is not None:
                forked._history = self._history.fork(copies)
                self._state = None if self._state is None else states.reclaimed(self._state)

    def _snapshot(self) -> Snapshot | None:
        """Return what sampler and stops know now, where a rewinding may need it."""
        return None if self._history is None else (self._sampler.snapshot(), self._stops.snapshot())

    def _note(self, entry: Entry) -> None:
        """Add ``entry`` to the text, to be absorbed next."""
        self._sampler.note(entry.tokens, entry.valid)
        self._pending.append(entry)
        if self._history is not None:
            self._history.note(entry)
        self._lengths = [length + count for length, count in zip(self._lengths, entry.counts, strict=True)]

    def _drawn(self, logits: Tensor | None) -> Tensor:
        """Return the tokens [batch] drawn from ``logits``, which the text gains."""
        assert logits is not None
        before = self._snapshot()
        tokens = self._sampler(logits)
        tokens = self._stops.watch(tokens) if self._stops else tokens
        self._note(Entry(tokens[:, None], None, [1] * self.batch, before))
        return tokens

    def mark(self) -> None:
        """Make a mark here, before what is pending: going back, what follows is absorbed again, and nothing before."""
        if self._history is not None:
            self._state = self._stepping.settled(self._state)
            self._history.mark(self._state, self._logits, self._ends, self._pending)

    def _return(self) -> None:
        """Go back to the last mark; the text behind it is to be absorbed again."""
        assert self._history is not None
        mark = self._history.marks[-1]
        self._stepping.abandon()
        self._state = mark.state = None if mark.state is None else states.reclaimed(mark.state)
        self._logits, self._ends, self._pending = mark.logits, mark.ends, list(mark.entries)

    def _absorb_pending(self, by_step: bool = False) -> None:
        """Absorb what is pending, ``by_step`` where it is one token."""
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
            self._state = states.reserve(self.model.initial_state(self.batch), tokens.shape[1] + self.room)
        for start in range(0, tokens.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            self._absorb(tokens[:, part], None if valid is None else valid[:, part])

    def _absorb(self, tokens: Tensor, valid: Tensor | None) -> None:
        """Absorb one chunk; keep the logits after each row's last token (unchanged where a row has none)."""
        if valid is None:
            with few_rows(tokens.device, tokens.numel() < FEW):
                inputs, self._state = self.model.head_inputs(tokens, self._state)
                self._ends = states.map_tensors(lambda x: x[:, -1:], inputs)
                self._logits = self.model.logits(self._ends)[:, 0]
            return
        inputs, self._state = self.model.head_inputs(tokens, self._state, valid=valid)
        numbers = torch.arange(1, tokens.shape[1] + 1, device=valid.device) * valid
        last = (numbers.amax(dim=1) - 1).clamp_min(0)
        rows = torch.arange(len(last), device=last.device)
        self._ends = states.map_tensors(lambda x: x[rows, last][:, None], inputs)
        logits = self.model.logits(self._ends)[:, 0]
        before = torch.zeros_like(logits) if self._logits is None else self._logits
        self._logits = torch.where(valid.any(dim=1, keepdim=True), logits, before)

    def _counts(self, tokens: Tensor, valid: Tensor | None) -> list[int]:
        """Return how many tokens each row gains; wrong shapes, ids and empty rows are refused here."""
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
