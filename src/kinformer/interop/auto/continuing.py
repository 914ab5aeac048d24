"""What models that generate share, causal ones and those of a source: logits behind a cache, which holds the state."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_outputs import ModelOutput

from kinformer.core.contract import select_valid
from kinformer.core.state import map_tensors
from kinformer.interop.auto.base import KinformerModel
from kinformer.interop.auto.cache import StateCache
from kinformer.runtime.errors import KinformerError

CACHES = ("cache", "past_key_values")
CACHE = next(
    one for one in CACHES if one in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""What this version of transformers calls a cache: ``cache`` from 5.24 on."""


@dataclass
class ContinuedOutput(ModelOutput):  # type: ignore[misc]
    """The ``loss`` if there are labels, ``logits`` [batch, time, vocab], the cache as the version calls it, and of a
    model of a source the encoder's hidden states [batch, length, dim]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: StateCache | None = None
    past_key_values: StateCache | None = None
    encoder_last_hidden_state: Tensor | None = None


class ContinuingModel(KinformerModel, GenerationMixin):  # type: ignore[misc]
    """A model whose state is its cache."""

    main_input_name = "input_ids"
    _is_stateful = True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the first forward pass makes the cache."""
        return False

    def _continued(
        self,
        tokens: Tensor,
        valid: Tensor | None,
        cache: StateCache | None,
        state: object,
        logits_to_keep: int | Tensor = 0,
    ) -> tuple[Tensor, Any]:
        """Return logits [batch, time, vocab] of ``tokens`` [batch, time] behind ``state``, zero where not ``valid``,
        and the state behind them, which ``cache``, if there is one, then holds."""
        inputs, state = self.model.head_inputs(tokens, state, valid=valid)
        if cache is not None:
            cache.advance(state, tokens.shape[1])
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(map_tensors(lambda leaf: leaf[:, rows], inputs))
        return select_valid(logits, None if valid is None else valid[:, rows]), state

    def _cache_to_fill(self, cache: StateCache | None, use_cache: bool | None) -> StateCache | None:
        """Return the cache that is to hold the state behind a chunk, None if none is wanted."""
        if not (use_cache if use_cache is not None else self.config.use_cache and not self.training):
            return None
        return StateCache() if cache is None else cache


def cache_in(options: dict[str, Any]) -> StateCache | None:
    """Return the cache that a call names, whatever the version of transformers calls it; None if there is none."""
    cache = options.get("cache")
    cache = options.get("past_key_values") if cache is None else cache
    if cache is None or isinstance(cache, StateCache):
        return cache
    if cache.get_seq_length():
        raise KinformerError(
            f"the cache is of the type {type(cache).__name__} and holds another model's tokens; leave it out."
        )
    return StateCache()


def as_output(output: ContinuedOutput, options: dict[str, object]) -> Any:
    """Return ``output``, as a tuple where a call asks for one."""
    return output.to_tuple() if options.get("return_dict") is False else output
