"""``kinformer pack DATA --out SHARDS``: token shards with a manifest, for training on data of any size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from kinformer.lab.cli.options import Printing, require
from kinformer.lab.cli.output import print_json
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import KinformerError, require_share


@dataclass(frozen=True, kw_only=True)
class Options(Printing):
    """Turn text into token shards with a manifest, by several processes; train --data takes the folder.

    A command that was killed goes on where it was when it is given again.
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A file, a folder, or stdlib; each row of .jsonl, .parquet and .arrow is a document. hf:NAME:SPLIT streams a
    dataset of Hugging Face, hf:NAME:SUBSET:SPLIT one of its subsets. With --check: the shards."""
    out: str | None = None
    """The folder of the shards, which must be new."""
    tokenizer: str | None = None
    """Path of a tokenizer.json; without it the tokens are bytes."""
    text_field: str | None = None
    """The field of JSON lines, or the column of tables, that holds the text ("text" if not given)."""
    holdout: float | None = None
    """Hold out the last share of the data for validation and test at once, instead of 5 % for each."""
    shard_mb: int = 256
    """Megabytes of the data that make a shard."""
    workers: int | None = None
    """Processes that pack (one for each processor if not given)."""
    check: bool = False
    """Hold all bytes of the shards in DATA to their checksums, and pack nothing."""

    def __post_init__(self) -> None:
        require("shard_mb", self.shard_mb, 1)
        require("workers", self.workers, 1)
        require_share("holdout", self.holdout)
        if self.check == (self.out is not None):
            raise KinformerError("`out`: give the new folder of the shards, or `check` a folder that is there.")


def run(options: Options) -> int:
    """Pack the data or check the shards, and report."""
    from kinformer.lab.data.packed import check_shards
    from kinformer.lab.data.packing import packed

    if options.out is None:
        done = check_shards(options.data)
    else:
        done = packed(
            options.data,
            options.out,
            tokenizer=options.tokenizer,
            text_field=options.text_field,
            holdout=options.holdout,
            shard_mb=options.shard_mb,
            workers=options.workers,
            quiet=options.json or options.quiet,
        )
    if options.json:
        print_json(done.facts)
        return 0
    tokens = ", ".join(f"{name} {number:,}" for name, number in done.tokens.items())
    print(f"{done.folder}: {size(done.bytes)}{', as its manifest says' if options.check else ''}; tokens: {tokens}")
    return 0
