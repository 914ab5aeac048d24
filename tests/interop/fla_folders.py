"""Folders as flash-linear-attention saves them, with weights that follow from their names, and what it computes."""

import json
import zlib

import numpy as np
import torch
from safetensors.torch import save_file

SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 5, "rope_theta": 500.0}
FOLDERS = {
    "gated_deltanet": {"head_dim": 8, "expand_v": 1.5},
    "gated_deltanet, sigmoid gate, shared keys": {
        "head_dim": 8,
        "expand_v": 1.0,
        "num_v_heads": 4,
        "output_gate_activation": "sigmoid",
        "allow_neg_eigval": True,
        "tie_word_embeddings": True,
    },
    "gated_deltanet, with attention": {"head_dim": 8, "use_gate": False, "attn": ATTENTION},
    "delta_net": {"expand_k": 2.0},
    "delta_net, gated": {"use_gate": True, "expand_k": 0.5, "allow_neg_eigval": True},
    "gla": {},
    "gla, with convolutions": {"use_short_conv": True, "expand_v": 2.0, "fuse_norm": False},
    "retnet": {},
    "retnet without a gate": {"use_output_gate": False, "intermediate_size": None, "hidden_ratio": 1},
}
"""A ``model_type`` (up to a comma or a space), told from others, to its settings beside SIZES."""
SCALES = {
    "norm": (1.0, 0.1),
    "A_log": (-2.0, 0.3),
    "dt_bias": (-1.0, 0.5),
    "embeddings": (0.0, 1.0),
    "conv": (0.0, 0.5),
}
"""Part of a tensor's name to the mean and the deviation of its weights."""


def kind_of(name):
    return name.replace(",", " ").split()[0]


def weight(name, shape):
    """Return the weights of the tensor ``name``, the same everywhere."""
    mean, deviation = next((scale for part, scale in SCALES.items() if part in name), (0.0, 0.25))
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    return torch.from_numpy(mean + deviation * drawn).float()


def write(folder, config, shapes):
    """Write the folder of ``config``, with weights of these ``shapes`` by their names."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def token_ids(time=20, rows=2):
    return torch.from_numpy(np.random.RandomState(3).randint(1, SIZES["vocab_size"], (rows, time)))
