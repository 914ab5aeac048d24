"""The commands that exchange folders with other libraries or check them: import, export, verify and pack."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from kinformer.lab.cli.form import CommonOptions, Printing, UsingRun
from kinformer.lab.cli.output import print_json
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import KinformerError, plural, spelled


@dataclass(frozen=True, kw_only=True)
class Import(CommonOptions):
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

    def run(self) -> int:
        """Read and check the checkpoint, write the run, and return the exit status."""
        from kinformer.lab.runs.importing import import_checkpoint

        done = import_checkpoint(self.folder, self.out, self.name)
        for note in done.notes if not self.quiet else ():
            print(f"kinformer: {note}", file=sys.stderr)
        run = done.run
        line = f"{run.folder}: {run.member} ({run.recipe}), {plural(done.parameters, 'parameter')}"
        return self.show(done.facts, [line])


@dataclass(frozen=True, kw_only=True)
class Export(UsingRun):
    """Write a folder for the library transformers (config.json, safetensors, tokenizer, and a model card), or a graph.

    If a run's model is exactly a LLaMA, Mistral, Qwen2, Qwen3, Qwen3.5, OLMo Hybrid, Gemma 1 to 3, GPT-2, GPT-NeoX,
    OPT, BLOOM or MPT, every program that reads this architecture reads the folder. The same holds for encoders of the
    kinds BERT, RoBERTa, Longformer, Big Bird, ViT, DeiT or Swin, for Marian translators, and for Decision Transformers.
    All other causal models, encoders and translators of tokens, and encoders of images with classes, come with a file
    of code that imports kinformer.

    A graph takes and returns tokens and the state. The format onnx is one file for prompts and steps, which onnxruntime
    runs without kinformer or PyTorch.
    """

    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """The folder to write, which must be new or empty."""
    format: Literal["hf", "onnx"] = "hf"
    """What to write: a folder for transformers, or an ONNX file."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type of the weights in the folder."""
    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GB"
    """The most that a file of weights holds, as in 500MB; a model of more becomes several files and an index."""
    adapter: bool = False
    """Of a run trained with `lora`: write its updates alone, as an adapter for the library PEFT, not merged weights."""

    def run(self) -> int:
        """Announce the kind of folder, write it, and return the exit status."""
        from kinformer.lab.runs.exporting import ExportedGraph, export

        def announce(sentence: str) -> None:
            if not self.quiet:
                print(f"kinformer: {spelled(sentence)}", file=sys.stderr, flush=True)

        settings = {name: getattr(self, name) for name in ("format", "dtype", "max_shard_size", "adapter")}
        done = export(self.folder, self.out, **settings, announce=announce)
        parameters = plural(done.parameters, "parameter")
        if isinstance(done, ExportedGraph):
            line = f"{done.folder / done.file}: {parameters}, a state of {plural(len(done.leaves), 'tensor')}"
        else:
            line = f"{done.folder}: {done.model_type}, {parameters} in {plural(done.shards, 'file')} of {done.dtype}"
        return self.show(done.facts, [line])


@dataclass(frozen=True, kw_only=True)
class Verify(Printing):
    """Hold a causal model to its laws, and compare a run with its export, or a folder with its import.

    Laws: no output depends on later tokens; a cache changes nothing, wherever the text is cut; padding leaves no trace;
    rows do not depend on one another. The smallest case that breaks a law is shown, and the exit code is 1.
    """

    subject: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SUBJECT")]
    """A run folder, a folder of transformers, or module:object: a model with the attribute vocab_size whose call
    model(tokens, cache, valid) returns logits and the cache."""
    trust_remote_code: bool = False
    """Run the code that a folder of transformers brings; without it such a folder is refused."""
    length: int = 24
    """The most tokens of a text, 2 to 64."""
    limit: float = 1e-4
    """The largest difference of logits that counts as rounding, as a share of the largest logit."""

    LEAST = {"length": 2}
    SHARES = {"limit": "(0, 1]"}

    def run(self) -> int:
        """Verify the subject, print one table, and return 1 if a law is broken."""
        from kinformer.lab.runs.importing import TABLES, verify

        proof = verify(self.subject, trust_remote_code=self.trust_remote_code, length=self.length, limit=self.limit)
        if self.json:
            print_json(proof.facts)
            return 0 if proof.holds else 1
        print(f"{proof.subject}: {proof.kind}")
        for title, name in zip(("law", "beside transformers"), TABLES, strict=True):
            verdicts = getattr(proof, name)
            if verdicts:
                print(f"\n{title:<20} {'verdict':<11} {'difference':>10}")
            for one in verdicts:
                difference = "" if one.difference is None else f"{one.difference:.1e}"
                print(f"{one.law:<20} {one.badge:<11} {difference:>10}  {one.case}".rstrip())
        for note in proof.notes:
            print(f"\nnote: {note}")
        return 0 if proof.holds else 1


@dataclass(frozen=True, kw_only=True)
class Pack(Printing):
    """Turn text into token shards with a manifest, by several processes; train --data takes the folder.

    The same command continues one that was killed.
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

    LEAST = {"shard_mb": 1, "workers": 1}
    SHARES = {"holdout": "(0, 1)"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.check == (self.out is not None):
            raise KinformerError("`out`: give the new folder of the shards, or `check` an existing folder.")

    def run(self) -> int:
        """Pack the data or check the shards, print a report, and return the exit status."""
        from kinformer.lab.data.packed import check_shards
        from kinformer.lab.data.packing import packed

        if self.out is None:
            done = check_shards(self.data)
        else:
            names = ("tokenizer", "text_field", "holdout", "shard_mb", "workers")
            settings = {name: getattr(self, name) for name in names}
            done = packed(self.data, self.out, **settings, quiet=self.json or self.quiet)
        tokens = ", ".join(f"{name} {number:,}" for name, number in done.tokens.items())
        says = ", as its manifest says" if self.check else ""
        return self.show(done.facts, [f"{done.folder}: {size(done.bytes)}{says}; tokens: {tokens}"])
