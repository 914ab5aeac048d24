"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM, section 3) on PyTorch's DTensor: processes that share tokens.

    x  --copy-->  F_part(x)  --sum-->  y      copy: its gradient is the sum of the parts';  sum: its gradient is a copy

A config returns one of N equal parts of itself (``core.contract``), usually a config with fewer heads or hidden
features. The outputs of the parts add up to the output of the whole. The rows of each weight that a part takes follow
from the two shapes, and from ``in_blocks`` where one product makes queries, keys and values side by side. A config that
cannot be divided raises the reason.

The weights of a part become DTensors of the mesh's axis "tp". FSDP can cut them again along another axis, and
optimisers, norms and checkpoints see whole weights. While a unit computes, its modules see plain local tensors and run
as in one process, on fewer heads. The rows of a part are not adjacent in the whole weight, so a checkpoint gathers one
weight at a time into the order of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from kinformer.core.config import Config, describe
from kinformer.core.contract import CausalMixer, FollowsHeads, ReadsSource, RecomputesKV, undivided
from kinformer.core.learning import AuxLoss, Regularized, Resampled
from kinformer.core.model import StackedModel, modules_of
from kinformer.core.parts import OutputProduct, ResidualOutput
from kinformer.core.stack import Stack, share, sparse_tables, units_of
from kinformer.core.state import State
from kinformer.lab.training.data_module import ObjectiveModule
from kinformer.lab.training.layouts import Cut, Layouts
from kinformer.runtime.errors import KinformerError

# The division of a model's heads, hidden features and vocabulary into equal parts.
#
# mixer, feed-forward   y = sum over parts of F_part(x), F_part with 1 / parts of the heads, or of the hidden features
# table, logits         rows of the vocabulary

_FEED_FORWARDS = ("feed_forward", "first_feed_forward")
_ENTERING = {"pre": "norm", "reordered": "norm", "gated": "norm", "sandwich": "inner_norm"}
"""The norm that stands before a sublayer, by the kind of its residual."""


@dataclass
class Division:
    """The division of a model into ``parts``, by the names of its parameters and modules.

    ``cuts``: how each cut tensor is cut. ``partial``: whole tensors of divided modules, whose gradients are sums over
    the parts. ``added``: biases added after a sum over the parts; each part adds an equal share of the bias.
    ``mixers``: the divided mixers of chunks and states. ``feed_forwards``: the divided modules x -> y, mixers of
    encoders included. The outputs of divided modules are summed over the parts. ``vocabulary``: whether the table and
    the logits are cut.
    """

    parts: int
    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    added: set[str] = field(default_factory=set)
    mixers: list[str] = field(default_factory=list)
    feed_forwards: list[str] = field(default_factory=list)
    vocabulary: bool = False


def divide(model: Any, part: int, parts: int) -> Division:
    """Make ``model``, a decoder, an encoder or both in one, part number ``part`` of ``parts`` of itself, in place. A
    model that cannot be divided stays unchanged."""
    replaced = _replacements(model, parts)
    whole = _tensors(model)
    blocks = {name: getattr(module, "blocks", ()) for name, module in model.named_modules()}
    followed = {name: module for name, module in _modules(model).items() if isinstance(module, FollowsHeads)}
    division = Division(parts)
    for path, (parent, name, module) in replaced.items():
        module.train(parent.training)
        setattr(parent, name, module)  # of a list, too: its items are attributes
        (division.mixers if isinstance(module, CausalMixer) else division.feed_forwards).append(path)
    for _, stack, _, _ in _stacks(model):
        stack.shared = share(stack.layers)
    for name, new in _modules(model).items():
        if isinstance(new, FollowsHeads) and new is not followed[name]:
            new.follow(followed[name], part)
    embedding = getattr(model.config.input, "embedding", None)
    simple = embedding is not None and type(embedding).by_vocabulary and model.config.kind == "decoder"
    alone = getattr(model, "exit_heads", None) is None and getattr(model, "ahead", None) is None
    division.vocabulary = simple and alone and model.vocab_size % parts == 0 and output_product(model) is not None
    _take(model, whole, blocks, division, part)
    return division


def _stacks(model: Any) -> list[tuple[str, Stack, Any, Sequence[int]]]:
    """Return the stacks of a decoder, of an encoder, or of both in one model: the place in the model, the stack, the
    config of its layers, and the width of each layer."""
    places = {"decoder": ("",), "encoder": ("",), "encoder_decoder": ("", "encoder")}
    kind, stacks = str(getattr(model.config, "kind", "")), []
    for place in places.get(kind, ()):
        owner: Any = model.get_submodule(place) if place else model
        config, stack = owner.config, owner.stack
        if isinstance(stack, Stack):
            widths = config.stack.widths(model.config.dim, len(config.layers))
            stacks.append((".".join(filter(None, (place, "stack"))), stack, config, widths))
    if not stacks:
        raise KinformerError(
            f"{describe(model.config)} cannot be divided among processes: only decoders and encoders of tokens can; "
            "leave `parallel` tp out."
        )
    return stacks


def _replacements(model: Any, parts: int) -> dict[str, tuple[nn.Module, str, nn.Module]]:
    """Return the new modules by path: the parent, the name there, and the module."""
    stacks = _stacks(model)
    if sparse_tables(model):
        raise undivided(model.config, "a table has sparse gradients")
    replaced: dict[str, tuple[nn.Module, str, nn.Module]] = {}
    for place, stack, config, widths in stacks:
        if not stack.shardable:
            raise undivided(config.stack, "it computes layers again, branch by branch, outside of their forward pass")
        for number, (layer, options, width) in enumerate(zip(stack.layers, config.layers, widths, strict=True)):
            parts_of_layer = _parts_of_layer(layer, options, width, parts)
            replaced |= {f"{place}.layers.{number}.{path}": part for path, part in parts_of_layer.items()}
    for path, (_, _, module) in replaced.items():
        for inner in module.modules():
            if isinstance(inner, Regularized) or (isinstance(inner, Resampled) and inner.redraw):
                what = "a penalty of its weights" if isinstance(inner, Regularized) else "features that are redrawn"
                raise KinformerError(
                    f"{path} cannot be divided among processes: it has {what} for all heads; leave `parallel` tp out."
                )
    return replaced


def _parts_of_layer(
    layer: nn.Module, options: Config, width: int, parts: int
) -> dict[str, tuple[nn.Module, str, nn.Module]]:
    """Return the parts of a layer's mixers and feed-forwards by their paths in it, with the parent and the name."""
    causal = isinstance(layer.mixer, CausalMixer)
    made: dict[str, tuple[nn.Module, str, nn.Module]] = {}
    for name in ("mixer", *_FEED_FORWARDS):
        if isinstance(getattr(layer, name, None), nn.Module):
            feeds = name in _FEED_FORWARDS
            chosen = getattr(options, "feed_forward" if feeds else name).part(width, parts)
            made[name] = layer, name, chosen.build_causal(width) if feeds and causal else chosen.build(width)
    for index, chosen in enumerate(getattr(options, "further_mixers", ())):
        module = chosen.part(width, parts).build(width)
        made[f"further_mixers.{index}"] = layer.get_submodule("further_mixers"), str(index), module
    return made


def _take(
    model: Any, whole: Mapping[str, Tensor], blocks: Mapping[str, tuple[int, ...]], division: Division, part: int
) -> None:
    """Fill the tensors of a divided ``model`` from the ``whole`` one, and record in ``division`` how they are cut."""
    inside = tuple(f"{path}." for path in (*division.mixers, *division.feed_forwards))
    inside = (*inside, *(f"{place}.shared." for place, *_ in _stacks(model)))
    for number, (layer, options) in enumerate(zip(model.stack.layers, model.config.layers, strict=True)):
        if isinstance(layer.mixer, RecomputesKV) and options.residual.kind in _ENTERING:  # it repeats this norm itself
            inside = (*inside, f"stack.layers.{number}.mixer_residual.{_ENTERING[options.residual.kind]}.")
    vocabulary: set[str] = set()
    if division.vocabulary and (product := output_product(model)) is not None:
        path, head = product
        vocabulary = {"input.embedding.weight", *(f"{path}.{name}" for name, _ in head.named_parameters())}
    for name, tensor in _tensors(model).items():
        source, (owner, _, key) = whole[name], name.rpartition(".")
        dims = [dim for dim, (a, b) in enumerate(zip(source.shape, tensor.shape, strict=True)) if a != b]
        if name in vocabulary:
            dims = [0]
        if dims:
            (dim,) = dims
            sizes = blocks.get(owner, ())
            cut = Cut(dim, tuple(sizes) if sum(sizes) == source.shape[dim] else (source.shape[dim],))
            division.cuts[name] = cut
            source = source.index_select(dim, cut.rows(part, division.parts).to(source.device))
        elif name.startswith(inside):
            division.partial.add(name)
        parent: nn.Module = model.get_submodule(owner)
        if isinstance(old := getattr(parent, key), nn.Parameter):
            setattr(parent, key, nn.Parameter(source.detach().clone(), requires_grad=old.requires_grad))
        else:
            parent._buffers[key] = source.detach().clone()
    for name, module in model.named_modules():
        if isinstance(module, ResidualOutput) and f"{name}.weight" in division.cuts and module.bias is not None:
            division.added.add(f"{name}.bias")


def _tensors(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _modules(model: Any) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def output_product(model: StackedModel) -> tuple[str, OutputProduct] | None:
    """Return the path of a model's head and the head, if it multiplies by a matrix with a row for every token."""
    head: object = model.head
    path = "head"
    while not isinstance(head, OutputProduct):
        head, path = getattr(head, "inner", None), f"{path}.inner"
        if head is None or type(model.head).__name__ != "AdjustedHead":
            return None
    return path, head


class VocabularyPart(NamedTuple):
    """The cross-entropy of logits cut along the vocabulary (Shoeybi et al. 2019, Megatron-LM, section 3): no process
    has all logits of a token.

        loss = ln sum over parts of sum_v exp(l_v - m) + m - l_target,     m = the largest logit of all parts

    This process of ``mesh`` has the logits of the ``size`` tokens from ``begin`` on. ``mesh`` is None where nothing is
    computed (``estimation``).
    """

    begin: int
    size: int
    mesh: DeviceMesh | None

    def nats(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropies of ``targets`` [rows], a scalar in float32 or wider, in all processes.

        x: [rows, dim], the same everywhere; weight: [size, dim] and bias: [size] or None, this process's.
        """
        assert self.mesh is not None
        logits = torch.nn.functional.linear(copied(x, self.mesh), weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = logits.detach().amax(-1)
        distributed.all_reduce(top, distributed.ReduceOp.MAX, group=self.mesh.get_group())
        local = targets - self.begin
        here = (local >= 0) & (local < self.size)
        # Indexing keeps only the two indices for the backward; gather would keep all logits.
        rows = torch.arange(len(logits), device=logits.device)
        wanted = logits[rows, local.clamp(0, self.size - 1)]
        wanted = torch.where(here, wanted - top, wanted.new_zeros(()))
        both = torch.stack([(logits - top[:, None]).exp().sum(-1), wanted])
        total, wanted = summed(both, self.mesh)
        return (total.log() - wanted).sum()


def parallelize(step: ObjectiveModule, mesh: DeviceMesh) -> Layouts:
    """Divide the model of ``step``, whole in all processes, among the processes of ``mesh``, one axis called "tp", in
    place; return where its parameters lie."""
    model: Any = step.model
    part, parts = mesh.get_local_rank(), mesh.size()
    division = divide(model, part, parts)
    _distribute(step, division, mesh)
    for path in division.mixers:
        _share_mixer(model.get_submodule(path), mesh)
    for path in division.feed_forwards:
        _share_feed_forward(model.get_submodule(path), mesh)
    if division.vocabulary:
        product = output_product(model)
        assert product is not None
        size = model.vocab_size // parts
        _share_table(model.get_submodule("input.embedding"), part * size, size, mesh)
        _share_logits(model.get_submodule(product[0]), part * size, size, mesh)
    units = units_of(model)
    inner = {module for unit in units for module in unit.modules()}
    for unit in units:
        _Local(unit.modules(), division, mesh, model).hook(unit)
    _Local((module for module in step.modules() if module not in inner), division, mesh, model).hook(step)
    step.with_aux_loss = modules_of(model, AuxLoss)
    return Layouts(mesh, division.cuts, parts)


def _share_mixer(module: nn.Module, mesh: DeviceMesh) -> None:
    """Copy the chunk and the source of a mixer of some heads, and sum its outputs; its state covers its heads."""
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0]._replace(x=copied(inputs[0].x, mesh)), *inputs[1:]))
    module.register_forward_hook(lambda _, __, outputs: (summed(outputs[0], mesh), *outputs[1:]))
    if isinstance(module, ReadsSource):
        begin: Any = module.initial_state

        def over_copied(*sizes: int, source: Tensor | None = None, **options: object) -> State:
            return begin(*sizes, source=None if source is None else copied(source, mesh), **options)

        module.__dict__["initial_state"] = over_copied


def _share_feed_forward(module: nn.Module, mesh: DeviceMesh) -> None:
    """Copy the input of a feed-forward of some of the hidden features, and sum its outputs."""

    def share(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        part = inputs[0] / mesh.size()
        return (part + (inputs[0] - part).detach(),)

    module.register_forward_pre_hook(lambda _, inputs: (copied(inputs[0], mesh), *inputs[1:]))
    module.register_forward_hook(lambda _, __, y: summed(y, mesh))
    for loss in modules_of(module, AuxLoss):  # all processes compute it, and gradients are summed: scale by a share
        loss.register_forward_pre_hook(share)


def _share_table(module: nn.Module, begin: int, size: int, mesh: DeviceMesh) -> None:
    """Look up in ``size`` rows of a table from row ``begin`` on: zeros for other tokens, summed."""

    def look_up(tokens: Tensor, *rest: Tensor) -> Tensor:
        here = (tokens >= begin) & (tokens < begin + size)
        y = forward((tokens - begin).clamp(0, size - 1), *rest)
        return summed(torch.where(here[..., None], y, y.new_zeros(())), mesh)

    forward: Callable[..., Tensor] = module.forward
    module.forward = look_up


def _share_logits(module: nn.Module, begin: int, size: int, mesh: DeviceMesh) -> None:
    """Compute logits of ``size`` tokens from ``begin`` on, joined over the processes for other readers than the
    loss."""
    module.register_forward_pre_hook(lambda _, inputs: (copied(inputs[0], mesh), *inputs[1:]))
    module.register_forward_hook(lambda _, __, y: joined(y, mesh))
    module.vocabulary_part = VocabularyPart(begin, size, mesh)  # type: ignore[assignment]


class _Local:
    """The parameters of ``modules`` as plain local tensors, while a root of these modules computes."""

    def __init__(self, modules: Iterable[nn.Module], division: Division, mesh: DeviceMesh, model: nn.Module) -> None:
        self.mesh, self.parts = mesh, division.parts
        names = {module: name for name, module in model.named_modules()}
        self.places = []
        for module in modules:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = ".".join(filter(None, (names.get(module, "?"), key)))
                    self.places.append((module, key, name in division.partial, name in division.added))

    def hook(self, root: nn.Module) -> None:
        root.register_forward_pre_hook(self.enter)
        root.register_forward_hook(self.leave, always_call=True)
        if modules_of(root, ReadsSource) and hasattr(root, "initial_state"):  # whose weights project the source there
            begin: Any = root.initial_state

            def begin_locally(*sizes: int, **options: object) -> State:
                self.enter(root, sizes)
                try:
                    return begin(*sizes, **options)
                finally:
                    self.leave(root, sizes, None)

            root.__dict__["initial_state"] = begin_locally

    def enter(self, root: nn.Module, inputs: object) -> None:
        for module, key, partial, added in self.places:
            # Attribute look-up finds this tensor first. Optimisers still see the parameter, a DTensor.
            module.__dict__[key] = self._local(module._parameters[key], partial, added)

    def leave(self, root: nn.Module, inputs: object, outputs: object) -> None:
        for module, key, _, _ in self.places:
            module.__dict__.pop(key, None)

    def _local(self, parameter: Any, partial: bool, added: bool) -> Tensor:
        local = parameter.to_local()
        if partial:  # every process uses it for its own heads alone: the gradient is the sum over the processes
            local = copied(local, self.mesh)
        return local / self.parts if added else local


def _distribute(step: nn.Module, division: Division, mesh: DeviceMesh) -> None:
    """Make DTensors of all parameters, cut as ``division`` says or the same in all processes."""
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in step.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                name = ".".join(filter(None, (path.removeprefix("model").removeprefix("."), key)))
                cut = division.cuts.get(name) if path.startswith("model") else None
                placement: Placement = Replicate() if cut is None else Shard(cut.dim)
                spread = DTensor.from_local(parameter.detach().contiguous(), mesh, [placement], run_check=False)
                made[parameter] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
            module._parameters[key] = made[parameter]


# Collectives with gradients among processes that share tokens (Shoeybi et al. 2019, Megatron-LM, section 3: f, g).


def copied(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``x``, which all processes of ``mesh`` have; its gradient is the sum of the processes' gradients."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def summed(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the ``y`` of all processes of ``mesh``; the gradient of each summand is the sum's gradient."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    return DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def joined(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the ``y`` [..., n] of all processes of ``mesh`` side by side, [..., n * processes]."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    spread = DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False)
    return spread.redistribute(placements=[Replicate()]).to_local()
