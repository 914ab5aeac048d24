"""Tiny layers of every name, and what they need to run."""

import torch

import kinformer
from kinformer.nn.modules import _layer_config, _mixer_config
from tests.members import MEMBERS

DIM = 32
SETTINGS = {
    "linformer": {"max_length": 32},
    "tensorized": {"max_length": 32},
    "sinkhorn": {"max_length": 32},
}
"""What a layer of this test needs beside its width: sequences are short."""
GRID = {"swin", "windows", "convformer", "separable_convolution"}
RECORDS = kinformer.layers()
NAMES = [record.name for record in RECORDS]
CAUSAL = [record.name for record in RECORDS if record.causal]
BIDIRECTIONAL = [record.name for record in RECORDS if not record.causal and record.name not in GRID]


def unlike(names, whole=True):
    """Return the first of all ``names`` whose layers, or mixers, have equal configs, and so are one and the same."""
    configs = {}
    for name in names:
        config = _layer_config(name, "tiny" if name in MEMBERS else "small")
        configs.setdefault(config if whole else _mixer_config(config), name)
    return list(configs.values())


def made(name, whole=False, seed=0, **settings):
    """A tiny layer in float64; ``settings`` go before those of this test."""
    torch.manual_seed(seed)
    recipe = "tiny" if name in MEMBERS else "small"
    known = _layer_config(name, recipe)
    fits = {key: value for key, value in SETTINGS.get(name, {}).items() if hasattr(known, key)}
    return kinformer.layer(name, DIM, whole=whole, recipe=recipe, dtype=torch.float64, **fits, **settings).eval()


def extras(name, layer, batch):
    """The arguments without which a layer of this name does not run."""
    if name in GRID:
        return {"grid": (4, 4)}
    return {"context": randn(1, 7, DIM, seed=9).expand(batch, -1, -1)} if getattr(layer, "reads_context", False) else {}


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
