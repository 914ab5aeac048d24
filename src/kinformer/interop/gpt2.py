"""GPT-2 as the library transformers saves it, as our member ``gpt``.

Both compute the same: pre-norm layers, one product for queries, keys and values (in this order, head by head), learned
positions, the output matrix tied to the embedding. Its products are stored as [in, out] and are transposed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kinformer.interop.architecture import Architecture, Settings, choice, integer, number, switch
from kinformer.interop.encoders import ACTIVATIONS
from kinformer.interop.key_map import TRANSPOSED, ConfigData, KeyMap, key
from kinformer.runtime.errors import KinformerError

DEFAULTS: Mapping[str, object] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
"""The defaults of transformers for what a config leaves out."""
REQUIRED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
"""Settings under which attention is what ours is. ``reorder_and_upcast_attn`` only concerns half precision, where our
softmax runs in float32 anyway."""
MASKS = re.compile(r"h\.\d{1,5}\.attn\.(bias|masked_bias)")
"""Causal masks and their fill, which old checkpoints keep among the weights."""
KEYS = KeyMap(
    model=(
        key("input.embedding", "wte"),
        key("position.table", "wpe.weight", tensors=("",)),
        key("norm", "ln_f"),
        key("head.output", "lm_head"),
    ),
    layer=(
        key("mixer_residual.norm", "ln_1"),
        key("mixer.projection.qkv", "attn.c_attn", layout=TRANSPOSED),
        key("mixer.out", "attn.c_proj", layout=TRANSPOSED),
        key("feed_forward_residual.norm", "ln_2"),
        key("feed_forward.up", "mlp.c_fc", layout=TRANSPOSED),
        key("feed_forward.down", "mlp.c_proj", layout=TRANSPOSED),
    ),
    layers="h",
    prefix="transformer.",
    left_out=MASKS,
)


def _gpt2(full: Settings, place: Path) -> ConfigData:
    if full.get("pruned_heads"):
        raise KinformerError(f"{place}: heads are pruned; import the checkpoint before pruning.")
    dim = integer(full, place, "n_embd")
    norm = {"kind": "layer_norm", "eps": number(full, place, "layer_norm_epsilon"), "bias": True}
    layer = {
        "kind": "decoder",
        "mixer": {
            "kind": "softmax",
            "num_heads": integer(full, place, "n_head"),
            "dropout": number(full, place, "attn_pdrop"),
        },
        "feed_forward": {
            "kind": "mlp",
            "hidden_dim": 4 * dim if full["n_inner"] is None else integer(full, place, "n_inner"),
            "activation": ACTIVATIONS[choice(full, place, "activation_function", ACTIVATIONS)],
        },
        "norm": norm,
        "dropout": number(full, place, "resid_pdrop"),
    }
    return {
        "kind": "decoder",
        "input": {"kind": "tokens", "vocab_size": integer(full, place, "vocab_size")},
        "dim": dim,
        "layers": [layer] * full["n_layer"],
        "position": {"kind": "learned", "max_length": integer(full, place, "n_positions")},
        "head": {"kind": "language", "tied": switch(full, place, "tie_word_embeddings")},
        "norm": norm,
        "dropout": number(full, place, "embd_pdrop"),
    }


GPT2 = Architecture(
    title="GPT-2",
    member="gpt",
    defaults=DEFAULTS,
    required=REQUIRED,
    names={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    model=_gpt2,
    keys=KEYS,
)
ARCHITECTURES = {"gpt2": GPT2}
