"""A session: a model, the state of some sequences, and the next token of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.model import CausalModel, device_of
from kinformer.generation.recorded import logits_after
from kinformer.generation.sampling import SamplingOptions, TokenSampler, sampling_of
from kinformer.generation.steps import Steps
from kinformer.generation.stops import StopTokens
from kinformer.runtime.errors import KinformerError, require
from kinformer.runtime.fields import require_kind
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
    take less time; what is drawn is the same.
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
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        for name, value in (("batch", batch), ("chunk", chunk)):
            if value < 1:
                raise KinformerError(f"{name} is {value} but must be 1 or more.")
        require_continuing(model)
        self.model, self.chunk, self.room = model, chunk, min(room, _MOST_RESERVED)
        self._device = device_of(model)
        self._sampler = TokenSampler(sampling_of(sampling), range(batch))
        self._stops = StopTokens(stop, batch)
        self._lengths = [0] * batch
        self._steps = 0
        self._state: Any = None
        self._stepping = Steps(model, room, recorded)
        self._logits: Tensor | None = None
        self._pending: Tensor | None = None

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
            self._state = self._stepping.settled(self._state)
            tokens = tokens.to(self._device)
            valid = None if valid is None or valid.all() else valid.to(self._device)
            self._sampler.note(tokens, valid)
            if self._pending is not None:
                tokens = torch.cat([self._pending[:, None], tokens], dim=1)
                valid = None if valid is None else nn.functional.pad(valid, (1, 0), value=True)
                self._pending = None
            if self._state is None:
                self._state = states.reserve(self.model.initial_state(self.batch), tokens.shape[1] + self.room)
            for start in range(0, tokens.shape[1], self.chunk):
                part = slice(start, start + self.chunk)
                self._absorb(tokens[:, part], None if valid is None else valid[:, part])
            self._require_finite()
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]

    def step(self) -> Tensor:
        """Draw the next token of each row, [batch] int64; a row that has ended repeats its last token."""
        if self._logits is None:
            raise KinformerError("nothing was fed to this session yet; feed a prompt of one token or more first.")
        self.require(1)
        with torch.inference_mode():
            if self._pending is not None:
                self._logits, self._state = self._stepping.step(self._pending[:, None], self._state)
            self._steps += 1
            if self._steps % _CHECKED_EVERY == 0:
                self._require_finite()
            tokens = self._sampler(self._logits)
            self._pending = tokens = self._stops.watch(tokens) if self._stops else tokens
            self._sampler.note(tokens[:, None])
        self._lengths = [length + 1 for length in self._lengths]
        return tokens.clone()

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
        forked._sampler, forked._stops = self._sampler.fork(copies), self._stops.fork(copies)
        forked._lengths = [length for length in self._lengths for _ in range(copies)]
        with torch.inference_mode():
            self._state = self._stepping.settled(self._state)
            if self._state is not None:
                forked._state = states.repeat_rows(self._state, copies)
            for name in ("_logits", "_pending"):
                tensor = getattr(self, name)
                setattr(forked, name, None if tensor is None else tensor.repeat_interleave(copies, dim=0))
        return forked

    def _absorb(self, tokens: Tensor, valid: Tensor | None) -> None:
        """Absorb one chunk; return the logits after each row's last token (unchanged where a row has none)."""
        if valid is None:
            with few_rows(tokens.device, tokens.numel() < FEW):
                self._logits, self._state = logits_after(self.model, tokens, self._state)
            return
        inputs, self._state = self.model.head_inputs(tokens, self._state, valid=valid)
        numbers = torch.arange(1, tokens.shape[1] + 1, device=valid.device) * valid
        last = (numbers.amax(dim=1) - 1).clamp_min(0)
        rows = torch.arange(len(last), device=last.device)
        logits = self.model.logits(states.map_tensors(lambda x: x[rows, last][:, None], inputs))[:, 0]
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


def require_continuing(model: Any) -> None:
    """Raise unless ``model`` can continue texts: a causal model in eval mode."""
    if not isinstance(model, nn.Module):
        raise KinformerError(f"model is {model!r} but must be a model; kinformer.load gives that of a run.")
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


@contextmanager
def evaluating(model: CausalModel) -> Iterator[None]:
    """Put the model in eval mode, and back in training mode afterwards if it was."""
    training = isinstance(model, nn.Module) and model.training
    if not isinstance(model, nn.Module) or not training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


def generate(
    model: CausalModel,
    prompt_tokens: Tensor | np.ndarray | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Sequence[Sequence[int]] | None = None,
    valid: Tensor | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Tensor:
    """Continue ``prompt_tokens`` [batch, time] int64 by at most ``max_new_tokens``; return the new ones [batch, new].

    The prompt may also be a NumPy array, or lists of ids of one length. ``valid`` [batch, time] bool marks the real
    tokens of prompts of different lengths. A row ends with the first of the token sequences ``stop`` that it produces
    (included in the result, then repeated to its end by its last token); when every row has ended, ``new`` is smaller.
    ``sampling``: ``temperature`` (1.0; 0 is greedy), ``top_k``, ``top_p``, ``min_p``,
    ``repetition_penalty`` (1.0: none) and ``seed``; row r draws from stream r of
    the seed. The model is put in eval mode meanwhile.

    Errors: ``KinformerError`` where the tokens would go beyond the model's positions, before anything is computed.
    """
    require_kind("max_new_tokens", max_new_tokens, int)
    require("max_new_tokens", max_new_tokens, 1)
    tokens = _tokens(prompt_tokens)
    if valid is not None and not (isinstance(valid, Tensor) and valid.dtype == torch.bool):
        has = valid.dtype if isinstance(valid, Tensor) else type(valid).__name__
        raise KinformerError(f"valid is of the type {has} but must be a tensor [batch, time] of torch.bool.")
    with evaluating(model):
        session = Session(model, tokens.shape[0], stop=stop or (), room=max_new_tokens, **sampling)
        longest = tokens.shape[1] if valid is None else int(valid.sum(dim=1).max())
        session.require(max_new_tokens, [longest] * session.batch)
        session.feed(tokens, valid)
        new: list[Tensor] = []
        while len(new) < max_new_tokens and not session.finished:
            new.append(session.step())
    return torch.stack(new, dim=1)


def _tokens(prompt: Tensor | np.ndarray | Sequence[Sequence[int]]) -> Tensor:
    """Return the prompt as a tensor [batch, time]; of an array or lists int64."""
    if not isinstance(prompt, Tensor):
        try:
            ids = np.asarray(prompt)
        except ValueError:
            raise KinformerError(
                "prompt_tokens has rows of unlike length; pad them to one length and say by valid which are real."
            ) from None
        if ids.dtype.kind not in "iu":
            raise KinformerError(f"prompt_tokens holds {ids.dtype}, but must hold ids, which are whole numbers.")
        prompt = torch.from_numpy(ids.astype(np.int64))
    if prompt.dim() != 2:
        raise KinformerError(f"prompt_tokens must be [batch, time], but have the shape {tuple(prompt.shape)}.")
    return prompt
