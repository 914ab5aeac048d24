"""The names of ``kinformer.nn``: every kind of part has one, and none is imported before it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

from kinformer import nn
from kinformer.core.config import Config
from kinformer.family.kinds import PAGES, kinds, named_parts, parts_of

STUB = Path(nn.__file__).with_suffix(".pyi")


def stub() -> str:
    """The type stub of ``kinformer.nn``, from its names and from the pages of parts."""
    modules = sorted({config.__module__ for _, config in named_parts()})
    own = sorted((module, name) for name, module in nn._MODULES.items())
    return "".join(
        [
            *(f"import {module}\n" for module in modules),
            "from kinformer.nn import states as states\n",
            *(f"from kinformer.nn.{module} import {name} as {name}\n" for module, name in own),
            "\n",
            *(f"{name} = {config.__module__}.{config.__qualname__}\n" for name, config in named_parts()),
        ]
    )


def test_the_type_stub_has_every_part():
    assert STUB.read_text(encoding="utf-8") == stub(), "write it again: python tests/nn/test_names.py"
    names = [name for name, _ in named_parts()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("slot", PAGES)
def test_every_page_has_parts_of_its_slots(slot):
    assert all(slot in {config.slot for config in parts_of(page).values()} for page in PAGES[slot])
    kinds_of_slot = [config.kind for _, config in named_parts() if config.slot == slot]
    assert sorted(kinds_of_slot) == sorted(kinds()[slot])


@pytest.mark.parametrize("slot", PAGES)
def test_every_kind_of_part_has_a_name(slot):
    named = {value for value in (getattr(nn, name) for name in dir(nn)) if isinstance(value, type)}
    assert all(issubclass(config, Config) for config in kinds()[slot].values())
    assert set(kinds()[slot].values()) <= named


def test_no_module_hides_a_function():
    code = "import kinformer; from kinformer import nn; kinformer.layer('gpt', 8); assert len(nn.layers()) > 60"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
    assert "kinformer.nn.modules" not in lazy
    assert not {name for name in lazy if name.startswith(("kinformer.mixers", "kinformer.family"))}


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
