"""Laws of causal models, checked on models of this library, of transformers, or on a module of the user.

A model is a function ``logits, cache = model(tokens, cache, valid)`` of chunks [batch, time] (see
``interop.proof``). Every law is tried at growing lengths, so that what breaks it first is the smallest case.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError, plural

# Causal models as the laws of ``interop.proof`` call them: ``logits, cache = model(tokens, cache, valid)``.


class NotJudgedError(KinformerError):
    """The reason why a law cannot be checked on a model."""


class Uncached:
    """The cache of a model that returns none; no chunk can follow it."""


class Cached(NamedTuple):
    """The cache of a model of transformers, by the ``name`` of the argument that takes it, and the ``mask`` [batch,
    tokens so far]."""

    name: str
    past: object
    mask: Tensor


class Plain:
    """A model with the call of this library: ``logits, state = model(tokens, state, valid=valid)``."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval() if isinstance(model, nn.Module) else model
        self.vocab_size: int = getattr(model, "vocab_size", 0)
        if self.vocab_size < 2:
            raise KinformerError("the object does not have a vocab_size; give it one, the number of ids that it takes.")
        if not callable(model):
            raise KinformerError(
                f"the object is a {type(model).__name__}, which cannot be called; give a causal model, which returns "
                "(logits, state) of (tokens, state)."
            )
        self.max_length = getattr(model, "max_length", None)
        call = model.forward if isinstance(model, nn.Module) else model
        parameters = inspect.signature(call).parameters
        self.takes_padding = "valid" in parameters
        self.takes_packing = self.promises_packing = "reset" in parameters

    def __call__(self, tokens: Tensor, cache: State = None, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Return logits [batch, time, vocab] and the state for the next chunk."""
        logits, cache = self.model(tokens, cache, **({} if valid is None else {"valid": valid}))
        return logits, cache

    def packed(self, tokens: Tensor, start: int) -> Tensor:
        """Return logits of rows in which another text begins at ``start``."""
        reset = torch.zeros_like(tokens, dtype=torch.bool)
        reset[:, start] = True
        return self.model(tokens, None, reset=reset)[0]  # type: ignore[no-any-return]


class Theirs:
    """A causal model of transformers, whose cache is its own and whose masks cover all tokens so far.

    What pads is the model's padding token. Positions are named only where they count from 0 (RoBERTa's do not); the
    mask of a recurrent model covers a chunk alone, as its own ``generate`` has it.
    """

    takes_padding = True

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        self.pad_token = getattr(config, "pad_token_id", None)
        self.vocab_size = int(config.vocab_size)
        self.max_length = getattr(config, "max_position_embeddings", None)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters and self._counts_from_0()
        self.takes_packing = self.takes_positions
        self.promises_packing = False

    def __call__(
        self, tokens: Tensor, cache: Cached | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, Cached]:
        """Return logits [batch, time, vocab] and their cache with the mask so far."""
        name, past, before = cache or ("", None, tokens.new_ones(len(tokens), 0))
        if isinstance(past, Uncached):
            raise NotJudgedError("the model returns no cache")
        mask = torch.cat([before, torch.ones_like(tokens) if valid is None else valid.to(tokens)], dim=1)
        if valid is not None and self.pad_token is not None:
            tokens = tokens.masked_fill(~valid, self.pad_token)
        options: dict[str, object] = {"use_cache": True}
        if not mask.all():
            options["attention_mask"] = mask[:, -tokens.shape[1] :] if name == "cache_params" else mask
            if self.takes_positions:
                options["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        if name:
            options[name] = past
        output = self.model(tokens, **options)
        names = ("cache", "past_key_values", "cache_params")
        name = next((one for one in names if output.get(one) is not None), "")
        return output.logits, Cached(name, output[name] if name else Uncached(), mask)

    def packed(self, tokens: Tensor, start: int) -> Tensor:
        """Return logits of rows in which another text begins at ``start``, where positions restart."""
        positions = torch.cat([torch.arange(start), torch.arange(tokens.shape[1] - start)])
        output = self.model(tokens, position_ids=positions.expand_as(tokens), use_cache=False)
        return output.logits  # type: ignore[no-any-return]

    @torch.no_grad()
    def _counts_from_0(self) -> bool:
        """Return whether a text has the same logits with positions given from 0 on."""
        tokens = torch.arange(1, 4)[None] % self.vocab_size
        try:
            named = self.model(tokens, position_ids=torch.arange(3)[None]).logits
            return torch.allclose(named, self.model(tokens).logits, atol=1e-4)
        except Exception:
            return False


Subject: TypeAlias = Plain | Theirs

LENGTHS = (2, 3, 4, 6, 9, 13, 18, 24, 33, 48, 64)
ROWS = 3
LIMIT = 1e-4
"""The largest difference of logits, relative to the largest logit, that rounding explains in float32."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one law: whether it ``holds`` (None: not judged), the largest ``difference`` and the ``case``.

    ``case``: the smallest that breaks it, or why it is not judged.
    """

    law: str
    holds: bool | None
    difference: float | None
    case: str = ""

    @property
    def badge(self) -> str:
        """Return the verdict in a word or two."""
        if self.holds is None and self.difference is not None:
            return "measured"
        return {True: "holds", False: "BREAKS", None: "not judged"}[self.holds]


def gap(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest value of ``other``; infinite where either is NaN."""
    if one.shape != other.shape:
        return float("inf")
    difference = (one.detach().double() - other.detach().double()).abs().max()
    scale = other.detach().double().abs().max().clamp(min=1)
    return float((difference / scale).nan_to_num(nan=torch.inf))


Cases = Iterator[tuple[str, Tensor, Tensor]]


def causality(model: Subject, tokens: Tensor) -> Cases:
    """Yield the logits before a token that changes: after its change, and before."""
    expected, _ = model(tokens)
    for since in sorted({1, tokens.shape[1] // 2, tokens.shape[1] - 1} - {0}):
        changed = tokens.clone()
        changed[:, since:] = (changed[:, since:] + 1) % model.vocab_size
        yield f"tokens from {since} on changed", model(changed)[0][:, :since], expected[:, :since]


def cache(model: Subject, tokens: Tensor) -> Cases:
    """Yield the joined logits of chunks, and the logits of all tokens at once."""
    expected, time = model(tokens)[0], tokens.shape[1]
    for sizes in ([1] * time, [1, time - 1], [time - 1, 1], [time // 2, time - time // 2]):
        state, parts = None, []
        for chunk in tokens.split(sizes, dim=1):
            logits, state = model(chunk, state)
            parts.append(logits)
        name = f"{time} x 1" if set(sizes) == {1} else " + ".join(map(str, sizes))
        yield f"chunks of {name}", torch.cat(parts, dim=1), expected


def padding(model: Subject, tokens: Tensor, on_left: bool = True) -> Cases:
    """Yield the logits of a padded row among others, with a step after it, and the logits of the row alone."""
    batch, time = tokens.shape
    step = tokens[:, :1]
    counts = torch.arange(batch).clamp(max=time - 1)
    valid = torch.arange(time) >= counts[:, None]
    valid = valid if on_left else valid.flip(1)
    logits, state = model(tokens, None, valid)
    last, _ = model(step, state)
    for row in range(batch):
        alone, state = model(tokens[row][valid[row]][None])
        after, _ = model(step[row : row + 1], state)
        name = f"{plural(int(counts[row]), 'token')} of padding on the {'left' if on_left else 'right'}"
        yield name, logits[row][valid[row]], alone[0]
        yield f"{name}, the step after", last[row : row + 1], after


def packing(model: Subject, tokens: Tensor) -> Cases:
    """Yield the logits of two texts in one row, and the logits of each alone."""
    start = tokens.shape[1] // 2
    expected = torch.cat([model(part)[0] for part in (tokens[:, :start], tokens[:, start:])], dim=1)
    yield f"texts of {start} + {tokens.shape[1] - start}", model.packed(tokens, start), expected


def batch(model: Subject, tokens: Tensor) -> Cases:
    """Yield logits of every row alone and among the others."""
    expected, _ = model(tokens)
    for row in range(len(tokens)):
        yield f"row {row} alone", model(tokens[row : row + 1])[0], expected[row : row + 1]


def permutation(model: Subject, tokens: Tensor) -> Cases:
    """Yield logits of rows in another order, back in theirs."""
    yield "rows in reverse order", model(tokens.flip(0))[0].flip(0), model(tokens)[0]


LAWS: Mapping[str, Callable[[Subject, Tensor], Cases]] = {
    "causality": causality,
    "cache": cache,
    "padding left": padding,
    "padding right": partial(padding, on_left=False),
    "packing": packing,
    "batch": batch,
    "permutation": permutation,
}


def lengths(model: Subject, longest: int) -> list[int]:
    """Return the lengths at which laws are tried: up to ``longest`` and to the model's longest text, less one step."""
    bound = min(longest, model.max_length - 1) if model.max_length else longest
    return [length for length in LENGTHS if length <= bound] or [2]


def tokens_of(model: Subject, time: int, seed: int = 0, rows: int = ROWS) -> Tensor:
    """Return random tokens [rows, time] that the model takes, without padding, whose vector may be untrained."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (rows, time), generator=generator)
    pad = getattr(model, "pad_token", None)
    return tokens if pad is None else tokens.masked_fill(tokens == pad, int(pad == 0))


def judge(model: Subject, longest: int = 24, limit: float = LIMIT) -> list[Verdict]:
    """Return the verdict on every law, with texts of at most ``longest`` tokens."""
    verdicts = []
    for name, law in LAWS.items():
        if name.startswith("padding") and not model.takes_padding:
            verdicts.append(Verdict(name, None, None, "the model does not take a mask of padding"))
        elif name == "packing" and not model.takes_packing:
            verdicts.append(Verdict(name, None, None, "the model does not take a mark where a text begins"))
        else:
            verdict = _judged(name, law, model, longest, limit)
            if name == "packing" and verdict.holds is False and not model.promises_packing:
                verdict = Verdict(name, None, None, "positions that restart part no texts")
            verdicts.append(verdict)
    return [*verdicts, drift(model, longest)]


@torch.no_grad()
def _judged(name: str, law: Callable[[Subject, Tensor], Cases], model: Subject, longest: int, limit: float) -> Verdict:
    largest = 0.0
    for time in lengths(model, longest):
        where = f"{ROWS} rows of {plural(time, 'token')}"
        try:
            for case, got, expected in law(model, tokens_of(model, time)):
                difference = gap(got, expected)
                if not difference <= limit:
                    return Verdict(name, False, difference, f"{where}, {case}: logits differ by {difference:.2g}")
                largest = max(largest, difference)
        except NotJudgedError as error:
            return Verdict(name, None, None, str(error))
        except Exception as error:
            reason = " ".join(str(error).split())[:160] or "no reason"
            return Verdict(name, False, None, f"{where}: {type(error).__name__}: {reason}")
    return Verdict(name, True, largest)


@torch.no_grad()
def drift(model: Subject, longest: int) -> Verdict:
    """Return how far bfloat16 weights move the logits from float32 weights; this is a measure, not a law."""
    if not isinstance(getattr(model, "model", None), nn.Module):
        return Verdict("bfloat16", None, None, "the object is not an nn.Module")
    low = copy.copy(model)
    tokens = tokens_of(model, lengths(model, longest)[-1])
    try:
        low.model = copy.deepcopy(model.model).bfloat16()
        difference = gap(low(tokens)[0], model(tokens)[0])
    except Exception as error:
        return Verdict("bfloat16", None, None, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    return Verdict("bfloat16", None, difference, "the drift of logits with weights in bfloat16")


def beside(
    ours: Plain, theirs: Theirs, names: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], limit: float = LIMIT
) -> list[Verdict]:
    """Return verdicts on our model beside transformers': logits, gradients, streaming, padding and greedy tokens.

    ``names`` returns our weights by name as theirs.
    """
    time = lengths(ours, 24)[-1]
    tokens = tokens_of(theirs, time)
    with torch.no_grad():
        expected = theirs(tokens)[0]
        state, parts = None, []
        for chunk in tokens.split([1, time // 2, 1, *([1] * (time - 2 - time // 2))], dim=1):
            logits, state = ours(chunk, state)
            parts.append(logits)
        pairs = {"logits": (ours(tokens)[0], expected), "streaming": (torch.cat(parts, dim=1), expected)}
        valid = torch.arange(time) >= torch.arange(ROWS)[:, None]
        padded = (model(tokens, None, valid)[0][valid] for model in (ours, theirs))
        pairs["padding left"] = (next(padded), next(padded))
    verdicts = []
    for name, (one, other) in pairs.items():
        difference = gap(one, other)
        verdicts.append(Verdict(name, difference <= limit, difference, "" if difference <= limit else f"{time} tokens"))
    return [*verdicts, _gradients(ours, theirs, names, limit), _greedy(ours, theirs)]


def _gradients(ours: Plain, theirs: Theirs, names: Callable[..., Mapping[str, Tensor]], limit: float) -> Verdict:
    """Return the verdict on the gradients of one loss with respect to every weight."""
    tokens = tokens_of(theirs, min(9, lengths(ours, 24)[-1]))
    for model in (ours, theirs):
        model.model.zero_grad()
        logits = model(tokens)[0]
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    state = ours.model.state_dict(keep_vars=True)
    zeros = {name: torch.zeros_like(one) for name, one in state.items()}
    grads = {name: zeros[name] if one.grad is None else one.grad for name, one in state.items()}
    nothing = names(zeros)
    wanted = {name: one.grad for name, one in theirs.model.named_parameters() if one.grad is not None}
    renamed = {"embed_out.weight": "lm_head.weight"} if "lm_head.weight" in wanted else {}  # GPT-NeoX, by version
    named = {renamed.get(name, name): one - nothing[name] for name, one in names(grads).items()}
    gaps = {name: gap(one, wanted[name]) for name, one in named.items() if name in wanted}
    worst = max(gaps, key=lambda name: gaps[name])
    for model in (ours, theirs):
        model.model.zero_grad()
    holds = gaps[worst] <= limit and len(gaps) == len(wanted)
    case = "" if holds else f"{worst}, {len(gaps)} of {plural(len(wanted), 'tensor')} compared"
    return Verdict("gradients", holds, gaps[worst], case)


@torch.no_grad()
def _greedy(ours: Plain, theirs: Theirs) -> Verdict:
    """Return the verdict on the tokens that either model continues with."""
    time = max(2, lengths(ours, 24)[-1] // 2)
    sequences = []
    for model in (ours, theirs):
        chunk, state, new = tokens_of(theirs, time), None, []
        for _ in range(time):
            logits, state = model(chunk, state)
            chunk = logits[:, -1:].argmax(-1)
            new.append(chunk)
        sequences.append(torch.cat(new, dim=1))
    unlike = int((sequences[0] != sequences[1]).any(0).sum())
    return Verdict("greedy tokens", not unlike, None, f"{unlike} of {time} steps differ" if unlike else "")
