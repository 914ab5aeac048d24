"""The law that a function of the package leaves the caller's process as it was, held at every call in the suite."""

import os
import random
import signal
import sys
from contextlib import contextmanager
from functools import wraps

import numpy as np
import torch

import kinformer

DRAWS = {"build", "layer"}
"""Functions that draw from PyTorch's global generator, as their documentation says."""
SEEDS = {"train", "compare", "bench"}
"""Functions that seed PyTorch's global generator, one thread at a time, as their documentation says."""
OF_IMPORTS = {"TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST"}
"""Variables that PyTorch sets when it imports its compiler, and pytest between the steps of a test."""


def process_state():
    """Everything of the process that a caller relies on, as comparable values by name."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the legacy generator is what callers seed
    return {
        "PyTorch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "NumPy's random numbers": (name, keys.tobytes(), *rest),
        "Python's random numbers": random.getstate(),
        "threads": torch.get_num_threads(),
        "precision of products": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": {name: value for name, value in os.environ.items() if name not in OF_IMPORTS},
        "folder": os.getcwd(),
    }


def traced():
    """Whether PyTorch's compiler is among the callers."""
    frame = sys._getframe()
    while frame and not frame.f_code.co_filename.endswith("torch/_dynamo/utils.py"):
        frame = frame.f_back
    return frame is not None


class Watched:
    """PyTorch's global generator as its module ``torch.random`` sees it; ``calls`` holds what was to seed or set it.

    A generator that is set back is as before, but another thread may have drawn from it meanwhile. PyTorch's compiler
    sets it back whenever it traces a graph, as for ``export`` with the format "onnx".
    """

    def __init__(self, generator, calls):
        self.generator, self.calls = generator, calls

    def __getattr__(self, name):
        if name in ("manual_seed", "seed", "set_state") and not traced():
            self.calls.append(name)
        return getattr(self.generator, name)


@contextmanager
def watched():
    """The calls that seed or set PyTorch's global generator, by its functions, as a list that grows."""
    calls, generator = [], torch.random.default_generator
    torch.random.default_generator = Watched(generator, calls)
    try:
        yield calls
    finally:
        torch.random.default_generator = generator


def checked(function):
    """``function``, whose calls fail where they change the process, also where they raise."""

    @wraps(function)
    def call(*arguments, **options):
        before = process_state()
        try:
            with watched() as calls:
                return function(*arguments, **options)
        finally:
            after = process_state()
            if function.__name__ == "generate" and options.get("seed") is None:  # it takes the next number as seed
                after["PyTorch's random numbers"] = before["PyTorch's random numbers"]
            changed = [name for name in before if before[name] != after[name]]
            if calls and function.__name__ not in SEEDS:
                changed.append("PyTorch's random numbers, for a while")
            assert not changed, f"kinformer.{function.__name__} changed {' and '.join(changed)}"

    return call


def check_functions():
    """From now on every public function of the package is checked wherever a test calls it."""
    for name in kinformer.__all__:
        if name not in DRAWS:
            setattr(kinformer, name, checked(getattr(kinformer, name)))
