"""The options of an estimate. Free of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from kinformer.lab.training.settings import Precision
from kinformer.runtime.errors import Checked, KinformerError, nearest

# Descriptions of devices for estimates of time on many devices.
#
# Numbers come from data sheets: peaks, without sparsity, and for links in one direction. The option ``efficiency`` is
# the share of the peak FLOP/s that a run reaches.

MOST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device of a cluster.

    ``flops``: FLOP/s in bfloat16. ``flops_fp32``: FLOP/s in float32 (TF32 if the device supports it). ``memory``:
    bytes. ``bandwidth``, ``link``, ``network``: bytes a second of its memory, of its link to the other devices of a
    node, and of its share of the network between nodes. ``node``: how many devices a node has. ``source``: the source
    of the numbers. ``launch``: seconds from one kernel to the next where PyTorch starts them one by one.
    """

    flops: float
    flops_fp32: float
    memory: float
    bandwidth: float
    link: float
    network: float
    node: int
    source: str
    launch: float = 5e-6


DEVICES = {
    "a100": Device(
        flops=312e12, flops_fp32=156e12, memory=80e9, bandwidth=2.039e12, link=300e9, network=25e9, node=8,
        source="NVIDIA A100 80GB SXM data sheet (NVLink 600 GB/s both ways); one 200 Gb/s adapter a device",
    ),
    "h100": Device(
        flops=989e12, flops_fp32=494e12, memory=80e9, bandwidth=3.35e12, link=450e9, network=50e9, node=8,
        source="NVIDIA H100 SXM data sheet (NVLink 900 GB/s both ways); one 400 Gb/s adapter a device",
    ),
    "h200": Device(
        flops=989e12, flops_fp32=494e12, memory=141e9, bandwidth=4.8e12, link=450e9, network=50e9, node=8,
        source="NVIDIA H200 SXM data sheet (NVLink 900 GB/s both ways); one 400 Gb/s adapter a device",
    ),
    "mi300x": Device(
        flops=1307e12, flops_fp32=654e12, memory=192e9, bandwidth=5.3e12, link=448e9, network=50e9, node=8,
        source="AMD Instinct MI300X data sheet (seven links of 64 GB/s); one 400 Gb/s adapter a device",
    ),
}  # fmt: skip
FIELDS = tuple(field.name for field in fields(Device) if field.name != "source")


def device_of(text: str) -> Device:
    """Return the device that ``text`` names, with changes, as in ``h100,network=25e9``."""
    name, *changes = text.split(",")
    if name not in DEVICES:
        raise KinformerError(f"`hardware` {text}: {name!r} is not a described device; {nearest(name, DEVICES)}")
    values: dict[str, float] = {}
    for change in changes:
        field, _, number = change.partition("=")
        if field not in FIELDS:
            raise KinformerError(f"`hardware` {text}: {field!r} is none of its numbers; {nearest(field, FIELDS)}")
        try:
            values[field] = float(number)
        except ValueError:
            values[field] = 0.0
        if not 0 < values[field] < float("inf"):
            raise KinformerError(f"`hardware` {text}: {field} must be a number above 0, as in {field}=25e9; give one.")
    changed = {name: int(value) if name == "node" else value for name, value in values.items()}
    return replace(DEVICES[name], **changed)  # type: ignore[arg-type]


def numbers_of(text: str) -> list[int]:
    """Return the numbers of devices that ``text`` means: one, as in ``64``, or powers of two, as in ``8..4096``."""
    first, dots, last = text.partition("..")
    counts = [int(part) for part in (first, last or first) if part.isdigit()]
    if len(counts) < 2 or (dots and not last) or not 1 <= counts[0] <= counts[1] <= MOST:
        raise KinformerError(f"`devices` {text}: must be a number from 1 to {MOST:,}, or two, as in 64 or 8..4096.")
    doublings = (int(last) // int(first)).bit_length() if dots else 1
    return [int(first) << doubling for doubling in range(max(1, doublings))]


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(Checked):
    """The options that name a model: a member in a recipe, or a run, with changes."""

    member: str
    """A member of the family (see: kinformer list), or a run folder."""
    recipe: str | None = None
    """Which of the member's recipes (see: kinformer show MEMBER; small if not given)."""
    vocab_size: int | None = None
    """Size of the vocabulary; the recipe's own if not given."""
    set: Mapping[str, object] = field(default_factory=dict)
    """A change to the recipe, as in `set` layers=6 or `set` layers.*.mixer.num_heads=8; may be given again."""

    LEAST = {"vocab_size": 1}


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(SubjectOptions):
    """Parameters, FLOPs, and memory in training and inference, by part and in all, before anything is run."""

    length: int | None = None
    """Tokens of a sequence (1024, the length of a run's training, or the tokens of an image of the recipe's size)."""
    batch_size: int = 1
    """Sequences of a batch."""
    optimizer: Literal["adamw", "adamw-8bit", "radam", "muon", "lamb", "adafactor", "adagrad", "sgd"] = "adamw"
    """Whose state is counted; sgd has momentum, and adamw-8bit comes from bitsandbytes, which training here lacks."""
    precision: Precision = "fp32"
    """Precision of the activations in training, and of the weights in inference."""

    devices: str | None = None
    """Also estimate training and serving on this many devices: 64, or 8..4096 (powers of two). `batch_size`
    then counts the sequences of all devices."""
    hardware: str = "h100"
    """With `devices`: their kind (a100, h100, h200, mi300x), with changes as in h100,network=25e9,node=4."""
    efficiency: float = 0.5
    """With `devices`: the share of the peak FLOP/s that a device reaches in a step."""

    LEAST = {"length": 1, "batch_size": 1}
    SHARES = {"efficiency": "(0, 1)"}
