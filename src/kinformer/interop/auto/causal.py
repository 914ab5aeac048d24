"""Causal models of this library as ``AutoModelForCausalLM`` has models: ``generate``, ``Trainer`` and PEFT use them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kinformer.core.state import pop_aux
from kinformer.interop.auto.base import require_ids, scaling, valid_of
from kinformer.interop.auto.continuing import CACHE, ContinuedOutput, ContinuingModel, as_output, cache_in


class KinformerForCausalLM(ContinuingModel):
    """A causal model of tokens, which generates."""

    use = "CausalLM"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: object,
    ) -> ContinuedOutput | tuple[object, ...]:
        """Return logits [batch, time, vocab] of ``input_ids`` [batch, time], which follow the tokens in the cache.

        attention_mask: [batch, tokens so far] or [batch, time]; 0 marks padding, on either side. labels: shifted here;
        -100 is ignored. logits_to_keep: how many last positions have logits, or which; 0 for all. The cache is
        ``cache`` or ``past_key_values``, whatever the version of transformers.
        """
        tokens, before = require_ids(input_ids, options), cache_in(options)
        state = None if before is None else before.state if labels is None else pop_aux(before.state)[1]
        cache = self._cache_to_fill(before, use_cache)
        with self._costs() as costs:
            valid = valid_of(attention_mask, tokens)
            logits, after = self._continued(tokens, valid, cache, state, logits_to_keep)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **scaling(options))
            loss = self._with_costs(loss, labels, tokens.numel(), options, costs, pop_aux(after)[0])
        caches: dict[str, Any] = {} if cache is None else {CACHE: cache}
        return as_output(ContinuedOutput(loss=loss, logits=logits, **caches), options)
