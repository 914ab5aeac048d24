"""The names of ``kinformer.nn``: every kind of part has one, and none is imported before it is used."""

import subprocess
import sys

import pytest

from kinformer import nn
from kinformer.core.config import Config
from kinformer.family.kinds import kinds

SLOTS = ("mixer", "encoder_mixer", "layer", "encoder_layer", "position", "pattern", "score", "span", "feature_map")
SLOTS += ("decay", "projection", "feed_forward", "norm", "residual", "halting")


@pytest.mark.parametrize("slot", SLOTS)
def test_every_kind_of_part_has_a_name(slot):
    named = {value for value in (getattr(nn, name) for name in dir(nn)) if isinstance(value, type)}
    assert all(issubclass(config, Config) for config in kinds()[slot].values())
    assert set(kinds()[slot].values()) <= named


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'Mamba'"):
        _ = nn.Mamba
    with pytest.raises(ImportError):
        from kinformer.nn import RotaryPosition  # noqa: F401


def test_the_package_imports_next_to_nothing():
    code = "import sys, kinformer; print(*sorted(name for name in sys.modules if name.startswith('kinformer.')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not [name for name in run.stdout.split() if name.split(".")[1] not in ("core", "runtime")]
    assert len(run.stdout.split()) < 12


def test_a_layer_imports_pytorch_and_nothing_else():
    script = """
import sys
import torch
before = set(sys.modules)
import kinformer.nn
lazy = {name for name in sys.modules if name.startswith("kinformer.")}
kinformer.nn.layer("gated-deltanet", 16, num_heads=2)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before if not name.startswith("torch")}))
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("kinformer.")}))
print(*sorted(lazy))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    packages, rooms, lazy = (set(line.split()) for line in run.stdout.splitlines())
    assert packages.isdisjoint({"tyro", "rich", "tokenizers", "transformers", "matplotlib", "cattrs", "safetensors"})
    assert rooms.isdisjoint({"cli", "runs", "tasks", "training", "comparison", "data", "interop", "figures"})
    assert "kinformer.nn.factory" not in lazy
    assert not {name for name in lazy if name.startswith(("kinformer.mixers", "kinformer.family"))}
