"""Heads whose logits are one product of the hidden states."""

from __future__ import annotations

from torch import Tensor, nn

from kinformer.core.input import Input


class OutputProduct(nn.Module):
    """A head whose logits are x W^T + b."""

    def product(self, input: Input) -> tuple[Tensor, Tensor | None]:
        """W [vocab, dim] and b [vocab] or None; ``input`` is the model's, whose table may be W."""
        raise NotImplementedError
