"""The cross-entropy of logits x W^T + b, computed without all logits in memory at once.

    loss = sum_i -ln softmax(x_i W^T + b)_(y_i),    dloss / dlogits_i = softmax(x_i W^T + b) - onehot(y_i)

The forward computes a few rows of logits at a time. It adds their loss and their share of the gradients while the
rows are in the processor's cache, so no product is computed twice. Over a large vocabulary the logits, their softmax
and their gradient take much of the memory of a small model's step: more than a third of the process for 1,024 tokens
of a vocabulary of 50,257.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kinformer.core.model import Model
from kinformer.core.parts import OutputProduct
from kinformer.runtime.autograd import Context, autocast_dtype, check_reverse, first_order, no_autocast

if TYPE_CHECKING:
    from kinformer.lab.training.tensor_parallel import VocabularyPart

LOGITS = 1 << 22
"""The fewest elements of logits made in pieces, on a CPU: 16 MiB in float32."""
PIECE, LEAST = 1 << 21, 128
"""Elements of a piece, and its rows at least."""
_NAME, _REMEDY = "the cross-entropy in pieces", "differentiate torch's cross_entropy of the model's logits for that"


def in_pieces(model: Model, rows: int) -> bool:
    """Return whether the cross-entropies of this many ``rows`` of a causal model are to be summed by :func:`summed`."""
    if divided(model):
        return True
    product = _product(model)
    if product is None or rows * len(product[0]) < LOGITS or getattr(model, "_compiled_call_impl", None) is not None:
        return False
    weight = product[0]
    return type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu"


def divided(model: Model) -> bool:
    """Return whether processes share the vocabulary of ``model``'s head."""
    return getattr(getattr(model, "head", None), "vocabulary_part", None) is not None


def of_head(model: Model, x: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of ``targets`` [rows] int64 for hidden states x [rows, width]."""
    product = _product(model)
    assert product is not None
    part: VocabularyPart | None = getattr(getattr(model, "head", None), "vocabulary_part", None)
    return summed(x, *product, targets) if part is None else part.nats(x, *product, targets)


def large(model: Model, rows: int) -> bool:
    """Return whether the logits of ``rows`` rows are one product and large enough for pieces."""
    product = _product(model)
    return product is not None and rows * len(product[0]) >= LOGITS


def _product(model: Model) -> tuple[Tensor, Tensor | None] | None:
    """Return the matrix and the bias of a head that multiplies by a matrix; None for any other head."""
    head = getattr(model, "head", None)
    return head.product(model.input) if isinstance(head, OutputProduct) else None


def summed(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Return the sum over rows of the cross-entropies of ``targets`` [rows] int64, a scalar in float32 or wider.

    x: [rows, dim]; weight: [vocab, dim]; bias: [vocab] or None. Under autocast the products are in its type.
    """
    check_reverse(_NAME, x, weight, bias, remedy=_REMEDY)
    return _InPieces.apply(x, weight, bias, targets, torch.is_grad_enabled())


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, learning: bool
    ) -> Tensor:
        narrow = autocast_dtype(x.device) or x.dtype
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros((), dtype=wide)
        gradients = [torch.empty_like(x), weight.new_zeros(weight.shape, dtype=wide)] if learning else []
        if learning and bias is not None:
            gradients.append(bias.new_zeros(bias.shape, dtype=wide))
        rows = max(LEAST, PIECE // len(weight))
        with no_autocast(x.device):
            product = weight.to(narrow)
            for begin in range(0, len(x), rows):
                piece, wanted = x[begin : begin + rows].to(narrow), targets[begin : begin + rows, None]
                logits = (piece @ product.mT).to(wide)
                if bias is not None:
                    logits += bias
                likely = logits.softmax(-1)
                # ln sum_v exp(l_v) = m - ln(softmax of m), m the largest logit: exp(l_v) itself could overflow.
                top = logits.amax(-1, keepdim=True) - logits.gather(1, wanted)
                total += (top - likely.amax(-1, keepdim=True).log()).sum()
                if not learning:
                    continue
                # softmax - onehot, the gradient by the logits, in the memory of the softmax
                likely.scatter_add_(1, wanted, likely.new_full((), -1).expand_as(wanted))
                if bias is not None:
                    gradients[2] += likely.sum(0)
                likely = likely.to(narrow)
                # dX = G W and dW = G^T X while the piece lies in the cache; W's sum over pieces is in float32.
                gradients[0][begin : begin + rows] = likely @ product
                if narrow == wide:
                    torch.addmm(gradients[1], likely.mT, piece, out=gradients[1])
                else:
                    gradients[1] += likely.mT @ piece
        ctx.save_for_backward(x, weight, *gradients)
        return total

    @staticmethod
    @first_order(_NAME, _REMEDY)
    def backward(ctx: Context, saved: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The forward has computed the gradients; the chain rule scales them by the gradient of the loss.
        x, weight, *bias = (item * gradient.to(item.dtype) for item in saved[2:])
        return x, weight, bias[0] if bias else None, None, None
