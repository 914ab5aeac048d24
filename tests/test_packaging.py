"""The package as others install it: its lowest versions, and its wheel in an environment of its own."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests import oldest

ROOT = Path(__file__).parents[1]


def test_every_requirement_names_its_lowest_version():
    lines = oldest.constraints()
    assert len(lines) == len({line.partition("==")[0] for line in lines})
    assert {"torch==2.11", "tyro==1.0.5"} <= set(lines)
    assert len(lines) == len({oldest.oldest(requirement)[0] for requirement in oldest.requirements()})


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of an environment with the wheel, and with the packages of this one that the core needs."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "environment", with_pip=False)
    python = folder / "environment" / "bin" / "python"
    (site,) = (folder / "environment" / "lib").glob("python*/site-packages")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=600)
    import torch

    (site / "packages.pth").write_text(str(Path(torch.__file__).parents[1]), encoding="utf-8")  # after its own
    return python, folder


def run(installed, *words):
    """What a command prints in the folder beside the environment, out of reach of the checkout."""
    python, folder = installed
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, *words], cwd=folder, env=alone, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_all_that_it_needs(installed):
    python, folder = installed
    place = run(installed, "-c", "import kinformer; print(kinformer.__file__)").strip()
    assert place.startswith(str(folder))
    package = Path(place).parent
    here = ROOT / "src" / "kinformer"
    missing = {
        path.relative_to(here)
        for path in here.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not (package / path.relative_to(here)).is_file()
    }
    assert not missing
    assert "gated-deltanet" in run(installed, "-m", "kinformer", "list")
    code = "import torch, kinformer; print(tuple(kinformer.layer('local', 32)(torch.zeros(1, 5, 32)).shape))"
    assert run(installed, "-c", code) == "(1, 5, 32)\n"


NAMED = "kinformer.*,torch,torch._C.*,torch._tensor,torch.types,torch.nn,torch.nn.modules.*,torch.nn.parameter"
"""Modules that the names of a user's script come from; mypy reads no others, which are thousands."""


def check_strictly(installed, script):
    python, folder = installed
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings = folder / "mypy.ini"
    settings.write_text(f"[mypy]\nfollow_imports = skip\n[mypy-{NAMED}]\nfollow_imports = silent\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    command += ["--config-file", str(settings), "--cache-dir", str(ROOT / "build" / "types"), str(script)]
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout


def test_a_users_script_passes_strict_types(installed, tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(
        """
from typing import assert_type

import torch
from torch import Tensor, nn

import kinformer
from kinformer.nn import LocalPattern, RotaryPositions, SoftmaxAttention, attention, states


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mixer = kinformer.layer(SoftmaxAttention(num_heads=8, pattern=LocalPattern(window=64)), dim)
        self.other = kinformer.layer("gated-deltanet", dim, num_heads=4)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.mixer(x, return_state=True)
        y, _ = self.other(y, return_state=True)
        return y + self.mixer(x[:1], states.select_rows(state, torch.tensor([0])))


q = torch.randn(1, 2, 8, 16)
assert_type(attention(q, q, q, pattern=LocalPattern(window=4), position=RotaryPositions()), Tensor)
names: list[str] = [record.name for record in kinformer.layers()]
model = kinformer.build("gpt", recipe="tiny")
figures: dict[str, float] = dict(kinformer.evaluate("run").figures)
""",
        encoding="utf-8",
    )
    check_strictly(installed, script)
