r"""Relative effective context length (Dai et al. 2019, Transformer-XL, appendix C).

How far back does a model use its context, compared with other models? With the losses l_i(c, t) of model i on
token t after exactly c tokens of context, the group's best short-context model is everyone's baseline,

    b(c, t) = min over i of l_i(c, t)
    f_i(c, c') = mean over t in T of min(b(c, t), l_i(c', t))                      the relative loss
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)                  the relative gain, in perplexity

where T is the share r of the tokens with the largest b(c, t), which a short context explains least. The length grows in
steps, c' = c + step, while g_i(c, c') >= 0.01; the RECL of model i is the first c where this fails. A model therefore
cannot look good by being poor at short context, and tokens with a low loss at short context do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import map_tensors
from kinformer.lab.data import Split
from kinformer.runtime.errors import KinformerError, require_finite

Losses = NDArray[np.float64]

THRESHOLD = 0.01


@dataclass(frozen=True, kw_only=True)
class Recl:
    """The RECL of one model, ``length``; ``at_least``: whether every measured step still gained.
    ``gains``: g_i of each step, from one context to the next."""

    length: int
    at_least: bool
    gains: tuple[float, ...]


def relative_gains(losses: Losses, hardest: float) -> Losses:
    """Return g_i between contexts, [models, contexts - 1], of ``losses`` in nats [models, contexts, tokens]."""
    gains = np.empty((losses.shape[0], losses.shape[1] - 1))
    count = max(1, round(hardest * losses.shape[2]))
    for step in range(gains.shape[1]):
        baseline = losses[:, step].min(axis=0)
        # T: the share r of the tokens with the largest b(c, t)
        chosen = np.argsort(-baseline, kind="stable")[:count]
        relative = np.minimum(baseline, losses[:, step + 1])[:, chosen].mean(axis=1)
        # g = 1 - exp(f(c, c') - f(c, c)), where f(c, c) is the mean of b, because b(c, t) <= l(c, t)
        gains[:, step] = 1.0 - np.exp(relative - baseline[chosen].mean())
    return gains


def recl(
    losses: Losses, contexts: Sequence[int], *, hardest: float = 0.1, threshold: float = THRESHOLD
) -> tuple[Recl, ...]:
    """Return the RECL of each model of a group.

    losses: [models, contexts, tokens] in nats: l_i(c, t), the same tokens for all.
    contexts: rising; the paper has equal steps.
    hardest: r, the share of tokens that count (the paper: 0.1, 0.5, 1).
    """
    check(contexts, hardest)
    assert losses.shape[1] == len(contexts)
    points = []
    for gains in relative_gains(losses, hardest):
        fails = np.flatnonzero(~(gains >= threshold))
        step = int(fails[0]) if len(fails) else len(gains)
        points.append(Recl(length=contexts[step], at_least=not len(fails), gains=tuple(gains.tolist())))
    return tuple(points)


def check(contexts: Sequence[int], hardest: float) -> None:
    """Raise a :class:`KinformerError` for invalid ``contexts`` or an invalid share ``hardest``."""
    if len(contexts) < 2 or contexts[0] < 1 or any(one >= two for one, two in zip(contexts, contexts[1:])):
        raise KinformerError(
            f"the contexts {', '.join(map(str, contexts))} cannot give an effective context length; name two or more, "
            "rising, as in 64,128,192,256."
        )
    if not 0 < hardest <= 1:
        raise KinformerError(f"the share of hardest tokens is {hardest:g} but must be above 0 and at most 1.")


def spread_positions(split: Split, longest: int, count: int) -> NDArray[np.int64]:
    """Return at most ``count`` tokens of ``split``, evenly spread, each with ``longest`` tokens before it."""
    split.require(longest + 1, f"a context of {longest}", " or smaller `contexts`")
    last = len(split) - 1
    return np.unique(np.linspace(longest, last, min(count, last - longest + 1)).round().astype(np.int64))


def context_losses(
    model: CausalModel,
    split: Split,
    contexts: Sequence[int],
    positions: NDArray[np.int64],
    *,
    chunk: int = 2048,
    progress: Callable[[int, int], None] | None = None,
    prefix: Sequence[int] = (),
) -> Losses:
    """Return l(c, t) in nats, [contexts, positions]: each token predicted from exactly the ``c`` tokens before it.
    A model whose positions end earlier sees as many tokens as it can. ``chunk`` bounds the tokens computed at a time.
    ``prefix``: ids such as BOS in front of every context."""
    losses = np.empty((len(contexts), len(positions)))
    done, total = 0, sum(contexts) * len(positions)
    with torch.inference_mode():
        for index, context in enumerate(contexts):
            length = context if model.max_length is None else min(context, model.max_length - len(prefix))
            rows = max(1, chunk // length)
            for start in range(0, len(positions), rows):
                group = positions[start : start + rows]
                text = torch.from_numpy(split.rows(group - length, length + 1)).to(device_of(model))
                tokens = torch.cat([text.new_tensor([list(prefix)] * len(text)), text], 1) if prefix else text
                inputs, _ = model.head_inputs(tokens[:, :-1])
                logits = model.logits(map_tensors(lambda x: x[:, -1:], inputs))[:, 0].double()
                nats = nn.functional.cross_entropy(logits, tokens[:, -1], reduction="none")
                losses[index, start : start + rows] = nats.cpu().numpy()
                done += context * len(group)
                if progress is not None:
                    progress(done, total)
    require_finite(bool(np.isfinite(losses).all()))
    return losses
