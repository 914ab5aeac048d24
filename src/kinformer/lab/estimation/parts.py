"""The costs of a training step and a forward at inference, part by part, by running them on shapes only, on the meta
device.

PyTorch's table of formulas counts FLOPs (products and convolutions, not element-wise work). Activations are the bytes
of the distinct storages that autograd saves, parameters excluded. Parts are the direct children of the model and of its
layers. Work between the children belongs to the part ``model`` or ``layers.N``; the cross-entropy is the part ``loss``.

Attention by ``impl="sdpa"`` is an exception: the meta device decomposes it, so that its scores count as saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from kinformer.core.config import Config
from kinformer.core.contract import ReadsSource
from kinformer.core.model import Model, StackedModel
from kinformer.core.parts import Likelihood
from kinformer.core.stack import Stack, StackConfig, units_of
from kinformer.core.state import State, nbytes
from kinformer.lab.training import cross_entropy
from kinformer.runtime.compiling import unallocated

Costs = dict[tuple[str, str], int]
"""Amounts by kind (``forward``, ``backward`` and ``inference`` FLOPs, ``saved`` and ``state`` bytes) and by part."""

Forward = Callable[[Any, Tensor], tuple[Tensor, State]]
"""(model, tokens) -> the inputs of the loss, and the state after the tokens."""
LossFrom = Callable[[Any, Tensor, Tensor], Tensor]
"""(model, inputs of the loss, tokens) -> the loss."""


class ModelSpec(Protocol):
    """The protocol of a model's config (``core.stack.ModelConfig``) and of its substitutes."""

    @property
    def dim(self) -> int: ...

    @property
    def layers(self) -> tuple[Config, ...]: ...

    @property
    def stack(self) -> StackConfig: ...

    @property
    def uses(self) -> tuple[Config, ...]: ...

    def replace(self, **changes: object) -> Self: ...

    def build(self) -> Any: ...

    def __hash__(self) -> int: ...


S = TypeVar("S", bound=ModelSpec)


class _Ledger(TorchDispatchMode):
    """The ledger of saved storages and, as a mode, of FLOPs, each booked on the part that computes at the time.
    ``FlopCounterMode`` has the same total, but it also keeps a table of modules, which takes time at every call."""

    def __init__(self, model: nn.Module, direction: str = "forward") -> None:
        super().__init__()
        self.costs: Costs = defaultdict(int, {(direction, "model"): 0})
        self._direction = direction
        self._stack = ["model"]
        self._retained: dict[int, object] = {
            parameter.untyped_storage()._cdata: parameter for parameter in model.parameters()
        }
        for name, module in parts(model):
            module.register_forward_pre_hook(lambda _, __, part=name: self.enter(part))
            module.register_forward_hook(self._leave)
            if isinstance(module, ReadsSource):
                submodule: Any = module
                submodule.initial_state = self._within(name, submodule.initial_state)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, every operator passes through PyTorch's compiler

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        options = kwargs or {}
        if func.namespace != "prim" and func._can_decompose():  # "prim": attributes of imitated tensors
            with self:
                return func.decompose(*args, **options)
        output = func(*args, **options)
        if formula := flop_registry.get(func._overloadpacket):
            self.costs[self._direction, self._stack[-1]] += formula(*args, **options, out_val=output)
        return output

    def enter(self, part: str) -> None:
        self._stack.append(part)

    def save(self, tensor: Tensor) -> Tensor:
        """Book a tensor that autograd saves, unless its storage is a parameter's or already booked."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._retained:
            self._retained[storage._cdata] = storage
            self.costs["saved", self._stack[-1]] += storage.nbytes()
        return tensor

    def begin_backward(self, loss: Tensor) -> None:
        """Begin to book the backward: every node of the graph reports its part when it runs."""
        self._mark([loss])
        self._direction, self._stack = "backward", ["loss"]

    def move(self, part: str, share: float) -> None:
        """Move a share of the part's forward to its backward."""
        moved = round(share * self.costs["forward", part])
        self.costs["forward", part] -= moved
        self.costs["backward", part] += moved

    def _within(self, part: str, function: Callable[..., State]) -> Callable[..., State]:
        """Return ``function`` with its work booked on ``part``: a mixer projects its source where its state begins."""

        def inside(*args: object, **options: object) -> State:
            self.enter(part)
            output = function(*args, **options)
            self._leave(None, (), output)
            return output

        return inside

    def _leave(self, module: nn.Module | None, args: object, output: object) -> None:
        self._mark(torch.utils._pytree.tree_leaves(output))
        self._stack.pop()

    def _mark(self, outputs: Iterable[object]) -> None:
        """Assign the nodes that made ``outputs``, if they do not belong to a part yet, to the part at work."""
        nodes: list[Node | None] = [tensor.grad_fn for tensor in outputs if isinstance(tensor, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is None:
                continue
            notes: dict[str, str] = node.metadata  # type: ignore[assignment]
            if "part" in notes:
                continue
            notes["part"] = part = self._stack[-1]
            node.register_prehook(lambda grads, part=part: self._stack.__setitem__(-1, part))
            nodes += [following for following, _ in node.next_functions]


def parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a model by name: its children except the stack, and the stack's layers with their children."""
    units = units_of(model)
    yield from ((name, child) for name, child in _children(model) if not (units and name == "stack"))
    for index, layer in enumerate(units):
        yield f"layers.{index}", layer
        yield from ((f"layers.{index}.{name}", child) for name, child in _children(layer))
    yield from (("shared", part) for part in getattr(model.stack, "shared", ()) if units)
    yield from (("merges", part) for part in getattr(model.stack, "merges", ()))
    for name in ("halting", "rule"):
        if (decision := getattr(model.stack, name, None)) is not None:
            yield name, decision


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        listed = child if isinstance(child, nn.ModuleList) else [child]  # hooks on a ModuleList never run
        yield from ((name, item) for item in listed)


def layer_keys(config: ModelSpec) -> list[tuple[int, Config]]:
    """Return a key for every layer, its width and its config; layers with equal keys have equal costs."""
    return list(zip(config.stack.widths(config.dim, len(config.layers)), config.layers, strict=True))


def distinct(config: S) -> S:
    """Return the model config with each distinct layer once."""
    keys = layer_keys(config)
    first = sorted({keys.index(key) for key in keys})
    return config.replace(layers=tuple(config.layers[index] for index in first), stack=config.stack.select(first))


@lru_cache(maxsize=32)  # the peak of a training process, and another precision, ask for what was measured before
def measure(config: ModelSpec, batch: int, length: int, autocast: bool = False, pieces: bool = False) -> Costs:
    """Return the costs of one training step of ``config.build()`` on ``batch`` rows of ``length`` tokens, without data.
    ``pieces``: logits are made some rows at a time, as :func:`in_pieces` says; they then belong to the loss. With
    ``autocast``, products are in bfloat16 as on a CPU or GPU, and FLOPs are not counted. The meta device does not
    support autocast, so the step runs on imitated CPU tensors, which takes several times longer: keep ``length``
    small."""
    forward, loss_from = forward_and_loss(pieces)
    model = without_data(config)
    with FakeTensorMode() if autocast else nullcontext():
        model, tokens = imitated(model, batch, length, "cpu" if autocast else "meta")
        ledger = _Ledger(model)
        with nullcontext() if autocast else ledger, saved_tensors_hooks(ledger.save, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                made = forward(model, tokens)[0]
                ledger.enter("loss")
                loss = loss_from(model, made, tokens)
            ledger.begin_backward(loss)
            if pieces:  # the forward computed three products, and two belong to the backward (dX and dW)
                ledger.move("loss", 2 / 3)
            loss.backward()
    return dict(ledger.costs)


@lru_cache(maxsize=32)
def measure_inference(config: ModelSpec, batch: int, length: int, dtype: torch.dtype = torch.float32) -> Costs:
    """Return the FLOPs (``inference``, in float32 only) of one forward in evaluation mode, without gradients, of
    ``batch`` rows of ``length`` tokens in ``dtype``, and the ``state`` bytes of every layer, and of the rest, after it.
    Work for learning alone is left out, and memories hold their projections (``mixers``)."""
    model = without_data(config).to(dtype).eval()
    tokens = model.input.example(batch, length, "meta")
    ledger = _Ledger(model, "inference")
    with ledger if dtype == torch.float32 else nullcontext(), torch.no_grad():
        state = outputs(model, tokens)[1]
    if state is None:
        return dict(ledger.costs)
    layers = {("state", f"layers.{index}"): nbytes(layer) for index, layer in enumerate(state.layers)}
    return dict(ledger.costs) | layers | {("state", "model"): nbytes(state) - sum(layers.values())}


def outputs(model: Any, tokens: Tensor) -> tuple[Tensor, State]:
    """Return logits of ``tokens`` and the state after (None without a state); a source has as many tokens."""
    if hasattr(model, "begin"):
        return model(tokens, model.begin(model.source_input.example(*tokens.shape[:2], tokens.device)))
    output = model(tokens)
    return (output, None) if isinstance(output, Tensor) else output


def loss_of(model: StackedModel, logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of every token, or of every sequence where ``logits`` are [batch, classes]; for a
    :class:`Likelihood` head, the mean of its negative log-likelihood."""
    if isinstance(model.head, Likelihood):
        return model.head.nats(logits, model.input.predicted(tokens)).mean()
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def in_pieces(model: Model, rows: int) -> bool:
    """Return whether a training step that predicts ``rows`` tokens makes the logits in pieces, on a CPU. Processes that
    share the vocabulary make their part of the logits at once."""
    causal = hasattr(model, "head_inputs") and not hasattr(model, "begin")
    return causal and not cross_entropy.divided(model) and cross_entropy.large(model, rows)


def forward_and_loss(pieces: bool) -> tuple[Forward, LossFrom]:
    """Return the two halves of a training step's forward pass; with ``pieces`` the second one makes the logits."""
    return (lambda model, tokens: model.head_inputs(tokens), _loss_in_pieces) if pieces else (outputs, loss_of)


def _loss_in_pieces(model: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss as :func:`loss_of` does, from hidden states [batch, time, dim]."""
    targets = torch.zeros(hidden.shape[:-1].numel(), dtype=torch.int64, device=hidden.device)
    product = model.head.product(model.input)
    assert product is not None, "a new head does not have an adapter"
    weight, bias = product
    return cross_entropy.summed(hidden.flatten(0, -2), weight, bias, targets) / targets.numel()


def without_data(config: ModelSpec) -> Any:
    """Return the model of a config, shapes only."""
    with unallocated():
        return config.build()


def imitated(model: Any, batch: int, length: int, device: str) -> tuple[Any, Tensor]:
    """Return a model without data, and tokens for it, on ``device``: the meta device, or under imitation the CPU.
    Kernels on imitated tensors lack a seed. Under imitation therefore only dropout modules, whose masks are saved, and
    the stack, whose mode decides on checkpoints, stay in training mode."""
    tokens = model.input.example(batch, length, device)
    if device != "meta":
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        for module in model.modules():
            module.training = isinstance(module, nn.Dropout | Stack)
    return model, tokens
