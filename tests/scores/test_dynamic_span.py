"""Dynamic spans: a double loop, the contract, their limit, what they cost, the pairs that they leave out."""

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.state import nbytes, pop_aux
from kinformer.family.build import configure
from kinformer.kernels.attention import spans
from kinformer.lab.drawing.runs import span_panel
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Local
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import Convolved, Grouped
from kinformer.parts.relative_positions import Alibi, DistanceKeys, Rope
from kinformer.parts.scores import DynamicSpan, SoftSpan
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MODEL_CHECKS, MixerSubject, ModelSubject

SPAN, RAMP, DIM, HEADS = 10, 4, 16, 4


def mixer_of(span=None, **settings):
    span = span or DynamicSpan.Config(max_span=SPAN, ramp=RAMP, multiple=1, initial=0.3, penalty=0.5)
    settings = {"position": DistanceKeys.Config(max_distance=SPAN)} | settings
    return SoftmaxAttention.Config(num_heads=HEADS, span=span, **settings)


def spread(mixer, seed=1):
    """The mixer with spans that differ by token and head."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        mixer.span.weight.normal_(0, 0.5, generator=generator)
        mixer.span.bias.uniform_(-3, 1, generator=generator)
    return mixer


def random(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def absorbed(mixer, x):
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=x.dtype))


def double_loop(mixer, x):
    """Query by query, key by key, as the paper says it."""
    q, k, v = (part[0] for part in mixer.projection(x))
    span, table = mixer.span, mixer.position.table.keys
    heads = torch.zeros_like(q)
    for head in range(HEADS):
        for t in range(x.shape[1]):
            z = SPAN * torch.sigmoid(span.weight[head] @ x[0, t] + span.bias[head])
            weights, total = [], torch.zeros((), dtype=x.dtype)
            for r in range(max(0, t - SPAN), t):
                mask = ((RAMP + z - (t - r - 1)) / RAMP).clamp(0, 1)
                score = q[head, t] @ (k[head, r] + table[t - r - 1]) / mixer.head_dim**0.5
                weights.append((r, mask * score.exp()))
                total = total + weights[-1][1]
            for r, weight in weights:
                heads[head, t] = heads[head, t] + weight / total * v[head, r]
    return mixer.out(heads.transpose(0, 1).flatten(1))[None]


def test_a_span_of_whole_tokens_learns_where_its_ramp_begins():
    span, z = mixer_of().build(DIM).span, torch.tensor([3.0], requires_grad=True)
    mask = span.log_mask(z, torch.arange(1, 9))  # x = z at the fourth
    assert mask.exp().tolist() == pytest.approx([1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    slopes = [torch.autograd.grad(each, z, retain_graph=True)[0].item() for each in mask[2:6]]
    assert slopes == pytest.approx([0, 1 / RAMP, 1 / 3, 1 / 2])


def test_it_is_a_double_loop_with_its_gradients():
    mixer, x, slopes = spread(mixer_of().build(DIM).double()), random(1, 15, DIM), []
    for run in (double_loop, lambda mixer, x: absorbed(mixer, x)[0]):
        mixer.zero_grad()
        y = run(mixer, x)
        (y * torch.arange(y.numel()).cos().view(y.shape)).sum().backward()
        slopes.append((y.detach(), [weight.grad.clone() for weight in mixer.parameters()]))
    (want, others), (got, own) = slopes
    assert torch.allclose(got, want, atol=1e-12)
    assert all(torch.allclose(*pair, atol=1e-10) for pair in zip(own, others, strict=True))


MIXERS = {
    "distance keys": {},
    "alibi, grouped": {"position": Alibi.Config(), "projection": Grouped.Config(num_kv_heads=2)},
    "rope, convolved, window": {
        "position": Rope.Config(),
        "projection": Convolved.Config(),
        "pattern": Local.Config(window=6),
    },
}


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in MIXERS for check in CHECKS if name == "distance keys" or check != "compile"],
)
def test_contract(name, check):
    impls = {"reference": lambda: spread(mixer_of(**MIXERS[name], impl="reference").build(DIM))}
    CHECKS[check](MixerSubject(lambda: spread(mixer_of(**MIXERS[name]).build(DIM)), dim=DIM, impls=impls))


@pytest.mark.parametrize("check", ["partition", "ragged_reset", "reserved"])
def test_tokens_that_halt_pay_for_their_spans_too(check):
    config = configure("universal", "tiny", 23, {"layers.*.mixer": mixer_of(position=NoPosition.Config())})
    MODEL_CHECKS[check](ModelSubject(config.build, vocab_size=23, time=13))


@pytest.mark.parametrize("initial", [0.3, 0.31])
def test_tokens_that_ask_for_the_same_have_a_span_of_the_head(initial):
    one = mixer_of().build(DIM).double()
    two = mixer_of(SoftSpan.Config(max_span=SPAN, ramp=RAMP, multiple=1, initial=initial)).build(DIM).double()
    own = {name: weight for name, weight in one.state_dict().items() if not name.startswith("span.")}
    two.load_state_dict(own | {"span.span": torch.full((HEADS,), initial)})
    x = random(2, 30, DIM)
    assert torch.allclose(absorbed(one, x)[0], absorbed(two, x)[0], atol=1e-6) == (initial == 0.3)


def test_pairs_follow_what_tokens_ask_for(monkeypatch):
    mixer = mixer_of(DynamicSpan.Config(max_span=400, ramp=8, multiple=16), position=NoPosition.Config()).build(DIM)
    pairs = []

    def counted(q, k, *rest, **options):
        pairs.append(q.shape[1] * q.shape[2] * k.shape[2])
        return attention(q, k, *rest, **options)

    attention = spans.attention
    monkeypatch.setattr(spans, "attention", counted)
    x, found = torch.randn(1, 512, DIM), {}
    for bias in (-50.0, 50.0):
        pairs.clear()
        with torch.no_grad():
            mixer.span.bias.fill_(bias)
            mixer.span.bias[0] = -50.0
            y, state = absorbed(mixer, x)
            one = mixer(Chunk(x[:, :1]), state)[0]
        found[bias] = pairs[-1], sum(pairs[:-1] if bias < 0 else pairs[:-2])
        assert y.isfinite().all() and one.shape == (1, 1, DIM) and state.attention.k.shape[2] == 400
    assert found[-50.0][0] == 4 * 16 and found[50.0][0] == 3 * 400
    assert found[-50.0][1] < 0.4 * found[50.0][1]


def bounded(mixer, scale=0.02):
    """The mixer with weights so small that no token may look back as far as the longest span."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        mixer.span.weight.normal_(0, scale, generator=generator)
        mixer.span.bias.fill_(-2.0)
    return mixer


BOUNDED = DynamicSpan.Config(max_span=64, ramp=2, multiple=1, bounded=True, state_penalty=0.5)


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "compile"])
def test_contract_of_bounded_spans(check):
    impls = {"reference": lambda: bounded(mixer_of(BOUNDED, impl="reference").build(DIM))}
    CHECKS[check](MixerSubject(lambda: bounded(mixer_of(BOUNDED).build(DIM)), dim=DIM, impls=impls))


def test_bounded_spans_cut_the_state_and_change_no_output(monkeypatch):
    """A state of what the weights let any token see gives the outputs of a state of all that a span could be."""
    mixer = bounded(mixer_of(BOUNDED, position=NoPosition.Config()).build(DIM).double())
    x = random(2, 150, DIM) * 10 ** torch.linspace(-3, 3, 150, dtype=torch.float64)[:, None]
    y, state = absorbed(mixer, x)
    size = max(mixer.span.windows)
    assert size < 20 and state.attention.k.shape[2] == size
    assert nbytes(state) == 2 * mixer.state_bytes(150, dtype=torch.float64)
    steps, state = [], mixer.initial_state(2, dtype=x.dtype)
    for piece in x.split(7, 1):
        part, state = mixer(Chunk(piece), state)
        steps.append(part)
    assert torch.allclose(torch.cat(steps, 1), y, atol=1e-12)
    monkeypatch.setattr(DynamicSpan, "windows", (64,) * HEADS)
    monkeypatch.setattr(DynamicSpan, "pattern", mixer.span._cut((64,) * HEADS))
    uncut, whole = absorbed(mixer, x)
    assert whole.attention.k.shape[2] == 64 and torch.allclose(uncut, y, atol=1e-12)


def test_the_windows_follow_the_weights_and_the_penalty_pulls_them_in():
    mixer = bounded(mixer_of(BOUNDED).build(DIM), 0.1)
    before = mixer.span.windows
    rate = 1e-3
    for _ in range(20):
        mixer.span.penalty().backward()
        with torch.no_grad():
            for weight in (mixer.span.weight, mixer.span.bias):
                weight -= rate * weight.grad
                weight.grad = None
        mixer.span.constrain()
    assert max(mixer.span.windows) < max(before) < 64
    with torch.no_grad():
        mixer.span.bias.fill_(50)
    assert mixer.span.windows == (64,) * HEADS


def test_spans_cost_their_mean_over_heads():
    mixer, x = spread(mixer_of().build(DIM).double()), random(2, 12, DIM)
    valid = torch.arange(12) < torch.tensor([[12], [5]])
    _, state = mixer(Chunk(x, valid), mixer.initial_state(2, dtype=x.dtype))
    z = SPAN * torch.sigmoid(x @ mixer.span.weight.mT + mixer.span.bias)
    want = 0.5 * torch.where(valid, z.mean(-1), 0).sum(1)
    costs, _ = pop_aux(state)
    assert torch.allclose(costs["span"], want)
    costs["span"].sum().backward()
    assert (mixer.span.bias.grad > 0).all()


def test_dropout_differs_by_tile_and_is_drawn_by_the_seed():
    mixer = spread(mixer_of(position=NoPosition.Config(), dropout=0.5).build(DIM)).train()
    x = torch.randn(1, 130, DIM)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(absorbed(mixer, x)[0])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"span.initial": 0.0}, "initial must lie between 0 and 1"),
        ({"span.state_penalty": 1e-6, "span.bounded": False}, "spans are not bounded"),
        ({"span.state_penalty": -1.0}, "state_penalty must be 0 or more"),
        ({"span.ramp": 0}, "ramp must be 1 or more"),
        ({"impl": "sdpa"}, "knows no tables|knows no masks"),
    ],
)
def test_mistakes(changes, told):
    changes = {f"layers.*.mixer.{name}": value for name, value in changes.items()}
    with pytest.raises(KinformerError, match=told):
        kinformer.build("adaptive-span", recipe="tiny-dynamic", set=changes)


def test_spans_of_tokens_are_no_table():
    with pytest.raises(KinformerError, match="follow from its tokens"):
        span_panel(kinformer.build("adaptive-span", recipe="tiny-dynamic"), "the run")
