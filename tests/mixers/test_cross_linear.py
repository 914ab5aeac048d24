"""Linear cross-attention: the contract with a source bound to it, its formula, and exact cross-attention nearby."""

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.state import form, repeat_rows
from kinformer.family.kinds import kinds
from kinformer.mixers.cross import CrossAttention, LinearCrossAttention
from kinformer.mixers.encoders import BidirectionalLinear
from kinformer.parts.feature_maps import Elu, Favor, RandomFourier
from kinformer.runtime.errors import KinformerError
from kinformer.testing import MixerSubject, verify_config, verify_mixer

DIM, SOURCE_DIM, SOURCE = 16, 12, 7
MAPS = {
    "elu": {},
    "favor": {"feature_map": Favor.Config(features=6)},
    "sines": {"feature_map": RandomFourier.Config(features=5), "floor": 0.1},
}
SKIP = {"structure": "its state begins with the sums over a source, which are not zero"}


def config(name="elu"):
    return LinearCrossAttention.Config(num_heads=2, source_dim=SOURCE_DIM, **MAPS[name])


class Bound(LinearCrossAttention):
    """Every row looks at one source of seven tokens, the fifth of which is padding and holds NaN; it has no graph."""

    @torch.no_grad()
    def initial_state(self, batch, *, device=None, dtype=None):
        source = torch.randn(1, SOURCE, SOURCE_DIM, generator=torch.Generator().manual_seed(9))
        source[:, 4] = torch.nan
        valid = (torch.arange(SOURCE) != 4).expand(batch, -1)
        source = source.to(self.key_value.weight.dtype).expand(batch, -1, -1)
        return super().initial_state(batch, device=device, dtype=dtype, source=source, source_valid=valid)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", MAPS)
def test_contract(name):
    skip = SKIP if name == "favor" else SKIP | {"compile": "that of one feature map is enough"}
    report = verify_mixer(lambda: Bound(config(name), DIM), dim=DIM, skip=skip)
    assert {"causality", "partition", "padding", "ragged_reset", "reserved", "gradcheck"} <= set(report.passed)


def test_it_survives_a_file():
    subject = lambda item: MixerSubject(lambda: Bound(item, DIM), dim=DIM)  # noqa: E731
    verify_config(config(), kinds(), dim=DIM, subject=subject)


@pytest.mark.parametrize("name", MAPS)
def test_it_is_its_formula(name):
    """Every weight phi(q) . phi(k) by itself, with the factors that features lack."""
    mixer = config(name).build(DIM).double().eval()
    x, source = random(3, 5, DIM), random(3, SOURCE, SOURCE_DIM, seed=1)
    valid = torch.arange(SOURCE) < torch.tensor([[SOURCE], [4], [1]])
    got, _ = mixer(Chunk(x), mixer.initial_state(3, source=source, source_valid=valid))
    k, v = mixer.key_value(source).view(3, SOURCE, 2, 2, 8).permute(2, 0, 3, 1, 4)
    phi_q = mixer.feature_map.queries(mixer.query(x).view(3, 5, 2, 8).transpose(1, 2))
    phi_k, lacking = mixer.feature_map.keys(k)
    weights = phi_q @ phi_k.mT
    if lacking is not None:
        lacking = lacking.masked_fill(~valid[:, None], -torch.inf)
        weights = weights * (lacking - lacking.amax(-1, keepdim=True)).exp()[:, :, None]
    weights = weights.masked_fill(~valid[:, None, None], 0)
    total = weights.sum(-1, keepdim=True)
    total = total.clamp_min(0.1) if name == "sines" else total + mixer.config.eps
    want = mixer.out((weights / total @ v).transpose(1, 2).flatten(2))
    assert (got - want).abs().max() < 1e-12


def test_over_the_text_itself_it_is_an_encoders():
    """The same weights in the encoder's mixer, which has a test against code of others."""
    theirs = BidirectionalLinear.Config(num_heads=2, feature_map=Elu.Config()).build(DIM).double()
    ours = LinearCrossAttention.Config(num_heads=2).build(DIM).double()
    with torch.no_grad():
        for name in ("weight", "bias"):
            rows = getattr(theirs.qkv, name)
            getattr(ours.query, name).copy_(rows[:DIM])
            getattr(ours.key_value, name).copy_(rows[DIM:])
        ours.out.load_state_dict(theirs.out.state_dict())
    x = random(2, 6, DIM)
    y, _ = ours(Chunk(x), ours.initial_state(2, source=x))
    assert (y - theirs(x)).abs().max() < 1e-12
    longer = torch.cat([x, x[:, :1]], dim=1)
    assert (ours(Chunk(x), ours.initial_state(2, source=longer))[0] - theirs(x)).abs().max() > 1e-6


def test_with_many_features_it_comes_near_exact_cross_attention():
    torch.manual_seed(0)
    exact = CrossAttention.Config(num_heads=2, source_dim=SOURCE_DIM).build(DIM).double()
    x, source = 0.5 * random(2, 5, DIM), 0.5 * random(2, SOURCE, SOURCE_DIM, seed=1)
    want, _ = exact(Chunk(x), exact.initial_state(2, source=source))
    gaps = []
    for features in (16, 4096):
        torch.manual_seed(0)
        favor = Favor.Config(features=features)
        ours = LinearCrossAttention.Config(num_heads=2, source_dim=SOURCE_DIM, feature_map=favor).build(DIM).double()
        ours.load_state_dict(ours.state_dict() | exact.state_dict())
        y, _ = ours(Chunk(x), ours.initial_state(2, source=source))
        gaps.append((y - want).square().mean().sqrt().item())
    assert gaps[1] < 0.1 * gaps[0]


def test_the_state_does_not_grow_with_the_source():
    mixer = config().build(DIM)
    short, long = (mixer.initial_state(2, source=torch.randn(2, count, SOURCE_DIM)) for count in (3, 300))
    assert form(short) == form(long)
    assert mixer.state_bytes(5, source_length=3) == mixer.state_bytes(5, source_length=300) == 4 * 2 * 8 * 9


def test_neighbouring_rows_share_a_source_and_padding_leaves_no_trace():
    mixer = config("favor").build(DIM).double().eval()
    x, source = random(6, 5, DIM), random(2, SOURCE, SOURCE_DIM, seed=1)
    valid = torch.arange(SOURCE) < torch.tensor([[SOURCE], [0]])
    spoilt = source.masked_fill(~valid[..., None], torch.nan).requires_grad_()
    state = mixer.initial_state(2, source=spoilt, source_valid=valid)
    y, after = mixer(Chunk(x), state)
    want, _ = mixer(Chunk(x), repeat_rows(state, 3))
    assert (y - want).abs().max() < 1e-13 and len(after.kv) == 2
    assert torch.equal(y[3:], mixer.out.bias.expand(3, 5, -1))
    y.sum().backward()
    assert spoilt.grad.isfinite().all() and (spoilt.grad[~valid] == 0).all()


def test_features_whose_sum_may_vanish_need_a_floor():
    with pytest.raises(
        KinformerError, match=r"products of either sign, .* use floor = 0.1, or a feature map of positive"
    ):
        LinearCrossAttention.Config(num_heads=2, feature_map="random_fourier").build(DIM)
    with pytest.raises(KinformerError, match=r"products of either sign, .* use a feature map of positive"):
        LinearCrossAttention.Config(num_heads=2, feature_map="identity", floor=0.1).build(DIM)


def test_dropout_of_exact_cross_attention():
    mixer = CrossAttention.Config(num_heads=2, source_dim=SOURCE_DIM, dropout=0.5).build(DIM)
    x, state = torch.randn(2, 5, DIM), mixer.initial_state(2, source=torch.randn(2, SOURCE, SOURCE_DIM))
    whole = mixer.eval()(Chunk(x), state)[0]
    mixer.train()
    draws = [mixer(Chunk(x), state)[0] for _ in range(300)]
    assert not torch.equal(draws[0], draws[1]) and (torch.stack(draws).mean(0) - whole).abs().max() < 0.15


@pytest.mark.parametrize("kind", ["favor", "random_fourier", "elu"])
def test_a_translator_learns_by_it(kind):
    """One pair of sentences is learnt by heart."""
    torch.manual_seed(0)
    cross = {
        "kind": "cross_linear",
        "num_heads": 2,
        "feature_map": kind,
        "floor": 0.1 if kind == "random_fourier" else 0,
    }
    model = kinformer.build("vanilla", recipe="tiny", set={"layers.*.further_mixers": [cross]})
    source, target = torch.randint(256, (2, 6)), torch.randint(256, (2, 5))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        logits, _ = model(target[:, :-1], model.begin(source))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(parameter.grad is not None for parameter in model.stack.parameters())
