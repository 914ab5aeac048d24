"""Complex-order embeddings against the authors' code and against complex numbers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.parts.positions import ComplexOrder
from kinformer.runtime.errors import KinformerError


def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "complex_order.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def test_is_that_of_the_authors():
    """Text classification (float64), whose positions count backwards to 0."""
    arrays = golden()
    embedding = ComplexOrder.Config().build(13, 16).double()
    with torch.no_grad():
        embedding.weight.copy_(arrays["w.src_word_emb.weight"])
        embedding.offset.copy_(arrays["w.position_enc.weight"] - embedding._first(embedding.weight.device))
        got = embedding(arrays["in.tokens"].mT, torch.arange(4, -1, -1).expand(2, 5))
    want = torch.cat([arrays["out.embedding_real"], arrays["out.embedding_imag"]], -1)
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-12


@pytest.mark.parametrize("phase", [False, True])
@pytest.mark.parametrize(("sharing", "shape"), [("none", (7, 4)), ("features", (7, 1)), ("tokens", (1, 4))])
def test_is_amplitude_times_wave(sharing, shape, phase):
    torch.manual_seed(0)
    embedding = ComplexOrder.Config(sharing=sharing, phase=phase).build(7, 8).double()
    assert embedding.offset.shape == shape
    first = torch.tensor([1.0] if shape[1] == 1 else [1.0, 1.0, 1e-2, 1e-2], dtype=torch.float64)
    with torch.no_grad():
        embedding.offset.normal_()
        if phase:
            embedding.phase.normal_()
    tokens, positions = torch.randint(7, (2, 5)), torch.randint(1000, (2, 5))
    rate = (first + embedding.offset).expand(7, 4)[tokens]
    angle = rate * positions[..., None]
    if phase:
        angle = angle + embedding.phase.expand(7, 4)[tokens]
    want = embedding.weight[tokens] * torch.exp(1j * angle)
    got = torch.complex(*embedding(tokens, positions).chunk(2, -1))
    assert (got - want).abs().max() < 1e-10


def test_far_positions_are_exact_in_float32():
    embedding = ComplexOrder.Config().build(3, 8)
    with torch.no_grad():
        embedding.offset.fill_(0.1)
        embedding.weight.fill_(1.0)
        far = 10**6 + 1
        got = embedding(torch.tensor([[1]]), torch.tensor([[far]]))[0, 0]
        rate = 1 + embedding.offset[1, 0].item()
    assert float(got[0]) == pytest.approx(math.cos(rate * far), abs=1e-6)
    assert float(got[4]) == pytest.approx(math.sin(rate * far), abs=1e-6)


def test_weight_decay_leaves_the_first_frequencies_alone():
    embedding = ComplexOrder.Config().build(3, 8).double()
    optimiser = torch.optim.SGD(embedding.parameters(), lr=1.0, weight_decay=0.5)
    tokens, positions = torch.tensor([[0, 1, 2]]), torch.tensor([[3, 1, 4]])
    before = embedding(tokens, positions).detach()
    for parameter in embedding.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    assert (embedding(tokens, positions) - before / 2).abs().max() < 1e-12


def test_frequencies_may_begin_at_random():
    torch.manual_seed(0)
    table = ComplexOrder.Config(frequencies="random").build(500, 8)
    assert table.offset.abs().max() <= torch.pi and abs(float(table.offset.detach().std()) - torch.pi / 3**0.5) < 0.05
    tokens, positions = torch.tensor([[3, 8]]), torch.tensor([[0, 5]])
    angle = table.offset[[3, 8]].double() * positions[0, :, None]
    want = torch.cat([table.weight[[3, 8]] * turn for turn in (angle.cos().float(), angle.sin().float())], -1)
    assert (table(tokens, positions)[0] - want).abs().max() < 1e-5
    with pytest.raises(KinformerError, match="frequencies = 'random'"):
        ComplexOrder.Config(frequencies="random", base=100.0)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(KinformerError, match="even width, but the width is 7"):
        ComplexOrder.Config().build(3, 7)
    with pytest.raises(KinformerError, match="base must be above 1"):
        ComplexOrder.Config(base=1.0)
