"""kNN-LM's output (Khandelwal et al. 2020, "Generalization through Memorization"): a store's next tokens, mixed in.

    p(y) = w p_kNN(y) + (1 - w) p_LM(y)        p_kNN(y) = sum over the k nearest entries i with token y of
                                                         softmax_i(-||q - k_i||^2 / temperature)

The softmax runs over the k nearest entries only; ``temperature`` is 1 in the paper. The sum is taken as
logsumexp(log p_kNN + log w, log p_LM + log(1 - w)), and a token that no neighbour has gets log p_kNN = -10000.
"""

from __future__ import annotations

from math import isfinite, log, log1p

import torch
from torch import Tensor, nn

from kinformer.core.head import Neighbours, Searcher
from kinformer.runtime.errors import KinformerError

ABSENT = -10000.0


class KnnMixture(nn.Module):
    """The mixture (logits [n, vocab], queries [n, key width]) -> log-probabilities [n, vocab], float32 at least.

    ``searcher`` is only read, and owns no weight. Without it, with ``weight`` 0, and for a query without neighbours,
    the logits come back as they are.
    """

    def __init__(
        self, searcher: Searcher | None, *, weight: float = 0.25, temperature: float = 1.0, neighbours: int = 32
    ) -> None:
        super().__init__()
        if not 0 <= weight <= 1:
            raise KinformerError(f"the store's weight is {weight} but must be at least 0 and at most 1.")
        if not (isfinite(temperature) and temperature > 0):
            raise KinformerError(f"the temperature of the neighbours is {temperature} but must be above 0.")
        if neighbours < 1:
            raise KinformerError(f"neighbours is {neighbours} but must be 1 or more.")
        self.searcher = searcher
        self.weight, self.temperature, self.neighbours = weight, temperature, neighbours

    def forward(self, logits: Tensor, queries: Tensor) -> Tensor:
        if self.searcher is None or self.weight == 0:
            return logits
        neighbours = self.searcher.search(queries, self.neighbours)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        near = knn_log_probs(neighbours, logits.shape[-1], self.temperature).to(wide.dtype)
        mixed = mix(wide.log_softmax(dim=-1), near, self.weight)
        return torch.where(neighbours.distances[:, :1].isfinite(), mixed, wide)


def knn_log_probs(neighbours: Neighbours, vocab_size: int, temperature: float = 1.0) -> Tensor:
    """Return log p_kNN [n, vocab] float32."""
    # Slots without a neighbour have an infinite distance, so their share is 0.
    shares = (-neighbours.distances / temperature).softmax(dim=-1)
    sums = shares.new_zeros(len(shares), vocab_size).scatter_add_(1, neighbours.tokens, shares)
    return torch.where(sums > 0, sums.log(), ABSENT)


def mix(model: Tensor, store: Tensor, weight: float) -> Tensor:
    """Return log(weight exp(store) + (1 - weight) exp(model)) of log-probabilities of one shape."""
    if weight in (0, 1):
        return store if weight else model
    # log(w e^store + (1 - w) e^model), without leaving the logarithms
    return torch.logaddexp(store + log(weight), model + log1p(-weight))
