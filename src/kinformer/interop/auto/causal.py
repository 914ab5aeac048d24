"""Causal models of this library as ``AutoModelForCausalLM`` has models: ``generate``, ``Trainer`` and PEFT use them."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput

from kinformer.core.contract import select_valid
from kinformer.core.model import CausalModel
from kinformer.core.state import map_tensors
from kinformer.interop.auto.cache import StateCache
from kinformer.interop.auto.configuration import KinformerConfig
from kinformer.interop.writing import auto_map, write_code
from kinformer.runtime.errors import KinformerError

CACHES = ("cache", "past_key_values")
CACHE = next(
    one for one in CACHES if one in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""What this version of transformers calls a cache: ``cache`` from 5.24 on."""


@dataclass
class CausalOutput(ModelOutput):  # type: ignore[misc]
    """The ``loss`` if there are labels, ``logits`` [batch, time, vocab], and the cache as the version calls it."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: StateCache | None = None
    past_key_values: StateCache | None = None


class KinformerForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A causal model of this library, ``model``, with the interface of transformers."""

    config_class = KinformerConfig
    main_input_name = "input_ids"
    base_model_prefix = ""
    supports_gradient_checkpointing = False
    _no_split_modules: list[str] = []
    _is_stateful = True

    def __init__(self, config: KinformerConfig) -> None:
        super().__init__(config)
        self.model = config.build()
        if self.model.config.protocol is not CausalModel:
            raise KinformerError("composition: is of a model that continues no sequence; load it by another class.")
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the first forward pass makes the cache."""
        return False

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
        self.config.auto_map = auto_map("AutoModelForCausalLM", "KinformerForCausalLM")
        super().save_pretrained(save_directory, *arguments, **options)
        write_code(Path(save_directory), "KinformerForCausalLM")

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of the input."""
        return self.model.input.embedding  # type: ignore[no-any-return]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Refuse another table: the composition says how many ids there are."""
        raise KinformerError("the table of ids cannot be exchanged; train a run with another vocab_size instead.")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> Any:
        """Return logits [batch, time, vocab] of ``input_ids`` [batch, time], which follow the tokens in the cache.

        attention_mask: [batch, tokens so far] or [batch, time]; 0 marks padding, on either side. labels: shifted here;
        -100 is ignored. logits_to_keep: how many last positions have logits, or which; 0 for all. The cache is
        ``cache`` or ``past_key_values``, whatever the version of transformers.
        """
        cache = options.get("cache")
        cache = options.get("past_key_values") if cache is None else cache
        if options.get("inputs_embeds") is not None:
            raise KinformerError("inputs_embeds: this model reads input_ids alone; leave it out.")
        if cache is not None and not isinstance(cache, StateCache):
            cache = _empty(cache)
        valid = None if attention_mask is None else _valid(attention_mask, input_ids)
        before = None if cache is None else cache.state
        inputs, state = self.model.head_inputs(input_ids, before, valid=valid)
        if use_cache if use_cache is not None else self.config.use_cache and not self.training:
            cache = StateCache() if cache is None else cache
            cache.advance(state, input_ids.shape[1])
        else:
            cache = None
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(map_tensors(lambda leaf: leaf[:, rows], inputs))
        logits = select_valid(logits, None if valid is None else valid[:, rows])
        loss = None
        if labels is not None:
            count = {name: options[name] for name in ("num_items_in_batch",) if name in options}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **count)
        if options.get("return_dict") is False:
            return tuple(one for one in (loss, logits, cache) if one is not None)
        return CausalOutput(loss=loss, logits=logits, **({} if cache is None else {CACHE: cache}))


def _valid(attention_mask: Tensor, input_ids: Tensor) -> Tensor | None:
    """Return which of ``input_ids`` are real, None if all are."""
    if attention_mask.dim() != 2 or attention_mask.shape[1] < input_ids.shape[1]:
        raise KinformerError(
            f"attention_mask is {list(attention_mask.shape)}, but must be [batch, tokens] and cover the "
            f"{input_ids.shape[1]} of input_ids."
        )
    valid = attention_mask[:, -input_ids.shape[1] :].bool()
    return None if bool(valid.all()) else valid


def _empty(cache: Any) -> StateCache:
    """Return a new cache in place of an empty one of transformers."""
    if cache.get_seq_length():
        raise KinformerError(
            f"the cache is of the type {type(cache).__name__} and holds another model's tokens; leave it out."
        )
    return StateCache()
