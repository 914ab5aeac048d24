"""A pretrained model converted to other mixers in two phases, as in LoLCATs (Zhang et al. 2024, arXiv 2410.10254).

    transfer      each new mixer learns the outputs of its layer's attention for the hidden states of the unchanged
                  model; everything else is frozen, and all layers learn at once
    fine-tuning   the mixers stand in the model, and the model learns to predict the next token

The paper trains feature maps in the first phase and low-rank updates of the projections (LoRA, Hu et al. 2021) in the
second. Here the first phase trains whole mixers, and the second trains what ``Phase.trains`` says. Low-rank updates are
made by the library peft.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.interop.patching import (
    Layers,
    PatchedAttention,
    PatchedLayer,
    attention_name,
    build_replacements,
    install,
    layers_of,
)
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

Batch = Tensor | Mapping[str, Tensor]
TRAINS = ("model", "mixers", "lora")
RANK, ALPHA = 8, 16
"""Of the low-rank updates that "lora" trains, as in LoLCATs: W + (ALPHA / RANK) B A, with B of RANK columns."""


@dataclass(frozen=True)
class Phase:
    """One phase of :func:`convert`: ``steps`` of AdamW, whose rate falls from ``lr`` to 0 as a cosine.

    ``trains``: the whole model, its new mixers alone, or with "lora" low-rank updates of the new mixers' linear layers
    (rank 8, alpha 16), which are added to their weights at the end; a ``peft.LoraConfig`` says otherwise where the
    updates are and of which rank. The transfer always trains the mixers.
    """

    steps: int
    lr: float
    trains: Literal["model", "mixers", "lora"] | LoraConfig = "model"

    def __post_init__(self) -> None:
        if self.steps < 0 or not self.lr > 0:
            raise KinformerError(f"steps = {self.steps} must be 0 or more, and lr = {self.lr} above 0.")
        if self.trains not in TRAINS and not hasattr(self.trains, "peft_type"):
            raise KinformerError(
                f"trains is {self.trains!r}, but must be 'model', 'mixers', 'lora' or a peft.LoraConfig."
            )


@dataclass(frozen=True)
class Conversion:
    """The result of :func:`convert`: ``model``, its ``layers``, its losses in nats per token on the evaluation batches.

    ``losses`` has "before", "patched" (the new mixers untrained), "transferred" and "fine_tuned". ``errors`` are the
    mean squared errors of the mixers' outputs relative to the outputs' variance, in the first and last tenth of the
    transfer, one number for each layer. ``trained`` is the number of parameters that "transfer" and "fine_tuning"
    trained.
    """

    model: PreTrainedModel
    layers: tuple[PatchedLayer, ...]
    losses: dict[str, float]
    errors: dict[str, tuple[float, ...]]
    trained: dict[str, int]


def convert(
    hf_model: PreTrainedModel,
    mixer: str | Config,
    batches: Iterable[Batch],
    *,
    evaluation: Iterable[Batch],
    layers: Layers = None,
    transfer: Phase = Phase(400, 1e-3),  # noqa: B008
    fine_tuning: Phase = Phase(400, 1e-4),  # noqa: B008
    **settings: Any,
) -> Conversion:
    """Replace the attention of ``layers`` as :func:`patch` does, train the model for it, and return the losses.

    batches: tokens [batch, time] int64, or mappings with ``input_ids`` and perhaps ``attention_mask``; an iterator, or
        a list, which is read again and again.
    evaluation: the held-out batches of the losses.
    transfer, fine_tuning: the phases; either may have 0 steps.
    settings: as in ``patch``.

    Errors: the errors of ``patch``; batches that end too soon; LoRA without peft, or of mixers without linear layers.
    """
    stream, held_out = _endless(batches), [_inputs(batch, hf_model) for batch in evaluation]
    if not held_out:
        raise KinformerError("evaluation is empty; give a batch at least, of tokens that `batches` does not hold.")
    replacements = build_replacements(hf_model, mixer, layers, **settings)
    losses = {"before": evaluate(hf_model, held_out)}
    attentions = install(hf_model, replacements)
    losses["patched"] = evaluate(hf_model, held_out)
    with _trained(hf_model, fine_tuning.trains):
        pass  # an error now, not after the transfer
    install(hf_model, attentions)
    errors = match(hf_model, replacements, stream, transfer)
    install(hf_model, replacements)
    losses["transferred"] = evaluate(hf_model, held_out)
    trained = {"transfer": sum(p.numel() for item in replacements.values() for p in item.parameters())}
    trained["fine_tuning"] = fine_tune(hf_model, stream, fine_tuning)
    losses["fine_tuned"] = evaluate(hf_model, held_out)
    return Conversion(hf_model, tuple(item.record for item in replacements.values()), losses, errors, trained)


def match(
    hf_model: PreTrainedModel, replacements: Mapping[int, PatchedAttention], stream: Iterator[Batch], phase: Phase
) -> dict[str, tuple[float, ...]]:
    """Train ``replacements`` to the outputs of their layers' attention in ``hf_model``; return the errors."""
    parameters = [parameter for item in replacements.values() for parameter in item.parameters()]
    training, history = hf_model.training, []
    hf_model.eval()
    for optimiser in _steps(parameters, phase):
        batch = _inputs(next(stream), hf_model)
        mask = batch.get("attention_mask")
        padding = None if mask is None else mask == 0
        errors = []
        for index, (x, y) in _seen(hf_model, replacements, batch).items():
            output = replacements[index].train().layer(x, key_padding_mask=padding)
            if padding is not None:
                output, y = output[~padding], y[~padding]
            errors.append((output - y).float().square().mean() / y.float().var())
        torch.stack(errors).sum().backward()
        history.append(torch.stack(errors).detach())
        optimiser.step()
    hf_model.train(training)
    for item in replacements.values():
        item.train(training)
    part = max(len(history) // 10, 1)
    ends = {"first": history[:part], "last": history[-part:]} if history else {}
    return {name: tuple(torch.stack(items).mean(0).tolist()) for name, items in ends.items()}


def fine_tune(hf_model: PreTrainedModel, stream: Iterator[Batch], phase: Phase) -> int:
    """Train the patched ``hf_model``, or what ``phase`` says of it, to predict the next token.

    Return how many parameters were trained.
    """
    training = hf_model.training
    with _trained(hf_model, phase.trains) as parameters:
        hf_model.train()
        for optimiser in _steps(parameters, phase):
            batch = _inputs(next(stream), hf_model)
            _loss(hf_model, batch).backward()
            optimiser.step()
            hf_model.zero_grad()
    hf_model.train(training)
    return sum(parameter.numel() for parameter in parameters)


@contextmanager
def _trained(hf_model: PreTrainedModel, trains: str | LoraConfig) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that a phase trains; low-rank updates stand in the model meanwhile and are merged then."""
    name = attention_name(hf_model)
    mixers = [getattr(layer, name) for layer in layers_of(hf_model)]
    patched = nn.ModuleList(item for item in mixers if isinstance(item, PatchedAttention))
    if trains in ("model", "mixers"):
        yield list((hf_model if trains == "model" else patched).parameters())
        return
    try:
        import peft
    except ImportError as error:
        raise KinformerError(f"LoRA needs peft ({error}); get it with: pip install 'kinformer[lora]'.") from error
    if trains == "lora":
        inside = {module for module in patched.modules() if isinstance(module, nn.Linear)}
        names = [name for name, module in hf_model.named_modules() if module in inside]
        if not names:
            raise KinformerError(
                "trains is 'lora', but the new mixers do not have linear layers that low-rank updates could adapt; "
                "train 'mixers' or the 'model'."
            )
        trains = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names)
    required = [(parameter, parameter.requires_grad) for parameter in hf_model.parameters()]
    adapted = peft.LoraModel(hf_model, cast("LoraConfig", trains), "default")
    try:
        yield [parameter for parameter in hf_model.parameters() if parameter.requires_grad]
    finally:
        adapted.merge_and_unload()
        for parameter, value in required:
            parameter.requires_grad_(value)


@torch.no_grad()
def evaluate(hf_model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> float:
    """Return the mean loss of ``batches`` in nats per token."""
    training = hf_model.training
    hf_model.eval()
    loss = sum(float(_loss(hf_model, batch)) for batch in batches) / len(batches)
    hf_model.train(training)
    return loss


def _loss(hf_model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy of the next token; padding does not count."""
    labels, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is not None:
        real = mask != 0
        real[:, 1:] &= real[:, :-1].clone()  # predictions at padding do not count either
        labels = labels.masked_fill(~real, -100)
    return hf_model(**batch, labels=labels, use_cache=False).loss  # type: ignore[no-any-return]


def _steps(parameters: list[nn.Parameter], phase: Phase) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimiser for every step of ``phase``, with gradients at 0; clip them by the norm 1 before it steps."""
    optimiser = torch.optim.AdamW(parameters, lr=phase.lr, weight_decay=0.0)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)

    optimiser.register_step_pre_hook(clip)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(phase.steps, 1))
    for _ in range(phase.steps):
        optimiser.zero_grad()
        yield optimiser
        schedule.step()


@torch.no_grad()
def _seen(
    hf_model: PreTrainedModel, replacements: Mapping[int, PatchedAttention], batch: dict[str, Tensor]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the inputs and outputs of the attention that ``replacements`` will replace, for ``batch``."""
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    layers, name = layers_of(hf_model), attention_name(hf_model)

    def record(index: int) -> RemovableHandle:
        def hook(
            module: nn.Module, arguments: tuple[Tensor, ...], options: dict[str, Any], output: tuple[Tensor, ...]
        ) -> None:
            pairs[index] = (arguments[0] if arguments else options["hidden_states"], output[0])

        return getattr(layers[index], name).register_forward_hook(hook, with_kwargs=True)

    handles = [record(index) for index in replacements]
    try:
        hf_model(**batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return pairs


def _inputs(batch: Batch, hf_model: PreTrainedModel) -> dict[str, Tensor]:
    """Return ``batch`` as the arguments of the model, on its device."""
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    return {name: inputs[name].to(hf_model.device) for name in ("input_ids", "attention_mask") if name in inputs}


def _endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield ``batches``, again and again if they can be gone through again."""
    again = not isinstance(batches, Iterator)
    while True:
        count = 0
        for batch in batches:
            count += 1
            yield batch
        if not again or not count:
            raise KinformerError(
                "batches ended before the steps of both phases; give a list, or an iterator without an end."
            )
