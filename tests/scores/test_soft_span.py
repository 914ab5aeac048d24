"""Adaptive spans: against the authors' code, at their limit, cut to what was learnt, in training."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kinformer.core.contract import Chunk
from kinformer.core.learning import Regularized, regularization_metrics
from kinformer.core.model import modules_of
from kinformer.core.state import nbytes
from kinformer.family.build import build
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Dilated, Local, Strided
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import MultiHead
from kinformer.parts.relative_positions import Alibi, DistanceKeys, Shaw
from kinformer.parts.scores import SoftSpan
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

GOLDEN = Path(__file__).parents[1] / "golden" / "adaptive_span.npz"
SPAN, RAMP, DIM, HEADS, BLOCK = 10, 4, 16, 2, 5
ADDED = 1e-8
"""What the authors add to a query's sum of masked probabilities; ours has no such term, so tests put it in."""


def mixer_of(position=None, impl="auto", pattern=None, heads=HEADS, **span):
    span = {"max_span": SPAN, "ramp": RAMP, "multiple": 1, "initial": 0.3} | span
    extra = {} if pattern is None else {"pattern": pattern}
    return SoftmaxAttention.Config(
        num_heads=heads,
        position=position or DistanceKeys.Config(max_distance=span["max_span"]),
        span=SoftSpan.Config(**span),
        projection=MultiHead.Config(bias=False),
        bias=False,
        impl=impl,
        **extra,
    )


def outputs(mixer, x, state=None):
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=x.dtype) if state is None else state)


def random(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("ramp", [1, 32])
def test_the_nearest_key_counts_whatever_the_span(ramp):
    """A step of one query relies on it (``kernels.attention.cached``): a row without a key would be NaN there."""
    for share in (-1.0, 0.0, 0.4, 2.0):
        span = mixer_of(ramp=ramp).build(DIM).span
        with torch.no_grad():
            span.span.fill_(share)
        assert torch.equal(span.bias(5)[:, 0], torch.zeros(HEADS))


@pytest.fixture(scope="module")
def arrays():
    with np.load(GOLDEN, allow_pickle=False) as found:
        return {key: torch.from_numpy(found[key]) for key in found}


def official(arrays, layer, table, impl="auto"):
    mixer = mixer_of(impl=impl, penalty=0.002).build(DIM).double()
    name = f"w.layers.{layer}.attn"
    with torch.no_grad():
        parts = [arrays[f"{name}.proj_{each}.weight"] for each in ("query", "key", "val")]
        mixer.projection.qkv.weight.copy_(torch.cat(parts))
        mixer.out.weight.copy_(arrays[f"{name}.proj_out.weight"])
        mixer.span.span.copy_(arrays[f"{name}.attn.adaptive_span._mask.current_val"].flatten())
    mixer.position.table.keys = table
    masked = (arrays[f"out.seg2.layer{layer}.attn_softmax"] * arrays[f"out.layer{layer}.span_mask"]).sum(-1)
    share = (masked / (masked + ADDED)).transpose(1, 2).repeat_interleave(DIM // HEADS, 2)
    mixer.out.register_forward_pre_hook(lambda _, x: torch.cat([x[0][:, :-BLOCK], x[0][:, -BLOCK:] * share], 1))
    return mixer


def table_of(arrays):
    """The authors' columns count from the farthest key on."""
    return torch.nn.Parameter(arrays["w.key_pe"][0].T.flip(0).clone())


def inputs_of(arrays, layer, segment):
    if layer:
        return arrays[f"out.seg{segment}.layer{layer - 1}.output"]
    return arrays["w.in_emb.weight"][arrays[f"in.seg{segment}.x"]]


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("layer", [0, 1])
def test_attention_is_the_authors(arrays, layer, impl):
    """The last segment, all of whose keys are real, in one chunk and as a third chunk after two."""
    mixer = official(arrays, layer, table_of(arrays), impl)
    assert mixer.span.penalty().item() == pytest.approx(float(arrays[f"out.layer{layer}.span_loss"]), abs=1e-15)
    mask = arrays[f"out.layer{layer}.span_mask"][0, :, 0].flip(-1)
    assert (mixer.span.bias(SPAN).exp() - mask).abs().max() < 1e-12
    parts = [inputs_of(arrays, layer, segment) for segment in range(3)]
    want = arrays[f"out.seg2.layer{layer}.attn_out"]
    whole = outputs(mixer, torch.cat(parts, 1))[0][:, -BLOCK:]
    state = None
    for part in parts:
        cut, state = outputs(mixer, part, state)
    assert (whole - want).abs().max() < 1e-12 and (cut - want).abs().max() < 1e-12
    assert (whole - outputs(mixer, torch.cat(parts[1:], 1))[0][:, -BLOCK:]).abs().max() > 1e-4


def test_the_model_and_its_gradients_are_the_authors(arrays):
    """Loss of the last segment, with spans' penalty; caches are constants, from which projections learn."""
    table = table_of(arrays)
    h, cost, mixers = arrays["w.in_emb.weight"][arrays["in.seg2.x"]], 0.0, []
    for layer in range(2):
        name = f"w.layers.{layer}"
        mixers.append(mixer := official(arrays, layer, table))
        past = torch.cat([inputs_of(arrays, layer, segment) for segment in range(2)], 1)
        norm = [(arrays[f"{name}.norm{n}.weight"], arrays[f"{name}.norm{n}.bias"]) for n in (1, 2)]
        h = h + outputs(mixer, torch.cat([past, h], 1))[0][:, -BLOCK:]
        h = torch.layer_norm(h, (DIM,), *norm[0])
        inner = torch.relu(h @ arrays[f"{name}.ff.fc1.weight"].T + arrays[f"{name}.ff.fc1.bias"])
        inner = inner @ arrays[f"{name}.ff.fc2.weight"].T + arrays[f"{name}.ff.fc2.bias"]
        h = torch.layer_norm(h + inner, (DIM,), *norm[1])
        assert (h - arrays[f"out.seg2.layer{layer}.output"]).abs().max() < 1e-12
        cost = cost + mixer.span.penalty()
    scores = (h @ arrays["w.out_emb.weight"].T + arrays["w.out_emb.bias"]).log_softmax(-1)
    assert (scores - arrays["out.seg2.log_probs"]).abs().max() < 1e-12
    loss = cost + torch.nn.functional.nll_loss(scores.flatten(0, 1), arrays["in.seg2.y"].flatten())
    assert (loss - arrays["out.seg2.total_loss"]).item() == pytest.approx(0, abs=1e-12)
    loss.backward()
    assert (table.grad - arrays["grad.key_pe"][0].T.flip(0)).abs().max() < 1e-7
    for layer, mixer in enumerate(mixers):
        want = arrays[f"grad.layer{layer}.current_val"].flatten()
        assert want.abs().max() > 1e-3
        assert (mixer.span.span.grad - want).abs().max() < 1e-7


def test_spans_at_their_bounds_learn_and_those_beyond_do_not():
    span = mixer_of(heads=4, penalty=0.5).build(DIM).span
    with torch.no_grad():
        span.span.copy_(torch.tensor([-0.1, 0.0, 1.0, 1.1]))
    span.penalty().backward()
    assert span.span.grad.tolist() == pytest.approx([0, 0.5 * SPAN / 4, 0.5 * SPAN / 4, 0])
    # At x = z the mask is exactly 1: log m has the slope max_span / ramp there, and 0 at nearer tokens.
    slopes = torch.autograd.grad(span.bias(SPAN + 1)[[1, 2], [0, SPAN]].sum(), span.span)[0]
    assert slopes.tolist() == pytest.approx([0, SPAN / RAMP, SPAN / RAMP, 0])
    assert not torch.autograd.grad(span.bias(SPAN)[2].sum(), span.span)[0].any()


def dense(mixer, x, window):
    """Attention to the ``window`` tokens before each, with a vector by distance, by its formula."""
    time = x.shape[1]
    d = torch.arange(time)[:, None] - torch.arange(time)
    seen = (d >= 1) & (d <= window)
    q, k, v = mixer.projection(x)
    moved = k[:, :, None] + mixer.position.table.keys[(d - 1).clamp(0, SPAN - 1)]
    scores = (q[..., None, :] * moved).sum(-1) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).where(seen.any(-1)[:, None], 0)
    return mixer.out((weights @ v).transpose(1, 2).flatten(2))


def test_whole_spans_are_local_attention():
    mixer, x = mixer_of(initial=1.0).build(DIM).double(), random(2, 25, DIM)
    assert mixer.span.windows == (SPAN, SPAN)
    with torch.no_grad():
        assert (outputs(mixer, x)[0] - dense(mixer, x, SPAN)).abs().max() < 1e-12
        mixer.span.span.sub_(2 / SPAN)  # two tokens less: the last key counts 3 / 4
        assert mixer.span.windows == (SPAN, SPAN)
        got = outputs(mixer, x)[0]
        gap = (got - dense(mixer, x, SPAN)).abs().amax((0, 2))
        assert gap[:SPAN].max() < 1e-12 and gap[SPAN:].min() > 1e-5


def test_windows_and_the_state_follow_the_spans():
    mixer = mixer_of(max_span=200, ramp=RAMP, multiple=64).build(DIM).double()
    x = random(2, 250, DIM)

    def check(shares, windows):
        with torch.no_grad():
            mixer.span.span.copy_(torch.tensor(shares))
            y, state = outputs(mixer, x)
            short, _ = outputs(mixer, x[:, -2 * max(windows) :])
        assert mixer.span.windows == windows
        assert mixer.retained == state.k.shape[2] == max(windows)
        assert mixer.state_bytes(250, dtype=torch.float64) == nbytes(state) // 2
        assert (y[:, -1] - short[:, -1]).abs().max() < 1e-12

    check([0.0, 0.0], (8, 8))  # 200 less three times 64, and 4 are needed
    check([0.02, 0.02], (8, 8))
    check([0.021, 0.02], (72, 8))  # 4.2 tokens and a ramp of 4
    check([0.1, 0.5], (72, 136))
    check([1.0, 0.0], (200, 8))


def test_masked_keys_of_a_wider_window_have_no_weight():
    """Rounding up changes nothing but what is computed."""
    one, other = (mixer_of(multiple=multiple, initial=0.25).build(DIM).double() for multiple in (1, 64))
    other.load_state_dict(one.state_dict())
    assert one.span.windows == (7, 7) and other.span.windows == (SPAN, SPAN)
    x = random(2, 30, DIM)
    found = []
    for mixer in (one, other):
        y, _ = outputs(mixer, x)
        found.append((y, torch.autograd.grad(y.square().sum(), list(mixer.parameters()))))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-12
    for left, right in zip(found[0][1], found[1][1], strict=True):
        assert right.isfinite().all() and (left - right).abs().max() < 1e-12


BATTERY = {
    "heads of unlike windows": mixer_of(max_span=12, ramp=3, multiple=2, heads=4),
    "within a window, alibi": mixer_of(Alibi.Config(), pattern=Local.Config(window=6)),
    "shaw": mixer_of(Shaw.Config(max_distance=3)),
    "a pattern whose keys some spans hide": mixer_of(
        NoPosition.Config(), pattern=Dilated.Config(window=4, dilation=3), initial=0.0, ramp=1, multiple=10, heads=4
    ),
    "no position": mixer_of(NoPosition.Config()),
}


@pytest.mark.parametrize("check", CHECKS)
def test_spans_keep_the_contract(check):
    config = BATTERY["heads of unlike windows"]
    subject = MixerSubject(
        lambda: config.build(DIM), dim=DIM, impls={"reference": lambda: config.replace(impl="reference").build(DIM)}
    )
    assert len(set(subject.build().span.windows)) > 1
    CHECKS[check](subject)


@pytest.mark.parametrize("name", list(BATTERY)[1:])
def test_spans_go_with_any_position(name):
    config = BATTERY[name]
    subject = MixerSubject(
        lambda: config.build(DIM), dim=DIM, impls={"reference": lambda: config.replace(impl="reference").build(DIM)}
    )
    for check in ("partition", "implementations", "gradcheck"):
        CHECKS[check](subject)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("pattern", [Dilated.Config(window=5, dilation=3), Strided(stride=4, part="columns")])
def test_a_span_that_hides_all_keys_of_a_pattern_gives_zero(pattern, impl):
    mixer = mixer_of(NoPosition.Config(), pattern=pattern, initial=0.0, ramp=1, multiple=10, impl=impl)
    mixer, x = mixer.build(DIM).double(), random(2, 20, DIM).requires_grad_()
    for sizes in ([20], [1] * 20):
        state, parts = None, []
        for part in x.split(sizes, 1):
            y, state = outputs(mixer, part, state)
            parts.append(y)
        y = torch.cat(parts, 1)
        assert not y.any() and not torch.autograd.grad(y.sum(), x)[0].any()


def test_a_captured_graph_follows_what_the_trainer_trims():
    mixer, x = mixer_of().build(DIM).double(), random(2, 20, DIM)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    for share in (0.0, 2.0):
        with torch.no_grad():
            mixer.span.span.fill_(share)
            mixer.span.constrain()
            y, _ = compiled(Chunk(x), mixer.initial_state(2, dtype=x.dtype))
            assert (y - outputs(mixer, x)[0]).abs().max() < 1e-12
    assert mixer.span.windows == (SPAN, SPAN) and mixer.span.spans() == [SPAN, SPAN]


def test_penalty_and_measures_of_a_model():
    model = build("adaptive-span", "tiny", 256)
    parts = modules_of(model, Regularized)
    with torch.no_grad():
        for part, share in zip(parts, (0.25, 0.5), strict=True):
            part.span.fill_(share)
    found = regularization_metrics(parts)
    assert found == {"penalty": pytest.approx(2e-6 * 12), "mean_span": 6.0}
    assert regularization_metrics([]) == {}
    torch.stack([part.penalty() for part in parts]).sum().backward()
    assert parts[0].span.grad.tolist() == pytest.approx([2e-6 * 16 / 2] * 2)


def test_wrong_numbers_are_refused():
    for settings, message in (
        ({"max_span": 0}, "max_span must be 1 or more, but is 0"),
        ({"ramp": 0}, "ramp must be 1 or more"),
        ({"multiple": 0}, "multiple must be 1 or more"),
        ({"initial": 1.5}, "initial is a share of max_span, from 0 to 1, but is 1.5"),
        ({"penalty": -1.0}, "penalty must be 0 or more, but is -1"),
    ):
        with pytest.raises(KinformerError, match=message):
            SoftSpan.Config(**settings)
    with pytest.raises(KinformerError, match="no token sees itself, but the pattern lets it see nothing else"):
        mixer_of(pattern=Local.Config(window=1)).build(DIM)
    with pytest.raises(KinformerError, match="impl is 'sdpa', which knows no tables by distance"):
        mixer_of(NoPosition.Config(), impl="sdpa").build(DIM)
    with pytest.raises(KinformerError, match="max_distance must be 1 or more"):
        DistanceKeys.Config(max_distance=0)
