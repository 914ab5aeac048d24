"""The tensors of decoders with LayerNorm as the library transformers names them: GPT-NeoX, OPT, BLOOM and MPT."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kinformer.interop.key_map import KeyMap, key
from kinformer.interop.layouts import BY_HEAD, QKV, SAME, Behind


def _keys(
    ours: Mapping[str, tuple[str, ...]], prefix: str, layers: str, outside: Mapping[str, str], *heads: str
) -> KeyMap:
    """Return the key map of a decoder: ``ours`` to the modules of a layer, ``outside`` to those of the model.

    ``heads``: further names of the output matrix, in files of other versions.
    """
    layouts = {"mixer.projection.qkv": BY_HEAD, "position.table": Behind(2)}
    layer = tuple(
        key(one, *theirs, layout=QKV if len(theirs) == 3 else layouts.get(one, SAME)) for one, theirs in ours.items()
    )
    model = [key(one, theirs) for one, theirs in outside.items() if one != "position.table"]
    model += [key("head.output", name) for name in heads]
    if "position.table" in outside:
        name = outside["position.table"]
        model.append(key("position.table", name, layout=layouts["position.table"], tensors=("",)))
    return KeyMap(model=tuple(model), layer=layer, layers=layers, prefix=prefix, left_out=BUFFERS)


BUFFERS = re.compile(r".*attention\.(bias|masked_bias|rotary_emb\.inv_freq)|.*rotary_emb\.inv_freq")
"""Masks and angles, which old checkpoints keep among the weights."""
NEOX_KEYS = _keys(
    {
        "mixer_residual.norm": ("input_layernorm",),
        "mixer.projection.qkv": ("attention.query_key_value",),
        "mixer.out": ("attention.dense",),
        "feed_forward_residual.norm": ("post_attention_layernorm",),
        "feed_forward.up": ("mlp.dense_h_to_4h",),
        "feed_forward.down": ("mlp.dense_4h_to_h",),
    },
    "gpt_neox.",
    "layers",
    {"input.embedding": "embed_in", "norm": "final_layer_norm", "head.output": "embed_out"},
    "lm_head",
)
OPT_KEYS = _keys(
    {
        "mixer_residual.norm": ("self_attn_layer_norm",),
        "mixer.projection.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mixer.out": ("self_attn.out_proj",),
        "feed_forward_residual.norm": ("final_layer_norm",),
        "feed_forward.up": ("fc1",),
        "feed_forward.down": ("fc2",),
    },
    "model.decoder.",
    "layers",
    {
        "input.embedding": "embed_tokens",
        "position.table": "embed_positions.weight",
        "norm": "final_layer_norm",
        "head.output": "lm_head",
    },
)
BLOOM_KEYS = _keys(
    {
        "mixer_residual.norm": ("input_layernorm",),
        "mixer.projection.qkv": ("self_attention.query_key_value",),
        "mixer.out": ("self_attention.dense",),
        "feed_forward_residual.norm": ("post_attention_layernorm",),
        "feed_forward.up": ("mlp.dense_h_to_4h",),
        "feed_forward.down": ("mlp.dense_4h_to_h",),
    },
    "transformer.",
    "h",
    {
        "input.embedding": "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        "norm": "ln_f",
        "head.output": "lm_head",
    },
)
MPT_KEYS = KeyMap(
    model=(key("input.embedding", "wte"), key("norm", "norm_f"), key("head.output", "lm_head")),
    layer=(
        key("mixer_residual.norm", "norm_1"),
        key("mixer.projection.qkv", "attn.Wqkv"),
        key("mixer.out", "attn.out_proj"),
        key("feed_forward_residual.norm", "norm_2"),
        key("feed_forward.up", "ffn.up_proj"),
        key("feed_forward.down", "ffn.down_proj"),
    ),
    layers="blocks",
    prefix="transformer.",
)
