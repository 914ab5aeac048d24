"""What models are trained and measured on: the next token of a text, its hidden tokens, or the classes of examples.

A run folder's ``config.json`` names its task under ``data``; an older one, which does not, is one of next tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kinformer.core.errors import KinformerError, choose

if TYPE_CHECKING:
    from pathlib import Path

    from kinformer.core.parts import ModelConfig
    from kinformer.data import BosEos, Corpus, Labelled, Tokenizer
    from kinformer.data.masking import Masking
    from kinformer.family.record import Member
    from kinformer.family.runs import Run

NEXT_TOKEN, MLM, CLASSIFY, LISTOPS = "next-token", "mlm", "classify", "listops"
SPECIAL_TOKENS = 3


class Task(NamedTuple):
    """``causal``: whether it is one for decoders. ``objectives``: what can be minimised for it, the usual one first.
    ``head``: the kind of an encoder's head that it needs."""

    causal: bool
    objectives: tuple[str, ...]
    head: str | None = None


TASKS: Mapping[str, Task] = {
    NEXT_TOKEN: Task(True, ("next-token", "deep-supervision")),
    MLM: Task(False, ("masked-language", "mlm-cpc"), "masked_language"),
    CLASSIFY: Task(False, ("classification",), "classification"),
    LISTOPS: Task(False, ("classification",), "classification"),
}


def task_of(run: Run) -> str:
    """The task of a run, by its own word or by what its model can do."""
    if isinstance(named := run.data.get("task"), str):
        return choose(named, TASKS, f"task of {run.folder}")
    if run.model.get("kind") != "encoder":
        return NEXT_TOKEN
    head = run.model.get("head") or {}
    return CLASSIFY if head.get("kind") == "classification" else MLM


def chosen_task(asked: str | None, member: Member) -> str:
    """The task that a member is to be trained on: the one asked for, or the one that it is made for."""
    own = NEXT_TOKEN if member.causal else MLM
    if asked is None or TASKS[asked].causal == member.causal:
        return asked or own
    what, fitting = ("causal", [NEXT_TOKEN]) if member.causal else ("an encoder", [MLM, CLASSIFY, LISTOPS])
    raise KinformerError(
        f"--task {asked}: {member.name} is {what}, whose tasks are {', '.join(fitting)}; choose one, or another member."
    )


def open_data(data: Mapping[str, Any], task: str, tokenizer: Tokenizer, cache: Path | None = None) -> Corpus | Labelled:
    """What a run's ``data`` names: ``spec`` and ``holdout``, or of ListOps ``examples`` and ``example_tokens``."""
    from kinformer.data import open_corpus, open_labelled

    if task == LISTOPS:
        from kinformer.data.listops import open_listops

        return open_listops(data["examples"], bounds_of(data["example_tokens"]), cache=cache)
    opened = open_labelled if task == CLASSIFY else open_corpus
    return opened(data["spec"], cache=cache, tokenizer=tokenizer, holdout=data.get("holdout"))


def bounds_of(text: str) -> tuple[int, int]:
    """``500-2000`` as two numbers."""
    least, dash, most = text.partition("-")
    if not (dash and least.isdecimal() and most.isdecimal()):
        raise KinformerError(f"--example-tokens {text}: is no range; write as in 500-2000.")
    return int(least), int(most)


def ids_of(task: str, tokenizer: Tokenizer) -> int:
    """Below how many the ids of a task's data lie."""
    if task == LISTOPS:
        from kinformer.data.listops import SYMBOLS

        return len(SYMBOLS)
    return tokenizer.vocab_size


def edges_of(config: ModelConfig) -> BosEos:
    """What an encoder expects before and behind a text."""
    from kinformer.data import BosEos

    return BosEos(getattr(config, "first_token", None), getattr(config, "last_token", None))


def masking_of(config: ModelConfig, tokenizer: Tokenizer, share: float, whole_words: bool) -> Masking:
    """How tokens are hidden from an encoder."""
    from kinformer.data.masking import Masking, Words, ordinary

    mask: int | None = getattr(config, "mask_token", None)
    if mask is None:
        raise KinformerError("this model has no token that stands for a mask; give one, as in --set mask_token=103.")
    special = {token for token in (mask, *edges_of(config)) if token is not None}
    usual = ordinary(tokenizer.vocab_size, special)
    return Masking(mask, usual, share, Words.of(tokenizer) if whole_words else None)
