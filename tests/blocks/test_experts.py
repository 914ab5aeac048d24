"""Mixtures of experts: the blocks of Mixtral, Qwen3-MoE and DeepSeek-V3, the limits, what balances loads, refusals."""

import pytest
import torch
from torch.nn import functional

from kinformer.blocks.feed_forward import Experts, SwiGLU, grouped_products
from kinformer.core.learning import gather_aux_losses
from kinformer.family.build import configure
from kinformer.lab.evaluation.usage import record_usage
from kinformer.runtime.errors import KinformerError

DIM, HIDDEN, EXPERTS = 12, 10, 6


def built(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    config = Experts.Config(**{"num_experts": EXPERTS, "topk": 2, "hidden_dim": HIDDEN} | changes)
    return config.build(DIM).to(dtype)


def inputs(batch=2, time=9, dtype=torch.float64):
    return torch.randn(batch, time, DIM, generator=torch.Generator().manual_seed(1), dtype=dtype)


def mixtral():
    from transformers.models.mixtral import modeling_mixtral as theirs

    config = theirs.MixtralConfig(
        hidden_size=DIM, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    return theirs.MixtralSparseMoeBlock(config), built()


def qwen():
    from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

    config = theirs.Qwen3MoeConfig(
        hidden_size=DIM, moe_intermediate_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=3, norm_topk_prob=False
    )
    return theirs.Qwen3MoeSparseMoeBlock(config), built(topk=3, normalise=False)


def deepseek():
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = theirs.DeepseekV3Config(
        hidden_size=DIM, moe_intermediate_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=1,
        topk_group=1, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    return theirs.DeepseekV3MoE(config), built(router="sigmoid", scale=2.5, shared_dim=HIDDEN, bias_rate=0.001)


@pytest.mark.parametrize("block", [mixtral, qwen, deepseek])
def test_parity(block):
    theirs, ours = block()
    theirs, x = theirs.double().eval(), inputs()
    with torch.no_grad():
        for parameter in [*theirs.parameters()]:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
        ours.router.weight.copy_(theirs.gate.weight)
        ours.gate_up.copy_(theirs.experts.gate_up_proj.mT)
        ours.down.copy_(theirs.experts.down_proj.mT)
        if ours.shared_expert is not None:
            theirs.gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
            ours.bias.copy_(theirs.gate.e_score_correction_bias)
            shared = theirs.shared_experts
            ours.shared_expert.gate_up.weight.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
            ours.shared_expert.down.weight.copy_(shared.down_proj.weight)
        want, got = theirs(x), ours(x)
    # Their scores are float32, and the weights of experts with them.
    assert (got - want).abs().max() < 1e-6 * want.abs().max()
    assert want.abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner, outer", [(6, 10), (18, 6), (8, 9)])
def test_products_of_any_width_are_the_references(dtype, inner, outer):
    draw, ends = torch.Generator().manual_seed(0), torch.tensor([3, 3, 9], dtype=torch.int32)
    x, weight = torch.randn(9, inner, generator=draw).to(dtype), torch.randn(3, inner, outer, generator=draw).to(dtype)
    got = []
    for impl in ("auto", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        y = grouped_products(*leaves, ends, impl=impl)
        got.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for ours, want in zip(*got, strict=True):
        assert ours.shape == want.shape
        assert (ours - want).abs().max() <= (1e-5 if dtype == torch.float32 else 0.02) * want.abs().max()


@pytest.mark.parametrize("inner", [8, 6])
def test_products_have_second_derivatives(inner):
    draw, ends = torch.Generator().manual_seed(0), torch.tensor([3, 3, 9], dtype=torch.int32)
    x, weight = torch.randn(9, inner, generator=draw), torch.randn(3, inner, 8, generator=draw)
    seconds = []
    for impl in ("auto", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        y = grouped_products(*leaves, ends, impl=impl)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(one.square().sum() for one in first), leaves))
    for ours, want in zip(*seconds, strict=True):
        assert torch.allclose(ours, want, rtol=1e-4, atol=1e-4 * want.abs().max())


def test_compiled_experts_compute_what_they_do_uncompiled():
    experts, x = built(dtype=torch.float32).eval(), inputs(dtype=torch.float32).requires_grad_()
    torch._dynamo.reset()
    y, want = torch.compile(experts, fullgraph=True, backend="aot_eager")(x), experts(x)
    leaves = [x, experts.gate_up, experts.down]
    for got, expected in zip([y, *torch.autograd.grad(y.square().sum(), leaves)],
                             [want, *torch.autograd.grad(want.square().sum(), leaves)], strict=True):  # fmt: skip
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_product_is_the_reference_with_gradients_and_idle_groups(dtype):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(11, 8, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(4, 8, 16, generator=draw).to(dtype).requires_grad_()
    ends = torch.tensor([3, 3, 10, 11], dtype=torch.int32)
    results = []
    for impl in ("native", "reference"):
        y = grouped_products(x, weight, ends, impl=impl)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, weight])])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * other.abs().max()


def test_one_expert_is_a_swiglu_and_two_are_not():
    ours, plain = built(num_experts=1, topk=1), SwiGLU.Config(hidden_dim=HIDDEN).build(DIM).double()
    with torch.no_grad():
        plain.gate_up.weight.copy_(ours.gate_up[0].T)
        plain.down.weight.copy_(ours.down[0].T)
        assert (ours(inputs()) - plain(inputs())).abs().max() < 1e-12
        other = built(num_experts=2, topk=1)
        other.gate_up[0], other.down[0] = ours.gate_up[0], ours.down[0]
        assert (other(inputs()) - plain(inputs())).abs().max() > 1e-3


def test_padding_changes_nothing_and_counts_for_no_load():
    ours, x = built(bias_rate=0.1).train(), inputs()
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, 5:] = False
    want = [ours(x[:1]), ours(x[1:, :5])]
    loads, ours._loads = ours._loads, None
    x = torch.where(valid[..., None], x, torch.nan)
    y = ours(x, valid)
    assert (y[:1] - want[0]).abs().max() < 1e-12
    assert (y[1, :5] - want[1][0]).abs().max() < 1e-12
    assert not y[1, 5:].any()
    assert torch.equal(loads, ours._loads)


def test_the_bias_moves_towards_equal_loads():
    ours, x = built(bias_rate=0.01, balance=0.0, router="sigmoid").train(), inputs(4, 64)
    with torch.no_grad():
        ours.router.weight[0] = 3 * ours.router.weight.norm() * functional.normalize(x.mean((0, 1)), dim=0)
    spread = []
    for _ in range(150):
        ours(x.requires_grad_())
        spread.append(float(ours._loads.std()))
        ours.learn(lambda total: total)
    assert spread[-1] < 0.25 * spread[0]


def test_the_auxiliary_loss_is_one_for_equal_loads_and_the_number_of_experts_for_one_idle_crowd():
    ours = built(topk=1, balance=0.5).train()
    scores = torch.full((1, EXPERTS, EXPERTS), 1e-9, dtype=torch.float64)
    for rows, expected in ((torch.arange(EXPERTS), 1.0), (torch.zeros(EXPERTS, dtype=torch.int64), float(EXPERTS))):
        some = scores.scatter(-1, rows.view(1, -1, 1), 1.0)
        with gather_aux_losses([ours.balance]) as costs:
            ours._learn_from(some, rows.view(1, -1, 1), None)
        assert abs(float(costs["balance"]) - 0.5 * EXPERTS * expected) < 1e-6


def test_what_a_token_uses_and_how_often_experts_are_chosen():
    ours = built()
    assert ours.unused_parameters == (EXPERTS - 2) * 3 * DIM * HIDDEN
    model = configure("mixtral", "tiny").build().eval()
    with torch.no_grad(), record_usage(model) as usages:
        model(torch.arange(40).view(1, -1))
    usage = usages.read()
    assert [one.values for one in usage] == [4, 4]
    assert all(0 < one.used <= 1 for one in usage)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"topk": 7}, "topk must be from 1 to num_experts = 6"),
        ({"router": "hash"}, "router of the feed_forward 'experts'"),
        ({"impl": "sdpa"}, "impl of the feed_forward 'experts'"),
        ({"hidden_dim": 0}, "hidden_dim must be 1 or more"),
        ({"balance": -1.0}, "balance must be 0 or more"),
        ({"scale": 0.0}, "scale must be above 0"),
    ],
)
def test_what_it_refuses(changes, sentence):
    with pytest.raises(KinformerError, match=sentence):
        built(**changes)
