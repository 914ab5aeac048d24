"""The options of ``kinformer train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from kinformer.cli.options import Changes, Computing, Count, Member, Number, Text
from kinformer.training.settings import Settings

Vocabulary = Annotated[str, tyro.conf.arg(metavar="bytes|PATH")]


@dataclass(frozen=True, kw_only=True)
class Options(Settings, Computing):
    """Train a member. With --resume, what is not given is as it was when the run began."""

    member: Member
    """A member of the family (see: kinformer list)."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """The run folder: new, or with --resume an existing one."""
    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = "stdlib"
    """A file or folder of text or bytes, - for standard input, or stdlib: the sources of Python's standard library.
    For the task classify, a folder with a folder of examples per class, or a file of lines: .tsv or .jsonl."""
    task: Literal["next-token", "mlm", "classify", "listops"] | None = None
    """next-token for decoders; for encoders mlm (hidden tokens) if not given, classify (examples with labels), or
    listops (classify what nested lists compute)."""
    examples: Count = None
    """With the task listops: lists to train on (96,000 if not given)."""
    example_tokens: Annotated[str | None, tyro.conf.arg(metavar="N-N")] = None
    """With the task listops: how many tokens a list has, more than the one and fewer than the other (500-2000)."""
    recipe: str = "small"
    """Which of the member's recipes (see: kinformer show MEMBER)."""
    set: Changes = ()
    """A change to the recipe, as in --set layers.*.dropout=0.1; may be given again."""
    tokenizer: Vocabulary = "bytes"
    """bytes, or a tokenizer.json."""
    train_tokenizer: Count = None
    """Train a byte-level tokenizer of so many tokens on the training data first."""
    holdout: Number = None
    """Hold out the last share of the data for validation, instead of the usual 5 %."""
    init: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Begin with the model, weights and tokenizer of another run folder (trained or imported); a head of another task
    is replaced by a new one."""
    datastore: Text = None
    """Of a member that looks things up (spalm): a datastore of the training data (see: kinformer index)."""
    retriever: Text = None
    """With --datastore: the run that made it, which reads along, frozen, and is looked up with."""
    neighbours: Count = None
    """With --datastore: entries looked up per token (4 if not given)."""
    probes: Count = None
    """With --datastore: search approximately, in so many of its lists (see: kinformer index --approximate)."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint."""
    devices: int = 1
    """Processes on this machine, one per GPU or, on a CPU, sharing its cores."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: each has the whole model (ddp), or a share of it (fsdp)."""
