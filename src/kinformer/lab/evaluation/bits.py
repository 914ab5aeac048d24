"""Bits per byte of a model on a split, by one protocol: every token is scored once, in order.

    bits per byte = (sum of -ln p(token | what came before) / ln 2 + log2(vocab_size)) / bytes of text

The last term in the numerator charges the very first token, which has nothing before it. Bits per byte of text, unlike
bits per token, compare models with different tokenizers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from math import isfinite, log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer
from kinformer.core.model import CausalModel, Model, device_of
from kinformer.core.state import State, map_tensors
from kinformer.lab.data.sampling import EvaluationStream, Split
from kinformer.runtime.errors import Checked, KinformerError, plural, require, require_finite

# Windows over a stream, for models that cannot carry a state for ever. The windows score every token once.


@dataclass(frozen=True, kw_only=True)
class Windows(Checked):
    """Windows of ``context`` tokens. Every window but the first begins with the share ``overlap`` of tokens that were
    scored before and are context only."""

    context: int
    overlap: float = 0.0

    LEAST = {"context": 1}
    SHARES = {"overlap": "[0, 1)"}

    def behind(self, prefix: int) -> Windows:
        """Return windows that leave room for ``prefix`` tokens in front of each window."""
        if self.context <= prefix:
            raise KinformerError(
                f"context is {self.context} but must be at least {prefix + 1}, as every window begins with "
                f"{plural(prefix, 'token')} of the tokenizer."
            )
        return replace(self, context=self.context - prefix)


class ScoredWindow(NamedTuple):
    """Inputs ``start .. start + size - 1`` predict the next tokens; the first ``unscored`` predictions do not count."""

    start: int
    size: int
    unscored: int


def cut(predictions: int, windows: Windows) -> Iterator[ScoredWindow]:
    """Yield the windows over a stream of ``predictions`` inputs, in order; the last may be shorter."""
    repeated = int(windows.context * windows.overlap)
    start, scored = 0, 0
    while scored < predictions:
        size = min(windows.context, predictions - start)
        yield ScoredWindow(start, size, scored - start)
        scored = start + size
        start = scored - repeated


def batches(predictions: int, windows: Windows, rows: int) -> Iterator[list[ScoredWindow]]:
    """Yield windows of one size together, at most ``rows`` at a time."""
    for _, alike in groupby(cut(predictions, windows), key=lambda window: window.size):
        while group := list(islice(alike, rows)):
            yield group


def window_rows(split: Split, windows: Windows, rows: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens [n, size + 1] of at most ``rows`` windows over ``split`` at a time, in order, and which of their
    predictions count, bool [n, size]."""
    for group in batches(len(split) - 1, windows, rows):
        size = group[0].size
        starts, _, unscored = (np.array(column) for column in zip(*group, strict=True))
        counted = torch.arange(size) >= torch.from_numpy(unscored)[:, None]
        yield torch.from_numpy(split.rows(starts, size + 1)).to(device), counted.to(device)


# Head inputs before every prediction of a stream: with the state carried from end to end, or in windows.


class Contexts(NamedTuple):
    """The head ``inputs`` of some positions, leaves [rows, n, ...]; ``targets`` [rows, n]: the tokens that come next;
    ``counted`` [rows, n] bool: whether a prediction counts."""

    inputs: Any
    targets: Tensor
    counted: Tensor


def contexts(
    model: CausalModel, stream: EvaluationStream, windows: Windows | None, prefix: Sequence[int] = ()
) -> Iterator[Contexts]:
    """Yield the contexts of all predictions of ``stream``, each counted once, in order.
    ``windows`` None: the state is carried. Otherwise windows are rows of a batch of at most ``stream.length`` tokens,
    or of one window. ``prefix``: ids such as BOS in front of the stream, or in front of every window. In a window the
    prefix counts as tokens of its context. The predictions of the prefix are not counted."""
    device = device_of(model)
    first = torch.tensor([list(prefix)], device=device)
    if windows is None:
        state: State = model.head_inputs(first)[1] if prefix else None
        for segment in stream:
            tokens, counted = (torch.from_numpy(field).to(device) for field in (segment.tokens, segment.valid))
            inputs, state = model.head_inputs(tokens[:, :-1], state)
            yield Contexts(inputs, tokens[:, 1:], counted)
        return
    rows = max(1, stream.length // windows.context)
    for tokens, counted in window_rows(stream.split, windows.behind(len(prefix)), rows, device):
        read = torch.cat([first.expand(len(tokens), -1), tokens[:, :-1]], 1) if prefix else tokens[:, :-1]
        inputs, _ = model.head_inputs(read)
        if prefix:
            inputs = map_tensors(lambda x: x[:, len(prefix) :], inputs)
        yield Contexts(inputs, tokens[:, 1:], counted)


CHUNK = 2048
_LOGITS_AT_ONCE = 1 << 24

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result: ``nats`` is the sum over ``tokens`` predictions; ``context`` None means that the state was carried.
    ``by_position``: bits per byte by position within the windows; empty if the state was carried."""

    bits_per_byte: float
    nats: float
    tokens: int
    bytes: int
    context: int | None
    overlap: float
    by_position: tuple[Bin, ...] = ()

    @property
    def bits_per_token(self) -> float:
        """Return the bits of a predicted token on average."""
        return self.nats / log(2) / self.tokens


def streamable(model: Model) -> bool:
    """Return whether ``model`` can carry its state for ever: the state is bounded, and positions do not end."""
    mixers = (module for module in model.modules() if isinstance(module, CausalMixer))
    return model.max_length is None and all(mixer.growth != "linear" for mixer in mixers)


def measure(
    model: CausalModel,
    split: Split,
    windows: Windows | None = None,
    *,
    chunk: int = CHUNK,
    progress: Progress | None = None,
    prefix: Sequence[int] = (),
) -> Measurement:
    """Measure ``model`` (in eval mode) on ``split``: with its state carried from end to end, or in ``windows``.

    ``chunk`` is how many tokens are computed at a time (at least one whole window); it bounds the memory and changes
    nothing else. ``progress(done, total)`` is called after every chunk. ``prefix``: ids such as BOS in front of the
    split, or of every window, because prompts of the model begin with them.
    """
    _check(model, split, windows, chunk)
    stream = EvaluationStream(split, chunk)
    by_position = ByPosition()
    nats, done = 0.0, 0
    with torch.inference_mode():
        for inputs, targets, counted in contexts(model, stream, windows, prefix):
            losses = negative_log_likelihood(model, inputs, targets)
            if windows is not None:
                by_position.add(losses, counted)
            nats, done = nats + float(losses.where(counted, 0.0).sum()), done + int(counted.sum())
            require_finite(isfinite(nats), f" within the first {plural(done, 'token')} of split {split.name!r}")
            if progress is not None:
                progress(done, stream.predictions)
    assert done == stream.predictions
    return Measurement(
        bits_per_byte=stream.bits_per_byte(nats),
        nats=nats,
        tokens=done,
        bytes=split.bytes,
        context=None if windows is None else windows.context,
        overlap=0.0 if windows is None else windows.overlap,
        by_position=by_position.bins(done / split.bytes),
    )


def negative_log_likelihood(model: CausalModel, inputs: object, targets: Tensor) -> Tensor:
    """Return -ln p of ``targets`` [batch, n] by the head's ``inputs`` (leaves [batch, n, ...]), [batch, n] float64."""
    parts = logits_in_parts(model, inputs, targets)
    nats = [nn.functional.cross_entropy(logits, wanted, reduction="none") for logits, wanted in parts]
    return torch.cat(nats).double().view(targets.shape)


def logits_in_parts(model: CausalModel, inputs: object, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [n, vocab], float32 at least, of the head's ``inputs`` (leaves [batch, time, ...]) and the
    ``targets`` [batch, time] of the same positions, [n], some positions at a time."""
    wanted, flat = targets.flatten(), map_tensors(lambda x: x.flatten(0, 1), inputs)
    # Logits of a whole chunk over a large vocabulary would be the peak of memory.
    step = max(1, _LOGITS_AT_ONCE // model.vocab_size)
    for start in range(0, len(wanted), step):
        part = slice(start, start + step)
        logits = model.logits(map_tensors(lambda x, part=part: x[None, part], flat))[0]  # type: ignore[misc]
        yield logits.to(torch.promote_types(logits.dtype, torch.float32)), wanted[part]


def _check(model: CausalModel, split: Split, windows: Windows | None, chunk: int) -> None:
    require("chunk", chunk, 1)
    if model.training:
        raise KinformerError("the model is in training mode, with its random masks; call model.eval() first.")
    if split.vocab_size > model.vocab_size:
        raise KinformerError(
            f"split {split.name!r} of {split.corpus} has ids up to {split.vocab_size - 1}, but this model knows "
            f"{model.vocab_size}; use the tokenizer that the model was trained with."
        )
    needed = len(split) - 1 if windows is None else min(windows.context, len(split) - 1)
    if model.max_length is not None and needed > model.max_length:
        raise KinformerError(
            f"a context of {plural(needed, 'token')} is beyond this model's positions, which end at max_length = "
            f"{model.max_length}; choose a smaller context."
        )


class Bin(NamedTuple):
    """The predictions that had ``first`` to ``last`` tokens of their window before them."""

    first: int
    last: int
    tokens: int
    bits_per_byte: float


class ByPosition:
    """The sums of negative log-likelihoods by the number of tokens of the window before the prediction, in bins that
    double: 1, 2, 3-4, 5-8, 9-16, ..."""

    def __init__(self) -> None:
        self._nats: dict[int, float] = defaultdict(float)
        self._tokens: dict[int, int] = defaultdict(int)

    def add(self, nats: Tensor, counted: Tensor) -> None:
        """Add ``nats`` [rows, size] where ``counted``; a prediction in column j has j + 1 tokens before it."""
        by_column, tokens = nats.where(counted, 0.0).sum(dim=0).cpu(), counted.sum(dim=0).cpu()
        for power in range((len(by_column) - 1).bit_length() + 1):
            part = slice(1 << power >> 1, 1 << power)
            self._nats[power] += float(by_column[part].sum())
            self._tokens[power] += int(tokens[part].sum())

    def bins(self, tokens_per_byte: float = 1.0) -> tuple[Bin, ...]:
        """Return the bins with predictions, in order, in bits per byte for tokens of the mean number of bytes."""
        return tuple(
            Bin((1 << power >> 1) + 1, 1 << power, count, self._nats[power] / log(2) / count * tokens_per_byte)
            for power, count in sorted(self._tokens.items())
            if count
        )
