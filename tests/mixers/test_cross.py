"""Cross-attention: the contract with a source bound to it, against PyTorch's own, and what its source must be."""

import pytest
import torch
from torch import nn

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.state import difference, join_rows, repeat_rows, select_rows, select_sources
from kinformer.family.kinds import kinds
from kinformer.mixers.cross import CrossAttention
from kinformer.runtime.errors import KinformerError
from kinformer.testing import MixerSubject, verify_config, verify_mixer

DIM, SOURCE_DIM, SOURCE = 16, 12, 7
CONFIG = CrossAttention.Config(num_heads=2, source_dim=SOURCE_DIM)
SKIP = {"structure": "its state begins with the source's keys and values, which are not zero"}


class Bound(CrossAttention):
    """Every row looks at one source of seven tokens, the fifth of which is padding and holds NaN; it has no graph."""

    @torch.no_grad()
    def initial_state(self, batch, *, device=None, dtype=None):
        source = torch.randn(1, SOURCE, SOURCE_DIM, generator=torch.Generator().manual_seed(9))
        source[:, 4] = torch.nan
        valid = (torch.arange(SOURCE) != 4).expand(batch, -1)
        source = source.to(self.key_value.weight.dtype).expand(batch, -1, -1)
        return super().initial_state(batch, device=device, dtype=dtype, source=source, source_valid=valid)

    def state_bytes(self, length, *, dtype=torch.float32):
        return super().state_bytes(length, dtype=dtype, source_length=SOURCE)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_contract():
    report = verify_mixer(lambda: Bound(CONFIG, DIM), dim=DIM, skip=SKIP)
    needed = {"causality", "partition", "padding", "ragged_reset", "reserved", "gradcheck", "compile"}
    assert needed <= set(report.passed)


def test_it_survives_a_file():
    def subject(config):
        return MixerSubject(lambda: Bound(config, DIM), dim=DIM)

    verify_config(CONFIG, kinds(), dim=DIM, subject=subject)


@pytest.mark.parametrize("score", ["dot", "additive", {"kind": "capped", "cap": 2.0}])
def test_contract_with_another_score(score):
    config = CrossAttention.Config(num_heads=2, source_dim=SOURCE_DIM, score=score)
    verify_mixer(lambda: Bound(config, DIM), dim=DIM, skip=SKIP | {"compile": "that of the first test is enough"})


def test_without_a_scale_it_is_that_of_scaled_queries(pair):
    _, ours = pair
    other = CONFIG.replace(score="dot").build(DIM).double()
    other.load_state_dict(ours.state_dict())
    with torch.no_grad():
        other.query.weight.mul_((DIM // 2) ** -0.5)
        other.query.bias.mul_((DIM // 2) ** -0.5)
    x, source = random(3, 5, DIM), random(3, SOURCE, SOURCE_DIM, seed=1)
    results = [model(Chunk(x), model.initial_state(3, source=source))[0] for model in (ours, other)]
    assert (results[0] - results[1]).abs().max() < 1e-12


@pytest.fixture
def pair():
    """PyTorch's multi-head attention, and ours with its weights, in float64."""
    theirs = nn.MultiheadAttention(DIM, 2, kdim=SOURCE_DIM, vdim=SOURCE_DIM, batch_first=True).double().eval()
    ours = CONFIG.build(DIM).double().eval()
    with torch.no_grad():
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
        ours.query.weight.copy_(theirs.q_proj_weight)
        ours.key_value.weight.copy_(torch.cat([theirs.k_proj_weight, theirs.v_proj_weight]))
        query, *rest = theirs.in_proj_bias.chunk(3)
        ours.query.bias.copy_(query)
        ours.key_value.bias.copy_(torch.cat(rest))
        ours.out.load_state_dict(theirs.out_proj.state_dict())
    return theirs, ours


def test_it_is_that_of_pytorch(pair):
    theirs, ours = pair
    x, source = random(3, 5, DIM), random(3, SOURCE, SOURCE_DIM, seed=1)
    valid = torch.arange(SOURCE) < torch.tensor([[SOURCE], [4], [1]])
    x.requires_grad_()
    source.requires_grad_()
    want, _ = theirs(x, source, source, key_padding_mask=~valid, need_weights=False)
    got, _ = ours(Chunk(x), ours.initial_state(3, source=source, source_valid=valid))
    assert (got - want).abs().max() < 1e-12
    for mine, other in zip(*(torch.autograd.grad(y.square().sum(), (x, source)) for y in (got, want)), strict=True):
        assert (mine - other).abs().max() < 1e-11


def test_an_unknown_option_of_the_first_state_is_refused(pair):
    with pytest.raises(TypeError, match="source_mask"):
        pair[1].initial_state(3, source=random(3, SOURCE, SOURCE_DIM), source_mask=None)


def test_it_is_stepped_token_by_token(pair):
    _, ours = pair
    x, source = random(2, 6, DIM), random(2, SOURCE, SOURCE_DIM, seed=1)
    state = start = ours.initial_state(2, source=source)
    want, _ = ours(Chunk(x), start)
    for index in range(6):
        y, state = ours(Chunk(x[:, index : index + 1]), state)
        assert (y[:, 0] - want[:, index]).abs().max() < 1e-13
    assert difference(state, start) == 0.0


def test_padding_of_the_source_is_not_seen(pair):
    _, ours = pair
    x, source = random(3, 5, DIM), random(3, SOURCE, SOURCE_DIM, seed=1)
    valid = torch.arange(SOURCE) < torch.tensor([[5], [2], [0]])
    spoilt = source.masked_fill(~valid[..., None], torch.nan).requires_grad_()
    y, _ = ours(Chunk(x), ours.initial_state(3, source=spoilt, source_valid=valid))
    for row, count in enumerate((5, 2)):
        alone, _ = ours(Chunk(x[row : row + 1]), ours.initial_state(1, source=source[row : row + 1, :count]))
        assert (y[row] - alone[0]).abs().max() < 1e-13
    assert torch.equal(y[2], ours.out.bias.expand(5, -1))
    y.sum().backward()
    assert spoilt.grad.isfinite().all() and (spoilt.grad[~valid] == 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


def test_sequences_over_sources_of_unlike_length_are_joined(pair):
    _, ours = pair
    x, sources = random(2, 5, DIM), [random(1, length, SOURCE_DIM, seed=length) for length in (4, 7)]
    alone = [ours.initial_state(1, source=source) for source in sources]
    y, _ = ours(Chunk(x), join_rows(alone))
    for row in (0, 1):
        assert (y[row] - ours(Chunk(x[row : row + 1]), alone[row])[0][0]).abs().max() < 1e-13


def test_neighbouring_rows_share_a_source(pair):
    """As hypotheses of a beam do: three rows for each of the source's."""
    _, ours = pair
    x, source = random(6, 5, DIM), random(2, SOURCE, SOURCE_DIM, seed=1)
    valid = torch.arange(SOURCE) < torch.tensor([[SOURCE], [3]])
    state = ours.initial_state(2, source=source, source_valid=valid)
    y, after = ours(Chunk(x), state)
    want, _ = ours(Chunk(x), repeat_rows(state, 3))
    assert (y - want).abs().max() < 1e-13 and len(after.k) == 2
    shared = repeat_rows((state, x), 3, sources=False)
    assert len(shared[0].k) == 2 and len(shared[1]) == 18
    rows = torch.tensor([5, 0])
    selected = select_rows(shared, rows, sources=False)
    assert selected[0] is state and torch.equal(selected[1], shared[1][rows])
    second = select_sources(shared, torch.tensor([1]))
    assert torch.equal(second[0].k, state.k[1:]) and second[1] is shared[1]


def test_a_reset_keeps_the_source(pair):
    _, ours = pair
    x, state = random(2, 6, DIM), ours.initial_state(2, source=random(2, SOURCE, SOURCE_DIM, seed=1))
    reset = torch.rand(2, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(ours(Chunk(x, reset=reset), state)[0], ours(Chunk(x), state)[0])


def test_a_wrong_source_is_one_sentence():
    mixer = CONFIG.build(DIM)
    with pytest.raises(KinformerError, match=r"begin with initial_state\(batch, source="):
        mixer.initial_state(2)
    for shape in ((2, SOURCE_DIM), (3, 4, SOURCE_DIM), (2, 4, DIM)):
        with pytest.raises(KinformerError, match=r"expected \[2, length, 12\]"):
            mixer.initial_state(2, source=torch.zeros(shape))


def test_a_decoder_has_no_source_yet():
    model = kinformer.build("gpt", recipe="tiny", set={"layers.*.mixer": "cross"})
    with pytest.raises(KinformerError, match="cross-attention has nothing to look at"):
        model(torch.zeros(1, 3, dtype=torch.int64))
