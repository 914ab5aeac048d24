"""Encoders of this library as transformers has models for masked tokens, classes of texts, tokens and images:
``Trainer`` and PEFT use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import (
    ImageClassifierOutput,
    MaskedLMOutput,
    ModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from kinformer.interop.auto.base import KinformerModel, require_ids, scaling, valid_of
from kinformer.runtime.errors import KinformerError


class TextEncoder(KinformerModel):
    """An encoder of full texts; ``output`` is what a call returns."""

    main_input_name = "input_ids"
    output: type[ModelOutput]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> ModelOutput | tuple[object, ...]:
        """Return the logits of ``input_ids`` [batch, time], zero at padding, or of texts.

        attention_mask: 0 marks padding, on either side. global_attention_mask: 1 marks tokens that all others see;
        without one the first are global that the model makes so. ``sentences`` [batch, time]: the sentence of each
        token, for models with a global input. labels: -100 is ignored.
        """
        tokens = require_ids(input_ids, options)
        further = {"kinds": global_attention_mask, "sentences": options.get("sentences"), "types": token_type_ids}
        if token_type_ids is not None and not self.model.config.input.types:
            if bool(token_type_ids.any()):
                raise KinformerError("token_type_ids: this model has no types of tokens; leave them out.")
            del further["types"]
        marks = {name: one.long() for name, one in further.items() if one is not None}
        with self._costs() as costs:
            logits = self.model(tokens, valid=valid_of(attention_mask, tokens), **marks)
        loss = None if labels is None else self._loss(logits, labels, scaling(options))
        if loss is not None and labels is not None:
            loss = self._with_costs(loss, labels, tokens.numel(), options, costs)
        output = self.output(loss=loss, logits=logits)
        return output.to_tuple() if options.get("return_dict") is False else output

    def _loss(self, logits: Tensor, labels: Tensor, scale: dict[str, object]) -> Tensor:
        """Return the loss of ``logits``, as transformers has it for the use of the class."""
        raise NotImplementedError


class KinformerForMaskedLM(TextEncoder):
    """An encoder that predicts the tokens behind masks."""

    use, output = "MaskedLM", MaskedLMOutput

    def _loss(self, logits: Tensor, labels: Tensor, scale: dict[str, object]) -> Tensor:
        return self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **scale)  # type: ignore[no-any-return]


class KinformerForSequenceClassification(TextEncoder):
    """An encoder that predicts the class of a text."""

    use, output = "SequenceClassification", SequenceClassifierOutput

    def _loss(self, logits: Tensor, labels: Tensor, scale: dict[str, object]) -> Tensor:
        return self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **scale)  # type: ignore[no-any-return]


class KinformerForTokenClassification(TextEncoder):
    """An encoder that predicts the class of every token."""

    use, output = "TokenClassification", TokenClassifierOutput

    def _loss(self, logits: Tensor, labels: Tensor, scale: dict[str, object]) -> Tensor:
        return self.loss_function(logits=logits, labels=labels, config=self.config, **scale)  # type: ignore[no-any-return]


class KinformerForImageClassification(KinformerModel):
    """An encoder that predicts the class of an image."""

    use = "ImageClassification"
    main_input_name = "pixel_values"

    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **options: object
    ) -> ImageClassifierOutput | tuple[object, ...]:
        """Return the logits [batch, classes] of ``pixel_values`` [batch, channels, height, width], from 0 to 1 or
        uint8; the model normalises them itself. Of several classifiers logits and losses are means."""
        if pixel_values is None:
            raise KinformerError("pixel_values: is missing; give images [batch, channels, height, width].")
        with self._costs() as costs:
            logits = self.model(pixel_values)
        heads, loss = logits.unbind(1) if logits.dim() == 3 else (logits,), None
        if labels is not None:
            scale = scaling(options)
            losses = [
                self.loss_function(labels=labels, pooled_logits=head, config=self.config, **scale) for head in heads
            ]
            positions = len(pixel_values) * self.model.input.length(pixel_values)
            loss = self._with_costs(torch.stack(losses).mean(), labels, positions, options, costs)
        output = ImageClassifierOutput(loss=loss, logits=logits.mean(1) if logits.dim() == 3 else logits)
        return output.to_tuple() if options.get("return_dict") is False else output
