"""Optimisers over groups of parameters, and their state as plain named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer, RAdam, SparseAdam

from kinformer.core.stack import sparse_tables, units_of
from kinformer.runtime.compiling import spared
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.sharding import gathered, whole
from kinformer.training.lamb import Lamb
from kinformer.training.layer_decay import rate_factors
from kinformer.training.layouts import UNDIVIDED, Layouts
from kinformer.training.muon import StackedMuon
from kinformer.training.per_parameter import ParameterGroup, PerParameter, scale_
from kinformer.training.settings import Settings

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

Named = list[tuple[str, nn.Parameter]]


class Optimiser:
    """The optimiser of all parameters of a model, and of ``extras`` trained with it, made of some of PyTorch's.

    Tensors of two or more axes decay; vectors (norms, biases) do not. Muon (Jordan et al. 2024) takes the matrices in
    the model's layers, at the scale of AdamW's updates so that one learning rate suits both; AdamW takes the others.
    Tables with sparse gradients have an Adam of their own, whose learning rate is constant and which moves the rows
    that were looked up (Lample et al. 2019); they do not decay, and are not clipped. With ``layer_decay`` rates fall
    from the head to the input (``training.layer_decay``).
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        extras: nn.Module | None = None,
        layouts: Layouts = UNDIVIDED,
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
        parts = [named]
        if settings.optimizer == "muon" and hidden:
            # Muon moves the matrices of the layers; embeddings, heads, norms and biases are AdamW's.
            parts = [hidden, [item for item in named if item[1] not in inner]]
        self.parameters = [parameter for _, parameter in named]
        self.optimisers: list[Optimizer] = []
        self.names: list[list[str]] = []
        for kind, part in zip([settings.optimizer, "adamw"], parts, strict=False):
            groups = _groups(part, settings.weight_decay, factors)
            self.names.append([name for group in groups for name in group.pop("names")])
            self.optimisers.append(_build(kind, groups, settings))
        self.clips_itself = settings.optimizer == "adagrad"
        self.table_rate = settings.table_lr
        if tables:
            groups = _groups(tables, 0.0, factors)
            self.names.append([name for group in groups for name in group.pop("names")])
            self.optimisers.append(spared(SparseAdam)(groups))

    def step(self, rate: float) -> None:
        """Make one update with learning rate ``rate``, and free the gradients. At the rate 0 nothing moves."""
        for optimiser in self.optimisers:
            # Tables with sparse gradients have a constant rate (Lample et al. 2019), but rate 0 moves nothing at all.
            rate_ = self.table_rate if isinstance(optimiser, SparseAdam) and rate else rate
            for group in optimiser.param_groups:
                group["lr"] = rate_ * group["factor"]
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Empty the state, as if no update had been made."""
        for optimiser in self.optimisers:
            optimiser.state.clear()

    def clip(self, largest: float) -> Tensor:
        """Return the norm of all gradients, a scalar tensor; they are scaled down to ``largest`` unless it is 0 or the
        optimiser clips each parameter by itself."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = gathered(nn.utils.get_total_norm(gradients))
        if largest and not self.clips_itself:
            nn.utils.clip_grads_with_norm_(self.parameters, largest, norm)
        return norm

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state as (``"parameter:key"``, tensor) pairs; sharded ones are still sharded."""
        for optimiser, names in zip(self.optimisers, self.names, strict=True):
            parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
            for name, parameter in zip(names, parameters, strict=True):
                for key, value in optimiser.state.get(parameter, {}).items():
                    yield f"{name}:{key}", torch.as_tensor(value)

    def rooms(self, forms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return memory for tensors of :meth:`tensors` with these forms, sharded as their parameters are."""
        names = [name for part in self.names for name in part]
        groups = [group for optimiser in self.optimisers for group in optimiser.param_groups]
        parameters = dict(zip(names, [item for group in groups for item in group["params"]], strict=True))
        rooms = {}
        for path, form in forms.items():
            parameter = parameters.get(path.rpartition(":")[0])
            rooms[path] = self.layouts.room(path, form if parameter is None else parameter, form)
        return rooms

    def load(self, tensors: Mapping[str, Tensor], place: str) -> None:
        """Restore whole tensors of :meth:`tensors`, whatever the number of processes was then and is now."""
        parameter_names = {name for names in self.names for name in names}
        states: dict[str, dict[str, Tensor]] = {}
        for path, tensor in tensors.items():
            name, _, key = path.rpartition(":")
            if name not in parameter_names:
                raise KinformerError(f"{place}: holds an optimiser's state of {name!r}, unknown here; use its own run.")
            states.setdefault(name, {})[key] = tensor
        for optimiser, names in zip(self.optimisers, self.names, strict=True):
            data = optimiser.state_dict()
            parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
            whole_number = isinstance(optimiser, SparseAdam)
            data["state"] = {
                index: {
                    key: int(value) if whole_number and key == "step" else self.layouts.placed(name, value, parameter)
                    for key, value in states[name].items()
                }
                for index, (name, parameter) in enumerate(zip(names, parameters, strict=True))
                if name in states
            }
            optimiser.load_state_dict(data)


def _groups(named: Named, weight_decay: float, factors: Mapping[nn.Parameter, float]) -> list[ParameterGroup]:
    """Return the groups of parameters with one weight decay and one ``factor`` of the learning rate, matrices first."""
    groups: dict[tuple[bool, float], ParameterGroup] = {}
    for name, parameter in sorted(named, key=lambda item: item[1].dim() < 2):
        decay, factor = weight_decay if parameter.dim() >= 2 else 0.0, factors.get(parameter, 1.0)
        form = {"names": [], "params": [], "weight_decay": decay, "factor": factor}
        group = groups.setdefault((parameter.dim() < 2, factor), form)
        group["names"].append(name)
        group["params"].append(parameter)
    return list(groups.values())


def _build(kind: str, groups: list[ParameterGroup], settings: Settings) -> Optimizer:
    if kind == "muon":
        return spared(StackedMuon)(groups, settings.lr)
    if kind == "lamb":
        return spared(Lamb)(groups, lr=settings.lr, betas=(settings.momentum, settings.beta2))
    if kind == "radam":
        betas = (settings.momentum, settings.beta2)
        return spared(RAdam)(groups, lr=settings.lr, betas=betas, decoupled_weight_decay=True)
    if kind == "adafactor":
        return spared(Adafactor)(groups, lr=settings.lr)
    if kind == "adagrad":
        return spared(ClippedAdagrad)(groups, lr=settings.lr, clip=settings.clip)
    if kind == "sgd":
        return spared(SGD)(groups, lr=settings.lr, momentum=settings.momentum)
    return spared(AdamW)(groups, lr=settings.lr, betas=(settings.momentum, settings.beta2), fused=True)


def gather(named: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    """Return every tensor whole, one at a time; processes that do not ``keep`` them only take part."""
    retained = {}
    for name, tensor in named:
        value = whole(tensor)
        if keep:
            retained[name] = value
    return retained


def finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether no tensor holds NaN or infinity."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values() if tensor.is_floating_point())


ADAGRAD_EPS = 1e-10


class ClippedAdagrad(PerParameter):
    """Adagrad (Duchi et al. 2011) whose steps are clipped parameter by parameter, as adaptive spans were trained with;
    with g the gradient of one parameter tensor (Sukhbaatar et al. 2019, the authors' code):

        sum <- sum + g^2,    w <- w - lr * min(1, clip / |g|) * g / (sqrt(sum) + eps)

    The sum has the gradient as it came; only the step is made shorter. ``clip`` 0 lets any pass. Weight decay is
    decoupled, w <- w - lr * weight_decay * w.
    """

    def __init__(self, params: ParamsT, lr: float, clip: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "clip": clip, "weight_decay": weight_decay})

    def move(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> None:
        state = self.state[parameter]
        if not state:
            state["sum"] = torch.zeros_like(parameter)
        # The gradient enters the sum as it came: only the step is clipped.
        state["sum"].addcmul_(gradient, gradient)
        update = gradient / state["sum"].sqrt().add_(ADAGRAD_EPS)
        if group["clip"]:
            norm = gathered(torch.linalg.vector_norm(gradient))
            factor = torch.where(norm > group["clip"], group["clip"] / (norm + ADAGRAD_EPS), torch.ones_like(norm))
            scale_(update, factor)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])
