"""Functions of the package for folders of the library transformers, free of PyTorch until it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.commands import preserving

if TYPE_CHECKING:
    from pathlib import Path

    from kinformer.runs.exporting import Exported
    from kinformer.runs.importing import ImportedRun
    from kinformer.runs.proving import Proof


@preserving
def import_checkpoint(folder: str | Path, out: str | Path, name: str = "imported") -> ImportedRun:
    """Turn a Hugging Face checkpoint folder (config.json, safetensors) into a run folder that computes the same logits.

    The result has ``run``, ``parameters``, ``tokenizer`` (whether there was one) and ``notes``.

    folder: the checkpoint; the how-to on Hugging Face checkpoints lists what can be imported.
    out: the run folder, which must be new or empty.
    name: what the run calls its recipe.

    Errors: ``KinformerError`` that names what cannot be imported faithfully.
    """
    from kinformer.runs.importing import import_checkpoint

    return import_checkpoint(folder, out, name)


@preserving
def export(run: str | Path, out: str | Path, *, dtype: str = "float32", max_shard_size: str | int = "5GB") -> Exported:
    """Write a run as a folder that the library transformers loads: config.json, safetensors, tokenizer, model card.

    The result has ``folder``, ``model_type``, ``native`` (whether transformers loads it without code of ours),
    ``reason`` (why not), ``model_class``, ``auto_class``, ``parameters``, ``shards`` and ``dtype``.

    run: the folder of a run whose model continues tokens.
    out: the folder to write, which must be new or empty.
    dtype: the type of the weights there: "float32", "bfloat16" or "float16".
    max_shard_size: the most that a file of weights holds, such as "500MB" or a number of bytes.

    Errors: ``KinformerError`` for a model that transformers has no class for, and wrong options.
    """
    from kinformer.runs.exporting import export

    return export(run, out, dtype=dtype, max_shard_size=max_shard_size)


@preserving
def verify(subject: str | Path, *, trust_remote_code: bool = False, length: int = 24, limit: float = 1e-4) -> Proof:
    """Hold a causal model to its laws, and compare a run with its export, or a folder with its import.

    The result has ``holds``, ``laws`` and ``beside`` (verdicts with ``law``, ``holds``, ``difference``, ``case``).

    subject: a run folder, a folder of transformers, or "module:object", a model that is called as ``model(tokens,
        cache, valid)``, returns logits and the cache, and has ``vocab_size``.
    trust_remote_code: run the code that a folder brings; without it such a folder is refused.
    length: the most tokens of a text, 2 to 64.
    limit: the largest difference of logits that counts as rounding, as a share of the largest logit.

    Errors: ``KinformerError`` for what is no causal model or cannot be loaded.
    """
    from kinformer.runs.proving import verify

    return verify(subject, trust_remote_code=trust_remote_code, length=length, limit=limit)
