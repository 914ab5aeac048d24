"""``kinformer export DIR --out FOLDER``: a run as a folder that transformers loads, or as a graph."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from kinformer.lab.cli.options import Printing, RunFolder
from kinformer.lab.cli.output import print_json
from kinformer.runtime.errors import plural, spelled


@dataclass(frozen=True, kw_only=True)
class Options(Printing):
    """Write a folder for the library transformers (config.json, safetensors, tokenizer, and a model card), or a graph.

    Where a run's model is exactly a LLaMA, Mistral, Qwen2, Qwen3, Qwen3.5, OLMo Hybrid, Gemma 1 to 3, GPT-2, GPT-NeoX,
    OPT, BLOOM or MPT, the folder is one, and whatever reads that architecture reads it; so it is with encoders that are
    a BERT, RoBERTa, Longformer, Big Bird, ViT, DeiT or Swin, with translators that are a Marian, and with Decision
    Transformers. All other causal models, encoders and translators of tokens, and encoders of images with classes,
    leave with a file of code that imports kinformer.

    A graph takes and returns tokens and the state. As onnx it is one file for prompts and steps, which onnxruntime
    runs without kinformer or PyTorch. As aoti it is a step that PyTorch compiles for this processor, and that generate
    takes by --package.
    """

    folder: RunFolder
    """The run folder."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """The folder to write, which must be new or empty."""
    format: Literal["hf", "onnx", "aoti"] = "hf"
    """What is written: a folder for transformers, an ONNX file, or a compiled step."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type of the weights in the folder."""
    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GB"
    """The most that a file of weights holds, as in 500MB; a model of more becomes several files and an index."""


def run(options: Options) -> int:
    """Print what the folder will be, write it, and return the exit status."""
    from kinformer.lab.runs.exporting import ExportedGraph, export

    def announce(sentence: str) -> None:
        if not options.quiet:
            print(f"kinformer: {spelled(sentence)}", file=sys.stderr, flush=True)

    settings = {name: getattr(options, name) for name in ("format", "dtype", "max_shard_size")}
    done = export(options.folder, options.out, **settings, announce=announce)
    if options.json:
        print_json(done.facts)
    elif isinstance(done, ExportedGraph):
        tensors, parameters = plural(len(done.leaves), "tensor"), plural(done.parameters, "parameter")
        print(f"{done.folder / done.file}: {parameters}, a state of {tensors}")
    else:
        files = plural(done.shards, "file")
        print(f"{done.folder}: {done.model_type}, {plural(done.parameters, 'parameter')} in {files} of {done.dtype}")
    return 0
