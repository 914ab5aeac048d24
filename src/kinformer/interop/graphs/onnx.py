"""A causal model as one ONNX graph for prompts and steps: any batch, any time, any number of past slots.

Kernel attention becomes ``LinearAttention`` and ``CausalConvWithState`` of opset 27, an LSTM ``LSTM``; all else is
operators of ``torch.export``. Attention is dense in the graph: a pattern is a mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kinformer.core.leaves import Leaf, named_leaves
from kinformer.core.model import CausalModel
from kinformer.interop.graphs.flat import FlatStep, captured, without_notes
from kinformer.interop.graphs.operators import OPSET, SUBSTITUTES
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

FILE = "model.onnx"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
CONVERTED = 25
"""The opset that the converter of onnxscript reaches. What it writes means the same in opset 27."""
LIMIT = 1e-3
"""The largest difference of logits, relative to the largest logit, that rounding explains in float32."""


def require_packages() -> None:
    """Raise where a package is missing that an ONNX file is written or checked with."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise KinformerError(
            f"`format` onnx: needs {' and '.join(missing)}; pip install 'kinformer[onnx]' brings what is missing."
        )


def write_onnx(model: CausalModel, folder: Path, facts: Mapping[str, object]) -> tuple[dict[str, Any], float]:
    """Write ``model`` into ``folder`` with ``facts`` as metadata; return the facts of the file, and the largest
    difference between the logits that onnxruntime computes and those of the model, relative to the largest logit.

    Errors: ``KinformerError`` for a model that is no graph, and for a file that computes something else.
    """
    step = FlatStep(model, SUBSTITUTES)
    program = captured(step)
    leaves = [leaf.name for leaf in step.leaves]
    inputs, outputs = ["tokens", *leaves], ["logits", *(f"next.{name}" for name in leaves)]
    try:
        with without_notes():
            program = program.run_decompositions(WRITTEN_OTHERWISE)
            program._guards_code = []  # conditions on open sizes, which a graph of ONNX cannot hold
            written = torch.onnx.export(
                program, (), input_names=inputs, output_names=outputs, dynamo=True, verbose=False,
                opset_version=CONVERTED,
            )  # fmt: skip
    except Exception as error:
        raise KinformerError(
            f"ONNX has no counterpart to this model: {_reason(error.__cause__ or error)}; export another member, or "
            "this one with `format` hf."
        ) from error
    assert written is not None
    written.model.opset_imports[""] = OPSET
    described = {"file": FILE, "opset": OPSET, "inputs": inputs, "outputs": outputs}
    described["state"] = [leaf.facts for leaf in step.leaves]
    written.model.metadata_props["kinformer"] = json.dumps({**facts, **described})
    written.save(str(folder / FILE))
    difference = gap(model, folder / FILE, step.leaves)
    if not difference <= LIMIT:
        raise KinformerError(
            f"the ONNX file computes other logits than the model, by {difference:.1e} of the largest; nothing is "
            "written."
        )
    return described, difference


def _reason(error: BaseException) -> str:
    """Return what the converter could not write, in a clause."""
    operator = re.search(r"target=torch\.ops\.([\w.]+)", str(error))
    return f"it has no operator {operator[1]}" if operator else str(error).splitlines()[0].rstrip(".")


def session_of(path: Path, threads: int = 0) -> InferenceSession:
    """Return a session of onnxruntime on the processor, with ``threads`` threads (0: its default)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class OnnxModel:
    """A file in onnxruntime as a function of chunks: ``logits, state = model(tokens, state)``, in NumPy."""

    def __init__(self, path: Path, leaves: Sequence[Leaf]) -> None:
        self.session = session_of(path, 1)
        self.leaves = leaves

    def begin(self, batch: int) -> list[np.ndarray]:
        """Return the state of ``batch`` new sequences."""
        return [leaf.zeros(batch).numpy() for leaf in self.leaves]

    def __call__(self, tokens: np.ndarray, state: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return logits [batch, time, vocab] of ``tokens`` [batch, time] and the state behind them."""
        names = ("tokens", *(leaf.name for leaf in self.leaves))
        logits, *after = self.session.run(None, dict(zip(names, (tokens, *state), strict=True)))
        return logits, after


def gap(model: CausalModel, path: Path, leaves: Sequence[Leaf]) -> float:
    """Return the largest difference of logits and of constant leaves between the file at ``path`` and ``model``,
    relative to the largest number: with a prompt and steps, and with steps before a longer chunk."""
    graph = OnnxModel(path, leaves)
    return max(_gap(model, graph, 2, (7, 1, 1, 3, 1)), _gap(model, graph, 1, (1, 1, 9)))


@torch.no_grad()
def _gap(model: CausalModel, graph: OnnxModel, batch: int, times: Sequence[int]) -> float:
    past, state, worst = graph.begin(batch), model.initial_state(batch), 0.0
    numbers = np.random.default_rng(0)
    for time in times:
        tokens = numbers.integers(model.vocab_size, size=(batch, time))
        logits, state = model(torch.from_numpy(tokens), state)
        theirs, past = graph(tokens, past)
        worst = max(worst, _relative(torch.from_numpy(theirs), logits))
    for (_, ours), item in zip(named_leaves(state), past, strict=True):
        if ours.shape == item.shape and ours.numel():
            worst = max(worst, _relative(torch.from_numpy(item), ours))
    return worst


def _relative(one: Tensor, other: Tensor) -> float:
    difference = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp_min(1)
    return float(difference.nan_to_num(nan=torch.inf))


def _running_maximum(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return cummax over the last axis, which ONNX has no operator for: the maximum of what a triangle leaves. Its
    indices are never read."""
    assert dim in (-1, x.dim() - 1)
    index = torch.arange(x.shape[-1], device=x.device)
    lowest = torch.iinfo(x.dtype).min if not x.is_floating_point() else -torch.inf
    values = torch.where(index[:, None] >= index, x.unsqueeze(-2), lowest).amax(-1)
    return values, torch.zeros_like(values, dtype=torch.int64)


def _sorted(x: Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return a stable sort, which ONNX has no operator for, as TopK of all: of equal numbers that takes the first ones
    first."""
    numbers = x if x.is_floating_point() or x.dtype == torch.int64 else x.to(torch.int32)
    values, order = numbers.topk(x.shape[dim], dim, largest=descending)
    return values.to(x.dtype), order


def _order(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Tensor:
    """Return the indices of a stable sort."""
    return _sorted(x, stable=stable, dim=dim, descending=descending)[1]


def _place(
    ends: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Return how many of the ascending ``ends`` lie before each value: searchsorted over one list, by counting."""
    assert ends.dim() == 1 and sorter is None
    last = right or side == "right"
    before = ends <= values.unsqueeze(-1) if last else ends < values.unsqueeze(-1)
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


WRITTEN_OTHERWISE = {
    torch.ops.aten.cummax.default: _running_maximum,
    torch.ops.aten.searchsorted.Tensor: _place,
    torch.ops.aten.sort.stable: _sorted,
    torch.ops.aten.argsort.stable: _order,
    torch.ops.aten.argsort.default: _order,
}
"""Operators of PyTorch that the converter lacks, to what stands in for them."""
