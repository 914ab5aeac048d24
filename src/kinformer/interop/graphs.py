"""Causal models as graphs without Python: an ONNX file.

A graph is a function of flat tensors: tokens and the leaves of a state go in, logits and the leaves behind the tokens
come out. The graph is made of the program that ``torch.export`` captures.

The ONNX graph is one for prompts and steps, with any batch, any time and any number of past slots. Kernel attention
becomes ``LinearAttention`` and ``CausalConvWithState`` of opset 27, an LSTM ``LSTM``; everything else is operators of
``torch.export``. Attention is dense in the graph: a pattern is a mask.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.config import Config, field_types
from kinformer.core.model import PROTOCOLS, CausalModel
from kinformer.core.stack import ModelConfig
from kinformer.core.state import map_tensors
from kinformer.generation.recording import BATCH, PAST, Leaf, leaves_of, named_leaves, unflattened
from kinformer.interop.proof import gap as relative_gap
from kinformer.runtime.compiling import HostDriven, Operator, substituting, trusted_arguments
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

TIME = "time"
ROWS, TOKENS, SLOTS = 5, 11, 13
"""Sizes of a graph's examples. A size that a model has elsewhere, too, or 0 or 1, could be taken for a constant."""

TALKATIVE = ("torch", "onnxscript", "onnx_ir")
"""The loggers of packages whose notes do not help a user."""


class FlatStep(nn.Module):
    """The function (tokens [batch, time] int64, leaf, leaf, ...) -> (logits [batch, time, vocab], leaf, leaf, ...).

    ``model`` computes by its references, which consist of operators that any runtime has, and by ``operators`` in
    place of kernels. No argument is checked.
    """

    def __init__(self, model: CausalModel, operators: Mapping[str, Operator]) -> None:
        super().__init__()
        self.leaves = leaves_of(model)
        self.operators = operators
        self.model = _by_references(model)
        self._like = map_tensors(lambda leaf: leaf.to("meta"), model.initial_state(1))

    def forward(self, tokens: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Return logits, and the leaves behind the tokens."""
        with trusted_arguments(), substituting(self.operators):
            logits, state = self.model(tokens, unflattened(self._like, leaves))
        return (logits, *(leaf for _, leaf in named_leaves(state)))


def require_graphable(config: ModelConfig) -> None:
    """Raise unless a model of ``config`` continues sequences of tokens, and takes the same steps for all data."""
    if config.protocol is not CausalModel or config.input.kind != "tokens":
        raise KinformerError(
            f"its model is {PROTOCOLS[config.protocol]} with the input {config.input.kind!r}, but a graph continues "
            "sequences of tokens; export a run of a causal model of tokens."
        )


def captured(step: FlatStep) -> torch.export.ExportedProgram:
    """Return the graph of ``step``, of any batch and time."""
    _require_no_host(step.model)
    names = {BATCH, TIME} | {PAST for leaf in step.leaves if leaf.grows}
    open_axes = {name: torch.export.Dim(name, min=int(name != PAST)) for name in names}
    examples = (torch.zeros(ROWS, TOKENS, dtype=torch.int64), *(leaf.zeros(ROWS, SLOTS) for leaf in step.leaves))
    shapes = ((BATCH, TIME), *(leaf.shape for leaf in step.leaves))
    dynamic = [{axis: open_axes[name] for axis, name in enumerate(shape) if name in open_axes} for shape in shapes]
    try:
        with torch.no_grad(), without_notes():
            return torch.export.export(step, examples, dynamic_shapes=(dynamic[0], tuple(dynamic[1:])), strict=False)
    except Exception as error:
        raise KinformerError(
            f"torch.export makes no graph of this model, as {_reason(error)}; export another member, or this one with "
            "`format` hf."
        ) from error


def _require_no_host(model: Any) -> None:
    """Raise for a part of ``model`` whose steps follow numbers that the host reads."""
    for module in model.modules():
        reads = module.host_reads if isinstance(module, HostDriven) else ""
        if reads:
            raise KinformerError(
                f"its part {module.config.kind!r} cannot be in a graph, which makes the same steps for all numbers, as "
                f"the host follows some of its numbers ({reads}); export another member, or this one with `format` hf."
            )


def _reason(error: Exception) -> str:
    """Return what ``error`` of PyTorch says, in a clause."""
    name = type(error).__name__
    fixed = dict.fromkeys(re.findall(r"(?:You marked (?=\w+ as dynamic but your)|Not all values of )(\w+)", str(error)))
    if fixed:
        return (
            f"its operators depend on {' and '.join(fixed)} on the host, so that a graph would hold for some sizes only"
        )
    if "DataDependent" in name or "data-dependent" in str(error):
        return "its next step depends on numbers that it has computed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"it says: {lines[0].rstrip('.')} ({name})" if lines else f"it raises {name}"


@contextmanager
def without_notes() -> Iterator[None]:
    """Hide the warnings and notes of PyTorch and of the converter about their own graphs."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, TALKATIVE)}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


def _by_references(model: Any) -> Any:
    """Return a model of the same weights, in eval mode, that computes everything by its references."""
    with private_numbers(0):  # the stored weights replace the random ones
        other = _by_reference(model.config).build()
    other.load_state_dict(model.state_dict())
    return other.eval()


def _by_reference(config: object) -> Any:
    """Return ``config`` with every ``impl`` in it set to "reference"."""
    if isinstance(config, tuple):
        return tuple(map(_by_reference, config))
    if not isinstance(config, Config):
        return config
    values = {name: getattr(config, name) for name in field_types(type(config))}
    changed = {name: "reference" if name == "impl" else _by_reference(value) for name, value in values.items()}
    return config.replace(**{name: value for name, value in changed.items() if value is not values[name]})


# Operators of ONNX's opset 27 in place of kernels: ``LinearAttention``, ``CausalConvWithState`` and ``LSTM``.
#
# The operators are written, not computed. They have the shapes of the kernels that they replace.


OPSET = 27
"""The first version of ONNX with all three operators."""


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, log_decay: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs and the sums s, z behind a chunk (see ``kernels.linear``).

    The operator does not have a normaliser. A column of ones beside the values replaces it: the column's s is z.
    """
    rule = "linear" if log_decay is None else "gated"
    if eps is None:
        y, s = _attend(rule, q, k, v, s, log_decay)
        return y, s, z
    ones, sums = torch.ones_like(v[..., :1]), torch.cat([s, z.unsqueeze(-1)], dim=-1)
    y, sums = _attend(rule, q, k, torch.cat([v, ones], dim=-1), sums, log_decay)
    return y[..., :-1] / (y[..., -1:] + eps), sums[..., :-1], sums[..., -1]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs and the memory behind a chunk (see ``kernels.delta``)."""
    rule = "delta" if log_decay is None else "gated_delta"
    return _attend(rule, q, k, v, state, log_decay, beta)


def short_convolution(x: Tensor, recent: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the convolved chunk, with SiLU, and the tokens before the next (see ``parts.output_parts``)."""
    batch, heads, time, channels = x.shape
    taps = weight.flip(0).permute(1, 2, 0).reshape(heads * channels, 1, -1)  # the last tap is of the token itself
    context = taps.shape[2] - 1
    mixed, after = _emit(
        "CausalConvWithState",
        (_by_channel(x), taps, None if bias is None else bias.flatten(), _by_channel(recent.to(x.dtype))),
        {"activation": "silu"},
        ([batch, heads * channels, time], [batch, heads * channels, context]),
        (x.dtype, x.dtype),
    )
    return (
        mixed.reshape(batch, heads, channels, time).mT,
        after.reshape(batch, heads, channels, context).mT.to(recent.dtype),
    )


def lstm(
    x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, w_bias: Tensor, u_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, h and c behind a chunk (see ``kernels.lstm``): ``LSTM``, whose gates are in the order i, o, f,
    g."""
    batch, time, width = *x.shape[:2], h.shape[1]
    w, u, w_bias, u_bias = (
        torch.cat([tensor.chunk(4)[gate] for gate in (0, 3, 1, 2)]) for tensor in (w, u, w_bias, u_bias)
    )
    y, after, memory = _emit(
        "LSTM",
        (x.transpose(0, 1), w[None], u[None], torch.cat([w_bias, u_bias])[None], None, h[None], c[None]),
        {"hidden_size": width},
        ([time, 1, batch, width], [1, batch, width], [1, batch, width]),
        (x.dtype, x.dtype, x.dtype),
    )
    return y[:, 0].transpose(0, 1), after[0], memory[0]


SUBSTITUTES: dict[str, Operator] = {
    "linear_attention": linear_attention,
    "delta_rule": delta_rule,
    "short_convolution": short_convolution,
    "lstm": lstm,
}
"""The operators by the names of the kernels that they stand in for."""


def _attend(
    rule: str, q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs [batch, heads, time, value_dim] and the present state of ``LinearAttention``."""
    batch, heads, time, columns = v.shape
    decay = None if log_decay is None else _packed(log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1))
    y, after = _emit(
        "LinearAttention",
        (_packed(q), _packed(k), _packed(v), state, decay, None if beta is None else beta.mT),
        {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule, "scale": 1.0},
        ([batch, time, heads * columns], state.shape),
        (v.dtype, state.dtype),
    )
    return y.reshape(batch, time, heads, columns).transpose(1, 2), after


def _packed(x: Tensor) -> Tensor:
    """Return x [batch, heads, time, width] as ONNX packs heads, [batch, time, heads * width]."""
    return x.transpose(1, 2).flatten(2)


def _by_channel(x: Tensor) -> Tensor:
    """Return x [batch, heads, time, channels] as [batch, heads * channels, time]."""
    return x.mT.flatten(1, 2)


def _emit(
    name: str,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, int | float | str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
) -> Sequence[Tensor]:
    """Return the outputs, of these ``shapes`` and ``dtypes``, of the ONNX operator ``name``."""
    return torch.onnx.ops.symbolic_multi_out(name, inputs, {**attributes}, dtypes=dtypes, shapes=shapes)


ONNX_FILE = "model.onnx"
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
            f"`format` onnx: needs {' and '.join(missing)}; pip install 'kinformer[onnx]' brings the missing packages."
        )


def write_onnx(model: CausalModel, folder: Path, facts: Mapping[str, object]) -> tuple[dict[str, Any], float]:
    """Write ``model`` into ``folder`` with ``facts`` as metadata; return the facts of the file, and the largest
    difference between the logits of onnxruntime and of the model, relative to the largest logit."""
    step = FlatStep(model, SUBSTITUTES)
    program = captured(step)
    leaves = [leaf.name for leaf in step.leaves]
    inputs, outputs = ["tokens", *leaves], ["logits", *(f"next.{name}" for name in leaves)]
    try:
        with without_notes():
            program = program.run_decompositions(WRITTEN_OTHERWISE)
            program._guards_code = []  # conditions on open sizes, which a graph of ONNX cannot hold
            written = torch.onnx.export(
                program,
                (),
                input_names=inputs,
                output_names=outputs,
                dynamo=True,
                verbose=False,
                opset_version=CONVERTED,
            )
    except Exception as error:
        raise KinformerError(
            f"ONNX does not have a counterpart to this model: {converter_reason(error.__cause__ or error)}; export "
            "another member, or this one with `format` hf."
        ) from error
    assert written is not None
    written.model.opset_imports[""] = OPSET
    described = {"file": ONNX_FILE, "opset": OPSET, "inputs": inputs, "outputs": outputs}
    described["state"] = [leaf.facts for leaf in step.leaves]
    written.model.metadata_props["kinformer"] = json.dumps({**facts, **described})
    written.save(str(folder / ONNX_FILE))
    difference = gap(model, folder / ONNX_FILE, step.leaves)
    if not difference <= LIMIT:
        raise KinformerError(
            f"the ONNX file computes other logits than the model, by {difference:.1e} of the largest; nothing is "
            "written."
        )
    return described, difference


def converter_reason(error: BaseException) -> str:
    """Return the reason for which the converter failed, in a clause."""
    operator = re.search(r"target=torch\.ops\.([\w.]+)", str(error))
    return f"it does not have the operator {operator[1]}" if operator else str(error).splitlines()[0].rstrip(".")


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


@torch.no_grad()
def gap(model: CausalModel, path: Path, leaves: Sequence[Leaf]) -> float:
    """Return the largest difference of logits and of constant leaves between the file at ``path`` and ``model``,
    relative to the largest number: with a prompt and steps, and with steps before a longer chunk."""
    graph, worst = OnnxModel(path, leaves), 0.0
    for batch, times in ((2, (7, 1, 1, 3, 1)), (1, (1, 1, 9))):
        past, state, numbers = graph.begin(batch), model.initial_state(batch), np.random.default_rng(0)
        for time in times:
            tokens = numbers.integers(model.vocab_size, size=(batch, time))
            logits, state = model(torch.from_numpy(tokens), state)
            theirs, past = graph(tokens, past)
            worst = max(worst, relative_gap(torch.from_numpy(theirs), logits))
        for (_, ours), item in zip(named_leaves(state), past, strict=True):
            if ours.shape == item.shape and ours.numel():
                worst = max(worst, relative_gap(torch.from_numpy(item), ours))
    return worst


def _running_maximum(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return cummax over the last axis: the maximum behind a triangular mask. Nothing reads its indices."""
    assert dim in (-1, x.dim() - 1)
    index = torch.arange(x.shape[-1], device=x.device)
    lowest = torch.iinfo(x.dtype).min if not x.is_floating_point() else -torch.inf
    values = torch.where(index[:, None] >= index, x.unsqueeze(-2), lowest).amax(-1)
    return values, torch.zeros_like(values, dtype=torch.int64)


def _sorted(x: Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return a stable sort as TopK of all numbers, which keeps the order of equal numbers."""
    numbers = x if x.is_floating_point() or x.dtype == torch.int64 else x.to(torch.int32)
    values, order = numbers.topk(x.shape[dim], dim, largest=descending)
    return values.to(x.dtype), order


def _order(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Tensor:
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
