"""Functions of the package that write folders: of the library transformers, of graphs, and of token shards. Free of
PyTorch until it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.commands import preserving

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from kinformer.data.packed import Packed
    from kinformer.runs.exporting import Exported
    from kinformer.runs.graphs import ExportedGraph
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
def export(
    run: str | Path,
    out: str | Path,
    *,
    format: str = "hf",
    dtype: str = "float32",
    max_shard_size: str | int = "5GB",
) -> Exported | ExportedGraph:
    """Write a run as a folder that the library transformers loads: config.json, safetensors, tokenizer, model card; or
    as a graph without Python.

    The result has ``folder``, ``model_type``, ``native`` (whether transformers loads it without code of ours),
    ``reason`` (why not), ``model_class``, ``auto_class``, ``parameters``, ``shards`` and ``dtype``; of a graph
    ``folder``, ``format``, ``file``, ``leaves``, ``parameters`` and ``difference``.

    run: the folder of a run; of one whose model continues tokens for a graph.
    out: the folder to write, which must be new or empty.
    format: "hf" (transformers), "onnx" (one graph for prompts and steps), or "aoti" (a step compiled for this
        processor, for ``package`` of ``kinformer generate``).
    dtype: the type of the weights there: "float32", "bfloat16" or "float16".
    max_shard_size: the most that a file of weights holds, such as "500MB" or a number of bytes.

    PyTorch's compiler makes the graphs, and it resets PyTorch's global random numbers to their earlier state.

    Errors: ``KinformerError`` for a model that the format has no place for, and wrong options.
    """
    from kinformer.runs.exporting import export

    return export(run, out, format=format, dtype=dtype, max_shard_size=max_shard_size)


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


def pack(
    data: str | Path | Iterable[str | Mapping[str, object]],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    text_field: str | None = None,
    holdout: float | None = None,
    shard_mb: int = 256,
    workers: int | None = None,
    quiet: bool = True,
) -> Packed:
    """Turn text into token shards with a manifest, which training reads where they are: ``data=`` takes the folder.

    What a killed call has done is kept, and the same call goes on. The result has ``folder``, ``manifest``, ``tokens``
    (by split), ``bytes`` and ``facts``.

    data: a file, a folder or "stdlib"; JSON lines (.jsonl) and Parquet tables are documents, row by row. Or documents
        that are streamed: "hf:NAME:SPLIT" or "hf:NAME:SUBSET:SPLIT", a dataset of Hugging Face, or any iterable of
        texts or of rows with a text that can be read again, such as its ``IterableDataset``.
    out: a new folder.
    tokenizer: the path of a tokenizer.json; bytes if not given.
    text_field: the field or column of tables with the text ("text" if not given).
    holdout: hold out this share for validation and test at once; else 5 % each, of tables by the documents' contents.
    shard_mb: megabytes of the data that make a shard.
    workers: processes, one for each processor if not given. With more than one, scripts need the usual
        ``if __name__ == "__main__":``.
    quiet: no progress on a terminal.

    Errors: ``KinformerError`` for data that cannot be read, and for a folder that holds something else.
    """
    from kinformer.data.packing import packed

    return packed(
        data,
        out,
        tokenizer=tokenizer,
        text_field=text_field,
        holdout=holdout,
        shard_mb=shard_mb,
        workers=workers,
        quiet=quiet,
    )


def check_shards(folder: str | Path) -> Packed:
    """Hold every byte of a folder of token shards to its manifest's checksums.

    Errors: ``KinformerError`` that names the first file that differs.
    """
    from kinformer.data.packed import check_shards

    return check_shards(folder)
