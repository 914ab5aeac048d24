"""The option ``parallel``: how many processes share what, as in ``tp=2,fsdp=4``."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kinformer.runtime.errors import KinformerError, nearest

AXES = ("tp", "fsdp", "dp")


class Parallel(NamedTuple):
    """``tensor`` processes share the heads, hidden features and vocabulary of every row; ``replicas`` groups of them
    have other rows and, with the ``strategy`` fsdp, share the weights."""

    tensor: int
    replicas: int
    strategy: Literal["ddp", "fsdp"]

    @property
    def devices(self) -> int:
        """Return how many processes there are."""
        return self.tensor * self.replicas


def parallel_of(text: str) -> Parallel:
    """Return what ``text`` says, such as ``tp=2``, ``tp=2,fsdp=2`` or ``tp=2,dp=4``."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, number = item.strip().partition("=")
        if name not in AXES:
            raise KinformerError(f"`parallel` {text}: {name!r} is none of its axes; {nearest(name, AXES)}")
        if name in sizes or not number.isdigit() or int(number) < 1:
            raise KinformerError(
                f"`parallel` {text}: {item.strip()!r} must be {name}=N, once, with N of 1 or more; give it so, as in "
                "tp=2,fsdp=4."
            )
        sizes[name] = int(number)
    if "fsdp" in sizes and "dp" in sizes:
        raise KinformerError(
            f"`parallel` {text}: groups of processes that compute other rows share the weights (fsdp) or do not (dp); "
            "give one of the two."
        )
    replicas = sizes.get("fsdp", sizes.get("dp", 1))
    return Parallel(sizes.get("tp", 1), replicas, "fsdp" if "fsdp" in sizes else "ddp")


def spread(text: str | None, devices: int) -> dict[str, object]:
    """Return the options that ``parallel`` ``text`` stands for, beside ``devices``; none where it is not given."""
    if text is None:
        return {}
    sizes = parallel_of(text)
    if devices not in (1, sizes.devices):
        raise KinformerError(f"`devices` {devices}: `parallel` {text} is {sizes.devices}; leave `devices` out.")
    return {"devices": sizes.devices, "strategy": sizes.strategy}


class Processes:
    """Mixin of options that have ``devices`` and ``parallel``."""

    devices: int
    parallel: str | None

    @property
    def tensor(self) -> int:
        """How many processes share every row."""
        return 1 if self.parallel is None else parallel_of(self.parallel).tensor

    @property
    def replicas(self) -> int:
        """How many shares of a batch's rows there are."""
        return self.devices // self.tensor
