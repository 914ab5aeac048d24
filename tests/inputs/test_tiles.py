"""Tiles: a pyramid of encoders against a flat loop over regions and tiles; what is frozen; features computed before."""

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.family.build import configure
from kinformer.heads.classes import PooledHead
from kinformer.inputs import images as tiles
from kinformer.runtime.errors import KinformerError


@pytest.fixture(scope="module")
def pyramid():
    """Patches of 4, tiles of 8, regions of 16 pixels, in float64 and with positions and tokens that are no zeros."""
    torch.manual_seed(0)
    model = kinformer.build("hipt", recipe="tiny").double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def tokens(encoder, vectors):
    """What the first layer of ``encoder`` reads of a grid of vectors [rows * columns, width], one row of the batch."""
    patches = encoder.input.patches
    x = functional.gelu(vectors @ patches.projection.weight.T + patches.projection.bias)
    return torch.cat([patches.tokens, x])[None] + patches.positions


def test_a_pyramid_is_what_a_loop_over_regions_and_tiles_makes(pyramid):
    one, two = pyramid.input.lower
    image = torch.rand(1, 3, 32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    regions = []
    for down in range(0, 32, 16):
        for across in range(0, 48, 16):
            region = image[:, :, down : down + 16, across : across + 16]
            vectors = [one(region[:, :, y : y + 8, x : x + 8])[0] for y in (0, 8) for x in (0, 8)]
            hidden = two.stack.read(tokens(two, torch.stack(vectors)), tiles_text(), lambda x, use: x)[0]
            regions.append(two.norm(hidden)[0, 0])
    top = pyramid.input.patches.projection
    x = (torch.stack(regions) @ top.weight.T + top.bias).relu()[None]
    hidden = pyramid.stack.read(x, tiles_text(), lambda x, use: x)[0][0]
    gate = pyramid.head.gate
    scores = [gate.score(gate.content(h).tanh() * gate.gate(h).sigmoid()) for h in hidden]
    shares = torch.cat(scores).softmax(0)
    pooled = sum(share * h for share, h in zip(shares, hidden, strict=True))
    want = pyramid.head.output(pyramid.head.dense(pooled).relu())
    assert (pyramid(image)[0] - want).abs().max() < 1e-12


def tiles_text():
    from kinformer.core.encoder import SequenceContext

    return SequenceContext()


def test_the_lowest_encoder_is_a_vit(pyramid):
    lowest = pyramid.input.lower[0]
    changes = {"dim": 16, "layers": lowest.config.layers, "input": lowest.config.input, "head": PooledHead.Config()}
    vit = configure("vit", "tiny").replace(**changes).build().double().eval()
    vit.load_state_dict(lowest.state_dict())
    images = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(vit(images), lowest(images))


def test_features_may_be_computed_before(pyramid, monkeypatch):
    images = torch.randint(256, (3, 3, 20, 40), dtype=torch.uint8)
    features = pyramid.input.features(images)
    assert features.shape == (3, 24, 2, 3) and torch.equal(pyramid(features), pyramid(images))
    alone = torch.cat([pyramid.input.features(image[None]) for image in images])
    monkeypatch.setattr(tiles, "AT_ONCE", 1000)
    few = pyramid.input.features(images)
    assert (alone - features).abs().max() < 1e-12 and (few - features).abs().max() < 1e-12


def test_an_image_is_continued_with_zeros(pyramid):
    image = torch.rand(1, 3, 20, 40, dtype=torch.float64)
    assert torch.equal(pyramid(image), pyramid(functional.pad(image, (0, 8, 0, 12))))
    assert pyramid.input.grid(image) == (2, 3) and pyramid.input.length(image) == 6


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_encoder_does_not_learn(frozen):
    model = configure("hipt", "tiny", set={"input.frozen": frozen, "input.encoder.dropout": 0.5}).build().train()
    one, two = model.input.lower
    images = torch.rand(2, 3, 32, 32)
    model(images).sum().backward()
    assert two.training != frozen and not one.training
    assert all((weight.grad is None) == frozen for name, weight in two.named_parameters() if "encoder" not in name)
    assert all(weight.grad is None for weight in one.parameters())
    assert torch.equal(model.input.features(images), model.input.features(images)) == frozen
    assert all(weight.grad is not None for weight in model.input.patches.parameters())


@pytest.mark.parametrize(
    ("level", "parameters"),
    [
        (0, 22_050_664 - 385_000 + 60 * 384),  # ViT-S without its head, with 257 positions where it has 197
        (1, 6 * 444_864 + 2 * 192 + 258 * 192 + 385 * 192),  # layers, norm, token and positions, the projection
    ],
)
def test_published_sizes(level, parameters):
    with torch.device("meta"):
        encoder = configure("hipt", "paper").build().input.lower[level]
    own = [weight.numel() for name, weight in encoder.named_parameters() if not name.startswith("input.encoder")]
    assert sum(own) == parameters


def test_an_encoder_keeps_its_own_initialisation():
    changes = {"initialisation.std": 0.5, "initialisation.scheme": "normal"}
    changes |= {f"input.encoder.{name}": value for name, value in changes.items()} | {"initialisation.std": 0.01}
    model = configure("hipt", "tiny", set=changes).build()
    assert model.input.encoder.stack.layers[0].feed_forward.up.weight.std() > 0.3
    assert model.stack.layers[0].feed_forward.up.weight.std() < 0.02


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"input.encoder.head": {"kind": "linear_classification", "classes": 3}}, "the head pooled"),
        ({"input.encoder.input.size": (8, 16)}, "must be the size of a square tile"),
        ({"input.size": (0, 4)}, "size must be rows and columns"),
        ({"input.encoder.input.channels": 24}, "channels"),
        ({"input.encoder.input.encoder.input.channels": 24}, "the encoder's width is 24"),
        ({"input.resize": "bicubic"}, "does nothing where no positions are learned"),
    ],
)
def test_refusals(changes, told):
    with pytest.raises(KinformerError, match=told):
        configure("hipt", "tiny", set=changes)


def test_values_that_are_no_images(pyramid):
    with pytest.raises(KinformerError, match="images must be"):
        pyramid(torch.rand(1, 4, 8, 8, dtype=torch.float64))
    with pytest.raises(KinformerError, match="valid: an image does not have padding"):
        pyramid(torch.rand(1, 3, 32, 32, dtype=torch.float64), valid=torch.tensor([[True, True, True, False]]))
