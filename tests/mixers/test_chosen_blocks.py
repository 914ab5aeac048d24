"""Attention to chosen blocks: the authors' results, exact attention in its limits, its contract, what it refuses."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kinformer.core.contract import Chunk
from kinformer.core.probe import NoWeights, weights_of
from kinformer.kernels.chosen import choice, chunked
from kinformer.mixers.chosen_blocks import ChosenBlocks
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.projections import Convolved, Grouped
from kinformer.parts.relative_positions import Alibi, Rope
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, MixerSubject

from .made import DIM, built, inputs

GROUPED = Grouped.Config(num_kv_heads=2)
MOBA = {"num_heads": 2, "block": 3, "count": 2}
NSA = {
    "num_heads": 4, "projection": GROUPED, "block": 3, "count": 4, "first": 1, "near": 1, "shared_choice": True,
    "compression": "mean", "window": 4, "position": Rope.Config(),
}  # fmt: skip
LEARNT = NSA | {"compression": "mlp"}
OVERLAPPING = LEARNT | {"block": 4, "summary_length": 4, "summary_stride": 2, "count": 3, "near": 0}
APART = NSA | {
    "block": 6, "summary_stride": 3, "projection": Grouped.Config(num_kv_heads=4), "shared_choice": False,
}  # fmt: skip
PER_HEAD = {"num_heads": 4, "projection": GROUPED, "block": 4, "count": 3}


def outputs(mixer, x, **masks):
    return mixer(Chunk(x, **masks), mixer.initial_state(len(x), dtype=x.dtype))[0]


class Projected(nn.Module):
    """Queries, keys and values that are there already, [batch, heads, time, width]."""

    context = 0

    def __init__(self, *qkv):
        super().__init__()
        self.qkv, self.num_kv_heads = qkv, qkv[1].shape[1]

    def forward(self, x):
        return self.qkv


class Gated(nn.Module):
    """Gates [batch, time, heads, branches] that are there already, before the sigmoid."""

    def __init__(self, gates):
        super().__init__()
        self.gates = gates

    def forward(self, x):
        return self.gates.logit().flatten(2)


def of_authors(config, *qkv):
    """A mixer without output projection and its first state; q, k, v [batch, time, heads, width] are those given."""
    mixer = config.replace(num_heads=qkv[0].shape[2], head_dim=4).build(8)
    start = mixer.initial_state(1)
    mixer.projection, mixer.out = Projected(*(x.transpose(1, 2) for x in qkv)), nn.Identity()
    return mixer, start


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "chosen_blocks.npz", allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_parity_with_moba(golden, impl):
    """moba_attn_varlen_naive of MoonshotAI/MoBA, on two sequences of 9 and 14 tokens in one row."""
    *qkv, want = (golden[f"moba_{name}"][None] for name in "qkvo")
    mixer, start = of_authors(ChosenBlocks.Config(block=4, count=3, impl=impl), *qkv)
    reset = (torch.arange(23) == 9)[None]
    y = mixer(Chunk(torch.zeros(1, 23, 8), reset=reset), start)[0]
    assert (y.view(want.shape) - want).abs().max() < 1e-5


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_parity_with_nsa(golden, impl):
    """naive_nsa_with_compression of fla-org/native-sparse-attention, two groups of two heads."""
    *qkv, want = (golden[f"nsa_{name}"] for name in "qkvo")
    config = ChosenBlocks.Config(
        projection=GROUPED, block=4, count=3, shared_choice=True, compression="mean", window=5, impl=impl
    )
    mixer, start = of_authors(config.replace(num_heads=4), *qkv)
    mixer.branch_gates = Gated(golden["nsa_g"].permute(1, 2, 3, 0))
    y = mixer(Chunk(torch.zeros(1, 23, 8)), start)[0]
    assert (y.view(want.shape) - want).abs().max() < 1e-5


@pytest.mark.parametrize("grouped", [{}, {"projection": GROUPED, "num_heads": 4, "shared_choice": True}])
def test_it_is_softmax_attention_where_all_blocks_are_seen(grouped):
    config = ChosenBlocks.Config(**{"num_heads": 2, "position": Rope.Config()} | grouped, block=4, count=5)
    parts = {name: getattr(config, name) for name in ("num_heads", "projection", "position")}
    full = built(SoftmaxAttention.Config(**parts))
    x = inputs(20)
    mixer = built(config)
    mixer.load_state_dict(full.state_dict())
    assert (outputs(mixer, x) - outputs(full, x)).abs().max() < 1e-12
    fewer = config.replace(count=4).build(DIM).double()
    fewer.load_state_dict(full.state_dict())
    gap = (outputs(fewer, x) - outputs(full, x)).abs().amax(-1)
    assert gap[:, :16].max() < 1e-12
    assert gap[:, 16:].min() > 1e-5


def test_branches_are_softmax_attention_where_blocks_are_tokens_and_the_window_is_the_text():
    """Means of blocks of one token are the tokens; every branch then is full attention, and gates of 1/2 add up."""
    mixer = built(ChosenBlocks.Config(**NSA | {"block": 1, "count": 12, "window": 12}))
    with torch.no_grad():
        mixer.branch_gates.weight.zero_()
    full = SoftmaxAttention.Config(num_heads=4, projection=GROUPED, position=Rope.Config()).build(DIM).double()
    full.load_state_dict({name: value for name, value in mixer.state_dict().items() if name != "branch_gates.weight"})
    with torch.no_grad():
        full.out.weight *= 1.5
    assert (outputs(mixer, inputs(12)) - outputs(full, inputs(12))).abs().max() < 1e-12
    assert (outputs(mixer, inputs(13)) - outputs(full, inputs(13)))[:, 12].abs().max() > 1e-5


def away_from_the_mean(mixer):
    """``mixer`` with perceptrons that no longer compute the mean."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for summary in (mixer.key_summary, mixer.value_summary):
            for weight in () if summary is None else summary.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.3)
    return mixer


def naive_nsa(mixer, x):
    """The paper's equations 5 to 11, token by token, of one sequence x [time, dim]."""
    config, time, scale = mixer.config, len(x), mixer.head_dim**-0.5
    length, stride = config.summary_and_stride
    q, k, v = (part[0] for part in mixer.projection(x[None]))
    turn = lambda x, at: mixer.position.rotate_keys(x[None, None], torch.tensor([[at]]).expand(1, len(x)))[0, 0]  # noqa: E731
    gates = torch.sigmoid(mixer.branch_gates(x)).unflatten(-1, (config.num_heads, 3))
    outputs = torch.zeros(time, config.num_heads, mixer.head_dim, dtype=x.dtype)

    def perceptron(net, tokens, head):
        return net.out(net.hidden((tokens + net.places[head]).flatten()).relu())

    def summaries(group, count):
        keys, values = [], []
        for c in range(count):
            block = slice(c * stride, c * stride + length)
            placed = torch.cat([turn(k[group, j : j + 1], i) for i, j in enumerate(range(time)[block])])
            keys.append(turn(perceptron(mixer.key_summary, placed, group)[None], block.start))
            values.append(perceptron(mixer.value_summary, v[group, block], group)[None])
        return torch.cat(keys), torch.cat(values)

    for group in range(2):
        heads, keys = (2 * group, 2 * group + 1), torch.cat([turn(k[group, j : j + 1], j) for j in range(time)])
        for t in range(time):
            own, importance = t // config.block, torch.zeros(t // config.block, dtype=x.dtype)
            queries = {head: turn(q[head, t : t + 1], t)[0] * scale for head in heads}
            if complete := max(0, (t + 1 - length) // stride + 1):
                coarse_keys, coarse_values = summaries(group, complete)
                for head in heads:
                    p = (coarse_keys @ queries[head]).softmax(0)
                    # Equation 9, whose blocks and summaries are counted from 1.
                    for j, m, n in product(range(own), range(config.block // stride), range(length // stride)):
                        at = config.block // stride * (j + 1) - 1 - m - n
                        importance[j] += p[at] if 0 <= at < complete else 0.0
                    outputs[t, head] += gates[t, head, 0] * (p @ coarse_values)
            always = [*range(config.first), *range(own - config.near, own)]
            importance[[c for c in always if 0 <= c < own]] = torch.inf
            seen = {own, *importance.topk(min(config.count - 1, own)).indices.tolist()}
            fine = [j for j in range(t + 1) if j // config.block in seen]
            for branch, some in ((1, fine), (2, list(range(max(0, t + 1 - config.window), t + 1)))):
                for head in heads:
                    p = (keys[some] @ queries[head]).softmax(0)
                    outputs[t, head] += gates[t, head, branch] * (p @ v[group, some])
    return mixer.out(outputs.flatten(1))


@torch.no_grad()
@pytest.mark.parametrize("settings", [LEARNT, OVERLAPPING], ids=["learnt", "overlapping"])
def test_a_learnt_summary_is_the_papers_formula_token_by_token(settings):
    mixer, x = away_from_the_mean(built(ChosenBlocks.Config(**settings))), inputs(23, batch=1)
    assert (outputs(mixer, x)[0] - naive_nsa(mixer, x[0])).abs().max() < 1e-12


def test_a_learnt_summary_begins_as_the_mean_and_leaves_it():
    size = {"block": 4}  # 1 / 4 is the same in float32
    mean, learnt = (ChosenBlocks.Config(**settings | size).build(DIM).double() for settings in (NSA, LEARNT))
    x = inputs(23)
    learnt.load_state_dict(mean.state_dict(), strict=False)
    gap = outputs(learnt, x) - outputs(mean, x)
    assert gap.abs().max() < 1e-12
    assert (outputs(away_from_the_mean(learnt), x) - outputs(mean, x)).abs().max() > 1e-3


def test_a_learnt_summary_does_not_know_where_its_block_lies():
    """All positions moved by whole blocks, RoPE with a magnitude of its own: the same summaries, turned."""
    position = Rope.Config(scaling="yarn", factor=4.0, original_length=64)
    mixer = away_from_the_mean(built(ChosenBlocks.Config(**LEARNT | {"position": position})))
    k, v = torch.randn(2, 1, 2, 5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    begins, far = 3 * torch.arange(5)[None], 300
    moved = mixer.position.moved(k.flatten(2, 3), torch.full((1, 15), far)).view_as(k)
    near = mixer._summaries((k, v), begins)
    later = mixer._summaries((moved, v), begins + far)
    assert (mixer.position.moved(near[..., :4], torch.full((1, 5), far)) - later[..., :4]).abs().max() < 1e-12


@pytest.mark.parametrize(
    "settings",
    [MOBA, NSA, PER_HEAD, LEARNT, OVERLAPPING, APART],
    ids=["moba", "nsa", "per head", "learnt", "overlapping", "overlapping, every head"],
)
def test_tiles_are_the_reference_with_gradients_part_by_part(settings, monkeypatch):
    """After a past, with padding and a new sequence, in parts of a few queries and groups of a few tiles."""
    monkeypatch.setattr(chunked, "LINES", 40)
    monkeypatch.setattr(chunked, "PAIRS", 60)
    monkeypatch.setattr(chunked, "ROWS", 4)
    monkeypatch.setattr(choice, "SCORES", 1)
    x, valid, reset = inputs(61), torch.ones(2, 40, dtype=torch.bool), torch.zeros(2, 40, dtype=torch.bool)
    valid[1, 33:], reset[0, 8], reset[0, 25] = False, True, True
    results = []
    for impl in ("auto", "reference"):
        mixer = away_from_the_mean(built(ChosenBlocks.Config(**settings, impl=impl)))
        x = x.detach().requires_grad_()
        first, state = mixer(Chunk(x[:, :21]), mixer.initial_state(2, dtype=x.dtype))
        second, state = mixer(Chunk(x[:, 21:], valid=valid, reset=reset), state)
        y = torch.cat([first, second], 1)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() < 1e-9 * max(1, float(other.detach().abs().max()))


def test_equal_blocks_are_chosen_from_the_end_however_the_text_is_cut():
    """Without a position, the same token everywhere: means differ by rounding at most, and the last are chosen."""
    mixer = ChosenBlocks.Config(num_heads=1, block=2, count=3).build(DIM)
    x = torch.randn(1, 1, DIM, generator=torch.Generator().manual_seed(3)).expand(1, 40, -1).contiguous()
    noted = []
    kernel = mixer._choose
    mixer._choose = lambda *call: noted.append(kernel(*call)[1]) or (None, noted[-1])
    with torch.no_grad():
        outputs(mixer, x)
        state = mixer.initial_state(1)
        for token in x.split(1, 1):
            _, state = mixer(Chunk(token), state)
    whole, *single = noted
    assert all(set(one.flatten().tolist()) == set(whole[0, 0, t].tolist()) for t, one in enumerate(single) if t > 5)
    assert set(whole[0, 0, 39].tolist()) == {17, 18}


def test_the_state_is_the_cache_and_the_means_of_complete_blocks():
    mixer = built(ChosenBlocks.Config(**NSA))
    _, state = mixer(Chunk(inputs(13)), mixer.initial_state(2, dtype=torch.float64))
    assert state.means.shape == (2, 2, 4, 2 * 4)
    want = torch.cat([state.attention.k, state.attention.v], -1)[:, :, :12].unflatten(2, (4, 3)).mean(3)
    assert (state.means - want).abs().max() < 1e-12
    assert mixer.state_bytes(13, dtype=torch.float64) == 2 * (2 * 13 * 4 + 4 * 8) * 8 + 8


def test_summaries_that_overlap_are_held_whole_ones_alone():
    mixer = built(ChosenBlocks.Config(**OVERLAPPING))
    for tokens, summaries in ((3, 0), (4, 1), (5, 1), (6, 2), (13, 5)):
        _, state = mixer(Chunk(inputs(tokens)), mixer.initial_state(2, dtype=torch.float64))
        assert state.means.shape[2] == summaries
        assert mixer.state_bytes(tokens, dtype=torch.float64) == 2 * (2 * tokens * 4 + summaries * 8) * 8 + 8


@pytest.mark.parametrize("settings", [MOBA, NSA, APART], ids=["moba", "nsa", "overlapping"])
def test_weights_are_read_and_rows_add_up_to_the_gates(settings):
    mixer, x = built(ChosenBlocks.Config(**settings)), inputs(20, batch=1)
    read = weights_of(mixer, (Chunk(x), mixer.initial_state(1, dtype=x.dtype)))
    assert (read.weights @ read.values + read.constant - read.outputs).abs().max() < 1e-12
    rows = torch.ones(2, 20, dtype=x.dtype)
    if mixer.branch_gates is not None:
        gates = torch.sigmoid(mixer.branch_gates(x))[0].unflatten(-1, (4, 3)).permute(2, 1, 0)
        first = mixer.config.summary_and_stride[0] - 1  # before the first complete block there are no means
        complete = (torch.arange(20) >= first).to(x.dtype)
        rows = gates[0] * complete + gates[1] + gates[2]
    assert (read.weights.sum(-1) - rows).abs().max() < 1e-12


def test_why_learnt_summaries_have_no_weights():
    mixer, x = built(ChosenBlocks.Config(**LEARNT)), inputs(20, batch=1)
    with pytest.raises(NoWeights, match=r"A perceptron sums up the values of blocks.*\."):
        weights_of(mixer, (Chunk(x), mixer.initial_state(1, dtype=x.dtype)))


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "compile"])
@pytest.mark.parametrize("settings", [MOBA, NSA, LEARNT, OVERLAPPING], ids=["moba", "nsa", "learnt", "overlapping"])
def test_the_contract(settings, check):
    one = ChosenBlocks.Config(**settings)
    impls = {"reference": lambda: away_from_the_mean(one.replace(impl="reference").build(DIM))}
    CHECKS[check](MixerSubject(lambda: away_from_the_mean(one.build(DIM)), dim=DIM, impls=impls))


@pytest.mark.parametrize("settings", [NSA, OVERLAPPING], ids=["nsa", "overlapping"])
def test_it_compiles(settings):
    CHECKS["compile"](MixerSubject(lambda: ChosenBlocks.Config(**settings).build(DIM), dim=DIM))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block": 0}, "block must be 1 or more, but is 0"),
        ({"window": 0}, "window must be 1 or more"),
        ({"count": 3, "first": 1, "near": 1}, "leave none of count = 3 to choose; let count be 4 or more"),
        ({"shared_choice": True}, "shared_choice is for heads that share keys"),
        ({"position": Alibi.Config()}, "acts by the distance of a query and a key"),
        ({"projection": Convolved.Config()}, "looks at earlier tokens"),
        ({"impl": "sdpa"}, "impl of the mixer 'chosen_blocks'"),
        ({"compression": "max"}, "compression of the mixer 'chosen_blocks'"),
        ({"summary_stride": 16}, "summaries are of compression, but compression is none"),
        ({"compression": "mean", "summary_length": 32, "summary_stride": 24}, "summary_stride = 24 of chosen"),
        ({"compression": "mean", "summary_stride": 0}, "summary_stride must be 1 or more, but is 0"),
    ],
)
def test_what_it_refuses(changes, sentence):
    with pytest.raises(KinformerError, match=sentence):
        ChosenBlocks.Config(**{"num_heads": 2} | changes).build(DIM)
