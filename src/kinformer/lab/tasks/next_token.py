"""The rows and objectives of the next token: one loss, losses of all layers or exits, losses of several tokens ahead.

A training row is a window of `length` + 1 tokens of the text, here with the beginning of a document at d:

    window     a  b  c  d  e  f
    inputs     a  b  c  d  e
    targets    b  c  d  e  f       every target counts; in validation, the valid ones
    reset      0  0  0  1  0       with `reset_documents` or `segments`: d sees no earlier token
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.adaptive.rules import AllExits
from kinformer.adaptive.stack import ExitDecoder
from kinformer.core.model import CausalModel, StackedCausalModel
from kinformer.core.stack import ModelConfig, units_of
from kinformer.core.state import State
from kinformer.generation.drafts import DraftedSession, Drafting
from kinformer.generation.generate import MOST_NEW as MOST_NEW
from kinformer.generation.generate import session_of
from kinformer.generation.sampling import StoppedText, ends_of_text
from kinformer.generation.session import Session
from kinformer.lab.data import Corpus, EvaluationStream, RandomWindows, SegmentStreams, Split
from kinformer.lab.data.corpus import MixedWindows
from kinformer.lab.data.ngram import NgramModel
from kinformer.lab.data.tokenizer import prompt_ids
from kinformer.lab.evaluation.depths import Exited, noting_exits, saved
from kinformer.lab.tasks.evaluation import LoadedRun, Write, part_of
from kinformer.lab.tasks.task import GenerationSettings, TrainingPlan
from kinformer.lab.tasks.texts import check_ids, check_long_enough, tell_untrained, tokenizer_of, vocab_size_of
from kinformer.lab.training import cross_entropy
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput
from kinformer.lab.training.logging import BITS_PER_BYTE
from kinformer.lab.training.settings import Settings
from kinformer.models.decoder import Decoder
from kinformer.runtime.errors import KinformerError

# Rows of text for a causal model, and the objective of the next token.


def check(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model without the corpus's tokens, a too short corpus, and segments for a state that grows."""
    check_ids(plan, model, plan.data.tokenizer.vocab_size)
    if plan.options.segments:
        if (limit := part_of(model, "max_length")) is not None:
            raise KinformerError(
                f"`segments`: the state is carried without end, but this model's positions end at {limit}; choose "
                "another member, or another position such as `set` position=sinusoidal."
            )
        if any(getattr(module, "growth", "") == "linear" for module in model.modules()):
            raise KinformerError(
                "`segments`: the state is carried without end, but this model's state grows with every token; choose "
                "another member, or bound it, as `set` "
                '\'layers.*.mixer.pattern={"kind": "local", "window": 256}\' does.'
            )
    rows = plan.settings.batch_size if plan.options.segments else 1
    check_long_enough(plan.data, rows, plan.settings.length)


class TokenBatch(NamedTuple):
    """``tokens`` [batch, time + 1] int64, inputs and, one later, targets; ``reset`` and ``valid`` [batch, time] bool or
    None; ``neighbours`` [batch, time, k] int64, the tokens that followed where they were retrieved, -1 where is
    none."""

    tokens: Tensor
    reset: Tensor | None = None
    valid: Tensor | None = None
    neighbours: Tensor | None = None

    @property
    def size(self) -> int:
        rows, width = self.tokens.shape
        return rows * (width - 1)

    def stretch(self, number: int, count: int) -> TokenBatch:
        """Return stretch ``number`` of ``count`` of the rows' time, which is padded to a multiple of ``count``."""
        time = self.tokens.shape[1] - 1
        size = -(-time // count)
        valid, lacking = self.valid, size * count - time
        if lacking and valid is None:
            valid = torch.ones_like(self.tokens[:, 1:], dtype=torch.bool)
        begin, end = number * size, (number + 1) * size
        reset, valid = (
            None if mark is None else functional.pad(mark, (0, lacking))[:, begin:end] for mark in (self.reset, valid)
        )
        near = self.neighbours
        if near is not None:
            near = functional.pad(near, (0, 0, 0, lacking), value=-1)[:, begin:end]
        return TokenBatch(functional.pad(self.tokens, (0, lacking))[:, begin : end + 1], reset, valid, near)


NGRAM_CONTEXT = 4
"""The bytes of context of the baseline, an n-gram model."""
COUNTED_BYTES = 1 << 20
"""The most bytes of training text that the n-gram model beside a training counts, which takes about a second."""


class NextTokens(DataModule):
    """Windows of text or, with ``segments``, consecutive segments with a carried state.
    Validation reads windows as training does, each as a new sequence; with segments the state is carried. With
    ``reset_documents`` (as always with segments) every document begins a new sequence, too."""

    metrics = (BITS_PER_BYTE,)
    by_time = True
    neighbours: Mapping[str, np.ndarray] | None = None

    def __init__(
        self, corpus: Corpus, settings: Settings, segments: bool = False, reset_documents: bool = False
    ) -> None:
        self.corpus, self.settings, self.carries = corpus, settings, segments
        place = (corpus.splits["train"], settings.batch_size, settings.length, settings.seed)
        self.sampler: SegmentStreams | RandomWindows | MixedWindows
        if segments:
            corpus.require_single("segments")
            self.sampler = SegmentStreams(*place)
        elif corpus.mixture is not None:
            self.sampler = MixedWindows(place[0], corpus.mixture, *place[1:], reset_documents=reset_documents)
        else:
            self.sampler = RandomWindows(*place, reset_documents=reset_documents)
        held_out = corpus.held_out(settings.validation_tokens)
        streams = max(1, min(settings.batch_size, (len(held_out) - 1) // settings.length))
        self.stream = EvaluationStream(held_out, settings.length, streams, reset_documents=segments or reset_documents)

    @property
    def validations(self) -> int:
        return len(self.stream)

    def batch(self, step: int, rank: int, world: int) -> TokenBatch:
        tokens = torch.from_numpy(self.sampler.batch(step, rank, world))
        batch = TokenBatch(tokens, _marks(self.sampler.resets(step, rank, world)))
        if self.neighbours is None:
            return batch
        return self._add_neighbours(batch, "train", self.sampler.starts(step), rank)

    def validation(self, rank: int, world: int) -> Iterator[TokenBatch]:
        for index, segment in enumerate(self.stream):
            tokens, valid = (torch.from_numpy(_share(item, rank, world)) for item in (segment.tokens, segment.valid))
            reset = None if segment.reset is None else _share(segment.reset, rank, world)
            batch = TokenBatch(tokens, _marks(reset), None if valid.all() else valid)
            starts = self.stream.starts + index * self.stream.length
            yield batch if self.neighbours is None else self._add_neighbours(batch, "validation", starts, rank)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {BITS_PER_BYTE.name: bits_per_byte(means["nats"], self.corpus.splits[split])}

    def baselines(self) -> dict[str, float]:
        train = self.corpus.splits["train"].text.take(COUNTED_BYTES)
        return {"ngram_bits_per_byte": NgramModel(train, NGRAM_CONTEXT).bits_per_byte(self.stream.split)}

    def with_neighbours(self, train: np.ndarray, validation: np.ndarray) -> NextTokens:
        """Return these rows with neighbours from now on. Row t of ``train`` and ``validation``, int32 [tokens, k],
        belongs to the input at position t of the training split, and of the measured part of the validation split."""
        for table, split in ((train, self.corpus.splits["train"]), (validation, self.stream.split)):
            assert len(table) == len(split) - 1
        self.neighbours = {"train": train, "validation": validation}
        return self

    def _add_neighbours(self, batch: TokenBatch, split: str, starts: np.ndarray, rank: int) -> TokenBatch:
        """Return ``batch`` with its neighbours; ``starts`` are the positions of all processes' rows. The last process
        may have fewer rows than the others."""
        assert self.neighbours is not None
        table = self.neighbours[split]
        count, time = batch.tokens.shape[0], batch.tokens.shape[1] - 1
        rows = np.full((count, time, table.shape[1]), -1, np.int64)
        for row, start in zip(rows, starts[rank * count : (rank + 1) * count].tolist(), strict=False):
            rows_of_table = table[start : start + time]
            row[: len(rows_of_table)] = rows_of_table
        return batch._replace(neighbours=torch.from_numpy(rows))


def training_rows(plan: TrainingPlan) -> NextTokens:
    """Return the rows of training."""
    return NextTokens(plan.data, plan.settings, plan.options.segments, plan.options.reset_documents)


def token_loss(model: nn.Module, data: DataModule | None) -> NextTokenLoss | RetrievedNextToken:
    """Return the objective of the next token, of rows with retrieved neighbours where ``data`` has them."""
    retrieves = isinstance(data, NextTokens) and data.neighbours is not None
    return RetrievedNextToken() if retrieves else NextTokenLoss()


class NextTokenLoss:
    """Cross-entropy of each next token, in nats, over the valid tokens. ``by_token``: the loss is a mean over
    predictions, and each prediction needs only its own logits."""

    by_token = True

    def __call__(self, model: CausalModel, batch: TokenBatch, state: State, progress: float) -> ObjectiveOutput:
        tokens, targets, marks = batch.tokens[:, :-1], batch.tokens[:, 1:], {"valid": batch.valid, "reset": batch.reset}
        if cross_entropy.in_pieces(model, tokens.numel()):
            inputs, state = model.head_inputs(tokens, state, **marks)
            loss, nats = hidden_nats(model, inputs, targets, batch.valid)
        else:
            logits, state = model(tokens, state, **marks)
            loss, nats = next_token_nats(logits, targets, batch.valid)
        return loss, {"nats": nats, "predicted": predicted(batch)}, state


def predicted(batch: TokenBatch) -> Tensor:
    """Return how many tokens of a batch are predicted and count."""
    return torch.full((), batch.size, device=batch.tokens.device) if batch.valid is None else batch.valid.sum()


def next_token_nats(logits: Tensor, targets: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean and the detached sum of the cross-entropies of ``targets`` [batch, time], where ``valid``."""
    count: Tensor | int = max(1, targets.numel())
    if valid is not None:
        # -100 is the target that cross_entropy ignores; all rows may be invalid in a process's share, hence the clamp.
        targets, count = targets.masked_fill(~valid, -100), valid.sum().clamp_min(1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return nats / count, nats.detach()


def hidden_nats(model: CausalModel, inputs: object, targets: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return :func:`next_token_nats` from the head's ``inputs``; many hidden states without all logits at once."""
    if not (isinstance(inputs, Tensor) and cross_entropy.in_pieces(model, targets.numel())):
        return next_token_nats(model.logits(inputs), targets, valid)
    count: Tensor | int = max(1, targets.numel())
    if valid is not None:
        inputs, targets, count = inputs[valid], targets[valid], valid.sum().clamp_min(1)
    nats = cross_entropy.of_head(model, inputs.flatten(0, -2), targets.flatten())
    return nats / count, nats.detach()


def bits_per_byte(nats_per_token: float, split: Split) -> float:
    """Return nats per token as bits per byte of the split's text."""
    return nats_per_token / log(2) * len(split) / split.bytes


def _share(field: np.ndarray, rank: int, world: int) -> np.ndarray:
    """Return a process's rows; rows that fill up the last share are zeros, and so not valid."""
    size = -(-len(field) // world)
    padded = np.zeros((size * world, *field.shape[1:]), field.dtype)
    padded[: len(field)] = field
    return padded[rank * size : (rank + 1) * size]


def _marks(reset: np.ndarray | None) -> Tensor | None:
    """Return where sequences begin, or None where none does, as in most batches, which saves work."""
    return None if reset is None or not reset.any() else torch.from_numpy(reset)


class RetrievedNextToken:
    """Cross-entropy of each next token where the head is given what followed the neighbours of every token (SPALM,
    Yogatama et al. 2021)."""

    reads_hidden = True

    def __call__(self, model: StackedCausalModel, batch: TokenBatch, state: State, progress: float) -> ObjectiveOutput:
        hidden_states, state, _ = model.hidden(batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset)
        logits = model.head(hidden_states, model.input, neighbours=batch.neighbours)
        loss, nats = next_token_nats(logits, batch.tokens[:, 1:], batch.valid)
        return loss, {"nats": nats, "predicted": predicted(batch)}, state


# Next tokens by the losses of all exits of a stack (Elbayad et al. 2020, section 3.1; Schuster et al. 2022, 3.3).


class ExitLosses:
    """The loss of models with early exits, of the kind that the model's stack names:

    aligned    loss = sum of w_n L_n over the exits n / sum of w_n, L_n the cross-entropy of exit n for all tokens
    mixed      loss = mean of L over ``stack.samples`` runs, each with evenly drawn exits for its tokens

    Aligned training adds the loss of the stack's exit rule, if any. In eval mode this is :class:`NextTokenLoss`, of
    tokens that leave by the rule.
    """

    reads_hidden = True
    trains_exits = True

    @classmethod
    def of(cls, model: nn.Module, data: DataModule | None = None) -> ExitLosses:
        """Make the objective for ``model``; KinformerError for a stack without exits."""
        if not isinstance(model, ExitDecoder):
            raise KinformerError(
                "the objective 'exits' needs a model whose tokens may leave early, but this model's tokens may not; "
                "train calm or depth-adaptive, add `set` stack=exits, or leave `objective` out."
            )
        return cls()

    def __call__(self, model: ExitDecoder, batch: TokenBatch, state: State, progress: float) -> ObjectiveOutput:
        targets, stack = batch.tokens[:, 1:], model.stack
        if not model.training:
            return NextTokenLoss()(model, batch, state, progress)
        if stack.config.training == "mixed":
            drawn = [NextTokenLoss()(model, batch, state, progress) for _ in range(stack.config.samples)]
            means, metrics, states = zip(*drawn, strict=True)
            mean_nats = torch.stack([metric["nats"] for metric in metrics]).mean()
            return torch.stack(means).mean(), metrics[0] | {"nats": mean_nats}, states[-1]
        _, state, tapped = model.hidden(
            batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset, taps=stack.exits
        )
        logits = [model.exit_logits(x, number) for number, x in enumerate(tapped)]
        losses, nats = zip(*(next_token_nats(logit, targets, batch.valid) for logit in logits), strict=True)
        seen = None if stack.rule is None else exits_of(tapped, logits, batch)
        loss = stack.aligned_loss(losses, seen, progress)
        return loss, {"nats": nats[-1], "predicted": predicted(batch)}, state


def exits_of(hidden: tuple[Tensor, ...], logits: list[Tensor], batch: TokenBatch) -> AllExits:
    """Return the outputs of every exit, without a graph except for ``hidden``."""
    targets = batch.tokens[:, 1:]
    valid = torch.ones_like(targets, dtype=torch.bool) if batch.valid is None else batch.valid
    sequence = torch.zeros_like(targets) if batch.reset is None else batch.reset.long().cumsum(1)
    return AllExits.of(hidden, logits, targets, valid, sequence)


class DeepSupervision(nn.Module):
    """Next tokens by losses at all layers and of two tokens ahead (Al-Rfou et al. 2018, section 3).

    The further losses make deep stacks trainable.

        loss = L_n + sum of L_l over the layers l = 1 ... n - 1 that have not stopped yet
        L_l = cross-entropy of the next token + AHEAD * cross-entropy of the token after it

    Layer l of n stops when the share l / (2 n) of training is done: half-way only the last is left. ``readers`` make
    all predictions except the last layer's prediction of the next token. They are trained and kept in checkpoints, but
    do not belong to the model. In eval mode this is :class:`NextTokenLoss`.
    """

    AHEAD = 0.5
    reads_hidden = True

    def __init__(self, dim: int, vocab_size: int, depth: int) -> None:
        super().__init__()
        self.readers = nn.ModuleList(_Reader(dim, vocab_size, targets=2) for _ in range(depth - 1))
        self.readers.append(_Reader(dim, vocab_size, targets=1))

    @classmethod
    def of(cls, model: nn.Module, data: DataModule | None = None) -> DeepSupervision:
        """Make the objective for the sizes of ``model``, which must show its layers' outputs by ``hidden(tokens, state,
        taps=...)``; KinformerError if it does not."""
        if not (hasattr(model, "hidden") and units_of(model)):
            raise KinformerError(
                f"the objective 'deep-supervision' reads the layers of a model, but {type(model).__name__} shows none; "
                "train it with next-token."
            )
        config: ModelConfig = part_of(model, "config")
        return cls(config.width, vocab_size_of(config), len(config.uses))

    def active(self, progress: float) -> list[int]:
        """Return the indices (from 0) of the layers below the last that still have a loss at ``progress``."""
        depth = len(self.readers)
        return [layer - 1 for layer in range(1, depth) if 2 * depth * progress < layer]

    def forward(self, model: CausalModel, batch: TokenBatch, state: State, progress: float) -> ObjectiveOutput:
        if not self.training:
            return NextTokenLoss()(model, batch, state, progress)
        taps = self.active(progress)
        hidden, state, tapped = model.hidden(
            batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset, taps=tuple(taps)
        )
        loss, nats = next_token_nats(model.logits(hidden), batch.tokens[:, 1:], batch.valid)
        loss = loss + self._layer(batch, None, *self.readers[-1](hidden))
        for index, x in zip(taps, tapped, strict=True):
            loss = loss + self._layer(batch, *self.readers[index](x))
        # The stopped readers have a part of 0, since engines expect a gradient of every parameter.
        idle = [reader for index, reader in enumerate(self.readers[:-1]) if index not in taps]
        nothing = sum((0.0 * parameter.sum() for reader in idle for parameter in reader.parameters()), 0.0)
        return loss + nothing, {"nats": nats, "predicted": predicted(batch)}, state

    def _layer(self, batch: TokenBatch, following: Tensor | None, ahead: Tensor) -> Tensor:
        """Return a layer's loss from its logits of the next token, if it has some, and of the one after it."""
        valid = None if batch.valid is None else batch.valid[:, 1:] & batch.valid[:, :-1]
        loss = self.AHEAD * next_token_nats(ahead[:, :-1], batch.tokens[:, 2:], valid)[0]
        return loss if following is None else loss + next_token_nats(following, batch.tokens[:, 1:], batch.valid)[0]


class _Reader(nn.Module):
    """A layer: hidden [batch, time, dim], normed first, -> a tuple of logits [batch, time, vocab] for ``targets``."""

    def __init__(self, dim: int, vocab_size: int, targets: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, targets * vocab_size, bias=False)
        self.targets = targets
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.output(self.norm(hidden)).chunk(self.targets, dim=-1)


# Next tokens and those after them (multi-token prediction: Gloeckle et al. 2024; DeepSeek-V3 2024, section 2.2).


class MultiToken:
    """The loss of models that predict n further tokens (``ahead``):

        loss = L_1 + WEIGHT / n * sum of L_j over j = 2 ... n + 1

    L_j is the cross-entropy of the token j places ahead, from the hidden states and the tokens between (which training
    knows, and generation has guessed), within its document. In eval mode this is :class:`NextTokenLoss`.
    """

    WEIGHT = 0.3  # DeepSeek-V3, section 4.2
    reads_hidden = True
    trains_ahead = True

    @classmethod
    def of(cls, model: nn.Module, data: DataModule | None = None) -> MultiToken:
        """Make the objective for ``model``; KinformerError if it predicts no further tokens."""
        if getattr(model, "ahead", None) is None:
            raise KinformerError(
                "the objective 'multi-token' needs a model that predicts further tokens; add `set` ahead=3, or leave "
                "`objective` out."
            )
        return cls()

    def __call__(self, model: Decoder, batch: TokenBatch, state: State, progress: float) -> ObjectiveOutput:
        if not model.training:
            return NextTokenLoss()(model, batch, state, progress)
        tokens, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
        hidden, state, _ = model.hidden(tokens, state, valid=batch.valid, reset=batch.reset)
        loss, nats = hidden_nats(model, hidden, targets, batch.valid)
        further = self.further(model, hidden, batch)
        return loss + self.WEIGHT * further.mean(), {"nats": nats, "predicted": predicted(batch)}, state

    def further(self, model: Decoder, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """Return L_2 ... L_(n + 1), [n], from the ``hidden`` states [batch, time, width]."""
        assert model.ahead is not None
        losses, time = [], hidden.shape[1]
        valid = torch.ones_like(batch.tokens[:, 1:], dtype=torch.bool) if batch.valid is None else batch.valid
        for number in range(1, len(model.ahead) + 1):
            if number >= time:
                losses.append(hidden.sum() * 0.0)
                continue
            hidden = model.ahead.further(number, hidden[:, : time - number], batch.tokens[:, number:time], model.input)
            valid = valid[:, : time - number] & (
                valid[:, 1:] if batch.reset is None else valid[:, 1:] & ~batch.reset[:, number:]
            )
            losses.append(hidden_nats(model, hidden, batch.tokens[:, number + 1 :], valid)[0])
        return torch.stack(losses)


@dataclass
class Sample:
    """One continuation: ``tokens``, ``text``, and whether it ``stopped`` at a stop text or a token that ends texts."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stopped: bool = False


@dataclass
class Generated:
    """The ``samples`` and their cost: prompt and new tokens (over all samples), seconds for each; ``interrupted`` by
    Ctrl-C; ``exits``: where new tokens could leave early; ``drafting``: with a draft."""

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
        """Return new tokens per second; the first token's time is included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0


def continue_text(subject: LoadedRun, prompt: str | bytes, options: GenerationSettings, write: Write) -> Generated:
    """Continue ``prompt``; the text of a single sample is given to ``write`` piece by piece while it is drawn."""
    tokenizer = tokenizer_of(subject.run)
    tokens = prompt_ids(tokenizer, prompt)
    if not len(tokens):
        raise KinformerError("the prompt is empty; give at least one character with `prompt` or `prompt_file`.")
    session, new = _session(subject, options, len(tokens))
    write = write if options.samples == 1 else None
    writers = [_Writer(subject, options, tokens, write) for _ in range(options.samples)]
    tell_untrained(subject.run, len(tokens) + new - 1)
    result = Generated([writer.sample for writer in writers], len(tokens))
    started_at, exits = time.perf_counter(), None
    try:
        session.feed(torch.from_numpy(np.asarray(tokens))[None])
        session = session if options.samples == 1 else session.fork(options.samples)
        result.prompt_seconds, started_at = time.perf_counter() - started_at, time.perf_counter()
        with noting_exits(subject.model) as leaving:
            for row_tokens in session.stream(new):
                for writer, token in zip(writers, row_tokens, strict=True):
                    if not writer.sample.stopped:
                        result.new_tokens += 1
                        writer.feed(token)
                if all(writer.sample.stopped for writer in writers):
                    break
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
    """A text that a run continues in turns: every turn adds a text and draws its continuation. The state is carried, so
    that earlier turns are not read again."""

    def __init__(self, subject: LoadedRun, options: GenerationSettings) -> None:
        self.subject, self.options = subject, options
        self.session: Session | None = None

    def turn(self, text: str | bytes) -> Iterator[str]:
        """Return an iterator that draws the continuation of all so far and ``text``, and yields its pieces."""
        tokenizer = tokenizer_of(self.subject.run)
        tokens = prompt_ids(tokenizer, text) if self.session is None else tokenizer.encode(text)
        if not len(tokens):
            raise KinformerError("the text to continue is empty; give at least one character.")
        if self.session is None:
            self.session, new = _session(self.subject, self.options, len(tokens))
        else:
            new = _new_tokens(self.subject.model, self.options, self.session.length + len(tokens))
            self.session.require(new, [len(tokens)])
        return self._continued(self.session, tokens, new)

    def answer(self, prompt: str) -> Iterator[str]:
        """Return an iterator that draws the continuation of ``prompt``, the whole conversation as a chat template
        writes it, BOS included, and yields its pieces.
        The conversation is read anew, since a template may write earlier messages otherwise in later turns."""
        tokens = tokenizer_of(self.subject.run).encode(prompt)
        if not len(tokens):
            raise KinformerError("the chat template writes an empty prompt; give `before` or `after` instead.")
        self.session, new = _session(self.subject, self.options, len(tokens))
        return self._continued(self.session, tokens, new)

    def _continued(self, session: Session, tokens: np.ndarray, new: int) -> Iterator[str]:
        session.feed(torch.from_numpy(np.asarray(tokens))[None])
        return self._pieces(session, tokens, new)

    def _pieces(self, session: Session, before: np.ndarray, new: int) -> Iterator[str]:
        pieces: list[str] = []
        writer = _Writer(self.subject, self.options, before, pieces.append)
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
    names = ("chunk", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    settings = {name: getattr(options, name) for name in names} | {"room": new}
    session = session_of(subject.model, 1, subject.draft, options.draft_length, settings)
    session.require(new, [prompt])
    return session, new


class _Writer:
    """A sample in the making behind the ids ``before``, and the function that its text is written by as it comes."""

    def __init__(self, subject: LoadedRun, options: GenerationSettings, before: np.ndarray, write: Write) -> None:
        self.write, self.sample = write, Sample()
        stream = tokenizer_of(subject.run).stream(before.tolist())
        self._text = StoppedText(stream, options.stop, ends_of_text(subject.model))

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
