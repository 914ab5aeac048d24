"""Keys whose bias alone takes them out of the softmax are not looked at, and nobody can tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kinformer.core.parts import Relative
from kinformer.core.pattern import Band, Pattern
from kinformer.kernels import block_sparse as chunked
from kinformer.kernels.attention import Scoring, Visibility, reference
from kinformer.kernels.block_sparse import Blocks
from kinformer.kernels.block_sparse.scores import WORTH, reaches
from kinformer.parts.patterns.sequence import Local
from kinformer.parts.relative_positions import Alibi

HEADS, KV_HEADS, TIME, PAST = 4, 2, 600, 100


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the pairs of each block of tiles that is worked on."""
    found: list[int] = []
    every = Blocks.__iter__

    def counted(self: Blocks):
        for tile, block in every(self):
            found.append((block.n.stop - block.n.start) * self.group * (tile.last - tile.first) * tile.width)
            yield tile, block

    monkeypatch.setattr(Blocks, "__iter__", counted)
    return found


def operands(dtype: torch.dtype, size: float = 1.0) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    slots = PAST + TIME
    shapes = (2, HEADS, TIME, 8), (2, KV_HEADS, slots, 8), (2, KV_HEADS, slots, 5), (2, HEADS, TIME, 5)
    q, k, v, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in (q * size, k, v)], upstream.to(dtype)


def outcome(attend, inputs: list[Tensor], upstream: Tensor, pattern: Pattern, relative: Relative, padding=None):
    visibility = Visibility(pattern, (PAST + torch.arange(TIME)).expand(2, TIME), key_padding_mask=padding)
    out, lse = attend(*inputs, visibility, Scoring(0.5, relative=relative))
    return [out, lse, *torch.autograd.grad((out * upstream).sum() + lse.sum(), inputs)]


def steep(slope: float, dtype: torch.dtype = torch.float64, lowest: int = 0) -> Relative:
    slopes = slope * Alibi(HEADS).slopes()[:, None]
    return Relative(lowest, bias=(-slopes * torch.arange(lowest, PAST + TIME).abs()).to(dtype))


def agree(found: list[Tensor], truth: list[Tensor], tolerance: float) -> None:
    for one, two in zip(found, truth, strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "pattern", [Band(), Band(ahead=None), Local.Config(window=580).build()], ids=["causal", "full", "window"]
)
def test_far_keys_are_left_out_and_nothing_changes(pattern: Pattern, dtype: torch.dtype, computed: list[int]) -> None:
    lowest = -TIME if pattern.band is not None and pattern.band[1] is None else 0
    inputs, upstream = operands(dtype)
    found = outcome(chunked.attend, inputs, upstream, pattern, steep(8.0, dtype, lowest))
    few = sum(computed)
    computed.clear()
    outcome(chunked.attend, inputs, upstream, pattern, steep(1e-6, dtype, lowest))
    assert few < 0.9 * sum(computed)
    truth = outcome(reference.attend, inputs, upstream, pattern, steep(8.0, dtype, lowest))
    agree(found, truth, 2e-5 if dtype == torch.float32 else 1e-12)


def test_products_may_outweigh_a_bias(computed: list[int]) -> None:
    """With queries so long, a key far away can be the largest, so no head leaves anything out."""
    inputs, upstream = operands(torch.float64, size=100.0)
    found = outcome(chunked.attend, inputs, upstream, Band(), steep(8.0))
    everything = 2 * 2 * HEADS * sum(min(TIME, low + 128) - low for low in range(0, TIME, 128)) * PAST
    assert sum(computed) > everything
    agree(found, outcome(reference.attend, inputs, upstream, Band(), steep(8.0)), 1e-9)


def test_padding_and_other_tables_leave_nothing_out(computed: list[int]) -> None:
    """What a query sees of itself may be hidden, and products with distances have no bound here."""
    inputs, upstream = operands(torch.float64)
    padding = torch.zeros(2, PAST + TIME, dtype=torch.bool)
    padding[1, 650:] = True
    steepest = steep(50.0)
    found = outcome(chunked.attend, inputs, upstream, Band(), steepest, padding)
    agree(found, outcome(reference.attend, inputs, upstream, Band(), steepest, padding), 1e-9)
    full = sum(computed)
    computed.clear()
    both = steepest._replace(values=torch.zeros(1, PAST + TIME, 5, dtype=torch.float64))
    agree(
        outcome(chunked.attend, inputs, upstream, Band(), both),
        outcome(reference.attend, inputs, upstream, Band(), both),
        1e-9,
    )
    assert sum(computed) == full


def test_reaches_are_bounds() -> None:
    """Beyond its reach a head's keys weigh less than rounding, whatever the vectors; NaN leaves nothing out."""
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(HEADS, 1, WORTH, 8, generator=generator) for _ in range(2))
    k = k[:, 0]
    bias = -torch.arange(WORTH, dtype=torch.float32) * Alibi(HEADS).slopes()[:, None].float()
    found = reaches(q, k, bias[:, None], HEADS)
    assert found == sorted(found) and 1 < found[0] < WORTH
    worst = 2 * q.norm(dim=-1).amax((1, 2)) * k.norm(dim=-1).amax(1)
    for head, reach in enumerate(found):
        if reach < WORTH:
            lost = (bias[head, reach:] + worst[head]).exp().sum()
            assert lost < torch.finfo(torch.float32).eps / 8
    q[0, 0, 3, 0] = torch.nan
    assert reaches(q, k, bias[:, None], HEADS)[0] == WORTH
