"""The task instruct: conversations as rows, the loss of their answers, and how well a run predicts the answers.

A training row is a conversation as the chat template writes it. A label is the token that follows; "-" stands for
IGNORED, and here "|" ends a message:

    tokens   user:  Hi  |  assistant:  Hello  |
    labels     -    -   -    Hello       |    -
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kinformer.core.model import CausalModel, device_of
from kinformer.lab.data import IGNORED
from kinformer.lab.data.buckets import STEP_OF_WIDTH, Order
from kinformer.lab.data.corpus import SHARES
from kinformer.lab.data.files import Identified, fingerprint_of, reading_corpus, single_file
from kinformer.lab.serving.fields import ChatTemplate
from kinformer.lab.tasks.answers import ScoredBatch, answers
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings, LoadedRun, TrainedRun
from kinformer.lab.tasks.options import InstructOptions
from kinformer.lab.tasks.task import NoOptions, Source, TrainingPlan
from kinformer.lab.tasks.texts import HeldOut, check_ids, ends_of, spec_of, whole_length
from kinformer.lab.training.data_module import DataModule, map_fields
from kinformer.lab.training.logging import ANSWER_BITS
from kinformer.runtime.errors import KinformerError, plural, require_finite, require_share
from kinformer.runtime.parsing import parse_json_line
from kinformer.runtime.progress import note

# Conversations from JSON lines, as ids in which the answers are marked.

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template ``chatml``, for runs that begin without a template."""


class Conversation(NamedTuple):
    """A conversation: ``ids`` int64 [tokens], ``answer`` [tokens] bool, and the ``bytes`` of text of its answers."""

    ids: np.ndarray
    answer: np.ndarray
    bytes: int


@dataclass(frozen=True, eq=False)
class Conversations(Identified):
    """Conversations in three splits, and the source of the chat template that wrote them (None: plain texts)."""

    splits: Mapping[str, Sequence[Conversation]]
    chat_template: str | None
    vocab_size: int

    @property
    def identity(self) -> dict[str, object]:
        return super().identity | {"examples": {name: len(split) for name, split in self.splits.items()}}

    def bits_per_byte(self, nats: float, split: str) -> float:
        """Return ``nats`` per token of the answers of ``split`` as bits per byte of their text."""
        rows = self.splits[split]
        return nats / log(2) * sum(int(row.answer.sum()) for row in rows) / sum(row.bytes for row in rows)


def open_conversations(source: Source, options: InstructOptions, cache: Path | None = None) -> Conversations:
    """Return the conversations that ``source`` names, in the template that the user or the run names."""
    assert source.tokenizer is not None
    require_share("holdout", source.holdout)
    path = Path(source.spec)
    template = _template(source, options)
    with reading_corpus(path):
        lines = [(number, line) for number, line in enumerate(path.read_bytes().splitlines(), start=1) if line.strip()]
    encoded = [
        _encode(f"{path}, line {number}", parse_json_line(path, number, line, WANTED), template, source)
        for number, line in lines
    ]
    share = SHARES[1] if source.holdout is None else source.holdout
    count, parts = ceil(share * len(encoded)), 2 if source.holdout is None else 1
    if len(encoded) <= parts * count:
        raise KinformerError(
            f"{path}: has {plural(len(encoded), 'conversation')}, and {parts * count} are held out; give more."
        )
    order = sorted(range(len(encoded)), key=lambda row: hashlib.sha256(lines[row][1]).digest())  # copies together
    rows = {"test": order[:count], "validation": order[(parts - 1) * count :][:count], "train": order[parts * count :]}
    text = None if template is None else template.source
    fingerprint = "sha256:" + hashlib.sha256(f"{fingerprint_of([single_file(path)])}{text}".encode()).hexdigest()
    splits = {name: [encoded[row] for row in sorted(some)] for name, some in rows.items()}
    return Conversations(path.name, fingerprint[:15], fingerprint, splits, text, source.tokenizer.vocab_size)


def _template(source: Source, options: InstructOptions) -> ChatTemplate | None:
    """Return the template; None if neither the user nor the run names one."""
    base: Any = source.base
    special = {} if base is None else base.prompts.get("special_tokens")
    if options.chat_template is not None and (base is None or "chat_template" in source.by_user):
        return ChatTemplate(CHATML if options.chat_template == "chatml" else Path(options.chat_template), (), special)
    return None if base is None or base.chat_template is None else ChatTemplate(base.chat_template, (), special)


WANTED = 'each line must be {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}'
ROLES = ("system", "user", "assistant")


def messages_of(place: str, row: object) -> list[dict[str, str]]:
    """Return the messages of a ``row`` of JSON lines; a prompt with its completion makes two."""
    row = row if isinstance(row, dict) else {}
    messages = row.get("messages")
    if "prompt" in row and "completion" in row:
        messages = []
        for role, text in (("user", row["prompt"]), ("assistant", row["completion"])):
            messages += text if isinstance(text, list) else [{"role": role, "content": text}]
    texts = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )
    if not texts or not messages:
        raise KinformerError(f"{place}: is not a conversation ({', '.join(row) or 'no fields'}); {WANTED}.")
    expected = "user"
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role != expected and not (number == 1 and role == "system"):
            kind = f"is by {role!r}" if role in ROLES else f"has the role {role!r}"
            raise KinformerError(
                f"{place}: message {number} {kind} where {expected!r} belongs; after a system message, if any, user "
                "and assistant take turns."
            )
        expected = "assistant" if role == "user" else "user"
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
        raise KinformerError(f"{place}: does not end with an answer of the assistant; add one, or remove the line.")
    return messages


def _encode(place: str, row: object, template: ChatTemplate | None, source: Source) -> Conversation:
    """Return a row's conversation as ids, with the ids of its answers marked."""
    tokenizer: Any = source.tokenizer
    messages = messages_of(place, row)
    if template is None:
        if "prompt" not in row or not isinstance(row["prompt"], str):  # type: ignore[operator, index]
            who = "a new run" if source.base is None else str(source.base.folder)
            raise KinformerError(
                f"{place}: messages need a chat template, and {who} has none; give `chat_template` FILE.jinja, or "
                "`chat_template` chatml."
            )
        prompt, answer = (message["content"] for message in messages)
        text, spans = prompt + answer, [(len(prompt), len(prompt) + len(answer))]
    else:
        try:
            text, spans = template.answers(messages)
        except KinformerError as error:
            raise KinformerError(f"{place}: {error.message}") from None
    ids, starts = tokenizer.places(text)
    marks = np.zeros(len(ids), bool)
    for begin, end in spans:
        marks |= (starts >= begin) & (starts < end)
    if template is None:  # as ``generate`` reads a prompt and ends a text
        eos = None if source.base is None else ends_of(source.base.config).eos
        last = [] if eos is None else [eos]
        ids = np.concatenate([np.array(tokenizer.prefix, np.int64), ids, np.array(last, np.int64)])
        marks = np.concatenate([np.zeros(len(tokenizer.prefix), np.bool_), marks, np.ones(len(last), np.bool_)])
    return Conversation(ids, marks, sum(len(text[begin:end].encode()) for begin, end in spans))


def check(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model without the tokenizer's ids, and a length within which there is no answer."""
    check_ids(plan, model, plan.data.vocab_size)
    for name in ("train", "validation"):
        _usable(plan.data.splits[name], plan.settings.length, name)


def tell(plan: TrainingPlan) -> None:
    """Note how many answers there are, and how many conversations are cut or left out."""
    length, rows = plan.settings.length, plan.data.splits["train"]
    usable = _usable(rows, length, "train")
    long, answered = sum(len(row.ids) > length + 1 for row in rows), sum(int(row.answer.sum()) for row in usable)
    cut = f"; {long} of more than {length} tokens lose their end" if long else ""
    left = f", and {len(rows) - len(usable)} keep no answer and are left out" if len(usable) < len(rows) else ""
    more = f"; `length` {length} can be raised" if long else ""
    note(
        f"note: {plan.data.name}: {plural(len(rows), 'conversation')} to train on, "
        f"{plural(answered, 'token')} of answers{cut}{left}{more}."
    )


def _usable(rows: Sequence[Conversation], length: int, name: str) -> list[Conversation]:
    """Return ``rows`` cut to ``length`` tokens, without rows that keep no answer."""
    usable = [
        Conversation(ids[: length + 1], answer[: length + 1], size)
        for ids, answer, size in rows
        if answer[1 : length + 1].any()
    ]
    if not usable:
        raise KinformerError(f"`length` {length}: no answer of the {name} split begins within it; give more.")
    return usable


# Rows, objective and evaluation.


class Rows:
    """Batches of conversations of similar length, cut to ``length`` tokens."""

    def __init__(self, rows: Sequence[Conversation], batch_size: int, length: int, seed: int, name: str) -> None:
        self.rows = _usable(rows, length, name)
        self.order = Order(np.array([len(row.ids) - 1 for row in self.rows]), batch_size, seed)

    def batch(self, indices: np.ndarray, rank: int = 0, world: int = 1) -> ScoredBatch:
        """Return a process's share of rows, all as wide as the longest row; a share may end with invalid rows."""
        longest, size = int(self.order.lengths[indices].max()), -(-len(indices) // world)
        shape = (size, -(-longest // STEP_OF_WIDTH) * STEP_OF_WIDTH)
        tokens, labels, valid = np.zeros(shape, np.int64), np.full(shape, IGNORED), np.zeros(shape, bool)
        for number, index in enumerate(indices[rank * size : (rank + 1) * size].tolist()):
            ids, answer, _ = self.rows[index]
            here = number, slice(len(ids) - 1)
            tokens[here], valid[here], labels[here] = ids[:-1], True, np.where(answer[1:], ids[1:], IGNORED)
        return ScoredBatch.of((tokens, labels, np.zeros(size, np.int64), valid))


class InstructRows(DataModule):
    """The rows of a run: each conversation once per epoch."""

    sums = ("nats",)
    metrics = (ANSWER_BITS,)

    def __init__(self, plan: TrainingPlan) -> None:
        settings, self.data = plan.settings, plan.data
        sizes = settings.batch_size, settings.length, settings.seed
        self.train, self.held_out = (Rows(self.data.splits[name], *sizes, name) for name in ("train", "validation"))
        lengths = self.held_out.order.lengths
        self.limit = int(np.searchsorted(np.cumsum(lengths), settings.validation_tokens)) + 1

    @property
    def validations(self) -> int:
        return -(-min(self.limit, len(self.held_out.rows)) // self.held_out.order.batch_size)

    def batch(self, step: int, rank: int, world: int) -> ScoredBatch:
        return self.train.batch(self.train.order.indices(step), rank, world)

    def validation(self, rank: int, world: int) -> Iterator[ScoredBatch]:
        for indices in self.held_out.order.batches(self.limit):
            yield self.held_out.batch(indices, rank, world)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {ANSWER_BITS.name: self.data.bits_per_byte(means["nats"], split)}


def evaluate(subject: LoadedRun, settings: EvaluationSettings, options: NoOptions, quiet: bool) -> Evaluation:
    """Evaluate a run on held-out answers, beside the run that it began with, if that is there."""
    run: Any = subject.run
    since = time.perf_counter()
    source = Source(spec_of(run, settings.data), run.data.get("holdout"), run.tokenizer, base=run)
    held, length = HeldOut.of(run, settings, open_conversations(source, run.options)), whole_length(run, subject.model)
    data, split = held.data, held.name
    rows = Rows(held.split[: settings.first], max(1, settings.chunk // length), length, 0, split)
    bits = data.bits_per_byte(_nats(subject.model, rows), split)
    baselines, beside = {}, ""
    if (base := _begun_with(run)) is not None:
        model = base.model().to(device_of(subject.model))
        baselines["before"] = data.bits_per_byte(_nats(model, rows), split)
        beside = f"; {base.folder.name}, with which it began, has {baselines['before']:.4f}"
        if baselines["before"] <= bits:
            beside += ", so training did not help: try a lower `lr`, fewer steps or more conversations"
    text = (f"{ANSWER_BITS.text(bits)}: {plural(len(rows.rows), 'conversation')}{beside}",)
    facts = baselines | {"conversations": len(rows.rows)}
    return held.report(subject, {ANSWER_BITS: bits}, text, facts=facts, baselines=baselines, since=since)


def _nats(model: CausalModel, rows: Rows) -> float:
    """Return the mean cross-entropy of the tokens of all answers."""
    nats, count = 0.0, 0
    with torch.inference_mode():
        for indices in rows.order.batches():
            batch = map_fields(rows.batch(indices), lambda tensor: tensor.to(device_of(model)))
            answered = answers(model, batch)
            nats, count = nats + float(answered.nats), count + len(answered.labels)
    require_finite(isfinite(nats))
    return nats / count


def _begun_with(run: TrainedRun) -> Any:
    """Return the run that ``run`` began with; None if there was none, or it is gone, or reads other ids."""
    from kinformer.lab.runs.run import open_run

    try:
        base = open_run(run.data["init"])
    except (KeyError, KinformerError):
        return None
    return base if base.tokenizer is not None and base.config.protocol is CausalModel else None
