"""The most probable tokens of the masks in texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import torch

from kinformer.core.model import device_of
from kinformer.data.buckets import STEP_OF_WIDTH, lay
from kinformer.data.items import TextItem, TextSource
from kinformer.runtime.errors import KinformerError, require_finite
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.arriving import in_batches
from kinformer.tasks.shared.options import MaskPredictionOptions
from kinformer.tasks.shared.text import ends_of, mask_token_of, texts_in, whole_length


class MaskedItem(NamedTuple):
    """A text with its ids between BOS and EOS, and where among these the masks stand."""

    item: TextItem
    ids: np.ndarray
    masks: tuple[int, ...]


class Candidate(TypedDict):
    """A token that may stand in place of a mask, with its probability, for JSON."""

    token: str
    probability: float


class MaskFiller:
    """A run that fills masks in; ``mark`` stands for one in a text."""

    def __init__(self, subject: LoadedRun, mark: str, top_k: int) -> None:
        self.run, self.model, self.mark, self.top_k = subject.run, subject.model, mark, top_k
        tokenizer, self.mask = subject.run.tokenizer, mask_token_of(subject.model.config)
        if tokenizer is None or self.mask is None:
            raise KinformerError(f"{subject.run.folder}: has no tokenizer, or no token that stands for a mask.")
        self.tokenizer = tokenizer
        self.ends, self.length = ends_of(subject.model.config), whole_length(subject.run, subject.model)

    def encode(self, item: TextItem) -> MaskedItem:
        """Return the ids of a text. Errors: ``KinformerError`` where it has no mask, or does not fit into the model."""
        pieces = item.text.split(self.mark)
        if len(pieces) < 2:
            raise KinformerError(
                f"{item.place}: holds no mask; write {self.mark} where a token is to be predicted, or give `mask` TEXT."
            )
        ids, masks = [self.tokenizer.encode(pieces[0]).astype(np.int64)], []
        for piece in pieces[1:]:
            masks.append(self.ends.before + sum(map(len, ids)))
            ids += [np.array([self.mask], np.int64), self.tokenizer.encode(piece).astype(np.int64)]
        joined = np.concatenate(ids)
        if (longest := len(joined) + self.ends.size) > self.length:
            raise KinformerError(
                f"{item.place}: has {longest} tokens, but {self.run.folder} reads {self.length} at most, its training "
                "length; shorten the text around its masks."
            )
        return MaskedItem(item, joined, tuple(masks))

    def __call__(self, batch: Sequence[MaskedItem]) -> list[Predicted]:
        """Return the texts with their masks filled in, and the candidates for each mask."""
        longest = max(len(item.ids) for item in batch) + self.ends.size
        width = min(self.length, -(-longest // STEP_OF_WIDTH) * STEP_OF_WIDTH)
        tokens, valid = lay([item.ids for item in batch], self.ends, width)
        device = device_of(self.model)
        rows = torch.tensor([row for row, item in enumerate(batch) for _ in item.masks], device=device)
        places = torch.tensor([place for item in batch for place in item.masks], device=device)
        with torch.inference_mode():
            valid_here = None if valid is None else torch.from_numpy(valid).to(device)
            hidden = self.model.hidden(torch.from_numpy(tokens).to(device), valid=valid_here).long_input
            logits = self.model.logits(hidden[rows, places][None])[0].float().cpu()
        require_finite(bool(logits.isfinite().all()))
        no_text = torch.tensor([self._is_no_text(number) for number in range(logits.shape[-1])])
        probabilities, numbers = (
            logits.masked_fill(no_text, -torch.inf).softmax(-1).topk(min(self.top_k, int((~no_text).sum())))
        )
        candidates = iter(zip(probabilities.tolist(), numbers.tolist(), strict=True))
        return [self._predicted(item.item, [next(candidates) for _ in item.masks]) for item in batch]

    def _is_no_text(self, token: int) -> bool:
        """Return whether an id is the model's for a mask or an end, or beyond the tokenizer's."""
        return token in (self.mask, *self.ends) or token >= self.tokenizer.vocab_size

    def _predicted(self, item: TextItem, best: list[tuple[list[float], list[int]]]) -> Predicted:
        masks: list[list[Candidate]] = [
            [
                {"token": self.tokenizer.decode([number]), "probability": share}
                for share, number in zip(shares, numbers, strict=True)
            ]
            for shares, numbers in best
        ]
        pieces = item.text.split(self.mark)
        filled = pieces[0] + "".join(mask[0]["token"] + piece for mask, piece in zip(masks, pieces[1:], strict=True))
        label = {} if item.label is None else {"label": item.label}
        row = {"text": item.text} | label | {"filled": filled, "masks": masks}
        return Predicted(row, filled if self.top_k == 1 else f"{filled}\t{'; '.join(map(_spelled, masks))}")


def _spelled(mask: Sequence[Candidate]) -> str:
    return ", ".join(f"{item['token']!r} {item['probability']:.1%}" for item in mask)


def predict(
    subject: LoadedRun, source: TextSource, settings: PredictionSettings, task_options: MaskPredictionOptions
) -> Iterator[Predicted]:
    """Yield the texts of ``source`` with their masks filled in, in order."""
    filler = MaskFiller(subject, task_options.mask, settings.top_k)
    inputs = texts_in(source, settings, filler.encode)
    encode: Callable[[TextItem], MaskedItem] = filler.encode
    yield from in_batches(
        map(encode, inputs.items),
        settings.batch_size,
        lambda item: len(item.ids),
        filler,
        inputs.total,
        settings.quiet,
    )
