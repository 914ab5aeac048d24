"""The optimisers of training: Muon, LAMB, Adagrad, layer-wise decay, groups of parameters; means of weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer, RAdam, SparseAdam

from kinformer.core.stack import Stack, sparse_tables, units_of
from kinformer.lab.training.checkpoint import Checkpoints
from kinformer.lab.training.layouts import UNDIVIDED, Layouts
from kinformer.lab.training.settings import Settings
from kinformer.runtime.compiling import gathered, is_sharded, local_part, replicated, spared, whole
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.process import processor_class

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


ParameterGroup: TypeAlias = dict[str, Any]
"""A group of parameters of a PyTorch optimiser: its ``params`` and their settings, by name."""


class PerParameter(Optimizer):
    """The base class; a subclass defines in :meth:`move` how a gradient changes its parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update from the present gradients."""
        assert closure is None, "the loss is not computed again"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)

    def move(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> None:
        """Update ``parameter`` and its state in place, by the settings of its ``group``."""
        raise NotImplementedError


def scale_(update: Tensor, factor: Tensor) -> Tensor:
    """Multiply ``update``, which may be sharded, by the scalar ``factor`` in place."""
    return update.mul_(float(factor) if is_sharded(update) else factor)


# Muon (Jordan et al. 2024): the momentum of a matrix, orthogonalised by five Newton-Schulz iterations, is its update.
#
#     X_0 = B / |B|,   A = X X^T,   X <- a X + (b A + c A^2) X,   W <- (1 - lr decay) W - 0.2 sqrt(max(m, n)) lr X
#
# This is PyTorch's optimiser with the matrices of one shape in one product. An operation on the matrices of a small
# model takes longer to start than to run. On two threads of an AMD EPYC the update of four layers of dim 128 takes six
# tenths of PyTorch's time (``benchmarks/small_operations.py``). The iterations reach singular values near 1, not 1, so
# low precision suffices: they compute in the type in which the processor is fastest.

SMALL = 1 << 18
"""The most elements of a matrix to orthogonalise together with others of its shape; larger matrices gain nothing."""

PRECISION = {"AMX": torch.bfloat16, "AVX-512 and bfloat16": torch.bfloat16, "other": torch.float32}
"""The type of the iterations by class of processor. Where bfloat16 is emulated, PyTorch's update, which uses it, takes
3.7 times as long as this one (Intel Xeon with AVX-512 alone, one thread, ``small_operations_other.json``)."""


class StackedMuon(Muon):
    """The optimiser ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``: the same updates and state."""

    def __init__(self, groups: list[ParameterGroup], lr: float) -> None:
        super().__init__(groups, lr=lr, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one update. Matrices sharded over processes are gathered, a shape at a time."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            matrices, gradients, momenta = list[Tensor](), list[Tensor](), list[Tensor]()
            self._init_group(group, matrices, gradients, momenta)
            if not matrices:
                continue
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            moved = momenta
            if group["nesterov"]:  # one by one: PyTorch 2.11 has no _foreach_lerp of sharded tensors
                moved = [torch.lerp(*pair, group["momentum"]) for pair in zip(gradients, momenta, strict=True)]
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            for alike in _alike(matrices):
                cast = [gathered(moved[index]).to(_precision(moved[index].device)) for index in alike]
                stack = torch.stack(cast) if len(cast) > 1 else cast[0]
                directions = orthogonalised(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
                # 0.2 sqrt(max(m, n)): the root mean square of AdamW's updates, so that one learning rate suits both.
                rate = 0.2 * max(cast[0].shape) ** 0.5 * group["lr"]
                for index, direction in zip(alike, directions.reshape(-1, *cast[0].shape), strict=True):
                    matrices[index].add_(replicated(matrices[index], direction), alpha=-rate)
        return loss


def _alike(matrices: list[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of ``matrices`` in groups: small matrices of one shape and device together, others alone."""
    groups: dict[tuple[torch.Size, torch.device, int | None], list[int]] = {}
    for index, matrix in enumerate(matrices):
        alone = index if matrix.numel() > SMALL else None
        groups.setdefault((matrix.shape, matrix.device, alone), []).append(index)
    yield from groups.values()


def _precision(device: torch.device) -> torch.dtype:
    """Return the type of the iterations on ``device``; bfloat16, as PyTorch's, on any but a CPU."""
    return PRECISION[processor_class()] if device.type == "cpu" else torch.bfloat16


def orthogonalised(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix, or a stack of matrices [n, rows, columns], with the singular values moved to 0.5 to 1.5."""
    a, b, c = coefficients
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    tall = x.shape[-2] > x.shape[-1]
    # X X^T of the short side: fewer operations.
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    if x.dtype == torch.float32 and x.shape[-1] >= 2 * x.shape[-2]:
        x = _factor(x @ x.mT, coefficients, steps) @ x
        return x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        # X <- a X + (b A + c A^2) X
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _factor(gram: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Return Q with X_steps = Q X_0, given A = X_0 X_0^T. All products are of the size of the short side. Each step
    multiplies X by P = a + b A + c A^2, a symmetric matrix that commutes with A, so A <- P A P and Q <- P Q. Squared
    singular values need float32."""
    a, b, c = coefficients
    add = torch.addmm if gram.dim() == 2 else torch.baddbmm
    factor: Tensor | None = None
    for step in range(steps):
        polynomial = add(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        factor = polynomial if factor is None else polynomial @ factor
        if step < steps - 1:
            gram = polynomial @ (gram @ polynomial)
    assert factor is not None
    return factor


EPS = 1e-6


class Lamb(PerParameter):
    """LAMB: AdamW's step scaled tensor by tensor to the length of its weights (You et al. 2020, algorithm 2).

        m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2       corrected for their beginning at 0
        r = m / (sqrt(v) + eps) + weight_decay w
        w <- w - lr |w| / |r| r                                              the factor is 1 where either norm is 0

    Each tensor moves by the same share of its length, so large batches can have large learning rates.
    """

    def __init__(
        self, params: ParamsT, lr: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def move(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        mean, square, steps = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**steps)).sqrt_().add_(EPS)
        update = (mean / (1 - beta1**steps)).div_(root).add_(parameter, alpha=group["weight_decay"])
        length, moved = (gathered(torch.linalg.vector_norm(tensor)) for tensor in (parameter, update))
        factor = torch.where((length > 0) & (moved > 0), length / moved, torch.ones_like(moved))
        parameter.sub_(scale_(update, factor), alpha=group["lr"])


# Layer-wise decay of the learning rate (Howard and Ruder 2018, ULMFiT, section 3.2; Bao et al. 2022, BEiT; He et al.
# 2022, MAE): lower layers, whose features are the most general, move the least.
#
#     rate of layer l = rate * decay^(L + 1 - l),   l = 1 .. L;     of the inputs before them rate * decay^(L + 1)
#
# The head, the last norm and tensors shared by layers move at the full rate, as in BEiT's code. A module that merges
# patches between two stages belongs to the layer before it.


def rate_factors(model: nn.Module, decay: float) -> dict[nn.Parameter, float]:
    """Return the factor of the learning rate of each parameter of ``model`` whose factor is not 1. Every stack counts
    from its last layer. A parameter with two uses (a tied table) has the factor of its lowest use."""
    if decay == 1:
        return {}
    depths: dict[nn.Parameter, int] = {}
    for trunk, stack in _trunks(model):
        for part, depth in _below(trunk, stack):
            for parameter in part.parameters():
                depths[parameter] = max(depth, depths.get(parameter, 0))
    if not depths:
        kind = type(model).__name__
        raise KinformerError(f"`layer_decay` {decay:g}: {kind} does not have a stack of layers; leave it out.")
    return {parameter: decay**depth for parameter, depth in depths.items()}


def _trunks(model: nn.Module) -> Iterator[tuple[nn.Module, Stack]]:
    """Yield every module with a stack, and its stack, except for encoders within an input, which count as its parts."""
    if isinstance(stack := getattr(model, "stack", None), Stack):
        yield model, stack
    yield from (trunk for name, child in model.named_children() if name != "input" for trunk in _trunks(child))


def _below(trunk: nn.Module, stack: Stack) -> Iterator[tuple[nn.Module, int]]:
    """Yield the parts of ``trunk`` that the head reads through layers, and the number of layers up to the head."""
    count = len(stack.layers)
    for number, layer in enumerate(stack.layers):
        yield layer, count - number
    ends, merges = list(getattr(stack.config, "depths", ())), getattr(stack, "merges", ())
    for stage, merge in enumerate(merges):
        yield merge, count - sum(ends[: stage + 1]) + 1
    for name in ("input", "position", "global_input", "embedding_norm"):
        if isinstance(part := getattr(trunk, name, None), nn.Module):
            yield part, count + 1


# Optimisers over groups of parameters, and their state as plain named tensors.

Named = list[tuple[str, nn.Parameter]]


class Optimiser:
    """The optimiser of all parameters of a model, and of ``extras`` trained with the model, composed of PyTorch's
    optimisers.

    Tensors of two or more axes decay; vectors (norms, biases) do not. Muon (Jordan et al. 2024) updates the matrices in
    the model's layers, at the scale of AdamW's updates, so that one learning rate suits both; AdamW updates the other
    parameters. A separate Adam with a constant learning rate updates tables with sparse gradients, and only the rows
    that were looked up (Lample et al. 2019); these tables do not decay and are not clipped. With ``layer_decay``
    learning rates fall from the head to the input (:func:`rate_factors`).
    """

    def __init__(
        self, model: nn.Module, settings: Settings, extras: nn.Module | None = None, layouts: Layouts = UNDIVIDED
    ) -> None:
        self.layouts = layouts
        named = list(model.named_parameters())
        if extras is not None:
            named += extras.named_parameters(prefix="objective")
        named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        sparse = sparse_tables(model)
        tables = [(name, parameter) for name, parameter in named if parameter in sparse]
        named = [(name, parameter) for name, parameter in named if parameter not in sparse]
        inner = {parameter for unit in units_of(model) for parameter in unit.parameters() if parameter.dim() == 2}
        hidden = [item for item in named if item[1] in inner]
        factors = rate_factors(model, settings.layer_decay)
        parts: list[tuple[str, Named, float]] = [(settings.optimizer, named, settings.weight_decay)]
        if settings.optimizer == "muon" and hidden:
            # Muon moves the matrices of the layers; embeddings, heads, norms and biases are AdamW's.
            rest = [item for item in named if item[1] not in inner]
            parts = [("muon", hidden, settings.weight_decay), ("adamw", rest, settings.weight_decay)]
        if tables:
            parts.append(("tables", tables, 0.0))
        self.parameters = [parameter for _, parameter in named]
        self.parts: list[tuple[Optimizer, Named]] = []
        for kind, part, decay in parts:
            groups = _groups(part, decay, factors)
            in_order = [item for group in groups for item in group["params"]]
            self.parts.append((_build(kind, groups, settings), in_order))
        self.clips_itself = settings.optimizer == "adagrad"
        self.table_rate = settings.table_lr

    def step(self, rate: float) -> None:
        """Make one update with learning rate ``rate``, and free the gradients. At the rate 0 nothing moves."""
        for optimiser, _ in self.parts:
            # Tables with sparse gradients have a constant rate (Lample et al. 2019), but rate 0 moves nothing at all.
            rate_ = self.table_rate if isinstance(optimiser, SparseAdam) and rate else rate
            for group in optimiser.param_groups:
                group["lr"] = rate_ * group["factor"]
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Empty the state, as if no update had been made."""
        for optimiser, _ in self.parts:
            optimiser.state.clear()

    def clip(self, largest: float) -> Tensor:
        """Return the norm of all gradients; they are scaled down to ``largest`` unless it is 0 or ``clips_itself``."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = gathered(nn.utils.get_total_norm(gradients))
        if gradients and largest and not self.clips_itself:
            # PyTorch's own function plans a product of DTensors anew for every model, which takes a second.
            factor = (largest / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)
        return norm

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state as (``"parameter:key"``, tensor) pairs; sharded ones are still sharded."""
        for optimiser, named in self.parts:
            for name, parameter in named:
                for key, value in optimiser.state.get(parameter, {}).items():
                    yield f"{name}:{key}", torch.as_tensor(value)

    def rooms(self, forms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return memory for tensors of :meth:`tensors` with these forms, sharded as their parameters are."""
        parameters = dict(item for _, named in self.parts for item in named)
        owners = {path: parameters.get(path.rpartition(":")[0], form) for path, form in forms.items()}
        return {path: self.layouts.room(path, owners[path], form) for path, form in forms.items()}

    def load(self, tensors: Mapping[str, Tensor], place: str) -> None:
        """Restore whole tensors of :meth:`tensors`; the number of processes may have changed."""
        names = {name for _, named in self.parts for name, _ in named}
        states: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for path, tensor in tensors.items():
            name, _, key = path.rpartition(":")
            if name not in names:
                raise KinformerError(f"{place}: holds an optimiser's state of {name!r}, unknown here; use its own run.")
            states[name][key] = tensor
        for optimiser, named in self.parts:
            data = optimiser.state_dict()
            whole_number = isinstance(optimiser, SparseAdam)
            data["state"] = {
                index: {
                    key: int(value) if whole_number and key == "step" else self.layouts.placed(name, value, parameter)
                    for key, value in states[name].items()
                }
                for index, (name, parameter) in enumerate(named)
                if name in states
            }
            optimiser.load_state_dict(data)


def _groups(named: Named, weight_decay: float, factors: Mapping[nn.Parameter, float]) -> list[ParameterGroup]:
    """Return the groups of parameters with one weight decay and one ``factor`` of the learning rate, matrices first."""
    groups: dict[tuple[bool, float], ParameterGroup] = {}
    for name, parameter in sorted(named, key=lambda item: item[1].dim() < 2):
        decay, factor = weight_decay if parameter.dim() >= 2 else 0.0, factors.get(parameter, 1.0)
        form = {"params": [], "weight_decay": decay, "factor": factor}
        groups.setdefault((parameter.dim() < 2, factor), form)["params"].append((name, parameter))
    return list(groups.values())


def _build(kind: str, groups: list[ParameterGroup], settings: Settings) -> Optimizer:
    betas = float(settings.momentum), float(settings.beta2)  # torch.optim refuses a whole number beside a float
    classes: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
        "adamw": (AdamW, {"betas": betas, "fused": True}),
        "radam": (RAdam, {"betas": betas, "decoupled_weight_decay": True}),
        "muon": (StackedMuon, {}),
        "lamb": (Lamb, {"betas": betas}),
        "adafactor": (Adafactor, {}),
        "adagrad": (ClippedAdagrad, {"clip": settings.clip}),
        "sgd": (SGD, {"momentum": settings.momentum}),
        "tables": (SparseAdam, {}),
    }
    made, options = classes[kind]
    build: Callable[..., Optimizer] = spared(made)
    return build(groups, lr=settings.lr, **options)


def gather(named: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    """Return every tensor whole, one at a time; processes that do not ``keep`` them only take part."""
    everything = ((name, whole(tensor)) for name, tensor in named)
    return {name: value for name, value in everything if keep}


def finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether no tensor, and no part that this process has of a sharded one, holds NaN or infinity."""
    parts = (local_part(tensor.detach()) for tensor in tensors.values() if tensor.is_floating_point())
    return all(bool(part.isfinite().all()) for part in parts)


ADAGRAD_EPS = 1e-10


class ClippedAdagrad(PerParameter):
    """Adagrad (Duchi et al. 2011) whose steps are clipped parameter by parameter, as adaptive spans were trained with
    (Sukhbaatar et al. 2019, the authors' code); with g the gradient of one parameter tensor:

        sum <- sum + g^2,    w <- w - lr * min(1, clip / |g|) * g / (sqrt(sum) + eps) - lr * weight_decay * w

    The sum takes the unclipped gradient. ``clip`` 0 turns clipping off.
    """

    def __init__(self, params: ParamsT, lr: float, clip: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "clip": clip, "weight_decay": weight_decay})

    def move(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> None:
        state = self.state[parameter]
        if not state:
            state["sum"] = torch.zeros_like(parameter)
        # The unclipped gradient enters the sum, as in the authors' code: only the step is clipped.
        state["sum"].addcmul_(gradient, gradient)
        update = gradient / state["sum"].sqrt().add_(ADAGRAD_EPS)
        if group["clip"]:
            norm = gathered(torch.linalg.vector_norm(gradient))
            factor = torch.where(norm > group["clip"], group["clip"] / (norm + ADAGRAD_EPS), torch.ones_like(norm))
            scale_(update, factor)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


# Means of weights: over the last checkpoints of a run (Vaswani et al. 2017, section 6.1), or a moving mean over steps.
#
# The moving mean forgets with the length of the run (polynomial-decay averaging, Shamir and Zhang 2013):
#
#     mean_t = mean_(t-1) + (w_t - mean_(t-1)) / (1 + share t),   t = 0, 1, ...
#
# At every step it covers about a ``share`` of the steps so far.


class MovingAverage:
    """The moving mean of the parameters of ``model``, without its buffers; empty where ``share`` is 0."""

    def __init__(self, model: nn.Module, share: float, layouts: Layouts = UNDIVIDED) -> None:
        self.share, self.layouts = share, layouts
        self.named = {name: named_parameter.detach() for name, named_parameter in model.named_parameters() if share}
        self.means = {name: value.clone() for name, value in self.named.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after update number ``step``, counted from 0."""
        if self.named:
            # mean_t = mean_(t-1) + (w_t - mean_(t-1)) / (1 + share t)
            torch._foreach_lerp_(list(self.means.values()), list(self.named.values()), 1 / (1 + self.share * step))

    def applied(self) -> AbstractContextManager[None]:
        """Replace the model's weights by their means within the context."""
        return swapped(self.named, self.means)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the means by the names of their parameters, sharded over processes as these are."""
        return self.means

    def rooms(self) -> dict[str, Tensor]:
        """Return memory for the means of a checkpoint."""
        return {name: self.layouts.room(name, mean, mean) for name, mean in self.means.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the means of a checkpoint, whole tensors by name."""
        for name, mean in self.means.items():
            mean.copy_(self.layouts.placed(name, tensors[name], mean))


def mean_weights(
    model: nn.Module, checkpoints: Checkpoints, steps: Sequence[int], layouts: Layouts = UNDIVIDED
) -> dict[str, Tensor]:
    """Return the mean weights of ``model`` and of the checkpoints of ``steps``, sharded as the model's weights are.
    Integer and boolean tensors are copied from the model."""
    weights_now = {name: weight for name, weight in model.state_dict().items() if weight.is_floating_point()}
    # The sum is in float64, so only the final division rounds noticeably, whatever the number of checkpoints.
    total = {name: weight.to(torch.float64, copy=True) for name, weight in weights_now.items()}
    for step in steps:
        rooms = {name: layouts.room(name, weight, weight) for name, weight in weights_now.items()}
        weights = checkpoints.weights(step, rooms)
        for name, weight in weights_now.items():
            total[name] += layouts.placed(name, weights[name], weight).to(weight.device)
    return {name: (weight / (len(steps) + 1)).to(weights_now[name].dtype) for name, weight in total.items()}


def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Replace the weights of ``model`` within the context by ``weights`` of the same names and sharding."""
    weights_now = model.state_dict()
    return swapped({name: weights_now[name] for name in weights}, weights)


@contextmanager
def swapped(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the tensors ``weights`` the values of ``others`` within the context."""
    before = {name: value.detach().clone() for name, value in weights.items()}
    put(weights, others)
    try:
        yield
    finally:
        put(weights, before)


@torch.no_grad()
def put(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give the tensors ``weights`` the values of their names."""
    for name, value in weights.items():
        value.copy_(values[name])
