"""Rotary positions: the frequencies and rotations of others, what scaling keeps, and what is refused.

The golden arrays are those of transformers 4.57.6 (Llama, GPT-J, GPT-NeoX) and of YaRN's authors (NTK-aware).
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.parts.relative_positions import Rope, frequencies
from kinformer.runtime.errors import KinformerError

GOLDEN = Path(__file__).parents[1] / "golden" / "rope.npz"
SCALINGS = {
    "default": {},
    "linear": {"scaling": "linear", "factor": 4.0},
    "ntk": {"scaling": "ntk", "factor": 4.0},
    "yarn": {"scaling": "yarn", "factor": 4.0, "original_length": 2048},
    "partial": {"fraction": 0.5},
}


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in SCALINGS
        for layout in ("half", "interleaved")
        if (name, layout) != ("partial", "interleaved")
    ],
)
def test_rotations_are_those_of_others(golden, name, layout):
    rope = Rope.Config(layout=layout, **SCALINGS[name]).build(16)
    rate = frequencies(rope.config, rope.width)
    assert torch.allclose(rate.float(), golden[f"{name}.inv_freq"], rtol=2e-7, atol=0)
    q, k = rope.rotate(golden["in.q"], golden["in.k"], golden["in.position_ids"])
    for got, part in ((q, "q"), (k, "k")):
        assert (got - golden[f"{name}.{part}_{layout}"]).abs().max() < 1e-6


def transformers_rope(kind, head_dim, length, monkeypatch, **parameters):
    """Frequencies [head_dim / 2] and attention factor of transformers, which computes in ``torch.float``."""
    modeling = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": length}
    config = LlamaConfig(**sizes, rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters})
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    return modeling.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


LENGTH = "original_max_position_embeddings"
FLAT = {"factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("factor", "original"), [(2.0, 512), (16.0, 4096), (3.5, 1_000_000), (8.0, 40)])
def test_yarn_is_that_of_transformers(head_dim, factor, original, monkeypatch):
    """The third length is so long that the ramp ends at its bound."""
    want, magnitude = transformers_rope(
        "yarn", head_dim, original, monkeypatch, factor=factor, **{LENGTH: original}, attention_factor=None
    )
    rope = Rope.Config(scaling="yarn", factor=factor, original_length=original).build(head_dim)
    assert torch.allclose(frequencies(rope.config, head_dim), want, rtol=1e-12, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        ("linear", {"factor": 8.0}, {"factor": 8.0}),
        ("yarn", {"factor": 8.0, "truncate": False}, {"factor": 8.0, "truncate": False}),
        ("yarn", {"factor": 4.0, "attention_factor": 0.7}, {"factor": 4.0, "attention_factor": 0.7}),
        (
            "yarn",
            {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
            {"factor": 4.0, "beta_fast": 16, "beta_slow": 2},
        ),
        ("llama3", {"factor": 8.0}, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("llama3", FLAT, FLAT),
    ],
)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_scaled_frequencies_are_those_of_transformers(kind, ours, theirs, head_dim, monkeypatch):
    length = {} if kind == "linear" else {"original_length": 1024}
    theirs = theirs if kind == "linear" else theirs | {LENGTH: 1024}
    want, magnitude = transformers_rope(kind, head_dim, 1024 * 8, monkeypatch, **theirs)
    rope = Rope.Config(scaling=kind, **ours, **length).build(head_dim)
    assert torch.allclose(frequencies(rope.config, head_dim), want, rtol=1e-12, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)


def products(rope, positions, dim=8):
    """q . k of fixed vectors, the query last, at each of ``positions`` [n]."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(dim, generator=generator, dtype=torch.float64) for _ in range(2))
    turned = [rope.rotate(q[None, None, None], k[None, None, None], torch.tensor([[p]])) for p in positions]
    return torch.stack([(turned[-1][0] * key).sum() for _, key in turned])


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_products_depend_on_distance_only_also_at_a_million(name, layout):
    rope = Rope.Config(layout=layout, **SCALINGS[name]).build(8)
    near, far = products(rope, [0, 3, 7, 20]), products(rope, [10**6, 10**6 + 3, 10**6 + 7, 10**6 + 20])
    assert (near - far).abs().max() < 1e-9
    assert (near - near[0]).abs().max() > 1e-2


def test_layouts_are_one_rotation_of_permuted_features():
    x = torch.randn(1, 1, 5, 8, dtype=torch.float64)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    positions = torch.arange(5)[None]
    half, _ = Rope.Config().build(8).rotate(x[..., order], x[..., order], positions)
    interleaved, _ = Rope.Config(layout="interleaved").build(8).rotate(x, x, positions)
    assert torch.equal(half, interleaved[..., order])


def test_interpolated_positions_are_positions_between():
    plain, linear = Rope.Config().build(8), Rope.Config(scaling="linear", factor=4.0).build(8)
    assert (products(plain, [0, 1, 5]) - products(linear, [0, 4, 20])).abs().max() < 1e-12


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_sharpens():
    config = Rope.Config(scaling="yarn", factor=8.0, original_length=1024)
    plain, scaled = frequencies(Rope.Config(), 64), frequencies(config, 64)
    turns = plain * 1024 / (2 * math.pi)
    assert torch.equal(scaled[turns > 40], plain[turns > 40])
    assert torch.allclose(scaled[turns < 0.7], plain[turns < 0.7] / 8, rtol=1e-12, atol=0)
    between = (scaled < plain * 0.999) & (scaled > plain / 8 * 1.001)
    assert between.sum() > 3
    rope, x, origin = config.build(64), torch.randn(1, 1, 1, 64, dtype=torch.float64), torch.zeros(1, 1)
    sharper = 0.1 * math.log(8) + 1
    assert torch.allclose(rope.rotate(x, x, origin)[0], sharper * x, rtol=1e-12)


def test_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest():
    rates = [frequencies(Rope.Config(**options), 32) for options in ({}, SCALINGS["ntk"])]
    assert rates[1][0] == rates[0][0]
    assert rates[1][-1] * 4 == pytest.approx(float(rates[0][-1]))


def test_a_fraction_leaves_the_rest_alone():
    x = torch.randn(2, 3, 5, 12)
    for layout in ("half", "interleaved"):
        turned, _ = Rope.Config(layout=layout, fraction=1 / 3).build(12).rotate(x, x, torch.arange(5).expand(2, 5))
        assert torch.equal(turned[..., 4:], x[..., 4:])
        assert (turned[:, :, 1:, :4] - x[:, :, 1:, :4]).abs().min() > 0


@pytest.mark.parametrize(
    ("options", "head_dim", "told"),
    [
        ({}, 7, "needs an even head_dim, but head_dim is 7"),
        ({"fraction": 0.5}, 6, "head_dim is 6, and fraction = 0.5 leaves 3"),
        ({"fraction": 0.1}, 8, "leaves 0"),
        ({"fraction": 1.5}, 8, "fraction must be above 0 and at most 1"),
        ({"base": 1.0}, 8, "base must be above 1"),
        ({"factor": 0.5}, 8, "factor must be 1 or more"),
        ({"factor": 2.0}, 8, "scaling is 'none' with factor = 2; set both"),
        ({"scaling": "linear"}, 8, "scaling is 'linear' with factor = 1; set both"),
        ({"scaling": "ntk", "factor": 2.0}, 2, "needs 4 or more features"),
        ({"scaling": "yarn", "factor": 2.0}, 8, "needs original_length, the length that the model was trained at"),
        ({"original_length": 0}, 8, "original_length must be 1 or more"),
        ({"scaling": "llama3", "factor": 2.0}, 8, "'llama3' needs original_length"),
        ({"scaling": "longrope", "factors": (1.0, 2.0)}, 4, "'longrope' needs original_length"),
        ({"scaling": "longrope", "factors": (1.0, 2.0), "original_length": 9}, 8, "of each of the 4 pairs that turn"),
        ({"factors": (1.0, 0.0)}, 4, "factors must be above 0 and finite"),
        ({"low_freq_factor": 4.0}, 8, "low_freq_factor = 4 must lie between 0 and high_freq_factor = 4"),
        ({"attention_factor": 0.0}, 8, "attention_factor must be above 0"),
        ({"scaling": "linear", "factor": 2.0, "truncate": False}, 8, "truncate = False does nothing with scaling"),
        ({"beta_fast": 1.0}, 8, "beta_slow = 1 must lie between 0 and beta_fast = 1"),
    ],
)
def test_what_cannot_be_is_refused(options, head_dim, told):
    with pytest.raises(KinformerError, match=told.replace("(", r"\(")):
        Rope.Config(**options).build(head_dim)
