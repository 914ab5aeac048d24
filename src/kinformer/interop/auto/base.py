"""What the classes of transformers for models of this library share: they are built of a composition, and saved so that
they can be loaded again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from kinformer.core.learning import AuxLoss, Regularized, gather_aux_losses
from kinformer.core.model import PROTOCOLS, modules_of
from kinformer.interop.auto.configuration import KinformerConfig
from kinformer.interop.native import auto_class_of, use_of
from kinformer.interop.writing import auto_map, write_code
from kinformer.runtime.errors import KinformerError

IGNORED = -100
"""The label of what is not predicted."""


class KinformerModel(PreTrainedModel):  # type: ignore[misc]
    """A model of this library, ``model``, with the interface of transformers; ``use`` is what the class is for, as in
    the end of its name, ``KinformerForMaskedLM``."""

    use: ClassVar[str]
    config_class = KinformerConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = False
    _no_split_modules: list[str] = []

    def __init__(self, config: KinformerConfig) -> None:
        super().__init__(config)
        self.model = config.build()
        use = use_of(self.model.config)
        if use != self.use:
            theirs = f"load it by {auto_class_of(use)}" if use else "transformers has no class for it"
            raise KinformerError(
                f"composition: its model is {PROTOCOLS[self.model.config.protocol]} with the input "
                f"{self.model.config.input.kind!r} and the head {self.model.config.head.kind!r}, which is no "
                f"{self.use}; {theirs}."
            )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what no file held, and buffers that no file holds, as a new model of ours has them."""
        if module is self:
            with torch.device("cpu"):
                fresh = self.config.build()
            values = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if not getattr(tensor, "_is_hf_initialized", False):
                    init.copy_(tensor, values[name].to(tensor.dtype))

    def save_pretrained(self, save_directory: str | os.PathLike[str], *arguments: Any, **options: Any) -> None:
        """Write the model as ``kinformer export`` does, with the code that loads it."""
        self.config.auto_map = auto_map(self.use)
        super().save_pretrained(save_directory, *arguments, **options)
        write_code(Path(save_directory), self.use)

    @contextmanager
    def _costs(self) -> Iterator[dict[str, Tensor]]:
        """Collect the auxiliary losses [batch] of the forward passes within the context, in training."""
        with gather_aux_losses(modules_of(self.model, AuxLoss) if self.training else ()) as costs:
            yield costs

    def _with_costs(
        self, loss: Tensor, labels: Tensor, positions: int, options: Mapping[str, Any], *costs: Mapping[str, Tensor]
    ) -> Tensor:
        """Return ``loss``, in training with what a run's trainer adds: auxiliary losses [batch] as a mean over the
        ``positions`` that were read, and penalties.

        Of several micro-batches in a step, each counts by its ``labels``, as in the loss of transformers.
        """
        if not self.training:
            return loss
        further = [module.penalty() for module in modules_of(self.model, Regularized)]
        further += [cost.float().sum() / positions for some in costs for cost in some.values()]
        if not further:
            return loss
        items = options.get("num_items_in_batch")
        return loss + torch.stack(further).sum() * (1 if items is None else (labels != IGNORED).sum() / items)

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of the input, or the input of a model of images."""
        return getattr(self.model.input, "embedding", self.model.input)  # type: ignore[no-any-return]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Refuse another table: the composition says how many ids there are."""
        raise KinformerError("the table of ids cannot be exchanged; train a run with another vocab_size instead.")


def valid_of(attention_mask: Tensor | None, values: Tensor) -> Tensor | None:
    """Return which positions of ``values`` [batch, time] are real, bool, by a mask [batch, tokens so far]; None if all
    are."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < values.shape[1]:
        raise KinformerError(
            f"attention_mask is {list(attention_mask.shape)}, but must be [batch, tokens] and cover the "
            f"{values.shape[1]} of input_ids."
        )
    valid = attention_mask[:, -values.shape[1] :].bool()
    return None if bool(valid.all()) else valid


def require_ids(values: Tensor | None, options: dict[str, object]) -> Tensor:
    """Return ``values``; refuse a call with vectors in their place."""
    if values is None or options.get("inputs_embeds") is not None:
        raise KinformerError("inputs_embeds: this model reads input_ids alone; leave it out.")
    return values


def scaling(options: dict[str, object]) -> dict[str, object]:
    """Return the option by which a trainer says how many labels there are in all micro-batches of a step."""
    return {name: options[name] for name in ("num_items_in_batch",) if name in options}
