"""Rules of kernel attention of 2025 and 2026: their recurrences, written from flash-linear-attention's formulas, and
their limits. The contract is checked in ``test_kernel_attention.py``."""

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.family.build import configure
from kinformer.runtime.errors import KinformerError

DIM, TIME = 16, 70


def mixer_of(member, **changes):
    torch.manual_seed(0)
    mixer = configure(member, "tiny").layers[0].mixer.replace(**changes).build(DIM).double()
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return mixer


def inputs(seed=1):
    return torch.randn(2, TIME, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def absorbed(mixer, x):
    return mixer(Chunk(x), mixer.initial_state(len(x), dtype=x.dtype))[0]


def close(got, want, limit=1e-10):
    assert (got - want).abs().max() <= limit * max(1.0, float(want.detach().abs().max()))


def convolved(mixer, x):
    """Queries, keys and values behind their convolution, and beta."""
    q, k, v, beta = mixer._project(x)
    recent = mixer.empty_state(len(x), x.device, x.dtype).recent
    return *mixer.convolution(torch.cat([q, k, v], -1), recent, None, None)[0].split(mixer.widths, -1), beta


def unit(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def over_time(step, *tokens):
    """Outputs [batch, heads, time, width] of ``step`` (state, token by token) from a state of zeros."""
    q, v = tokens[0], tokens[2]
    state, outputs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        state = step(state, *(x[:, :, t] for x in tokens))
        outputs.append((state * q[:, :, t, :, None]).sum(-2))
    return torch.stack(outputs, 2)


def comba(mixer, x):
    """Comba.forward and fused_recurrent_comba: p = k sigmoid(decay), q - D p, and v - S^T p before S decays."""
    q, k, v, beta = convolved(mixer, x)
    share = mixer.rule.feedback.sigmoid().view(-1, 1, 1)
    q, p, k = unit(q - mixer.rule.correction.view(-1, 1, 1) * share * k), share * unit(k), unit(k)
    q, p, k = (each.repeat_interleave(mixer.shared_by, 1) for each in (q, p, k))
    v = v.unflatten(-1, (mixer.shared_by, -1)).transpose(2, 3).flatten(1, 2)

    def step(state, q, k, v, p, beta, g):
        new = beta[..., None] * (v - (state * p[..., None]).sum(-2))
        return state * g[..., None, None].exp() + k[..., None] * new[..., None, :]

    return mixer._output(over_time(step, q, k, v, p, beta, mixer.decay(x)), x, x.dtype, None)


def gdn2(mixer, x):
    """naive_recurrent_gdn2: S = (I - k (b * k)^T) Diag(exp(g)) S + k (w * v)^T."""
    q, k, v, _ = convolved(mixer, x)
    q, k, largest = unit(q), unit(k), 2.0 if mixer.config.negative_eigenvalues else 1.0
    b, w = (
        each(x).sigmoid().unflatten(-1, (2, -1)).transpose(1, 2) for each in (mixer.rule.erasing, mixer.rule.writing)
    )

    def step(state, q, k, v, b, w, g):
        state = state * g[..., None].exp()
        return state + k[..., None] * (w * v - (state * (b * k)[..., None]).sum(-2))[..., None, :]

    return mixer._output(over_time(step, q, k, v, largest * b, w, mixer.decay(x)), x, x.dtype, None)


def mesa(mixer, x):
    """naive_mesa_net_exact: H = exp(g) H + beta k k^T and S alike with v, read by (H + diag(lamb))^-1 q."""
    q, k, v, _ = mixer._project(x)
    recent = mixer.empty_state(len(x), x.device, x.dtype).recent
    q, k = mixer.convolution(torch.cat([q, k], -1), recent, None, None)[0].chunk(2, -1)
    q, k, beta = unit(q), unit(k), mixer.rule.strength(x).sigmoid().mT
    ridge = torch.nn.functional.softplus(mixer.rule.penalty).view(2, -1) + 0.25
    h, s, outputs = q.new_zeros(2, 2, 8, 8), q.new_zeros(2, 2, 8, 8), []
    for t in range(TIME):
        fade, key = mixer.decay(x)[:, :, t, None, None].exp(), (beta[..., None] * k)[:, :, t, :, None]
        h, s = h * fade + key * k[:, :, t, None], s * fade + key * v[:, :, t, None]
        solution = torch.linalg.solve(h + ridge.diag_embed(), q[:, :, t])
        outputs.append((solution[..., None] * s).sum(-2))
    return mixer._output(torch.stack(outputs, 2), x, x.dtype, None)


@pytest.mark.parametrize(
    ("member", "formula", "changes"),
    [
        ("comba", comba, {}),
        ("comba", comba, {"num_heads": 4, "key_heads": 2, "value_dim": 3}),
        ("mesanet", mesa, {"num_heads": 2, "head_dim": 8}),
        ("gdn2", gdn2, {}),
        ("gdn2", gdn2, {"value_dim": 5, "negative_eigenvalues": True}),
    ],
)
def test_parity_with_the_recurrences_of_flash_linear_attention(member, formula, changes):
    """Outputs and gradients of all weights, beside chunks."""
    mixer, x = mixer_of(member, **changes), inputs()
    got, want = absorbed(mixer, x), formula(mixer, x)
    close(got, want)
    weights = list(mixer.parameters())
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), weights) for y in (got, want)), strict=True):
        close(one, other, 1e-8)


def test_comba_without_a_correction_and_with_the_whole_feedback_is_the_delta_rule():
    """Without decay it is Gated DeltaNet without decay; a decay tells the two apart, as do both parameters."""
    mixer, plain = mixer_of("comba", decay=None), mixer_of("gated-deltanet", decay=None, gate_activation="sigmoid")
    plain.load_state_dict({name: w for name, w in mixer.state_dict().items() if not name.startswith("rule")})
    x = inputs()
    with torch.no_grad():
        mixer.rule.feedback.fill_(40.0)
        mixer.rule.correction.zero_()
    want = absorbed(plain, x)
    close(absorbed(mixer, x), want, 1e-12)
    for name, value in (("feedback", 1.0), ("correction", 0.5)):
        changed = mixer_of("comba", decay=None)
        changed.load_state_dict(mixer.state_dict())
        with torch.no_grad():
            getattr(changed.rule, name).fill_(value)
        assert (absorbed(changed, x) - want).abs().max() > 1e-3
    mixer, plain = mixer_of("comba"), mixer_of("gated-deltanet", gate_activation="sigmoid")
    plain.load_state_dict({name: w for name, w in mixer.state_dict().items() if not name.startswith("rule")})
    with torch.no_grad():
        mixer.rule.feedback.fill_(40.0)
        mixer.rule.correction.zero_()
    assert (absorbed(mixer, x) - absorbed(plain, x)).abs().max() > 1e-3


def test_mesanet_is_one_solve_with_as_many_iterations_as_features_and_linear_attention_with_a_large_penalty():
    mixer, x = mixer_of("mesanet", iterations=8), inputs()
    want = mesa(mixer, x)
    close(absorbed(mixer, x), want, 1e-9)
    short = mixer_of("mesanet", iterations=3)
    assert (absorbed(short, x) - want).abs().max() > 1e-3
    mixer, plain = (mixer_of("mesanet", rule=rule, iterations=30, head_norm="none", convolution=0, decay=None)
                    for rule in ("mesa", "linear"))  # fmt: skip
    plain.load_state_dict({name: w for name, w in mixer.state_dict().items() if not name.startswith("rule")})
    with torch.no_grad():
        mixer.rule.penalty.fill_(1e9)
        mixer.rule.strength.weight.zero_()
        mixer.rule.strength.bias.fill_(60.0)
    close(1e9 * absorbed(mixer, x), absorbed(plain, x), 1e-6)


def test_gated_deltanet_2_with_one_number_for_both_gates_is_kda():
    mixer, plain, x = mixer_of("gdn2"), mixer_of("kda"), inputs()
    weights = {name: w for name, w in mixer.state_dict().items() if not name.startswith(("rule", "qkv"))}
    plain.load_state_dict(weights, strict=False)
    with torch.no_grad():
        q, k, v = (part.unflatten(0, (2, -1)) for part in mixer.qkv.weight.split(16))
        beta = torch.randn(2, 1, DIM, dtype=torch.float64)
        plain.qkv.weight.copy_(torch.cat([q, k, v, beta], 1).flatten(0, 1))
        for gate in (mixer.rule.erasing, mixer.rule.writing):
            gate.weight.copy_(beta.expand(2, 8, DIM).flatten(0, 1))
    want = absorbed(plain, x)
    close(absorbed(mixer, x), want, 1e-12)
    with torch.no_grad():
        mixer.rule.writing.weight[0] += 0.5
    assert (absorbed(mixer, x) - want).abs().max() > 1e-3


def test_mesanet_takes_inputs_of_autocast():
    mixer, x = mixer_of("mesanet").float(), inputs().float()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = mixer(Chunk(x.bfloat16()), mixer.initial_state(len(x)))
    close(y.float(), mixer(Chunk(x), mixer.initial_state(len(x)))[0], 0.1)


def test_mesanet_under_torch_func():
    layer, x = kinformer.layer("mesanet", 16, num_heads=2).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(torch.func.vmap(lambda row: layer(row[None])[0])(x), layer(x))
    with pytest.raises(KinformerError, match="not have a gradient under torch.func"):
        torch.func.grad(lambda row: layer(row).sum())(x)
