"""Import of flash-linear-attention's folders that none of its own numbers are at hand for: models written down from the
formulas of its layers and of its kernels' recurrences, with random weights in the layout of its checkpoints."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import kinformer
from kinformer.runtime.errors import KinformerError
from tests.interop.decoders import assert_close
from tests.interop.fla_folders import SIZES, token_ids, write

DIM, HIDDEN = SIZES["hidden_size"], SIZES["intermediate_size"]


def shapes_of(layer):
    """Shapes of a model's tensors by name, from the shapes of one layer's mixer."""
    shapes = {"model.embeddings.weight": (29, DIM), "model.norm.weight": (DIM,), "lm_head.weight": (29, DIM)}
    mlp = {"gate_proj": (HIDDEN, DIM), "up_proj": (HIDDEN, DIM), "down_proj": (DIM, HIDDEN)}
    for place in ("model.layers.0.", "model.layers.1."):
        shapes |= {f"{place}attn.{name}": shape for name, shape in layer.items()}
        shapes |= {f"{place}mlp.{name}.weight": shape for name, shape in mlp.items()}
        shapes |= {f"{place}{name}.weight": (DIM,) for name in ("attn_norm", "mlp_norm")}
    return shapes


def logits_of(weights, mixer, ids):
    """RMSNorm, ``mixer`` (weights of a layer, x) and a gated feed-forward, in two layers."""

    def norm(x, name):
        return functional.rms_norm(x, (DIM,), weights[name], eps=1e-6)

    x = weights["model.embeddings.weight"][ids]
    for place in ("model.layers.0.", "model.layers.1."):
        of = {name.removeprefix(place): each for name, each in weights.items() if name.startswith(place)}
        x = x + mixer(
            {name.removeprefix("attn."): each for name, each in of.items()}, norm(x, f"{place}attn_norm.weight")
        )
        y = norm(x, f"{place}mlp_norm.weight")
        gate, up = functional.silu(y @ of["mlp.gate_proj.weight"].T), y @ of["mlp.up_proj.weight"].T
        x = x + (gate * up) @ of["mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


def short(x, weight):
    """ShortConvolution with silu of x [batch, time, channels]."""
    y = functional.conv1d(functional.pad(x.mT, (weight.shape[-1] - 1, 0)), weight, groups=len(weight))
    return functional.silu(y).mT


def l2(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def heads(x, width):
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


COMBA = {"model_type": "comba", "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5, "norm_eps": 1e-6}
COMBA_SHAPES = {
    "q_proj.weight": (16, DIM), "k_proj.weight": (16, DIM), "v_proj.weight": (48, DIM), "g_proj.weight": (48, DIM),
    "a_proj.weight": (4, DIM), "b_proj.weight": (4, DIM), "decay": (2,), "D": (2,), "A_log": (4,), "dt_bias": (4,),
    "q_conv1d.weight": (16, 1, 4), "k_conv1d.weight": (16, 1, 4), "v_conv1d.weight": (48, 1, 4),
    "o_norm.weight": (12,), "o_proj.weight": (DIM, 48),
}  # fmt: skip


def comba(w, x):
    """Comba.forward; the kernel norms q, k and p, and reads p before the state decays."""
    q, k, v = (short(x @ w[f"{one}_proj.weight"].T, w[f"{one}_conv1d.weight"]) for one in "qkv")
    q, k, v = heads(q, 8), heads(k, 8), heads(v, 12)
    p = k * w["decay"].sigmoid()[:, None, None]
    q = q - w["D"][:, None, None] * p
    q, k, p = (l2(each).repeat_interleave(2, 1) for each in (q, k, p))
    beta = (x @ w["b_proj.weight"].T).sigmoid().mT
    g = (-w["A_log"].exp() * functional.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])).mT
    state, outputs = x.new_zeros(len(x), 4, 8, 12), []
    for t in range(x.shape[1]):
        new = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, p[:, :, t]))
        state = state * g[:, :, t, None, None].exp() + k[:, :, t, :, None] * new[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t] * 8**-0.5))
    o = functional.rms_norm(torch.stack(outputs, 2), (12,), w["o_norm.weight"], eps=1e-6)
    o = o * heads(x @ w["g_proj.weight"].T, 12).sigmoid()
    return o.transpose(1, 2).flatten(2) @ w["o_proj.weight"].T


MESA = {"model_type": "mesa_net", "num_heads": 2, "head_dim": 8, "use_output_gate": True, "norm_eps": 1e-6}
MESA_SHAPES = {f"{one}_proj.weight": (16, DIM) for one in "qkvgo"} | {
    "a_proj.weight": (2, DIM), "a_proj.bias": (2,), "b_proj.weight": (2, DIM), "b_proj.bias": (2,),
    "lambda_params": (16,), "q_conv1d.weight": (16, 1, 4), "k_conv1d.weight": (16, 1, 4), "o_norm.weight": (8,),
}  # fmt: skip


def mesa(w, x):
    """MesaNet.forward with naive_mesa_net_exact."""
    q, k = (l2(heads(short(x @ w[f"{one}_proj.weight"].T, w[f"{one}_conv1d.weight"]), 8)) for one in "qk")
    v, gate = (heads(x @ w[f"{one}_proj.weight"].T, 8) for one in "vg")
    beta, g = ((x @ w[f"{one}_proj.weight"].T + w[f"{one}_proj.bias"]).sigmoid().mT for one in "ba")
    ridge = (functional.softplus(w["lambda_params"]) + 0.25).view(2, 8).diag_embed()
    h_kk, h_kv, outputs = x.new_zeros(len(x), 2, 8, 8), x.new_zeros(len(x), 2, 8, 8), []
    for t in range(x.shape[1]):
        fade, key = g[:, :, t, None, None], (beta[:, :, t, None] * k[:, :, t])[..., None]
        h_kk, h_kv = h_kk * fade + key * k[:, :, t, None], h_kv * fade + key * v[:, :, t, None]
        outputs.append((torch.linalg.solve(h_kk + ridge, q[:, :, t])[..., None] * h_kv).sum(-2))
    o = functional.rms_norm(torch.stack(outputs, 2), (8,), w["o_norm.weight"], eps=1e-6) * functional.silu(gate)
    return o.transpose(1, 2).flatten(2) @ w["o_proj.weight"].T


CASES = {"comba": (COMBA, COMBA_SHAPES, comba), "mesa_net": (MESA, MESA_SHAPES, mesa)}


def folder_of(name, place, **changes):
    config, shapes, _ = CASES[name]
    return write(place / "peer", SIZES | config | changes, shapes_of(shapes))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_generation(name, tmp_path):
    folder = folder_of(name, tmp_path)
    kinformer.import_checkpoint(folder, tmp_path / "run")
    ours = kinformer.load(tmp_path / "run")
    weights = {name: each.double() for name, each in load_file(folder / "model.safetensors").items()}
    want = logits_of(weights, CASES[name][2], token_ids())
    with torch.no_grad():
        assert_close(ours(token_ids())[0], want.float())
        assert_close(ours.double()(token_ids())[0], want, 1e-5)
    ids = token_ids()[:, :6]
    for _ in range(4):
        ids = torch.cat([ids, logits_of(weights, CASES[name][2], ids)[:, -1:].argmax(-1)], 1)
    new = kinformer.generate(ours, token_ids()[:, :6], max_new_tokens=4, temperature=0, seed=0)
    assert torch.equal(new, ids[:, 6:])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("comba", {"use_output_correction": False}, "use_output_correction is False, but only True"),
        ("comba", {"num_v_heads": 3}, "num_v_heads is 3, but must be a multiple of num_heads"),
        ("comba", {"expand_v": 2.0}, "is not what config.json says"),
        ("mesa_net", {"lambda_lower_bound": 0.1}, "lambda_lower_bound is 0.1, but only 0.25"),
        ("mesa_net", {"max_cg_step_decoding": 8}, "max_cg_step_decoding is 8, but only 30"),
        ("mesa_net", {"use_short_conv": False}, "use_short_conv is False, but only True"),
    ],
)
def test_a_lying_config_is_one_sentence(name, changes, message, tmp_path):
    with pytest.raises(KinformerError, match=message) as refusal:
        kinformer.import_checkpoint(folder_of(name, tmp_path, **changes), tmp_path / "run")
    assert "\n" not in str(refusal.value)
