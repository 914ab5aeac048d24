"""Patterns against the masks, outputs and gradients of implementations that others wrote.

Computed by openai/sparse_attention (masks, and its dense attention) and by tensor2tensor (Image Transformer), float32.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.parts.patterns.blocks import Image1D, Image2D
from kinformer.parts.patterns.sequence import Causal, Columns, Fixed, Local, Strided
from tests.patterns.expressions import heads_of, mask_of

GOLDEN = Path(__file__).parents[1] / "golden" / "patterns.npz"


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays}


def test_window_and_columns_are_those_of_the_sparse_transformer(golden):
    local, columns = (Strided(stride=stride, part=part).build() for stride, part in ((5, "local"), (4, "columns")))
    assert (mask_of(local, 24) == golden["mask_local"]).all()
    assert (mask_of(columns, 24) == golden["mask_strided"]).all()
    assert (mask_of(Local.Config(window=8).build(), 32) == golden["local_block_mask"]).all()
    both = mask_of(Strided(stride=4).build(), 24)
    assert (both == (golden["mask_strided"] | mask_of(Local.Config(window=4).build(), 24))).all()


def test_fixed_pattern_is_that_of_the_sparse_transformer(golden):
    (mask,) = golden["fixedA_mask"]
    assert (mask_of(Fixed(segment=8, summary=2).build(), 32) == mask).all()
    parts = [mask_of(Fixed(segment=8, summary=2, part=part).build(), 32) for part in ("local", "columns")]
    assert (parts[0] | parts[1] == mask).all()


def test_heads_look_at_the_slices_of_the_sparse_transformer(golden):
    pattern = Fixed(segment=8, summary=2, slices=2, num_heads=4).build()
    masks = np.stack([mask_of(head, 32) for head in heads_of(pattern)])
    assert (masks == golden["fixedB_mask"]).all()
    assert not (masks[0] == masks[1]).all()


def attended(pattern, arrays, scale):
    """Output and the gradients of q, k, v, all [batch, heads, time, head_dim], for the upstream gradient given last."""
    *inputs, upstream = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
    inputs = [array.clone().requires_grad_() for array in inputs]
    positions = torch.arange(upstream.shape[2]).expand(upstream.shape[0], -1)
    out = attention(*inputs, Visibility(pattern, positions), Scoring(scale)).out
    (out * upstream).sum().backward()
    return [out.detach().numpy(), *(array.grad.numpy() for array in inputs)]


def close(got, want, limit):
    assert got.shape == want.shape
    assert abs(got - want).max() <= limit * max(1.0, abs(want).max())


@pytest.mark.parametrize(
    ("name", "pattern"), [("local", Local.Config(window=5).build()), ("strided", Columns.Config(stride=4).build())]
)
def test_attention_is_that_of_the_sparse_transformer(golden, name, pattern):
    heads = [golden[key].reshape(2, 24, 2, 8).transpose(0, 2, 1, 3) for key in ("q", "k", "v", "grad_out")]
    wanted = [golden.get(f"{key}_{name}") for key in ("out", "grad_q", "grad_k", "grad_v")]
    for got, want in zip(attended(pattern, heads, 8**-0.5), wanted, strict=True):
        if want is not None:
            close(got.transpose(0, 2, 1, 3).reshape(2, 24, 16), want, 1e-5)


def test_1d_blocks_are_those_of_the_image_transformer(golden):
    arrays = [golden[f"image.{name}1"] for name in ("q", "k", "v", "grad_out")]
    found = attended(Image1D(block=5).build(), arrays, 1.0)
    for got, name in zip(found, ("out", "grad_q", "grad_k", "grad_v"), strict=True):
        close(got, golden[f"image.{name}1"], 1e-5)


def test_1d_blocks_of_few_pixels_are_causal_as_in_the_image_transformer(golden):
    arrays = [golden[f"image.{name}1"][:, :, :8] for name in ("q", "k", "v", "grad_out")]
    pattern = Image1D(block=5).build()
    assert (mask_of(pattern, 8) == mask_of(Causal(), 8)).all()
    close(attended(pattern, arrays, 1.0)[0], golden["image.out1_short"], 1e-5)


def block_raster(image):
    """[batch, heads, 6, 8, dim] as the sequence of the cells of its 2 x 4 blocks."""
    batch, heads, height, width, dim = image.shape
    cells = image.reshape(batch, heads, height // 2, 2, width // 4, 4, dim)
    return cells.transpose(0, 1, 2, 4, 3, 5, 6).reshape(batch, heads, height * width, dim)


def test_2d_blocks_are_those_of_the_image_transformer(golden):
    config = Image2D.Config(height=6, width=8, block_height=2, block_width=4, flange_height=1, flange_width=2)
    arrays = [block_raster(golden[f"image.{name}2"]) for name in ("q", "k", "v", "grad_out")]
    found = attended(config.build(), arrays, 1.0)
    for got, name in zip(found, ("out", "grad_q", "grad_k", "grad_v"), strict=True):
        close(got, block_raster(golden[f"image.{name}2"]), 1e-5)


def test_2d_blocks_without_a_mask_are_those_of_the_image_transformer(golden):
    """Those of its encoder; ``out2`` is of ``local_attention_2d``, block 2 x 4, flange 2 x 2."""
    config = Image2D.Config(
        height=6, width=8, block_height=2, block_width=4, flange_height=2, flange_width=2, masked=False
    )
    arrays = [golden[f"image.{name}2"] for name in ("q", "k", "v", "grad_out")]
    by_rows = [array.reshape(2, 2, 48, 6) for array in arrays]
    with np.load(GOLDEN.parent / "image_unmasked.npz", allow_pickle=False) as arrays_of_encoder:
        out = arrays_of_encoder["out2"]
    close(attended(config.build(), list(map(block_raster, arrays)), 1.0)[0], block_raster(out), 1e-5)
    close(attended(config.replace(by_rows=True).build(), by_rows, 1.0)[0], out.reshape(2, 2, 48, 6), 1e-5)


def test_1d_blocks_without_a_mask_see_both_neighbours():
    mask = mask_of(Image1D(block=4, masked=False).build(), 16)
    block = np.arange(16) // 4
    assert (mask == (abs(block[:, None] - block) <= 1)).all()


def test_2d_memory_has_the_mask_of_the_image_transformer(golden):
    """A block amid an image: rows are its queries, columns the row above, then per row flange, block, flange."""
    image = Image2D(height=4, width=12, block_height=2, block_width=4, flange_height=1, flange_width=2)
    cells = [(1, x) for x in range(2, 10)] + [(y, x) for y in (2, 3) for x in range(2, 10)]
    order = [(y + i, x + j) for y in (0, 2) for x in (0, 4, 8) for i in (0, 1) for j in range(4)]
    keys = [order.index(cell) for cell in cells]
    queries = [order.index((y, x)) for y in (2, 3) for x in range(4, 8)]
    mask = mask_of(image, 48)[queries]
    assert (mask[:, keys] == (golden["image.raster_mask"] == 0)).all()
    assert mask.sum() == (golden["image.raster_mask"] == 0).sum()


def test_images_do_not_see_each_other():
    image = Image2D(height=4, width=4, block_height=2, block_width=2, flange_height=2, flange_width=2)
    mask = mask_of(image, 48)
    assert not mask[16:, :16].any()
    assert not mask[32:, :32].any()
    assert (mask[16:32, 16:32] == mask[:16, :16]).all()
