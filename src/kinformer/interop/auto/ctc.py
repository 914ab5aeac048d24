"""Models of sound of this library as ``AutoModelForCTC`` has models of speech recognition; ``Trainer`` uses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ctc_loss
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import CausalLMOutput

from kinformer.core.contract import select_valid
from kinformer.core.model import CausalModel
from kinformer.core.state import pop_aux
from kinformer.inputs.filterbank import Filterbank, features_of
from kinformer.interop.auto.base import IGNORED, KinformerModel
from kinformer.runtime.errors import KinformerError

BLANK = 0


class KinformerForCTC(KinformerModel):
    """A model that tells a symbol or none at every position of sound; ``config.sampling_rate`` samples are a second."""

    use = "CTC"
    main_input_name = "input_values"

    def forward(
        self,
        input_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput | tuple[object, ...]:
        """Return the logits [batch, positions, classes] of sound ``input_values`` [batch, samples] from -1 to 1, zero
        behind the end of a row.

        attention_mask [batch, samples]: 0 marks padding behind a row. labels [batch, n]: the classes of transcripts,
        padded with -100. The loss is the mean over symbols, as in a run.
        """
        if input_values is None or input_values.dim() != 2:
            raise KinformerError("input_values: give sound as floats [batch, samples] from -1 to 1.")
        frames, valid = self._positions(input_values, attention_mask)
        with self._costs() as costs:
            outputs = self.model(frames, valid=valid)
        logits, state = (outputs, None) if isinstance(outputs, Tensor) else outputs
        loss = None
        if labels is not None:
            loss = _nats(logits, valid.sum(1), labels) / options.get("num_items_in_batch", (labels >= 0).sum())
            absorbed = {} if state is None else pop_aux(state)[0]
            loss = self._with_costs(loss, labels, valid.numel(), options, costs, absorbed)
        output = CausalLMOutput(loss=loss, logits=select_valid(logits, valid))
        return output.to_tuple() if options.get("return_dict") is False else output

    def _positions(self, sound: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return positions [batch, time, width, mels] of ``sound`` [batch, samples] and which are real."""
        if attention_mask is not None and attention_mask.shape != sound.shape:
            raise KinformerError(
                f"attention_mask is {list(attention_mask.shape)}, but must be that of input_values, "
                f"{list(sound.shape)}."
            )
        lengths = [sound.shape[1]] * len(sound) if attention_mask is None else attention_mask.sum(1).tolist()
        config = self.model.config
        bank, causal = Filterbank(self.config.sampling_rate, config.input.mels), config.protocol is CausalModel
        width, stride = config.input.width, config.input.stride
        rows = [
            features_of(row[: int(length)].float().cpu(), bank, width, stride, causal)
            for row, length in zip(sound, lengths, strict=True)
        ]
        time = torch.arange(max(map(len, rows)))
        valid = time < torch.tensor([len(row) for row in rows])[:, None]
        return pad_sequence(rows, batch_first=True).to(sound.device), valid.to(sound.device)


def _nats(logits: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    """Return -log p of all transcripts ``labels`` [batch, n]; 0 where positions are too few for one."""
    precise = logits.float().log_softmax(-1).transpose(0, 1)
    targets, counts = labels.masked_fill(labels == IGNORED, BLANK), (labels != IGNORED).sum(1)
    return ctc_loss(precise, targets, lengths, counts, blank=BLANK, reduction="none", zero_infinity=True).sum()
