"""Optimisers are PyTorch's own, and none of them loads its compiler, which takes a second or two."""

import subprocess
import sys

SCRIPT = """
import sys
import torch
import kinformer
from kinformer.lab.training.optimisers import Optimiser
from kinformer.lab.training.settings import Settings

for kind in ("adamw", "muon", "adafactor", "adagrad", "sgd", "lamb", "radam"):
    torch.manual_seed(0)
    model = kinformer.build("gpt", recipe="tiny", set={"dim": 8, "layers": 1})
    optimiser = Optimiser(model, Settings(optimizer=kind, lr=0.1, beta2=0))  # also a whole number
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.ones(3, 4, dtype=torch.int64))[0].square().sum().backward()
    optimiser.step(0.1)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters())), kind
    assert all(parameter.grad is None for parameter in model.parameters()), kind
    for inner, _ in optimiser.parts:
        inner.load_state_dict(inner.state_dict())
assert "torch._dynamo" not in sys.modules, "an optimiser loaded the compiler"
"""


def test_no_optimiser_loads_the_compiler():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
