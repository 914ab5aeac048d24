"""Import of the folders of TTT-Linear's authors: logits by the formulas of their code, written out on its tensors."""

import pytest
import torch
from torch.nn.functional import conv1d, gelu, layer_norm, pad, rms_norm, silu

import kinformer
from kinformer.runtime.errors import KinformerError
from tests.interop.decoders import assert_close
from tests.interop.fla_folders import token_ids, weight, write

DIM, HEADS, WIDTH, VOCAB, HIDDEN, SIZE = 16, 2, 8, 29, 24, 4
CONFIG = {
    "model_type": "ttt", "vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN, "mini_batch_size": SIZE, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VARIANTS = {"transformer": {}, "mamba": {"use_gate": True, "share_qk": True, "ttt_base_lr": 0.5}}


def shapes(config):
    block = {
        **{f"{one}_proj.weight": (DIM, DIM) for one in ("qvog" if config.get("use_gate") else "qkvo")},
        "learnable_ttt_lr_weight": (HEADS, 1, DIM), "learnable_ttt_lr_bias": (HEADS, 1), "learnable_token_idx": (SIZE,),
        "ttt_norm_weight": (HEADS, WIDTH), "ttt_norm_bias": (HEADS, WIDTH), "W1": (HEADS, WIDTH, WIDTH),
        "b1": (HEADS, 1, WIDTH), "post_norm.weight": (DIM,), "post_norm.bias": (DIM,),
    }  # fmt: skip
    if config.get("share_qk"):
        block |= {f"conv_{one}.weight": (DIM, 1, 4) for one in "qk"} | {f"conv_{one}.bias": (DIM,) for one in "qk"}
    layer = {f"seq_modeling_block.{name}": shape for name, shape in block.items()} | {
        "seq_norm.weight": (DIM,), "ffn_norm.weight": (DIM,), "mlp.gate_proj.weight": (HIDDEN, DIM),
        "mlp.up_proj.weight": (HIDDEN, DIM), "mlp.down_proj.weight": (DIM, HIDDEN),
    }  # fmt: skip
    ends = {"model.embed_tokens.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    return ends | {f"model.layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}


def convolved(x, taps, bias):
    return conv1d(pad(x.mT, (3, 0)), taps, bias, groups=DIM).mT


def turned(x):
    """Rotary positions of pairs of neighbours, by the place in the mini-batch."""
    rate = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=x.dtype) / WIDTH)
    angle = (torch.arange(x.shape[2]) % SIZE)[:, None] * rate
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)


def block(x, get, config):
    """The layer on x [batch, time, dim], in its dual form; W and b apart, as there."""
    q, v = (x @ get(f"{one}_proj.weight").mT for one in "qv")
    if config.get("share_qk"):
        q, k = (convolved(q, get(f"conv_{one}.weight"), get(f"conv_{one}.bias")) for one in "qk")
    else:
        k = x @ get("k_proj.weight").mT
    q, k, v = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in (q, k, v))
    q, k = turned(q), turned(k)
    rate = (torch.einsum("bnc,hdc->bhn", x, get("learnable_ttt_lr_weight")) + get("learnable_ttt_lr_bias")).sigmoid()
    rate = config.get("ttt_base_lr", 1.0) * rate / WIDTH
    index = (1 / torch.arange(1.0, SIZE + 1, dtype=x.dtype) + get("learnable_token_idx")).clamp_min(0)
    gamma, beta = get("ttt_norm_weight")[:, None], get("ttt_norm_bias")[:, None]
    weights, bias, outputs = get("W1")[None], get("b1")[None], []
    for start in range(0, x.shape[1], SIZE):
        xq, xk, xv, lr = (part[:, :, start : start + SIZE] for part in (q, k, v, rate))
        z = xk @ weights + bias
        std = (z.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        normed = (z - z.mean(-1, keepdim=True)) / std
        grad = (gamma * normed + beta - (xv - xk)) * gamma
        sums = grad.sum(-1, keepdim=True), (grad * normed).sum(-1, keepdim=True)
        grad = (WIDTH * grad - sums[0] - normed * sums[1]) / (WIDTH * std)
        eta = index[: xq.shape[2], None] * lr[:, :, None]
        z = xq @ weights - (eta * (xq @ xk.mT).tril()) @ grad + bias - eta.tril() @ grad
        outputs.append(xq + layer_norm(z, (WIDTH,), eps=1e-6) * gamma + beta)
        last = eta[:, :, -1, :, None]
        weights, bias = weights - (last * xk).mT @ grad, bias - (last * grad).sum(2, keepdim=True)
    y = torch.cat(outputs, 2).transpose(1, 2).flatten(2)
    y = layer_norm(y, (DIM,), get("post_norm.weight"), get("post_norm.bias"), 1e-6)
    if config.get("use_gate"):
        y = gelu(x @ get("g_proj.weight").mT, approximate="tanh") * y
    return y @ get("o_proj.weight").mT


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_logits(name, tmp_path):
    config = CONFIG | VARIANTS[name]
    drawn = shapes(config)
    kinformer.import_checkpoint(write(tmp_path / "peer", config, drawn), tmp_path / "run")
    tensors = {key: weight(key, shape).double() for key, shape in drawn.items()}
    embedding = tensors["model.embed_tokens.weight"]
    x = embedding[token_ids()]
    for number in range(2):
        of = {key.removeprefix(f"model.layers.{number}."): each for key, each in tensors.items()}
        norm = rms_norm(x, (DIM,), of["seq_norm.weight"], 1e-6)
        x = x + block(norm, lambda key, of=of: of[f"seq_modeling_block.{key}"], config)
        norm = rms_norm(x, (DIM,), of["ffn_norm.weight"], 1e-6)
        gate, up = silu(norm @ of["mlp.gate_proj.weight"].mT), norm @ of["mlp.up_proj.weight"].mT
        x = x + (gate * up) @ of["mlp.down_proj.weight"].mT
    logits = rms_norm(x, (DIM,), tensors["model.norm.weight"], 1e-6) @ embedding.mT
    assert_close(kinformer.load(tmp_path / "run").double()(token_ids())[0], logits, 1e-10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttt_layer_type": "mlp"}, "ttt_layer_type is 'mlp', but only 'linear'"),
        ({"pre_conv": True}, "pre_conv is True, but only False"),
        ({"mini_batch_size": 5}, "mixer.shares is [4], which is not what config.json says"),
    ],
)
def test_a_lying_config_is_one_sentence(changes, message, tmp_path):
    with pytest.raises(KinformerError) as refusal:
        kinformer.import_checkpoint(write(tmp_path / "peer", CONFIG | changes, shapes(CONFIG)), tmp_path / "run")
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
