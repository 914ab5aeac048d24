"""``kinformer import FOLDER --out DIR``: a Hugging Face checkpoint folder as a run folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from kinformer.lab.cli.options import CommonOptions
from kinformer.lab.cli.output import print_json
from kinformer.runtime.errors import plural


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """Turn a Hugging Face checkpoint folder (config.json, safetensors) into a run folder."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The checkpoint folder: of GPT-2, LLaMA, Mistral, Qwen2, Qwen3, Gemma 1 to 3, GPT-NeoX, OPT, BLOOM or MPT; of
    Mixtral, Qwen3-MoE, DeepSeek-V2 or V3; of Qwen3.5, Qwen3-Next or OLMo Hybrid; of
    flash-linear-attention's Gated DeltaNet, DeltaNet, GLA or RetNet; of BERT, RoBERTa, Longformer, Big Bird or
    ModernBERT; of Marian, T5, mT5 or BART; of Decision Transformer, ViT, DeiT or Swin; or what kinformer export
    wrote."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """The run folder, which must be new or empty."""
    name: str = "imported"
    """What the run calls its recipe."""


def run(options: Options) -> int:
    """Read and check the checkpoint, write the run, and return the exit status."""
    from kinformer.lab.runs.importing import import_checkpoint

    done = import_checkpoint(options.folder, options.out, options.name)
    run = done.run
    for note in done.notes if not options.quiet else ():
        print(f"kinformer: {note}", file=sys.stderr)
    if options.json:
        print_json(done.facts)
    else:
        print(f"{run.folder}: {run.member} ({run.recipe}), {plural(done.parameters, 'parameter')}")
    return 0
