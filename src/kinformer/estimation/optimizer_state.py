"""The bytes of an optimiser's state, by the kind of the optimiser and of each parameter."""

from __future__ import annotations

from torch import nn

from kinformer.core.stack import sparse_tables, units_of

OPTIMIZERS = ("adamw", "adamw-8bit", "radam", "muon", "lamb", "adafactor", "adagrad", "sgd")
ADAMS = ("adamw", "adamw-8bit", "radam", "lamb")
LEAST_IN_8_BITS, SCALED_TOGETHER = 4096, 256
"""Elements of the smallest tensor whose AdamW state has 8 bits, and of those that share a scale."""


def optimizer_bytes(model: nn.Module, optimizer: str) -> int:
    """Return the bytes of an optimiser's float32 state: two elements a parameter for AdamW, RAdam and LAMB, one for
    SGD with momentum and for Adagrad. AdamW in 8 bits has two bytes a parameter and two scales for every 256, in
    tensors of 4,096 elements or more (Dettmers et al. 2022).

    Muon keeps one for the layers' matrices and is AdamW for the rest; Adafactor keeps a row and a column of a matrix.
    Tables with sparse gradients have an Adam of their own, frozen parameters nothing.
    """
    total, tables = 0, sparse_tables(model)
    inner = {parameter for unit in units_of(model) for parameter in unit.parameters()}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        matrix = parameter.dim() >= 2
        if parameter in tables:
            elements = 2 * parameter.numel()
        elif optimizer == "adafactor" and matrix:
            elements = parameter.numel() // parameter.shape[-1] + parameter.numel() // parameter.shape[-2]
        elif optimizer == "adamw-8bit" and parameter.numel() >= LEAST_IN_8_BITS:
            total += 2 * parameter.numel() + 8 * -(-parameter.numel() // SCALED_TOGETHER)
            continue
        elif optimizer in ADAMS or (optimizer == "muon" and not (matrix and parameter in inner)):
            elements = 2 * parameter.numel()
        else:
            elements = parameter.numel()
        total += 4 * elements
    return total
