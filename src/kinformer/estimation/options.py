"""The options of an estimate. Free of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kinformer.runtime.errors import require, require_share
from kinformer.runtime.fields import Checked


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(Checked):
    """Parameters, FLOPs, and memory in training and inference, by part and in all, before anything is run."""

    member: str
    """A member of the family (see: kinformer list), or a run folder."""
    recipe: str | None = None
    """Which of the member's recipes (see: kinformer show MEMBER; small if not given)."""
    vocab_size: int | None = None
    """Size of the vocabulary; the recipe's own if not given."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """A change to the recipe, as in `set` layers=6 or `set` layers.*.mixer.num_heads=8; may be given again."""
    length: int | None = None
    """Tokens of a sequence (1024, that of a run's training, or what an image of the recipe's size has)."""
    batch_size: int = 1
    """Sequences of a batch."""
    optimizer: Literal["adamw", "adamw-8bit", "radam", "muon", "lamb", "adafactor", "adagrad", "sgd"] = "adamw"
    """Whose state is counted; sgd has momentum, and adamw-8bit is that of bitsandbytes, which training here lacks."""
    precision: Literal["fp32", "bf16-mixed"] = "fp32"
    """Precision of the activations in training, and of the weights in inference."""

    devices: str | None = None
    """Also estimate training and serving on this many devices: 64, or 8..4096 (powers of two). `batch_size` is then
    that of all together."""
    hardware: str = "h100"
    """With `devices`: what they are (a100, h100, h200, mi300x), with changes as in h100,network=25e9,node=4."""
    efficiency: float = 0.5
    """With `devices`: the share of the peak FLOP/s that a device reaches in a step."""

    rounds: int | None = None
    """With `devices`: also estimate DiLoCo, whose devices train apart and exchange weights once every N steps."""

    def __post_init__(self) -> None:
        require_share("efficiency", self.efficiency, zero=False)
        for name in ("vocab_size", "length", "batch_size", "rounds"):
            require(name, getattr(self, name), 1)
        super().__post_init__()
