"""The option ``parallel``: how many processes share what, as in ``tp=2,fsdp=4``."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kinformer.runtime.errors import KinformerError, nearest

AXES = ("tp", "cp", "ring", "fsdp", "dp", "diloco")


class Parallel(NamedTuple):
    """``tensor`` processes share the heads, hidden features and vocabulary of every row, ``context`` groups of them its
    time (with ``ring`` by keys and values that go round); ``replicas`` of all that have other rows. With the
    ``strategy`` fsdp those that have other tokens share the weights, with diloco they train apart for rounds."""

    tensor: int
    replicas: int
    strategy: Literal["ddp", "fsdp", "diloco"]
    context: int = 1
    ring: bool = False

    @property
    def devices(self) -> int:
        """Return how many processes there are."""
        return self.tensor * self.context * self.replicas


def parallel_of(text: str) -> Parallel:
    """Return what ``text`` says, such as ``tp=2``, ``tp=2,fsdp=2``, ``cp=4`` or ``ring=2,dp=4``."""
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
    if "diloco" in sizes and len(sizes) > 1:
        raise KinformerError(
            f"`parallel` {text}: each process of diloco trains the whole model on whole rows of its own; give diloco "
            "alone."
        )
    if "cp" in sizes and "ring" in sizes:
        raise KinformerError(
            f"`parallel` {text}: processes that share the time of rows gather keys and values (cp) or pass them "
            "on in a ring (ring); give one of the two."
        )
    replicas, context = sizes.get("fsdp", sizes.get("dp", 1)), sizes.get("cp", sizes.get("ring", 1))
    if "diloco" in sizes:
        return Parallel(1, sizes["diloco"], "diloco")
    return Parallel(sizes.get("tp", 1), replicas, "fsdp" if "fsdp" in sizes else "ddp", context, "ring" in sizes)


def spread(text: str | None, devices: int, strategy: str = "ddp") -> dict[str, object]:
    """Return the options that ``parallel`` ``text`` stands for, beside ``devices`` and ``strategy``; none where it is
    not given."""
    if text is None:
        return {}
    sizes = parallel_of(text)
    if devices not in (1, sizes.devices):
        raise KinformerError(f"`devices` {devices}: `parallel` {text} is {sizes.devices}; leave `devices` out.")
    if strategy == "diloco" != sizes.strategy:
        raise KinformerError(
            f"`strategy` diloco: each process trains the whole model on whole rows of its own, but `parallel` {text} "
            "shares them; leave `parallel` out."
        )
    return {"devices": sizes.devices, "strategy": sizes.strategy}


class Processes:
    """Mixin of options that have ``devices`` and ``parallel``."""

    devices: int
    parallel: str | None

    @property
    def shared(self) -> Parallel:
        """What processes share according to ``parallel``."""
        return Parallel(1, 1, "ddp") if self.parallel is None else parallel_of(self.parallel)

    @property
    def replicas(self) -> int:
        """The number of shares of a batch's rows."""
        return self.devices // (self.shared.tensor * self.shared.context)
