"""How a process computes: in all of its threads."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from kinformer.training.precision import use_fast_products
use_fast_products()
torch.set_num_threads(2)
small = torch.full((1 << 20,), 1e-30) * 1e-10
print(int((small != 0).sum()), int((torch.full((1 << 20,), -100.0).exp() != 0).sum()))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="elsewhere nothing is flushed")
def test_no_thread_leaves_subnormal_numbers() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "0"]
