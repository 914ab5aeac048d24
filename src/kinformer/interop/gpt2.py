"""GPT-2 as the library transformers saves it, as our member ``gpt``.

Both compute the same: pre-norm layers, one product for queries, keys and values (in this order, head by head), learned
positions, the output matrix tied to the embedding. Its products are stored as [in, out] and are transposed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
REQUIRED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
"""Settings under which attention is what ours is. ``reorder_and_upcast_attn`` only concerns half precision, where our
softmax runs in float32 anyway."""

NAMES = {
    "wte.weight": "input.embedding.weight",
    "wpe.weight": "position.table",
    "ln_f": "norm",
    "lm_head.weight": "head.output.weight",
}
LAYER_NAMES = {
    "ln_1": "mixer_residual.norm",
    "attn.c_attn": "mixer.projection.qkv",
    "attn.c_proj": "mixer.out",
    "ln_2": "feed_forward_residual.norm",
    "mlp.c_fc": "feed_forward.up",
    "mlp.c_proj": "feed_forward.down",
}
MASKS = re.compile(r"(transformer\.)?h\.\d{1,5}\.attn\.(bias|masked_bias)")
"""Causal masks and their fill, which old checkpoints keep among the weights."""


def model_config(config: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return the model config, as data, of transformers' ``config.json``; settings that ours
    would compute otherwise are an error."""
    for name, value in REQUIRED.items():
        if config.get(name, value) is not value:
            raise KinformerError(
                f"{place}: {name} is {config[name]!r}, but only {value} can be imported: ours attends without it."
            )
    if config.get("pruned_heads"):
        raise KinformerError(f"{place}: heads are pruned; import the checkpoint before pruning.")
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise KinformerError(
            f"{place}: activation_function is {activation!r}, but only {', '.join(ACTIVATIONS)} can be imported."
        )
    dim = _setting(config, place, "n_embd", "hidden_size", 768)
    norm = {"kind": "layer_norm", "eps": _number(config, place, "layer_norm_epsilon", 1e-5), "bias": True}
    layer = {
        "kind": "decoder",
        "mixer": {
            "kind": "softmax",
            "num_heads": _setting(config, place, "n_head", "num_attention_heads", 12),
            "dropout": _number(config, place, "attn_pdrop", 0.1),
        },
        "feed_forward": {
            "kind": "mlp",
            "hidden_dim": _setting(config, place, "n_inner", "", 4 * dim),
            "activation": ACTIVATIONS[activation],
        },
        "norm": norm,
        "dropout": _number(config, place, "resid_pdrop", 0.1),
    }
    length = _setting(config, place, "n_positions", "max_position_embeddings", 1024)
    return {
        "kind": "decoder",
        "input": {"kind": "tokens", "vocab_size": _setting(config, place, "vocab_size", "", 50257)},
        "dim": dim,
        "layers": [layer] * _setting(config, place, "n_layer", "num_hidden_layers", 12),
        "position": {"kind": "learned", "max_length": length},
        "head": {"kind": "language", "tied": bool(config.get("tie_word_embeddings", True))},
        "norm": norm,
        "dropout": _number(config, place, "embd_pdrop", 0.1),
    }


def _setting(config: Mapping[str, Any], place: Path, name: str, alias: str, default: int) -> int:
    """Return a size by either of its names; transformers' own default where it is left out or null."""
    value = config.get(name)
    value = config.get(alias) if value is None else value
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise KinformerError(f"{place}: {name} is {value!r}, but must be a whole number of 1 or more.")
    if name == "n_layer" and value > 10_000:
        raise KinformerError(f"{place}: n_layer is {value}, more than any GPT-2 has; restore the file from a copy.")
    return value


def _number(config: Mapping[str, Any], place: Path, name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise KinformerError(f"{place}: {name} is {value!r}, but must be a number of 0 or more and below 1.")
    return float(value)


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; a tensor that a GPT-2 language model does not have is an error."""
    import torch

    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    weights = {}
    for name, tensor in plain.items():
        weights[_our_name(name, folder)] = tensor.mT.contiguous() if ".c_" in name and tensor.dim() == 2 else tensor
    if model["head"]["tied"]:
        output = weights.pop("head.output.weight", None)
        if output is not None and not torch.equal(output, weights.get("input.embedding.weight", output)):
            raise KinformerError(
                f"{folder}: lm_head.weight differs from wte.weight, but config.json ties them; "
                "set tie_word_embeddings to false there if the two were trained separately."
            )
    return weights


def _our_name(name: str, folder: Path) -> str:
    stem, _, kind = name.rpartition(".")
    if name in NAMES:
        return NAMES[name]
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    match = re.fullmatch(r"h\.(\d{1,5})\.(.+)", stem)
    if match is None or match[2] not in LAYER_NAMES or kind not in ("weight", "bias"):
        raise KinformerError(
            f"{folder}: holds {name[:99]!r}, which a GPT-2 language model has not; import one without further heads."
        )
    return f"stack.layers.{int(match[1])}.{LAYER_NAMES[match[2]]}.{kind}"
