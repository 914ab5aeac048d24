"""A run as a graph without Python: a folder with an ONNX file or a compiled package, and with ``graph.json`` beside it.

``graph.json`` has the keys ``schema``, ``kinformer``, ``format``, ``member``, ``weights`` (what identifies the run's),
``tokenizer`` ("bytes", or the file in the folder), ``vocab_size``, ``max_length`` (null: none), ``file`` (of the model)
and ``state``: ``name``, ``dtype`` and ``shape`` of every leaf, in order. A new sequence begins with zeros of these
shapes, "batch" being the number of sequences and "past" 0. Of ONNX also ``opset``, ``inputs`` and ``outputs``; of a
package ``sha256`` and the ``machine`` that it is for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.core.leaves import Leaf
from kinformer.core.model import CausalModel
from kinformer.generation.packaged import use_package
from kinformer.interop.checkpoint import TOKENIZER
from kinformer.interop.graphs import onnx, package
from kinformer.interop.graphs.flat import require_graphable
from kinformer.interop.writing import appearing, require_new
from kinformer.runs.run import BYTES, Run
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import read_json, reading, require_file, require_signature, signed, write_json
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from torch import nn

GRAPH = "graph.json"
SCHEMA = 1
FORMATS = ("onnx", "aoti")


@dataclass(frozen=True)
class ExportedGraph:
    """The ``folder``, its ``format`` and ``file``, and the names of the state's ``leaves``.

    ``difference``: how far the logits that onnxruntime computes are from the model's, of the largest; None of a
    package, which is not run when it is made.
    """

    folder: Path
    format: str
    file: str
    leaves: tuple[str, ...]
    parameters: int
    difference: float | None

    @property
    def facts(self) -> dict[str, object]:
        """The facts as data that JSON can hold."""
        names = ("format", "file", "parameters", "difference")
        return {"out": str(self.folder), "leaves": list(self.leaves)} | {name: getattr(self, name) for name in names}


def export_graph(run: Run, out: Path, format: str, announce: Callable[[str], object]) -> ExportedGraph:
    """Write ``run`` into the new folder ``out`` as a graph; ``announce`` is called with what it will be.

    Errors: ``KinformerError`` for a model that is no graph, and for what is not installed here.
    """
    (onnx.require_packages if format == "onnx" else package.require_compiler)()
    try:
        require_graphable(run.config)
    except KinformerError as error:
        raise KinformerError(f"{run.folder}: {error}") from None
    require_new(out)
    announce(_sentence(format))
    model, difference = run.model(), None
    facts = _facts(run, model, format)
    with appearing(out) as place:
        try:
            if format == "onnx":
                described, difference = onnx.write_onnx(model, place, facts)
            else:
                described = package.write_package(model, place)
        except KinformerError as error:
            raise KinformerError(f"{run.folder}: {error}") from error
        if facts["tokenizer"] == TOKENIZER:
            shutil.copyfile(run.folder / str(run.vocabulary), place / TOKENIZER)
        write_json(place / GRAPH, signed(facts | described))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    names = tuple(leaf["name"] for leaf in described["state"])
    return ExportedGraph(out, format, described["file"], names, parameters, difference)


def _sentence(format: str) -> str:
    if format == "onnx":
        return (
            "the folder is one ONNX graph for prompts and steps, which onnxruntime runs without kinformer or PyTorch."
        )
    return (
        "the folder is a package of one step, which AOTInductor compiles for this processor; this takes a minute or "
        "so, and `package` of generate uses it."
    )


def _facts(run: Run, model: CausalModel, format: str) -> dict[str, object]:
    from kinformer import __version__

    has_file = run.vocabulary not in (None, BYTES) and (run.folder / str(run.vocabulary)).is_file()
    return {
        "schema": SCHEMA,
        "kinformer": __version__,
        "format": format,
        "member": run.member,
        "weights": run.weights_digest(),
        "tokenizer": TOKENIZER if has_file else BYTES if run.vocabulary == BYTES else None,
        "vocab_size": model.vocab_size,
        "max_length": model.max_length,
    }


def attach_package(run: Run, model: nn.Module, folder: str | Path) -> None:
    """Let sessions of ``model``, that of ``run``, step by the package in ``folder``.

    Errors: ``KinformerError`` for a folder without a package, one of other weights, and one for another machine.
    """
    folder = Path(folder)
    facts = _package_facts(folder)
    if facts["weights"] != run.weights_digest():
        raise KinformerError(
            f"`package` {folder}: was made of other weights than {run.folder} has now; export the run again."
        )
    step = package.load_package(folder / facts["file"], facts)
    use_package(model, step, [Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in facts["state"]])


def _package_facts(folder: Path) -> JsonObject:
    path = folder / GRAPH
    if not path.is_file():
        raise KinformerError(
            f"`package` {folder}: holds no {GRAPH}; give a folder that kinformer export wrote with `format` aoti."
        )
    facts: JsonObject = read_json(path)
    require_signature(facts, path, required=True)
    with reading(path):
        if facts["format"] != "aoti":
            raise KinformerError(
                f"`package` {folder}: is of the format {facts['format']}, but generate takes one of aoti; export the "
                "run with `format` aoti."
            )
        if facts["schema"] != SCHEMA or not {"file", "weights", "machine", "sha256", "state"} <= set(facts):
            raise KinformerError(f"{path}: is by another version of kinformer; export the run again.")
        require_file(folder / facts["file"])
    return facts
