"""Densities and entropies of policies, as tensors."""

from __future__ import annotations

from math import e, log, pi

import torch
from torch import Tensor

from kinformer.control.environments.environment import Box, Discrete


def log_density(predicted: Tensor, actions: Tensor, space: Discrete | Box) -> Tensor:
    """Return the log-densities [...] of ``actions``, in nats: of [...] int64 under logits ``predicted`` [..., n], or of
    [..., dim] as in :func:`normal_log_density`."""
    if isinstance(space, Discrete):
        return predicted.log_softmax(-1).gather(-1, actions[..., None])[..., 0]
    return normal_log_density(predicted, actions)


def normal_log_density(predicted: Tensor, actions: Tensor) -> Tensor:
    """Return the log-densities [...] in nats of ``actions`` [..., dim] under normal distributions ``predicted`` [..., 2
    * dim]: means, then logarithms of standard deviations."""
    mean, log_std = predicted.chunk(2, dim=-1)
    return -(((actions - mean) * (-log_std).exp()).square() / 2 + log_std + log(2 * pi) / 2).sum(-1)


def entropy(predicted: Tensor, space: Discrete | Box) -> Tensor:
    """Return the policy's entropy in nats, [...]."""
    if isinstance(space, Discrete):
        return torch.special.entr(predicted.softmax(-1)).sum(-1)
    return (predicted.chunk(2, dim=-1)[1] + log(2 * pi * e) / 2).sum(-1)
