"""Windows of images: who sees whom, against a flat loop; the limit of one window; patch merging; sizes of any kind."""

from math import log

import pytest
import torch

import kinformer
from kinformer.core.encoder import SequenceContext
from kinformer.family.build import configure
from kinformer.mixers.encoders import HOTTEST, WindowAttention, apart, cut, joined
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.sequential import PatchMerging


def mixed(config, grid, dim=8):
    torch.manual_seed(0)
    mixer = config.build(dim).double()
    x = torch.randn(2, grid[0] * grid[1], dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return mixer, x, mixer(x, SequenceContext(grid=grid))


def looped(mixer, x, grid):
    """Pair by pair: two patches see each other in one window of the image, where no shift has wrapped one around."""
    config, (rows, columns) = mixer.config, grid
    side, shift = mixer.sizes(grid)
    heads = config.num_heads
    q, k, v = (part(x).unflatten(-1, (heads, -1)) for part in (mixer.query, mixer.key, mixer.value))
    if config.cosine:
        q, k = (each / each.norm(dim=-1, keepdim=True) for each in (q, k))
        q = q * mixer.heat.view(heads, 1).exp()
    table, places = mixer._table(), [(place // columns, place % columns) for place in range(rows * columns)]
    out = torch.zeros_like(v)
    for i, (row, column) in enumerate(places):
        seen = []
        for j, (other, across) in enumerate(places):
            if all(
                (a + side - shift) // side == (b + side - shift) // side for a, b in ((row, other), (column, across))
            ):
                down, right = row - other + config.window - 1, column - across + config.window - 1
                seen.append((j, down * (2 * config.window - 1) + right))
        slots, indices = (list(each) for each in zip(*seen, strict=True))
        scores = torch.einsum("bhd,bnhd->bhn", q[:, i], k[:, slots]) * mixer.scale + table[indices].T
        out[:, i] = torch.einsum("bhn,bnhd->bhd", scores.softmax(-1), v[:, slots])
    return mixer.out(out.flatten(2))


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_a_patch_sees_its_window(shift, cosine):
    for window, grid in ((2, (4, 6)), (3, (6, 9))):
        config = WindowAttention.Config(num_heads=2, window=window, shift=shift, cosine=cosine)
        mixer, x, y = mixed(config, grid)
        assert torch.allclose(y, looped(mixer, x, grid), atol=1e-12)


def test_a_heat_at_its_bound_learns_and_one_above_it_does_not():
    mixer, x, _ = mixed(WindowAttention.Config(num_heads=2, window=2, cosine=True), (4, 4))
    slopes = []
    for heat in (log(HOTTEST) - 1e-9, log(HOTTEST), log(HOTTEST) + 1e-9):
        with torch.no_grad():
            mixer.heat.fill_(heat)
        y = mixer(x, SequenceContext(grid=(4, 4)))
        slopes.append(torch.autograd.grad(y.square().sum(), mixer.heat)[0].flatten())
    assert slopes[0].abs().min() > 1e-4
    assert torch.allclose(slopes[1], slopes[0], rtol=1e-6) and not slopes[2].any()


def test_one_window_of_the_whole_image_is_exact_attention():
    config = WindowAttention.Config(num_heads=2, window=4)
    mixer, x, y = mixed(config, (4, 4))
    with torch.no_grad():
        mixer.table.zero_()
    q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (mixer.query, mixer.key, mixer.value))
    exact = mixer.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    assert torch.allclose(mixer(x, SequenceContext(grid=(4, 4))), exact, atol=1e-12)
    assert not torch.allclose(y, exact)  # the bias by distance
    smaller = config.replace(window=2)
    assert not torch.allclose(mixed(smaller, (4, 4))[2], exact)


def test_a_small_image_has_a_smaller_window_and_no_shift():
    mixer = WindowAttention.Config(num_heads=2, window=4, shift=True).build(8)
    assert [mixer.sizes(grid) for grid in ((3, 9), (4, 4), (5, 5))] == [(3, 0), (4, 0), (4, 2)]
    small = mixed(WindowAttention.Config(num_heads=2, window=4, shift=True), (3, 3))
    assert torch.allclose(small[2], looped(small[0], small[1], (3, 3)), atol=1e-12)


def test_windows_are_cut_and_joined():
    x = torch.arange(2 * 4 * 6.0).view(2, 4, 6, 1)
    windows = cut(x, 2)
    assert windows.shape == (12, 4, 1) and windows[1, :, 0].tolist() == [2, 3, 8, 9]
    assert torch.equal(joined(windows, 2, (4, 6)), x)
    assert apart((4, 6), 2, 0, x.device) is None
    mask = apart((4, 4), 2, 1, x.device)[:, 0]
    assert mask[0].all() and mask[1].sum() == 8 and torch.equal(mask[3], torch.eye(4, dtype=torch.bool))


@pytest.mark.parametrize("behind", [False, True])
def test_four_patches_become_one_in_the_published_order(behind):
    merge = PatchMerging(3, behind).double()
    x = torch.randn(2, 3 * 4, 3, dtype=torch.float64)
    y, text = merge(x, SequenceContext(grid=(3, 4)))
    assert text.grid == (2, 2) and y.shape == (2, 4, 6)
    image = torch.cat([x.view(2, 3, 4, 3), torch.zeros(2, 1, 4, 3, dtype=torch.float64)], 1)
    four = torch.cat([image[:, 2, 2], image[:, 3, 2], image[:, 2, 3], image[:, 3, 3]], -1)
    want = merge.norm(merge.reduction(four)) if behind else merge.reduction(merge.norm(four))
    assert torch.allclose(y[:, 3], want)


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        ("paper", 28_288_354),
        ("paper-small", 49_606_258),
        ("paper-base", 87_768_224),
        ("paper-large", 196_532_476),
        ("paper-v2", 28_347_154),
    ],
)
def test_published_sizes(recipe, parameters):
    with unallocated():
        model = configure("swin", recipe).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("recipe", ["tiny", "tiny-v2"])
def test_stages_of_any_size_and_taps(recipe):
    model = kinformer.build("swin", recipe=recipe).eval()
    images = torch.rand(2, 3, 37, 50)
    found = model.hidden(images, taps=(0, 3))
    assert [tuple(each.shape) for each in found.tapped] == [(2, 19 * 25, 16), (2, 10 * 13, 32)]
    assert found.long_input.shape == (2, 10 * 13, 32) and model(images).shape == (2, 10)


def test_what_has_no_windows():
    stages = {"kind": "stages", "depths": [1, 1]}
    for member, changes, told in (
        ("swin", {"layers": 3}, r"stack.depths is \[2, 2\], 4 layers together, but the model has 3"),
        ("swin", {"stack.depths": (2, 0)}, "depths must be layers of each stage"),
        ("swin", {"input.class_token": True}, "class_token = false"),
        ("swin", {"global_tokens": 1}, "reads the patches of images alone"),
        ("swin", {"position": "timing"}, "this position enters every layer"),
        ("swin", {"layers.*.mixer.window": 1}, "window must be 2 or more"),
        ("bert", {"stack": stages, "head.tied": False}, "the stack 'stages' is for the patches of images"),
        ("vit", {"stack": stages}, "the stack 'stages' is for the patches of images"),
        ("gpt", {"stack": stages, "head.tied": False}, "which no decoder reads"),
    ):
        with pytest.raises(KinformerError, match=told):
            configure(member, "tiny", set=changes).build()
