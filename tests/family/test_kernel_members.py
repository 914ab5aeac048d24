"""RetNet, Gated DeltaNet, GLA and RFA against what others computed, or against their definitions over all pairs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from kinformer.core.contract import Chunk
from kinformer.decays.fixed import Fixed
from kinformer.family.build import configure
from kinformer.features.random_fourier import RandomFourier
from kinformer.kernels.delta import delta_rule
from kinformer.mixers.linear import LinearAttention

DIM, TIME = 16, 70


def close(got, want, limit=1e-10):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= limit * max(1.0, float(want.detach().abs().max()))


def built(config, dim=DIM):
    torch.manual_seed(0)
    mixer = config.build(dim).double()
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return mixer


def mixer_of(member, **changes):
    return built(configure(member, "tiny").layers[0].mixer.replace(**changes))


def inputs(batch=2, time=TIME):
    return torch.randn(batch, time, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def absorbed(mixer, x, **masks):
    return mixer(Chunk(x, **masks), mixer.initial_state(len(x), dtype=x.dtype))[0]


def heads(x, weight, num_heads):
    """x weight^T as [batch, heads, time, width]."""
    return (x @ weight.T).unflatten(-1, (num_heads, -1)).transpose(1, 2)


def retention(mixer, x):
    """Equations 5 to 8 of the paper over all pairs, in complex numbers: keys turned by e^(i n theta), gamma^(n - m)."""
    wq, wk, wv = mixer.qkv.weight.split([16, 16, 32])
    q, k, v = (heads(x, weight, 2) for weight in (wq, wk, wv))
    q, k = (torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) for each in (q, k))
    distance = (torch.arange(TIME)[:, None] - torch.arange(TIME)).double()
    theta = 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turn = torch.polar(torch.ones(TIME, TIME, 4).double(), distance[..., None] * theta)
    scores = torch.einsum("bhtc,bhsc,tsc->bhts", q, k.conj(), turn).real / 8**0.5
    gamma = 1 - 2.0 ** (-5 - torch.arange(2).double())
    kept = (gamma[:, None, None] ** distance.clamp_min(0)).tril()
    y = (scores * kept) @ v
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    gate = x @ mixer.gate.weight.T
    return (y.transpose(1, 2).flatten(2) * gate * gate.sigmoid()) @ mixer.out.weight.T


def test_retnet_is_retention():
    mixer = mixer_of("retnet", value_dim=16)
    close(absorbed(mixer, inputs()), retention(mixer, inputs()))


def test_retnet_without_decay_and_rotation_is_linear_attention_without_a_normaliser():
    limit = {"position": {"kind": "none"}, "decay": Fixed.Config(first=60.0), "head_norm": "none", "gate": False}
    config = configure("retnet", "tiny", set={f"layers.*.mixer.{name}": value for name, value in limit.items()})
    mixer = built(config.layers[0].mixer)
    q, k, v = (heads(inputs(), weight, 2) for weight in mixer.qkv.weight.split([16, 16, 64]))
    want = (((q @ k.mT).tril() @ v) / 8**0.5).transpose(1, 2).flatten(2) @ mixer.out.weight.T
    close(absorbed(mixer, inputs()), want)
    off = built(config.layers[0].mixer.replace(decay=Fixed.Config(first=5.0)))
    assert (absorbed(off, inputs()) - want).abs().max() > 1e-2


def channels(mixer, x):
    """GLA token by token: S <- diag(a) S + k v^T (equation 3)."""
    wq, wk, wv = mixer.qkv.weight.split([16, 16, 32])
    q, k, v = (heads(x, weight, 2) for weight in (wq, wk, wv))
    logits = x @ mixer.decay.down.weight.T @ mixer.decay.up.weight.T + mixer.decay.up.bias
    a = logits.sigmoid().unflatten(-1, (2, -1)).transpose(1, 2) ** (1 / 16)
    state, outputs = x.new_zeros(len(x), 2, 8, 16), []
    for t in range(x.shape[1]):
        state = a[:, :, t, :, None] * state + k[:, :, t, :, None] * v[:, :, t, None]
        outputs.append((q[:, :, t, None] @ state).squeeze(2) / 8**0.5)
    y = functional.layer_norm(torch.stack(outputs, 2), (16,)).transpose(1, 2).flatten(2)
    return (y * functional.silu(x @ mixer.gate.weight.T)) @ mixer.out.weight.T


def test_gla_is_its_recurrence_and_its_decays_matter():
    mixer = mixer_of("gla")
    close(absorbed(mixer, inputs()), channels(mixer, inputs()))
    free = mixer_of("gla", decay=None, head_norm="none", gate=False)
    q, k, v = (heads(inputs(), weight, 2) for weight in free.qkv.weight.split([16, 16, 32]))
    want = (((q @ k.mT).tril() @ v) / 8**0.5).transpose(1, 2).flatten(2) @ free.out.weight.T
    close(absorbed(free, inputs()), want)


@pytest.fixture(scope="module")
def qwen():
    return pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


@pytest.mark.parametrize("decay", [1.0, 30.0])
def test_the_gated_delta_rule_is_that_of_qwen3_next(qwen, decay):
    """Their PyTorch form by chunks, in float32 inside, and that token by token."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, TIME, 8, generator=draw) for _ in range(3))
    g, beta = -decay * torch.rand(2, 2, TIME, generator=draw), torch.rand(2, 2, TIME, generator=draw)
    theirs = [each.transpose(1, 2) for each in (q, k, v, g, beta)]
    options = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    unit = [each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k)]
    got, state = delta_rule(*unit, v, beta, torch.zeros(2, 2, 8, 8), log_decay=g)
    for rule in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        out, last = rule(*theirs, **options)
        close(got * 8**-0.5, out.transpose(1, 2), 1e-5)
        close(state, last, 1e-5)


def test_gated_deltanet_is_the_layer_of_qwen3_next(qwen):
    """With its weights: rows of q, k, v and z, and of beta and a, stand head by head."""
    from transformers import Qwen3NextConfig

    sizes = {"linear_key_head_dim": 4, "linear_value_head_dim": 3, "linear_num_key_heads": 2}
    config = Qwen3NextConfig(hidden_size=DIM, linear_num_value_heads=2, linear_conv_kernel_dim=4, **sizes)
    torch.manual_seed(0)
    theirs = qwen.Qwen3NextGatedDeltaNet(config, 0)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    mixer = built(configure("gated-deltanet", "tiny").layers[0].mixer.replace(head_dim=4, value_dim=3)).float()
    with torch.no_grad():
        q, k, v, z = theirs.in_proj_qkvz.weight.view(2, 14, DIM).split([4, 4, 3, 3], dim=1)
        beta, a = theirs.in_proj_ba.weight.view(2, 2, DIM).split([1, 1], dim=1)
        mixer.qkv.weight.copy_(torch.cat([q, k, v, beta], dim=1).flatten(0, 1))
        mixer.gate.weight.copy_(z.flatten(0, 1))
        mixer.decay.gate.weight.copy_(a.flatten(0, 1))
        mixer.decay.log_rate.copy_(theirs.A_log)
        mixer.decay.step.copy_(theirs.dt_bias)
        taps = theirs.conv1d.weight.squeeze(1).flip(1).T  # the token itself first
        parts = [part.unflatten(-1, (2, -1)) for part in taps.split([8, 8, 6], dim=-1)]
        mixer.convolution.weight.copy_(torch.cat(parts, dim=-1))
        mixer.norm.weight.copy_(theirs.norm.weight)
        mixer.out.weight.copy_(theirs.out_proj.weight)
        x = inputs().float()
        close(absorbed(mixer, x), theirs(x), 1e-5)


def test_gated_deltanet_without_decay_and_convolution_is_the_delta_rule():
    plain = {"decay": None, "convolution": 0, "head_norm": "none", "gate": False}
    mixer = mixer_of("gated-deltanet", **plain)
    fast = mixer_of("fast-weights", feature_map=mixer.config.feature_map)
    fast.load_state_dict(mixer.state_dict())
    close(absorbed(mixer, inputs()), absorbed(fast, inputs()), 1e-14)


def test_hybrid_has_three_layers_to_one_of_softmax():
    kinds = [layer.mixer.kind for layer in configure("gated-deltanet", "hybrid").layers]
    assert kinds == ["linear", "linear", "linear", "softmax"]


@pytest.fixture(scope="module")
def rfa():
    """Arrays of the authors' code (ungated, as released), float64."""
    with np.load(Path(__file__).parents[1] / "golden" / "rfa.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def test_rfa_without_its_gate_is_the_authors(rfa):
    """Their features are 0.1 [sin, cos], and no denominator is below 1: with 16 features of ours, 6.25."""
    config = LinearAttention.Config(num_heads=2, feature_map=RandomFourier.Config(features=16), floor=1 / (0.4 * 0.4))
    mixer = config.build(DIM).double()
    with torch.no_grad():
        mixer.feature_map.weight.copy_(rfa["W"])
        mixer.feature_map.sigma.copy_(rfa["causal.sigma"])
        for kind in ("weight", "bias"):
            parts = [rfa[f"causal.{part}_proj.{kind}"] for part in "qkv"]
            getattr(mixer.qkv, kind).copy_(torch.cat(parts))
            getattr(mixer.out, kind).copy_(rfa[f"causal.out_proj.{kind}"])
    x = rfa["x"].transpose(0, 1).clone().requires_grad_()
    queries = heads(x, mixer.qkv.weight[:16], 2) + mixer.qkv.bias[:16].view(2, 1, 8)
    close(mixer.feature_map(queries) * 0.4, rfa["phi_q"].permute(1, 2, 0, 3))
    close(absorbed(mixer, x), rfa["out_causal_nopad"].transpose(0, 1))
    valid = ~rfa["key_padding_mask"]
    assert not valid.all()
    y = absorbed(mixer, x, valid=valid)
    want = rfa["out_causal"].transpose(0, 1)
    close(y[valid], want[valid])


def test_rfa_gates_as_its_recurrence():
    """S <- g S + (1 - g) phi(k) v^T, z likewise (section 3.2)."""
    mixer = mixer_of("rfa", floor=0.0, eps=1e-9)
    mixer.feature_map.weight.copy_(torch.randn_like(mixer.feature_map.weight))
    x = inputs()
    q, k, v = (each + b.view(2, 1, 8) for each, b in zip(
        (heads(x, weight, 2) for weight in mixer.qkv.weight.split(16)), mixer.qkv.bias.split(16), strict=True
    ))  # fmt: skip
    q, k = mixer.feature_map(q), mixer.feature_map(k)
    g = (x @ mixer.decay.gate.weight.T + mixer.decay.gate.bias).sigmoid().transpose(1, 2)[..., None]
    s, z, outputs = q.new_zeros(2, 2, 16, 8), q.new_zeros(2, 2, 16), []
    for t in range(TIME):
        s = g[:, :, t, :, None] * s + (1 - g[:, :, t, :, None]) * k[:, :, t, :, None] * v[:, :, t, None]
        z = g[:, :, t] * z + (1 - g[:, :, t]) * k[:, :, t]
        outputs.append((q[:, :, t, None] @ s).squeeze(2) / ((q[:, :, t] * z).sum(-1, keepdim=True) + 1e-9))
    close(absorbed(mixer, x), mixer.out(torch.stack(outputs, 2).transpose(1, 2).flatten(2)), 1e-8)


def test_rfa_without_its_gate_is_softmax_attention_of_unit_vectors_in_the_limit():
    errors = []
    for features in (16, 4096):
        feature_map = RandomFourier.Config(features=features, orthogonal=True)
        mixer = LinearAttention.Config(num_heads=1, feature_map=feature_map, eps=1e-9).build(DIM).double()
        x = inputs(1)
        with torch.no_grad():
            q, k, v = mixer.qkv(x).split(DIM, dim=-1)
            q, k = (each / (each.norm(dim=-1, keepdim=True) + 1e-3) for each in (q, k))
            weights = (q @ k.mT).exp().tril()
            want = mixer.out(weights / weights.sum(-1, keepdim=True) @ v)
            errors.append(float((absorbed(mixer, x) - want).norm() / want.norm()))
    assert errors[1] < 0.05 and 3 * errors[1] < errors[0]
