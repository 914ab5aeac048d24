"""Random numbers that leave PyTorch's global generator alone, and dropout by 16 random bits an element."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Random numbers without a change of PyTorch's global generator, with which other threads of the process may draw.

P = ParamSpec("P")
R = TypeVar("R")

_OF_TORCH = ("bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
             "randn_like", "randperm")  # fmt: skip
_OF_TENSORS = ("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial",
               "normal_", "random_", "uniform_")  # fmt: skip
_OF_INIT = ("kaiming_normal_", "kaiming_uniform_", "normal_", "orthogonal_", "sparse_", "trunc_normal_", "uniform_",
            "xavier_normal_", "xavier_uniform_")  # fmt: skip
_DRAWS = {
    getattr(place, name)
    for place, names in ((torch, _OF_TORCH), (Tensor, _OF_TENSORS), (nn.init, _OF_INIT))
    for name in names
}
"""The functions that take a ``generator``."""


class _PrivateNumbers(TorchFunctionMode):
    """The mode in which every function that takes a generator gets one of ``seed``, unless it has one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of a ``device``, which continues from call to call."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]

    def __torch_function__(
        self, func: Callable[..., object], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        options = dict(kwargs or {})
        if func in _DRAWS and options.get("generator") is None:
            tensors = (value for value in (*args, *options.values()) if isinstance(value, Tensor))
            device = next((tensor.device for tensor in tensors), torch.get_default_device())
            if options.get("device") is not None:
                device = torch.device(options["device"])
            if device.type != "meta":  # where nothing is drawn
                options["generator"] = self.generator(device)
        return func(*args, **options)


@contextmanager
def private_numbers(seed: int) -> Iterator[torch.Generator]:
    """Draw in this thread from generators of ``seed``, as after ``torch.manual_seed(seed)``, to build modules; the
    CPU's generator is the context's value.

    Do not run a model in this context: dropout ignores the generator, and every operation is slower.
    """
    with _PrivateNumbers(seed) as mode:
        yield mode.generator(torch.device("cpu"))


_SEEDING = RLock()


def seeding(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which seeds PyTorch's global generators, for one thread at a time; a second thread waits.

    The generators are restored at the end, also after an error. Steps of training draw dropout from these generators,
    and no module can replace them.
    """

    @wraps(function)
    def alone(*arguments: P.args, **options: P.kwargs) -> R:
        with _SEEDING:
            numbers = torch.get_rng_state()
            of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
            try:
                return function(*arguments, **options)
            finally:
                torch.set_rng_state(numbers)
                if of_gpus is not None:
                    torch.cuda.set_rng_state_all(of_gpus)

    return alone


_LEVELS = 1 << 16
_DRAWS_PER_WORD = 4
"""Elements that a draw of 64 bits decides."""


class Dropout(nn.Dropout):
    """Dropout (Srivastava et al. 2014) by 16 random bits an element, on a CPU.

    PyTorch's CPU draws a mask one double at a time on one thread, which took a tenth of the time in training steps
    of small models. Here four elements share one draw of 64 bits, so the probability is rounded to a multiple of
    2^-16. The scale uses the rounded probability, so expectations are exact.

    The module ``nn.Dropout``; on other devices than a CPU, PyTorch's dropout. Masks follow PyTorch's global generator.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x of any shape with elements zeroed with probability p and the others multiplied by 1 / (1 - p)."""
        dropped = round(self.p * _LEVELS)
        ours = self.training and 0 < dropped < _LEVELS and x.device.type == "cpu" and not self.inplace
        if not ours:
            return super().forward(x)
        words = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // _DRAWS_PER_WORD),), device=x.device)
        # int16 is uniform from -2^15 on, so it lies below dropped - 2^15 with probability dropped / 2^16.
        retained = words.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - _LEVELS // 2
        # The scale of the rounded probability keeps the expectation exact.
        return x * retained.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))
