"""Who sees whom in a mixer without a pattern: how much each output changes when tokens are exchanged for others.

Gradients would not tell: none reaches the inputs of an earlier segment, which a memory nevertheless shows to the query.
"""

from __future__ import annotations

from copy import deepcopy
from math import isqrt

import torch
from torch import Tensor

from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.encoder import EncoderMixer, GridOnly, SequenceContext
from kinformer.figures.panels import CELLS, HeatPanel, grid

PATCHES = 64
MOST_TOKENS = 1536
"""Tokens in a picture for which no length was asked."""
AT_ONCE = 1 << 14
"""Tokens in one call of the mixer."""
ROUNDING = 1e-10
"""Changes below this share of a row's largest are none."""


def influence_panel(
    mixer: CausalMixer | EncoderMixer, name: str, place: str, dim: int, length: int | None, trained: bool = True
) -> HeatPanel:
    """Return the influence of the keys of a cell on the queries of a cell: [query cell, key cell] from 0 to 1.

    It is the mean length of the change of an output when the cell's inputs, which are drawn at random, are drawn again.
    Rows are divided by their largest value beside a token's own, which may dwarf all others and counts as 1 at most;
    so the context shows and not the size of the outputs. ``length`` None: one and a half times what the mixer sees.
    """
    tokens, cells = _extent(mixer) if length is None else grid(length, ())
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, tokens * cells, dim, generator=generator, dtype=torch.float64)
    mixer = deepcopy(mixer).double().eval()
    before, columns = _outputs(mixer, x[None]), []
    for keys in torch.arange(cells).split(max(1, AT_ONCE // len(x))):
        drawn_again = torch.arange(len(x)) // tokens == keys[:, None]
        after = _outputs(mixer, torch.where(drawn_again[:, :, None], other, x))
        columns.append((after - before).norm(dim=-1).unflatten(1, (cells, tokens)).mean(dim=2))
    strength = torch.cat(columns).T
    strength = torch.where(strength > ROUNDING * strength.amax(dim=1, keepdim=True), strength, 0.0)
    others = strength.clone().fill_diagonal_(0.0).amax(dim=1, keepdim=True)
    return HeatPanel(
        place=place,
        name=f"{name}\ninfluence on the output{'' if trained else ', at random weights'}",
        values=(strength / others.clamp_min(torch.finfo(others.dtype).tiny)).clamp_max(1.0).numpy(),
        rows="query",
        columns="key",
        signed=False,
        tokens_per_cell=tokens,
    )


def _extent(mixer: CausalMixer | EncoderMixer) -> tuple[int, int]:
    """Return (tokens per cell, a power of two, cells) for what a query sees and
    half of that again; of an image 8 x 8."""
    if isinstance(mixer, GridOnly):
        return 1, PATCHES
    seen = getattr(mixer, "retained", None)
    if seen is None:
        return 1, min(CELLS, mixer.max_length or CELLS)
    length, tokens = min(MOST_TOKENS, max(CELLS, (seen + 1) * 3 // 2)), 1
    while tokens * CELLS < length:
        tokens *= 2
    return tokens, -(-length // tokens)


@torch.no_grad()
def _outputs(mixer: CausalMixer | EncoderMixer, x: Tensor) -> Tensor:
    if isinstance(mixer, EncoderMixer):
        rows = next(index for index in range(isqrt(x.shape[1]), 0, -1) if x.shape[1] % index == 0)
        grid = (rows, x.shape[1] // rows) if isinstance(mixer, GridOnly) else None
        return mixer(x, SequenceContext(grid=grid))
    return mixer(Chunk(x), mixer.initial_state(len(x)))[0]
