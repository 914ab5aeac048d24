"""Relative positions: their definitions written out, where they reduce to exact attention, and wrong uses."""

import copy
import math

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.parts import Position, PositionConfig, Relative
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.positions import Learned, NoPosition, Sinusoidal
from kinformer.parts.relative_positions import T5, Alibi, DistanceAware, Shaw, TransformerXL
from kinformer.runtime.errors import KinformerError

DIM, HEADS, WIDTH, TIME = 16, 2, 8, 21
RELATIVE = {
    "shaw": Shaw.Config(max_distance=4),
    "xl": TransformerXL.Config(),
    "t5": T5.Config(num_buckets=8, max_distance=12),
    "alibi": Alibi.Config(),
    "distance_aware": DistanceAware.Config(),
}


def attention(position, seed=0):
    torch.manual_seed(seed)
    mixer = SoftmaxAttention.Config(num_heads=HEADS, position=position).build(DIM).double()
    with torch.no_grad():
        for weight in mixer.position.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return mixer


def outputs(mixer, x=None, plain=None):
    """Outputs for random inputs, of the mixer with the products of ``plain`` if given."""
    x = torch.randn(2, TIME, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64) if x is None else x
    if plain is not None:
        mixer.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        return mixer(Chunk(x), mixer.initial_state(len(x)))[0]


def dense(mixer, scores, values):
    """Outputs by formulas of q, k [batch, heads, time, width] and of d [time, time], the distance of every pair."""
    x = torch.randn(2, TIME, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    d = torch.arange(TIME)[:, None] - torch.arange(TIME)
    with torch.no_grad():
        q, k, v = mixer.projection(x)
        p = scores(q, k, d.clamp_min(0)).masked_fill(d < 0, -math.inf).softmax(-1)
        y = p @ v + torch.einsum("bhij,ijw->bhiw", p, values(d.clamp_min(0)))
        return mixer.out(y.transpose(1, 2).flatten(2))


def nothing(d):
    return torch.zeros(*d.shape, WIDTH, dtype=torch.float64)


def test_shaw_by_its_equations():
    mixer = attention(RELATIVE["shaw"])
    keys, values = mixer.position.key_table, mixer.position.value_table

    def scores(q, k, d):
        moved = k[:, :, None] + keys[4 - d.clamp_max(4)]
        return (q[..., None, :] * moved).sum(-1) / WIDTH**0.5

    want = dense(mixer, scores, lambda d: values[4 - d.clamp_max(4)])
    assert (outputs(mixer) - want).abs().max() < 1e-12


def test_xl_by_its_equation():
    mixer = attention(RELATIVE["xl"])
    position = mixer.position
    u, v = (each[:, None] for each in (position.biases.content, position.biases.position))

    def scores(q, k, d):
        angle = d[..., None].double() / 10000 ** (torch.arange(0, DIM, 2).double() / DIM)
        r = position.projection(torch.cat([angle.sin(), angle.cos()], -1)).view(TIME, TIME, HEADS, WIDTH)
        return ((q + u) @ k.mT + torch.einsum("bhiw,ijhw->bhij", q + v, r)) / WIDTH**0.5

    assert (outputs(mixer) - dense(mixer, scores, nothing)).abs().max() < 1e-12


def test_distance_aware_by_its_equations():
    mixer = attention(RELATIVE["distance_aware"])
    rate, steepness = mixer.position.rate[:, None, None], mixer.position.steepness[:, None, None]

    def scores(q, k, d):
        factor = (1 + steepness.exp()) / (1 + (steepness - rate * d).exp())
        return (q @ k.mT).relu() * factor / WIDTH**0.5

    assert (outputs(mixer) - dense(mixer, scores, nothing)).abs().max() < 1e-12


def test_distance_aware_of_two_tokens_in_closed_form():
    """The share of the first token in the second's output is the sigmoid of the difference of their scores."""
    mixer = attention(RELATIVE["distance_aware"])
    x = torch.randn(1, 2, DIM, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with torch.no_grad():
        q, k, v = mixer.projection(x)
        first, second = ((q[:, :, 1] * k[:, :, j]).sum(-1).relu() / WIDTH**0.5 for j in (0, 1))
        v0 = mixer.position.steepness
        factor = (1 + v0.exp()) / (1 + (v0 - mixer.position.rate).exp())
        share = torch.sigmoid(first * factor - second)[..., None]
        want = mixer.out((share * v[:, :, 0] + (1 - share) * v[:, :, 1]).flatten(1))
    assert (outputs(mixer, x)[:, 1] - want).abs().max() < 1e-12


def factors(w, v, highest=50):
    position = DistanceAware.Config().build_heads(DIM, 1, WIDTH).double()
    with torch.no_grad():
        position.rate.fill_(w)
        position.steepness.fill_(v)
        return position.relative(0, highest).factor[0]


def test_distance_aware_limits():
    assert torch.equal(factors(0.0, 3.0), torch.ones(51, dtype=torch.float64))
    assert factors(-2.0, 0.5)[0] == 1
    growing, falling = factors(0.3, 1.0, 400), factors(-0.3, 1.0, 400)
    assert (growing.diff() >= 0).all() and abs(growing[-1] - 1 - math.e) < 1e-12
    assert (falling.diff() <= 0).all() and falling[-1] < 1e-50
    for w, v in ((50.0, 700.0), (-50.0, -700.0), (50.0, -700.0), (-50.0, 700.0)):
        assert not factors(w, v, 1000).isnan().any()
    assert abs(factors(-1.0, 800.0)[3] - math.exp(-3)) < 1e-15


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 12, 20, 40])
def test_alibi_slopes_of_any_number_of_heads(heads):
    """Against the authors' rule as a recursion."""

    def authors(n):
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        closest = 2 ** math.floor(math.log2(n))
        return authors(closest) + authors(2 * closest)[0::2][: n - closest]

    got = Alibi.Config().build_heads(heads * 4, heads, 4).to(torch.bfloat16).slopes()
    torch.testing.assert_close(got, torch.tensor(authors(heads), dtype=torch.float64), rtol=1e-12, atol=0)


def test_alibi_falls_on_both_sides():
    bias = Alibi.Config().build_heads(4, 1, 4).relative(-3, 2).bias
    assert bias.tolist() == [[-3 / 256, -2 / 256, -1 / 256, 0, -1 / 256, -2 / 256]]


EXACT = {"shaw": ("key_table", "value_table"), "t5": ("table",), "xl": ("projection.weight", "biases.content")}


@pytest.mark.parametrize("name", EXACT)
def test_positions_that_say_nothing_are_exact_attention(name):
    """Equal entries at all distances are none: softmax does not see a constant of the query."""
    plain = attention(NoPosition.Config())
    mixer = attention(RELATIVE[name])
    different = outputs(mixer, plain=plain)
    with torch.no_grad():
        for path in EXACT[name]:
            weight = mixer.position.get_parameter(path)
            weight.copy_(weight[:1].expand_as(weight) if path in ("key_table", "table") else 0)
    assert (outputs(mixer) - outputs(plain)).abs().max() < 1e-12
    assert (different - outputs(plain)).abs().max() > 1e-3


def test_distance_aware_without_rates_is_attention_by_rectified_scores():
    mixer = attention(RELATIVE["distance_aware"])
    rectified = dense(mixer, lambda q, k, d: (q @ k.mT).relu() / WIDTH**0.5, nothing)
    assert (outputs(mixer) - rectified).abs().max() > 1e-3
    with torch.no_grad():
        mixer.position.rate.zero_()
    assert (outputs(mixer) - rectified).abs().max() < 1e-12
    assert (outputs(attention(NoPosition.Config())) - rectified).abs().max() > 1e-3


def test_alibi_without_slopes_is_exact_attention():
    mixer, plain = attention(RELATIVE["alibi"]), outputs(attention(NoPosition.Config()))
    assert (outputs(mixer) - plain).abs().max() > 1e-3
    mixer.position.slopes = lambda: torch.zeros(HEADS, dtype=torch.float64)
    assert (outputs(mixer) - plain).abs().max() < 1e-12


def test_clipping_beyond_the_length_is_none():
    """Shaw's k, T5's and XL's farthest distance matter only to pairs that are as far apart."""
    for near, far in (
        (Shaw.Config(max_distance=TIME), Shaw.Config(max_distance=2 * TIME)),
        (TransformerXL.Config(clamp=TIME), TransformerXL.Config()),
    ):
        one, other = attention(near), attention(far)
        other.load_state_dict(
            {name: _rows(weight, one.state_dict()[name]) for name, weight in other.state_dict().items()}
        )
        assert (outputs(one) - outputs(other)).abs().max() < 1e-12
    clipped = attention(TransformerXL.Config(clamp=TIME - 2))
    got, want = outputs(clipped), outputs(other)
    assert (got - want)[:, : TIME - 1].abs().max() < 1e-12
    assert (got - want)[:, TIME - 1].abs().max() > 1e-6


def _rows(weight, narrow):
    """``narrow`` in the middle of a table like ``weight``."""
    if weight.shape == narrow.shape:
        return narrow
    skip = (len(weight) - len(narrow)) // 2
    return torch.cat([narrow[:1].expand(skip, -1), narrow, narrow[-1:].expand(skip, -1)])


@pytest.mark.parametrize("name", RELATIVE)
def test_ranges_are_parts_of_one_another(name):
    """However wide a range is asked for, a distance means the same; far ones are left out where they are alike."""
    position = RELATIVE[name].build_heads(DIM, HEADS, WIDTH).double()
    wide, narrow = position.relative(-9, 30), position.relative(0, 7)
    assert (wide.shift is None) == (narrow.shift is None) and (wide.shift is None or (wide.shift == narrow.shift).all())
    for field in Relative._fields[1:-1]:
        table, part = getattr(wide, field), getattr(narrow, field)
        assert (table is None) == (part is None)
        if table is not None:
            assert (table[:, 9 : 9 + part.shape[1]] - part).abs().max() < 1e-12
    reach = {"shaw": 4, "t5": 12}.get(name, 31)
    tables = [table for table in wide[1:-1] if table is not None]
    assert wide.lowest == -9 and all(table.shape[1] == 9 + reach for table in tables)
    if reach < 31:
        assert position.relative(reach, 40) is None


def test_rows_of_xl_are_kept_between_steps_and_follow_the_weights():
    position = TransformerXL.Config().build_heads(DIM, HEADS, WIDTH).double()
    made, project = [], position._project

    def counted(lowest, highest):
        made.append(highest - lowest + 1)
        return project(lowest, highest)

    position._project = counted

    def check(lowest, highest):
        with torch.no_grad():
            got = position.relative(lowest, highest)
        want = position.relative(lowest, highest)
        assert torch.allclose(got.keys, want.keys, rtol=0, atol=1e-13)
        assert torch.allclose(got.shift, want.shift, rtol=0, atol=1e-13)

    def added(position):
        relative = position.relative(0, 5)
        return relative.keys @ relative.shift.mT

    with torch.no_grad():
        for highest in range(9, 100):
            position.relative(0, highest)
    assert made == [10, 11, 22, 44, 88] and sum(made) <= 2 * 100
    del position._project
    twin = copy.deepcopy(position)
    assert position.state_dict().keys() == {"projection.weight", "biases.content", "biases.position"}
    with torch.no_grad():
        for name, weight in position.named_parameters():
            position.relative(0, 5)
            weight.add_(0.1)
            check(0, 5)
            check(3, 40)
            assert not torch.equal(added(position), added(twin)), name
        before = twin.relative(0, 5).keys
        twin.projection.weight.data = twin.projection.weight.data * 2
        assert torch.allclose(twin.relative(0, 5).keys, 2 * before)
    check(-3, 4)


@pytest.mark.parametrize("name", RELATIVE)
def test_a_model_refuses_what_acts_inside_attention(name):
    with pytest.raises(KinformerError, match=rf"'{name}' acts inside attention.*layers\.\*\.mixer\.position"):
        kinformer.build("gpt", recipe="tiny", set={"position": RELATIVE[name]})


@pytest.mark.parametrize("position", [Learned.Config(), Sinusoidal.Config()])
def test_a_mixer_refuses_what_is_added_to_tokens(position):
    with pytest.raises(KinformerError, match=f"'{position.kind}' is added to token embeddings"):
        kinformer.build("gpt", recipe="tiny", set={"layers.*.mixer.position": position})


class Strange(Position):
    """Somebody else's, by distance, whose config has nothing but ``build``."""

    class Config(PositionConfig):
        kind = "strange"

        def build(self, dim: int) -> Position:
            return Strange()

    def relative(self, lowest: int, highest: int) -> Relative:
        return Relative(lowest, bias=torch.zeros(1, highest - lowest + 1))


class StrangeHeads(Strange):
    """The same, built for heads alone."""

    class Config(PositionConfig):
        kind = "strange"

        def build_heads(self, dim: int, num_heads: int, head_dim: int) -> Position:
            return StrangeHeads()


class StrangeModel(Position):
    """Somebody else's at the tokens, built for a model alone."""

    class Config(PositionConfig):
        kind = "strange"

        def build_model(self, dim: int, depth: int) -> Position:
            return StrangeModel()

    def embed(self, positions):
        return torch.zeros(*positions.shape, 1)


@pytest.mark.parametrize("config", [Strange.Config(), StrangeHeads.Config()])
def test_a_stranger_s_position_by_distance_is_refused_as_the_model_s(config):
    with pytest.raises(KinformerError, match="'strange' acts inside attention, but was given to the model"):
        kinformer.build("gpt", recipe="tiny", set={"position": config})
    kinformer.build("gpt", recipe="tiny", set={"layers.*.mixer.position": config})


def test_a_stranger_s_position_at_the_tokens_is_refused_in_a_mixer():
    with pytest.raises(KinformerError, match="'strange' is added to token embeddings, but was given to a mixer"):
        kinformer.build("gpt", recipe="tiny", set={"layers.*.mixer.position": StrangeModel.Config()})
    kinformer.build("gpt", recipe="tiny", set={"position": StrangeModel.Config()})


def test_wrong_sizes_are_refused():
    for make, message in (
        (lambda: Shaw.Config(max_distance=0), "max_distance must be 1 or more"),
        (lambda: T5.Config(num_buckets=5), "multiple of 2"),
        (lambda: T5.Config(num_buckets=6, bidirectional=True), "multiple of 4"),
        (lambda: T5.Config(num_buckets=32, max_distance=16), "max_distance must be above 16"),
        (lambda: TransformerXL.Config(clamp=0), "clamp must be 1 or more"),
        (lambda: TransformerXL.Config().build_heads(15, 3, 5), "even width"),
    ):
        with pytest.raises(KinformerError, match=message):
            make()
