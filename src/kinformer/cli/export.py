"""``kinformer export DIR --out FOLDER``: a run folder becomes a folder that the library transformers loads."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from kinformer.cli.options import Printing, RunFolder
from kinformer.cli.output import print_json
from kinformer.runtime.errors import spelled
from kinformer.runtime.words import plural


@dataclass(frozen=True, kw_only=True)
class Options(Printing):
    """Write a folder for the library transformers: config.json, safetensors, tokenizer, and a model card.

    Where a run's model is exactly a LLaMA, Mistral, Qwen2, Qwen3, Gemma 1 to 3, GPT-2, GPT-NeoX, OPT, BLOOM or MPT, the
    folder is one, and whatever reads that architecture reads it; so it is with encoders that are a BERT, RoBERTa,
    Longformer, Big Bird, ViT, DeiT or Swin, and with translators that are a Marian. All other causal models of tokens
    leave with a file of code that imports kinformer.
    """

    folder: RunFolder
    """The run folder."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """The folder to write, which must be new or empty."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type of the weights in the folder."""
    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GB"
    """The most that a file of weights holds, as in 500MB; a model of more becomes several files and an index."""


def run(options: Options) -> int:
    """Read, say what the folder will be, and write; returns the exit status."""
    from kinformer.runs.exporting import export

    def announce(sentence: str) -> None:
        if not options.quiet:
            print(f"kinformer: {spelled(sentence)}", file=sys.stderr, flush=True)

    done = export(
        options.folder, options.out, dtype=options.dtype, max_shard_size=options.max_shard_size, announce=announce
    )
    if options.json:
        print_json(done.facts)
    else:
        files = plural(done.shards, "file")
        print(f"{done.folder}: {done.model_type}, {plural(done.parameters, 'parameter')} in {files} of {done.dtype}")
    return 0
