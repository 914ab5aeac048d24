"""Import of flash-linear-attention's PaTH models: logits by the formulas of its layer, written out on its tensors."""

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize, pad, rms_norm, silu

import kinformer
from tests.interop.decoders import assert_close
from tests.interop.fla_folders import SIZES, token_ids, weight, write

DIM, HEADS, WIDTH, VOCAB, HIDDEN = 16, 2, 8, SIZES["vocab_size"], SIZES["intermediate_size"]
VARIANTS = {
    "as published": {},
    "forget gates, full rank": {"use_forget_gate": True, "use_low_rank_w": False},
    "shared keys, no convolution": {"num_kv_heads": 1, "use_w_shortconv": False},
}


def shapes(config):
    """Return the shapes of the model's tensors by fla's names."""
    keys = config.get("num_kv_heads", HEADS) * WIDTH
    low = {"w_proj.0.weight": (32, DIM), "w_proj.1.weight": (keys, 32)}
    layer = {
        "attn_norm.weight": (DIM,), "mlp_norm.weight": (DIM,),
        "mlp.gate_proj.weight": (HIDDEN, DIM), "mlp.up_proj.weight": (HIDDEN, DIM),
        "mlp.down_proj.weight": (DIM, HIDDEN),
        "attn.q_proj.weight": (DIM, DIM), "attn.k_proj.weight": (keys, DIM), "attn.v_proj.weight": (keys, DIM),
        "attn.o_proj.weight": (DIM, DIM),
        "attn.bt_proj.weight": (keys // WIDTH, DIM), "attn.bt_proj.bias": (keys // WIDTH,),
    }  # fmt: skip
    full = {"w_proj.weight": (keys, DIM)}
    layer |= {f"attn.{name}": shape for name, shape in (low if config.get("use_low_rank_w", True) else full).items()}
    if config.get("use_w_shortconv", True):
        layer["attn.w_conv1d.weight"] = (keys, 1, 3)
    if config.get("use_forget_gate"):
        layer |= {"attn.g_proj.weight": (HEADS, DIM), "attn.g_proj.bias": (HEADS,)}
    ends = {"model.embeddings.weight": (VOCAB, DIM), "model.norm.weight": (DIM,), "lm_head.weight": (VOCAB, DIM)}
    return ends | {f"model.layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}


def attention(x, get):
    """fla's layer on x [batch, time, dim]; ``get(name)`` returns a tensor of the layer, None where it has none."""
    q, k, v = (heads(x @ get(f"{one}_proj.weight").mT) for one in "qkv")
    full = get("w_proj.weight")
    w = x @ full.mT if full is not None else x @ get("w_proj.0.weight").mT @ get("w_proj.1.weight").mT
    if (taps := get("w_conv1d.weight")) is not None:
        before = pad(w, (0, 0, 2, 0))
        w = silu(sum(taps[:, 0, place] * before[:, place : place + x.shape[1]] for place in range(3)))
    w = normalize(heads(w), dim=-1)
    beta = 2 * (x @ get("bt_proj.weight").mT + get("bt_proj.bias")).sigmoid().transpose(1, 2)[..., None]
    gate = get("g_proj.weight")
    gates = 0 * q[..., 0] if gate is None else logsigmoid(x @ gate.mT + get("g_proj.bias")).transpose(1, 2)
    outputs, keys = [], k[:, :, :0]
    for t in range(x.shape[1]):
        u = w[:, :, t : t + 1]
        keys = torch.cat([keys - beta[:, :, t : t + 1] * (keys @ u.mT) * u, k[:, :, t : t + 1]], 2)
        fading = gates[:, :, : t + 1].flip(-1).cumsum(-1).flip(-1) - gates[:, :, : t + 1]
        shared = HEADS // keys.shape[1]
        scores = (q[:, :, t : t + 1] @ keys.repeat_interleave(shared, 1).mT)[:, :, 0] / WIDTH**0.5 + fading
        outputs.append(scores.softmax(-1)[:, :, None] @ v[:, :, : t + 1].repeat_interleave(shared, 1))
    return torch.cat(outputs, 2).transpose(1, 2).flatten(2) @ get("o_proj.weight").mT


def heads(x):
    return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_logits(name, tmp_path):
    config = {**SIZES, "num_heads": HEADS, **VARIANTS[name], "model_type": "path_attn"}
    drawn = shapes(config)
    kinformer.import_checkpoint(write(tmp_path / "peer", config, drawn), tmp_path / "run")
    tensors = {key: weight(key, shape).double() for key, shape in drawn.items()}
    x = tensors["model.embeddings.weight"][token_ids()]
    for number in range(2):
        place = f"model.layers.{number}."
        norm = rms_norm(x, (DIM,), tensors[place + "attn_norm.weight"], 1e-6)
        x = x + attention(norm, lambda key, place=place: tensors.get(f"{place}attn.{key}"))
        norm = rms_norm(x, (DIM,), tensors[place + "mlp_norm.weight"], 1e-6)
        gate, up, down = (tensors[f"{place}mlp.{one}_proj.weight"].mT for one in ("gate", "up", "down"))
        x = x + (silu(norm @ gate) * (norm @ up)) @ down
    logits = rms_norm(x, (DIM,), tensors["model.norm.weight"], 1e-6) @ tensors["lm_head.weight"].mT
    assert_close(kinformer.load(tmp_path / "run").double()(token_ids())[0], logits, 1e-10)
