"""A package of somebody else, written into a folder: a module of parts and a member, and metadata that names them."""

import importlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from kinformer.runtime.plugins import entry_points_of

MODULE = "foreign_parts"

SOURCE = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import CausalMixer, Chunk, MixerConfig, real_resets, select_valid, state_dtype
from kinformer.core.parts import FeatureMap, FeatureMapConfig
from kinformer.core.parts import PatternConfig, Position, PositionConfig, Relative, Score, ScoreConfig
from kinformer.core.pattern import NONE, SOME, Boxes, Cover, Pattern
from kinformer.core.probe import KERNEL, probe
from kinformer.family.record import Member
from kinformer.lab.tasks.table import TASKS


class Softplus(FeatureMap):
    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureMapConfig):
        kind = "softplus"

        def build(self, head_dim: int) -> Softplus:
            return Softplus()

    def forward(self, x: Tensor) -> Tensor:
        return functional.softplus(x)


class LeakyState(NamedTuple):
    total: Tensor


class Leaky(CausalMixer):
    """total_t = decay total_(t-1) + value_t,  y_t = gate(x_t) total_t."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "leaky"
        num_heads: int = 4
        decays: tuple[float, ...] = (0.9,)
        gate: FeatureMapConfig = Softplus.Config()

        def build(self, dim: int) -> Leaky:
            return Leaky(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.decay, self.gate = sum(config.decays) / len(config.decays), config.gate.build(dim)
        self.project = nn.Linear(dim, 2 * dim)

    def initial_state(self, batch, *, device=None, dtype=None):
        like = self.project.weight
        dtype = state_dtype(dtype or like.dtype)
        return LeakyState(torch.zeros(batch, self.dim, device=device or like.device, dtype=dtype))

    def state_bytes(self, length, *, dtype=torch.float32):
        return self.dim * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: LeakyState) -> tuple[Tensor, LeakyState]:
        x, resets, total, outputs = select_valid(chunk.x, chunk.valid), real_resets(chunk), state.total, []
        gate, value = self.project(x).to(total.dtype).chunk(2, dim=-1)
        value, totals = probe("values", value[:, None], implied=KERNEL)[:, 0], []
        for t in range(x.shape[1]):
            kept = total if resets is None else total.masked_fill(resets[:, t, None], 0)
            new = self.decay * kept + value[:, t]
            total = new if chunk.valid is None else torch.where(chunk.valid[:, t, None], new, total)
            totals.append(total)
            outputs.append(self.gate(gate[:, t]) * total)
        probe("outputs", torch.stack(totals, dim=1))
        return select_valid(torch.stack(outputs, dim=1).to(x.dtype), chunk.valid), LeakyState(total)


class LogDistance(Position):
    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "log_distance"

        def build_heads(self, dim: int, num_heads: int, head_dim: int) -> LogDistance:
            return LogDistance()

    def relative(self, lowest: int, highest: int) -> Relative:
        return Relative(lowest, bias=-torch.arange(lowest, highest + 1).abs().double().log1p()[None])


@dataclass(frozen=True)
class SameParity(Pattern):
    @dataclass(frozen=True, kw_only=True)
    class Config(PatternConfig):
        kind = "same_parity"

        def build(self) -> SameParity:
            return SameParity()

    stride = 2

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((q - k) % 2 == 0)

    def cover(self, boxes: Boxes) -> Cover:
        return np.where(boxes.q_high >= boxes.k_low, SOME, NONE).astype(np.int8)


class WidthScaledDot(Score):
    @dataclass(frozen=True, kw_only=True)
    class Config(ScoreConfig):
        kind = "width_scaled_dot"

        def build(self, num_heads: int, head_dim: int) -> WidthScaledDot:
            return WidthScaledDot(head_dim)

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.scale = 1 / head_dim


def tiny(vocab_size: int | None):
    from kinformer.family.build import configure

    return configure("linear-transformer", "tiny", vocab_size, {"layers.*.mixer": Leaky.Config()})


TASK = TASKS["next-token"].derive(name="next-byte", title="next byte")

MEMBER = Member(
    name="leaky",
    title="Leaky averages",
    paper="Nobody 2026, Averages That Leak",
    year=2026,
    axes=("recurrence",),
    causal=True,
    growth="constant",
    departures=("it has no paper",),
    exact_limit="none",
    recipes={"tiny": tiny},
)
'''

PARTS = {
    "mixer.leaky": "Leaky.Config",
    "position.log_distance": "LogDistance.Config",
    "pattern.same_parity": "SameParity.Config",
    "score.width_scaled_dot": "WidthScaledDot.Config",
    "feature_map.softplus": "Softplus.Config",
}
ENTRIES = {
    "kinformer.parts": PARTS,
    "kinformer.members": {"leaky": "MEMBER"},
    "kinformer.tasks": {"next-byte": "TASK"},
}


def write_module(folder: Path, module: str = MODULE, source: str = SOURCE) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source, encoding="utf-8")


def write_metadata(
    folder: Path, name: str = "foreign-parts", version: str = "1.2", entries: Mapping = ENTRIES, module: str = MODULE
) -> None:
    """What an installer leaves beside the modules of a package."""
    for old in folder.glob(f"{name.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(old)
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [
        line
        for group, named in entries.items()
        for line in (f"[{group}]", *(f"{key} = {module}:{value}" for key, value in named.items()), "")
    ]
    (place / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def look_again(*modules: str) -> None:
    """Forget ``modules`` and what was found to be installed, as a new process would."""
    for module in modules or (MODULE,):
        sys.modules.pop(module, None)
    importlib.invalidate_caches()
    entry_points_of.cache_clear()
