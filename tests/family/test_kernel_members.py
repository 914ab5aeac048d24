"""Members of kernel attention against what others computed, or against their definitions over all pairs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from kinformer.core.contract import Chunk
from kinformer.family.build import configure
from kinformer.kernels.delta import DeltaTokens, delta_rule, delta_steps
from kinformer.mixers.linear import LinearAttention
from kinformer.parts.decays import Fixed, SoftplusChannels
from kinformer.parts.feature_maps import RandomFourier

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


@pytest.mark.parametrize(("member", "full"), [("gated-deltanet", "softmax"), ("kda", "latent")])
def test_hybrid_has_three_layers_to_one_of_full_attention(member, full):
    kinds = [layer.mixer.kind for layer in configure(member, "hybrid").layers]
    assert kinds == ["linear", "linear", "linear", full]


def disturbed(theirs):
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    return theirs


def copied_taps(mixer, taps, rows):
    """Copy a convolution's weight [channels, 1, width], whose channels are ``rows`` of q, k and v, head by head."""
    taps = taps.squeeze(1).flip(1).T  # the token itself first
    parts = [part.unflatten(-1, (mixer.key_heads, -1)) for part in taps.split(rows, dim=-1)]
    mixer.convolution.weight.copy_(torch.cat(parts, dim=-1))


def test_kda_is_the_layer_of_kimi_linear():
    """With its weights; the rows of q, k, v and beta stand head by head in ours."""
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    from transformers import KimiLinearConfig

    sizes = {"linear_head_dim": 4, "linear_num_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    torch.manual_seed(0)
    theirs = disturbed(kimi.KimiLinearDeltaAttention(KimiLinearConfig(hidden_size=DIM, **sizes), 0))
    mixer = built(configure("kda", "tiny").layers[0].mixer.replace(head_dim=4, gate_rank=4)).float()
    with torch.no_grad():
        parts = [getattr(theirs, f"{name}_proj").weight.unflatten(0, (2, -1)) for name in "qkvb"]
        mixer.qkv.weight.copy_(torch.cat(parts, dim=1).flatten(0, 1))
        mixer.gate.down.weight.copy_(theirs.g_a_proj.weight)
        mixer.gate.up.weight.copy_(theirs.g_b_proj.weight)
        mixer.decay.down.weight.copy_(theirs.forget_gate.f_a_proj.weight)
        mixer.decay.up.weight.copy_(theirs.forget_gate.f_b_proj.weight)
        mixer.decay.log_rate.copy_(theirs.forget_gate.A_log.flatten())
        mixer.decay.step.copy_(theirs.forget_gate.dt_bias.view(2, 4))
        copied_taps(mixer, theirs.conv1d.weight, [8, 8, 8])
        mixer.norm.weight.copy_(theirs.o_norm.weight)
        mixer.out.weight.copy_(theirs.o_proj.weight)
        x = inputs().float()
        close(absorbed(mixer, x), theirs(x), 1e-5)


def test_kda_with_equal_decays_of_a_heads_channels_is_gated_deltanet():
    mixer = mixer_of("kda")
    scalar = mixer_of("gated-deltanet", gate_rank=16, gate_activation="sigmoid")
    weights = {name: weight for name, weight in mixer.state_dict().items() if not name.startswith("decay")}
    scalar.load_state_dict(weights, strict=False)
    decay = mixer.decay
    with torch.no_grad():
        for weight in (decay.step, decay.up.weight.view(2, 8, 8)):
            weight.copy_(weight[:, :1].clone().expand_as(weight))
        scalar.decay.log_rate.copy_(decay.log_rate)
        scalar.decay.step.copy_(decay.step[:, 0])
        scalar.decay.gate.weight.copy_(decay.up.weight.view(2, 8, 8)[:, 0] @ decay.down.weight)
    want = absorbed(scalar, inputs())
    close(absorbed(mixer, inputs()), want, 1e-12)
    with torch.no_grad():
        decay.step[:, 1:] += 1.0
    assert (absorbed(mixer, inputs()) - want).abs().max() > 1e-3


def test_a_decay_with_a_lower_bound_is_that_of_flash_linear_attention():
    """log a = l sigmoid(exp(A_log) (W_2 W_1 x + b)), the newer form of KDA's gate."""
    decay = SoftplusChannels.Config(rank=3, lower_bound=-5.0).build(DIM, 2, 4).double()
    x = inputs()
    gate = (x @ decay.down.weight.T @ decay.up.weight.T).unflatten(-1, (2, 4)) + decay.step
    want = -5 * (decay.log_rate.exp()[:, None] * gate).sigmoid()
    close(decay(x), want.transpose(1, 2), 1e-14)
    assert decay(100 * x).min() >= -5


def mamba(groups):
    return mixer_of("mamba2", num_heads=4, head_dim=3, value_dim=8, key_heads=groups)


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_that_of_transformers(groups):
    """With its weights; their convolution has no bias here, and our rows are those of C, B and x."""
    theirs = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    from transformers import Mamba2Config, __version__

    if groups > 1 and tuple(map(int, __version__.split(".")[:2])) < (5, 23):
        pytest.skip("earlier versions compute two groups differently")

    sizes = {"num_heads": 4, "head_dim": 8, "state_size": 3, "n_groups": groups, "expand": 2, "chunk_size": 16}
    config = Mamba2Config(hidden_size=DIM, use_conv_bias=False, layer_norm_epsilon=1e-6, num_hidden_layers=1, **sizes)
    torch.manual_seed(0)
    theirs = disturbed(theirs.Mamba2Mixer(config, 0))
    mixer, size = mamba(groups).float(), 3 * groups
    with torch.no_grad():
        z, x, b, c, dt = theirs.in_proj.weight.split([32, 32, size, size, 4])
        mixer.qkv.weight.copy_(torch.cat([c, b, x]))
        mixer.gate.weight.copy_(z)
        mixer.decay.gate.weight.copy_(dt)
        mixer.decay.log_rate.copy_(theirs.A_log)
        mixer.decay.step.copy_(theirs.dt_bias)
        x, b, c = theirs.conv1d.weight.split([32, size, size])
        copied_taps(mixer, torch.cat([c, b, x]), [size, size, 32])
        mixer.skip.copy_(theirs.D)
        mixer.norm.weight.copy_(theirs.norm.weight.view(4, 8))
        mixer.out.weight.copy_(theirs.out_proj.weight)
        x = inputs().float()
        close(absorbed(mixer, x), theirs(x), 1e-5)


def test_mamba2_is_masked_attention_and_without_rates_linear_attention():
    """Equation 16 of the paper, y = (L * C B^T) (dt x) with L the products of decays, 1 where A is 0; D x beside it."""
    mixer = mamba(1)
    plain = built(mixer.config.replace(convolution=0, head_norm="none", gate=False, gate_first=False))
    x = inputs()
    with torch.no_grad():
        c, b, v = (each.unflatten(-1, (-1, width)).transpose(1, 2) for each, width in zip(
            plain.qkv(x).split([3, 3, 32], -1), (3, 3, 8), strict=True
        ))  # fmt: skip
        steps = functional.softplus(plain.decay.gate(x) + plain.decay.step).transpose(1, 2)
        sums = -(steps * plain.decay.log_rate.exp()[:, None]).cumsum(-1)
        left = (sums[..., None] - sums[..., None, :]).tril().exp().tril()
        skipped = plain.skip[:, None, None] * v
        want = [
            ((c @ b.mT) * mask) @ (steps[..., None] * v) + skipped
            for mask in (left, left.new_ones(()).expand_as(left).tril())
        ]
        want = [plain.out(y.transpose(1, 2).flatten(2)) for y in want]
        close(absorbed(plain, x), want[0])
        assert (want[0] - want[1]).abs().max() > 1e-2
        plain.decay.log_rate.fill_(-60.0)
        close(absorbed(plain, x), want[1])


def test_one_step_of_deltaproduct_is_the_delta_rule_and_more_reflect():
    """Two steps with beta = 2, reflections at e1 and (e1 + e2) / sqrt(2), turn the state by 90 degrees."""
    one, two = (mixer_of("gated-deltanet", steps=steps, convolution=0) for steps in (1, 2))
    with torch.no_grad():
        rows = two.qkv.weight.view(2, -1, DIM)
        q, k, _, v, _, beta, off = rows.split([8, 8, 8, 8, 8, 1, 1], dim=1)
        one.qkv.weight.copy_(torch.cat([q, k, v, beta], 1).flatten(0, 1))
        x = inputs()
        for name, weight in two.named_parameters():
            if name != "qkv.weight":
                one.get_parameter(name).copy_(weight)
        x[..., 0] = 1.0
        off.zero_()[..., 0] = -1e3  # the second step's beta is 0
        close(absorbed(two, x), absorbed(one, x), 1e-12)
        off.zero_()
        assert (absorbed(two, x) - absorbed(one, x)).abs().max() > 1e-3
    keys = torch.tensor([[1.0, 0.0], [0.5**0.5, 0.5**0.5]], dtype=torch.float64).view(1, 1, 1, 2, 2)
    tokens = DeltaTokens(keys[..., 0, :], keys, torch.zeros_like(keys), torch.full((1, 1, 1, 2), 2.0).double())
    _, state = delta_steps(tokens, torch.eye(2).double().view(1, 1, 2, 2))
    close(state[0, 0], torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double(), 1e-14)


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
    mixer = mixer_of("rfa", floor=0.01)
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
        outputs.append((q[:, :, t, None] @ s).squeeze(2) / (q[:, :, t] * z).sum(-1, keepdim=True).clamp_min(0.01))
    close(absorbed(mixer, x), mixer.out(torch.stack(outputs, 2).transpose(1, 2).flatten(2)), 1e-8)


def test_rfa_without_its_gate_is_softmax_attention_of_unit_vectors_in_the_limit():
    errors = []
    for features in (16, 4096):
        feature_map = RandomFourier.Config(features=features, orthogonal=True)
        mixer = LinearAttention.Config(num_heads=1, feature_map=feature_map, floor=1e-3).build(DIM).double()
        x = inputs(1)
        with torch.no_grad():
            q, k, v = mixer.qkv(x).split(DIM, dim=-1)
            q, k = (each / (each.norm(dim=-1, keepdim=True) + 1e-3) for each in (q, k))
            weights = (q @ k.mT).exp().tril()
            want = mixer.out(weights / weights.sum(-1, keepdim=True) @ v)
            errors.append(float((absorbed(mixer, x) - want).norm() / want.norm()))
    assert errors[1] < 0.05 and 3 * errors[1] < errors[0]
