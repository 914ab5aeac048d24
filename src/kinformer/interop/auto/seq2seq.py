"""Encoder-decoders of this library as ``AutoModelForSeq2SeqLM`` has models: ``generate``, ``Trainer`` and PEFT use
them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from kinformer.core.state import pop_aux
from kinformer.interop.auto.base import IGNORED, require_ids, scaling, valid_of
from kinformer.interop.auto.configuration import KinformerConfig
from kinformer.interop.auto.continuing import CACHE, ContinuedOutput, ContinuingModel, as_output, cache_in
from kinformer.runtime.errors import KinformerError


class SourceReader(nn.Module):
    """The ``encoder`` of a model, with the call of transformers."""

    main_input_name = "input_ids"

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: object) -> BaseModelOutput:
        """Return hidden states [batch, length, dim] of ``input_ids`` [batch, length], zero at padding."""
        valid = _source_valid(attention_mask, len(input_ids), input_ids.shape[1])
        return BaseModelOutput(last_hidden_state=self.encoder(input_ids, valid))


class KinformerForSeq2SeqLM(ContinuingModel):
    """A model that continues a source of tokens."""

    use = "Seq2SeqLM"

    def __init__(self, config: KinformerConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # labels stand where they are predicted

    def get_encoder(self, modality: str | None = None) -> SourceReader:
        """Return the encoder of the source."""
        return SourceReader(self.model.encoder)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return what the decoder reads to predict ``labels`` [batch, time]: the id that begins, then all but the
        last."""
        begin = self.config.decoder_start_token_id
        if begin is None:
            raise KinformerError("decoder_start_token_id is None, so that no target begins; set it in the config.")
        before = torch.cat([torch.full_like(labels[:, :1], begin), labels[:, :-1]], dim=1)
        return before.masked_fill(before == IGNORED, begin)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        **options: Any,
    ) -> ContinuedOutput | tuple[object, ...]:
        """Return logits [batch, time, vocab] of ``decoder_input_ids`` [batch, time], which follow those in the cache.

        A cache holds all that is read of the source. Without one the source is ``input_ids`` [batch, length], or what
        the encoder made of it, ``encoder_outputs``. attention_mask, of the source, and decoder_attention_mask: 0 marks
        padding. labels [batch, time]: the ids to predict, which also give ``decoder_input_ids`` where those are
        left out; -100 is ignored.
        """
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if decoder_input_ids is None:
            raise KinformerError("decoder_input_ids: is missing; give what was written so far, or labels.")
        before, hidden = cache_in(options), None
        cache = self._cache_to_fill(before, options.get("use_cache"))
        with self._costs() as costs:
            if before is not None and before.is_initialized:
                state = before.state if labels is None else pop_aux(before.state)[1]
            else:
                hidden = self._read(input_ids, attention_mask, encoder_outputs, options)
                valid = _source_valid(attention_mask, *hidden.shape[:2])
                state = self.model.initial_state(len(hidden), device=hidden.device, source=hidden, source_valid=valid)
            valid = valid_of(decoder_attention_mask, decoder_input_ids)
            logits, state = self._continued(decoder_input_ids, valid, cache, state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **scaling(options))
            loss = self._with_costs(loss, labels, decoder_input_ids.numel(), options, costs, pop_aux(state)[0])
        caches: dict[str, Any] = {} if cache is None else {CACHE: cache}
        return as_output(ContinuedOutput(loss=loss, logits=logits, encoder_last_hidden_state=hidden, **caches), options)

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None,
        options: dict[str, object],
    ) -> Tensor:
        """Return the hidden states of the source."""
        if encoder_outputs is not None:
            return encoder_outputs[0]  # type: ignore[no-any-return]
        source = require_ids(input_ids, options)
        return self.get_encoder()(source, attention_mask).last_hidden_state  # type: ignore[no-any-return]


def _source_valid(attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Return which tokens of sources [batch, length] are real, None if there is no mask."""
    if attention_mask is not None and tuple(attention_mask.shape) != (batch, length):
        raise KinformerError(
            f"attention_mask is {list(attention_mask.shape)}, but must be that of the source, {[batch, length]}."
        )
    return None if attention_mask is None else attention_mask.bool()
