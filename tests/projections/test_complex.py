"""Complex heads in real numbers, against PyTorch's complex arithmetic and the authors' code.

The golden arrays were computed in float64 by the text classification code of Wang et al. 2020. Its attention sees both
sides, so that a causal mixer is compared at the last token that a row's mask lets in.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.core.contract import Chunk
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Full
from kinformer.parts.projections import Complex
from kinformer.parts.scores import Modulus
from kinformer.runtime.errors import KinformerError


def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "complex_order.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def close(got, want, limit=1e-10):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= limit


def complexes(x):
    return torch.complex(*x.chunk(2, dim=-1))


def attend(q, k, v, score):
    visibility, scoring = Visibility(Full.Config().build()), Scoring(score.scale, score.form)
    return attention(score.queries(q), k, v, visibility, scoring, impl="reference").out


def test_bare_attention_is_that_of_the_authors():
    arrays = golden()
    q, k, v = (torch.cat([arrays[f"in.fn.{part}_{half}"] for half in ("real", "imag")], -1) for part in "qkv")
    got = attend(q, k, v, Modulus.Config().build(2, 8))
    close(got, torch.cat([arrays["out.fn.real"], arrays["out.fn.imag"]], -1))
    hermitian = attend(q, k, v, Modulus.Config(conjugate=True).build(2, 8))
    assert (hermitian - got).abs().max() > 0.1


def test_mixer_is_that_of_the_authors():
    arrays = golden()
    weights = {
        kind: [arrays[f"w.encoder.layers.0.self_attn.linears_real.{index}.{kind}"] for index in range(4)]
        for kind in ("weight", "bias")
    }
    mixer = SoftmaxAttention.Config(num_heads=2, projection=Complex.Config(), score=Modulus.Config()).build(16).double()
    with torch.no_grad():
        for kind, (*qkv, out) in weights.items():
            getattr(mixer.projection.qkv[0], kind).copy_(torch.cat(qkv))
            getattr(mixer.out.parts[0], kind).copy_(out)
        x = torch.cat([arrays["in.mha.real"], arrays["in.mha.imag"]], -1)
        y, _ = mixer(Chunk(x), mixer.initial_state(2, dtype=x.dtype))
    want = torch.cat([arrays["out.mha.real"], arrays["out.mha.imag"]], -1)
    lengths = arrays["in.mask"].sum(-1)[:, 0].tolist()
    assert lengths == [5, 3]
    for row, length in enumerate(lengths):
        close(y[row, length - 1], want[row, length - 1])


@pytest.mark.parametrize("conjugate", [False, True])
def test_scores_are_moduli_of_complex_products(conjugate):
    q, k, v = torch.randn(3, 2, 2, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    score = Modulus.Config(conjugate=conjugate).build(2, 8)
    queries = complexes(q).conj() if conjugate else complexes(q)
    logits = (queries @ complexes(k).mT).abs() / 4**0.5
    close(attend(q, k, v, score), logits.softmax(-1) @ v)


def waves(first):
    """Six tokens of one amplitude from position ``first`` on, with one frequency per feature for all of them."""
    rate = torch.tensor([1.0, 0.3, 0.01, 2.0], dtype=torch.float64)
    angle = (torch.arange(6, dtype=torch.float64) + first)[:, None] * rate
    return torch.cat([angle.cos(), angle.sin()], -1)[None, None]


@pytest.mark.parametrize("conjugate", [False, True])
def test_hermitian_scores_of_waves_depend_on_distance_alone(conjugate):
    """The point of the option: without it the phases of query and key add up."""
    v = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    score = Modulus.Config(conjugate=conjugate).build(1, 8)
    here, there = (attend(waves(first), waves(first), v, score) for first in (0, 7))
    assert ((here - there).abs().max() < 1e-9) == conjugate


def test_without_imaginary_parts_scores_are_absolute_values():
    torch.manual_seed(0)
    config = SoftmaxAttention.Config(
        num_heads=2, projection=Complex.Config(bias=False), score=Modulus.Config(), bias=False
    )
    mixer = config.build(16).double()
    real, imaginary = torch.randn(2, 2, 7, 8, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = mixer.projection.qkv[0](real).view(2, 7, 3, 2, 4).permute(2, 0, 3, 1, 4)
        hidden = ~torch.ones(7, 7, dtype=torch.bool).tril()
        weights = ((q @ k.mT).abs() / 4**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        want = mixer.out.parts[0]((weights @ v).transpose(1, 2).flatten(2))
        for share in (0.0, 0.1):
            x = torch.cat([real, share * imaginary], -1)
            y, _ = mixer(Chunk(x), mixer.initial_state(2, dtype=x.dtype))
            gap = (y - torch.cat([want, torch.zeros_like(want)], -1)).abs().max()
            assert gap < 1e-9 if share == 0 else gap > 1e-3


def test_parts_have_their_own_weights_unless_shared():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    for shared in (True, False):
        projection = Complex.Config(shared=shared).build(16, 2, 8)
        q, k, v = projection(x)
        halves = [module(half) for module, half in zip(list(projection.qkv) * 2, x.chunk(2, -1), strict=False)]
        for index, heads in enumerate((q, k, v)):
            assert heads.shape == (2, 2, 5, 8)
            for part, half in zip(heads.chunk(2, -1), halves, strict=True):
                want = half.view(2, 5, 3, 2, 4)[:, :, index].transpose(1, 2)
                close(part, want, 1e-6)
        assert len(projection.qkv) == (1 if shared else 2)


def test_output_puts_the_parts_back():
    """One head of the whole width and products of one: what comes in goes out, imaginary parts behind real ones."""
    for num_heads in (1, 2):
        output = Complex.Config().build_output(16, num_heads, 16 // num_heads, bias=False)
        with torch.no_grad():
            output.parts[0].weight.copy_(torch.eye(8))
        y = torch.randn(2, num_heads, 5, 16 // num_heads)
        real, imaginary = (half.transpose(1, 2).flatten(2) for half in y.chunk(2, -1))
        close(output(y.transpose(1, 2).flatten(2)), torch.cat([real, imaginary], -1), 1e-6)


def test_odd_widths_are_refused():
    with pytest.raises(KinformerError, match="pairs real and imaginary features, but dim is 15"):
        Complex.Config().build(15, 1, 15)
    with pytest.raises(KinformerError, match="head_dim 3"):
        Complex.Config().build(12, 4, 3)
