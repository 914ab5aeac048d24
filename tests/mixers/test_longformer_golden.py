"""Longformer's attention against that of its authors (their ``LongformerSelfAttention``, sliding chunks, float32).

Their module returns the heads side by side, so that the output projection is the identity here.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.core.encoder import SequenceContext, global_positions
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.parts.patterns.sequence import Window
from kinformer.parts.projections import MultiHeadGlobal

GOLDEN = Path(__file__).parents[1] / "golden" / "longformer.npz"
IMPLS = ("auto", "reference", "chunked")


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def mixer_of(golden, impl="auto"):
    """In float64, with the authors' weights."""
    config = BidirectionalAttention.Config(
        num_heads=int(golden["heads"]),
        projection=MultiHeadGlobal.Config(),
        pattern=Window(window=int(golden["window_one_sided"])),
        bias=False,
        impl=impl,
    )
    mixer = config.build(golden["x"].shape[2])
    weights = {"out.weight": torch.eye(golden["x"].shape[2])}
    for kind in ("weight", "bias"):
        weights[f"projection.qkv.{kind}"] = torch.cat([golden[f"w.{one}.{kind}"] for one in ("query", "key", "value")])
        for one in ("query", "key", "value"):
            weights[f"projection.of_global.{one}.{kind}"] = golden[f"w.{one}_global.{kind}"]
    mixer.load_state_dict(weights)
    return mixer.double()


def texts(golden):
    """The three texts of the fixture: plain, padded, padded with global tokens."""
    valid = golden["kind"] >= 0
    return {
        "window": SequenceContext(),
        "padded": SequenceContext(valid),
        "global": SequenceContext(valid, global_positions(golden["kind"], valid)),
    }


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["window", "padded", "global"])
def test_outputs(golden, name, impl):
    with torch.no_grad():
        got = mixer_of(golden, impl)(golden["x"].double(), texts(golden)[name])
    want = golden[f"out_{name}"]
    assert (got - want).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients(golden, impl):
    mixer, x = mixer_of(golden, impl), golden["x"].double().requires_grad_()
    (mixer(x, texts(golden)["global"]) * golden["grad_out"]).sum().backward()
    of_global, dim = mixer.projection.of_global, x.shape[2]
    got = {
        "x": x.grad,
        "w.query.weight": mixer.projection.qkv.weight.grad[:dim],
        "w.key.weight": mixer.projection.qkv.weight.grad[dim : 2 * dim],
        "w.query_global.weight": of_global.query.weight.grad,
        "w.value_global.weight": of_global.value.weight.grad,
    }
    for name, gradient in got.items():
        want = golden[f"grad_{name}"]
        assert (gradient - want).abs().max() < 5e-5 * want.abs().max(), name
