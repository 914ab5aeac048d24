"""Patches: a convolution whose stride is its kernel, tokens before them, positions that fit any image."""

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.family.build import configure
from kinformer.inputs.images import Patches
from kinformer.runtime.errors import KinformerError

SMALL = Patches.Config(size=(12, 8), channels=2, patch=4)


def entered(config, images, dim=6, seed=0):
    torch.manual_seed(seed)
    input = config.build(dim).to(images.dtype if images.is_floating_point() else torch.float64)
    return input, input(images, torch.arange(input.length(images)).expand(len(images), -1))


def test_a_patch_is_what_the_convolution_makes_of_it():
    images = torch.rand(2, 2, 12, 8, dtype=torch.float64)
    input, x = entered(SMALL.replace(class_token=False, positions=False), images)
    kernel = input.projection.weight.unflatten(1, (2, 4, 4))
    want = functional.conv2d(images, kernel, input.projection.bias, stride=4).flatten(2).transpose(1, 2)
    assert x.shape == (2, 6, 6) and (x - want).abs().max() < 1e-12


def test_tokens_stand_before_patches_and_positions_are_added_to_both():
    images = torch.rand(1, 2, 12, 8, dtype=torch.float64)
    input, x = entered(SMALL.replace(distillation_token=True), images)
    with torch.no_grad():
        input.tokens.copy_(torch.randn_like(input.tokens))
    _, bare = entered(SMALL.replace(class_token=False, positions=False), images)
    x = input(images, torch.arange(8)[None])
    bare = torch.cat([input.tokens[None], input.projection(_flat(images))], 1)
    assert (x - bare - input.positions).abs().max() < 1e-12


def _flat(images):
    return functional.unfold(images, 4, stride=4).transpose(1, 2)


def test_bytes_are_shares_of_255_and_channels_are_normalised():
    images = torch.randint(256, (2, 2, 12, 8), dtype=torch.uint8)
    config = SMALL.replace(mean=(0.25, 0.5), std=(0.5, 2.0))
    _, x = entered(config, images)
    shares = images.double() / 255
    normal = (shares - torch.tensor([0.25, 0.5])[:, None, None]) / torch.tensor([0.5, 2.0])[:, None, None]
    assert torch.allclose(x, entered(config, shares)[1]) and torch.allclose(x, entered(SMALL, normal)[1])
    assert not torch.allclose(x, entered(SMALL, shares)[1])


def test_an_image_of_any_size_is_continued_with_zeros():
    images = torch.rand(1, 2, 9, 7, dtype=torch.float64)
    _, x = entered(SMALL, images)
    assert torch.equal(x, entered(SMALL, functional.pad(images, (0, 1, 0, 3)))[1])


@pytest.mark.parametrize("resize", ["bilinear", "bicubic"])
def test_positions_are_interpolated_over_the_grid(resize):
    """From corner to corner, positions that grow evenly still do."""
    images = torch.zeros(1, 2, 20, 24)
    input, _ = entered(SMALL.replace(resize=resize), images, dim=2)
    with torch.no_grad():
        rows, columns = torch.meshgrid(torch.arange(3.0), torch.arange(2.0), indexing="ij")
        input.positions[1:] = torch.stack([rows, columns], -1).flatten(0, 1)
        input.projection.weight.zero_()
        input.projection.bias.zero_()
    x = input(images, torch.arange(31)[None])[0]
    assert torch.equal(x[0], input.positions[0])
    grid = x[1:].unflatten(0, (5, 6))
    down, across = torch.linspace(0, 2, 5)[:, None], torch.linspace(0, 1, 6)[None]
    even = torch.stack([down.expand(5, 6), across.expand(5, 6)], -1)
    assert torch.allclose(grid, even) == (resize == "bilinear")
    want = functional.interpolate(
        torch.stack([rows, columns])[None], size=(5, 6), mode=resize, align_corners=resize == "bilinear"
    )
    assert torch.allclose(grid, want[0].permute(1, 2, 0))


@pytest.mark.parametrize(
    ("member", "recipe", "parameters"),
    [
        ("vit", "paper-tiny", 5_717_416),
        ("vit", "paper-small", 22_050_664),
        ("vit", "paper", 86_567_656),
        ("vit", "paper-large", 304_326_632),
        ("vit", "paper-huge", 632_045_800),
        ("deit", "paper-tiny", 5_910_800),
        ("deit", "paper-small", 22_436_432),
        ("deit", "paper", 87_338_192),
    ],
)
def test_published_sizes(member, recipe, parameters):
    with torch.device("meta"):
        model = configure(member, recipe).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.input.length(model.input.example(1, model.config.input.length)) == model.config.input.length


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"size": (8,)}, "size must be rows and columns"),
        ({"patch": 0}, "patch must be 1 or more"),
        ({"mean": (0.5,)}, "mean must be one number for each of 2 channels"),
        ({"std": (1.0, 0.0)}, "std must be above 0"),
        ({"distillation_token": True, "class_token": False}, "set class_token too"),
        ({"positions": False, "resize": "bicubic"}, "resize = 'bicubic' does nothing"),
    ],
)
def test_what_makes_no_patches(changes, told):
    with pytest.raises(KinformerError, match=told):
        SMALL.replace(**changes)


def test_what_is_no_image():
    model = kinformer.build("vit", recipe="tiny")
    images = torch.rand(1, 3, 32, 32)
    for values, told in (
        (torch.rand(1, 1, 32, 32), "with 3 channels, but have the shape"),
        (torch.rand(3, 32, 32), "images must be"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.int64), "uint8, or floats"),
    ):
        with pytest.raises(KinformerError, match=told):
            model(values)
    with pytest.raises(KinformerError, match="an image does not have padding"):
        model(images, valid=torch.arange(65)[None] > 3)
    with pytest.raises(KinformerError, match="an image has no types"):
        model(images, types=torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(KinformerError, match="vit reads no ids"):
        kinformer.build("vit", vocab_size=7)
    with pytest.raises(KinformerError, match="'patches' is read at once, which a decoder cannot"):
        configure("gpt", "tiny", set={"input": "patches"})
    with pytest.raises(KinformerError, match="leaves no patch"):
        model.input.example(1, 1)
