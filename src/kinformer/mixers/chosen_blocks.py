"""Attention to chosen blocks: MoBA (Lu et al. 2025, arXiv 2502.13189) and NSA (Yuan et al. 2025, arXiv 2502.11089).

    o_t = softmax_j(q_t . k_j / sqrt(head_dim)) v_j    over j <= t in t's current block and ``count`` - 1 others

A block holds ``block`` tokens, cut by position. A token chooses complete blocks by the products of its query with the
means of their keys, after the position has turned them (``kernels.chosen.choice``). That is MoBA. NSA's three branches:

    compression  o = g_cmp o_cmp + g_slc o_slc + g_swa o_swa,   g = sigmoid(W_g x), a gate for every head and branch

``compression`` attends to a summary of the keys and values of each complete block, o_slc is the attention above, to the
blocks of the largest probabilities there, and ``window`` attends to the last tokens. Summaries are means, or outputs of
a perceptron over a block (``parts.projections``). The perceptron reads keys at positions counted from the block's first
token, and its output stands at that token: like a mean, a summary does not tell where the block lies. Summaries of
``summary_length`` tokens begin every ``summary_stride`` tokens and may overlap; the importance of a block is then the
importance of the summaries that share tokens with it (NSA, equation 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.attention_state import KeysValues, Past, ReservedKeysValues
from kinformer.core.contract import CausalMixer, Chunk, MixerConfig, select_valid
from kinformer.core.crossing import Crosses
from kinformer.core.parts import PositionConfig, ProjectionConfig, check_forgetful, head_width, merge_heads
from kinformer.core.pattern import Band
from kinformer.core.probe import no_weights, probe
from kinformer.kernels import AttentionImpl, ChosenImpl
from kinformer.kernels import chosen as reference
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.chosen import Blocks, Choosing, Cover, Numbers, attend_means, blocks_of, choose, chosen_attention
from kinformer.kernels.chosen.choice import Means, Place, averages, means_of
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import BlockSummary, MultiHead
from kinformer.runtime import errors
from kinformer.runtime.autograd import transformed
from kinformer.runtime.compiling import HostDriven


class ChosenState(NamedTuple):
    """The state: the cache ``attention`` of keys and values, and ``means`` [batch, kv_heads, blocks, width] of the
    complete blocks' keys, with ``compression`` also of their values behind them (or its summaries); right-aligned, zero
    where a row has none."""

    attention: KeysValues | ReservedKeysValues
    means: Tensor

    slots = ("means",)  # type: ignore[misc]


class Slots(NamedTuple):
    """What a chunk attends to: q, k, v, past slots before the chunk's; ``positions`` [batch, time] and ``seen`` [batch]
    before it; ``whole``: every slot belongs to the sequence of every query of its row."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    seen: Tensor
    whole: bool


Compression = Literal["none", "mean", "mlp"]


class ChosenBlocks(HostDriven, Crosses, CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads.

    ``count`` blocks of ``block`` tokens are seen: the current one, the ``first`` ones of the sequence, the ``near``
    ones before it, and chosen ones. With ``shared_choice`` the query heads of one head of keys choose together, by the
    sum of their probabilities.
    """

    growth = "linear"
    crosses = False

    class Config(MixerConfig):
        kind = "chosen_blocks"
        by_heads = True
        LEAST = {"block": 1, "count": 1, "first": 0, "near": 0, "window": 1, "summary_length": 1, "summary_stride": 1}
        num_heads: int = 4
        head_dim: int | None = None
        projection: ProjectionConfig = MultiHead.Config()
        position: PositionConfig = NoPosition.Config()
        block: int = 64
        count: int = 4
        first: int = 0
        near: int = 0
        shared_choice: bool = False
        compression: Compression = "none"
        summary_length: int | None = None
        summary_stride: int | None = None
        window: int | None = None
        bias: bool = True  # of the output projection
        impl: ChosenImpl = "auto"

        def __post_init__(self) -> None:
            if 0 < self.first + self.near >= self.count - 1:
                raise errors.KinformerError(
                    f"first = {self.first} and near = {self.near} blocks and the current one leave none of count = "
                    f"{self.count} to choose; let count be {self.first + self.near + 2} or more."
                )
            self._check_summaries()

        def _check_summaries(self) -> None:
            """Raise KinformerError where summaries do not fit blocks."""
            if self.compression == "none" and (self.summary_length or self.summary_stride):
                raise errors.KinformerError(
                    "summaries are of compression, but compression is none; set it to mean or mlp."
                )
            summary, stride = self.summary_and_stride
            if summary % stride or self.block % stride:
                raise errors.KinformerError(
                    f"summary_stride = {stride} of chosen_blocks must divide summary_length = {summary} and block = "
                    f"{self.block}."
                )

        @property
        def summary_and_stride(self) -> tuple[int, int]:
            """Return how many tokens a summary has, and how many lie between the first tokens of two summaries."""
            length = self.summary_length or self.block
            return length, self.summary_stride or length

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.dim, heads = config, dim, config.num_heads
        self.head_dim = config.head_dim or head_width(dim, heads)
        self.projection = config.projection.build(dim, heads, self.head_dim)
        check_forgetful(self.projection, config.projection)
        self.position = config.position.build_heads(dim, heads, self.head_dim)
        if self.position.relative(0, 1) is not None or self.position.overrides("values"):
            raise errors.KinformerError(
                f"the position {config.position.kind!r} acts by the distance of a query and a key, but the mean of a "
                "block's keys does not have a position; use rope or none."
            )
        self.kv_heads = self.projection.num_kv_heads
        if config.shared_choice and self.kv_heads == heads:
            raise errors.KinformerError(
                f"shared_choice is for heads that share keys, but each of the {heads} heads has its own; use the "
                "projection grouped, or leave shared_choice out."
            )
        self.compression = config.compression != "none"
        self.branches = 1 + self.compression + (config.window is not None)
        self.branch_gates = None if self.branches == 1 else nn.Linear(dim, heads * self.branches, bias=False)
        self.out = config.projection.build_output(dim, heads, self.head_dim, config.bias)
        self.scale = self.head_dim**-0.5
        choosers = self.kv_heads if config.shared_choice else heads
        self.choosing = Choosing(choosers, config.count - 1, config.first, config.near)
        self.mean_width = (1 + self.compression) * self.head_dim
        sizes = self.kv_heads, config.summary_and_stride[0], self.head_dim
        self.key_summary, self.value_summary = (
            BlockSummary(*sizes) if config.compression == "mlp" else None for _ in range(2)
        )

    @property
    def host_reads(self) -> str:
        return "it looks whether a token completes a block"

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> ChosenState:
        empty = torch.zeros(batch, self.kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        return ChosenState(KeysValues(empty, empty, seen), empty.new_zeros(batch, self.kv_heads, 0, self.mean_width))  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        summary, stride = self.config.summary_and_stride
        numbers = 2 * length * self.head_dim + max(0, (length - summary) // stride + 1) * self.mean_width
        return self.kv_heads * numbers * dtype.itemsize + 8

    def forward(self, chunk: Chunk, state: ChosenState) -> tuple[Tensor, ChosenState]:
        past = Past(chunk, state.attention, self)
        seen = past.positions[:, 0] if past.reserved else past.state.seen
        q, k, v = self._project(chunk, past.positions)
        (k, v), whole, cache = past.remember((k, v), None)
        y, means = self._attend(chunk, Slots(q, k, v, past.positions, seen, whole), state.means)
        return select_valid(y, chunk.valid), ChosenState(cache, means)  # type: ignore[call-arg]

    def _project(self, chunk: Chunk, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.projection(select_valid(chunk.x, chunk.valid))
        q, k = self.position.rotate(q, k, positions)
        lacking = "Where there are several branches, each counts by the gate of its head."
        return q, k, probe("values", v, lacking=lacking)

    def _attend(self, chunk: Chunk, slots: Slots, old: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [batch, time, dim] and the means after the chunk; ``old``: those before it."""
        q, k, v, positions, seen, _ = slots
        blocks = blocks_of(chunk, positions, seen, k.shape[2] - q.shape[2], self.config.block)
        averaged = (k, v) if self.compression else (k,)
        summarise = averages if self.key_summary is None else self._summaries
        length, stride = self.config.summary_and_stride
        apart = stride != blocks.size
        units = blocks_of(chunk, positions, seen, k.shape[2] - q.shape[2], stride) if apart else blocks
        means = means_of(averaged, old, units, chunk, Place(positions, seen), summarise, length)
        compressed, chosen = self._choose(q, means, blocks, units)
        probe("choices", chosen, block=blocks.size, heads=q.shape[1], first=self.config.first, near=self.config.near)
        branches = [] if compressed is None else [compressed]
        branches.append(chosen_attention(q, k, v, chosen, blocks, scale=self.scale, impl=self.config.impl))
        if self.config.window is not None:
            visibility = Visibility(Band(behind=self.config.window - 1), positions, slots.whole)
            impl: AttentionImpl = "reference" if self.config.impl == "reference" else "auto"
            branches.append(attention(q, k, v, visibility, Scoring(self.scale), impl=impl).out)
        y = branches[0]
        if self.branch_gates is not None:
            gates = torch.sigmoid(self.branch_gates(select_valid(chunk.x, chunk.valid)))
            gates = gates.unflatten(-1, (-1, self.branches)).transpose(1, 2)  # [batch, heads, time, branches]
            y = sum(gates[..., i, None] * branch for i, branch in enumerate(branches))
        return self.out(probe("outputs", merge_heads(y))), means.after

    def _summaries(self, keys_values: Sequence[Tensor], begins: Tensor) -> Tensor:
        """Return the perceptrons' summaries of blocks of keys and values [batch, kv_heads, blocks, block, head_dim]
        whose first tokens stand at ``begins`` [batch or 1, blocks] (a ``Summarise``)."""
        no_weights(
            "A perceptron sums up the values of blocks, which no weights of tokens do (compression = mean has them)."
        )
        assert self.key_summary is not None and self.value_summary is not None
        k, v = keys_values
        back = -begins.repeat_interleave(k.shape[3], 1)
        k = self.position.moved(k.flatten(2, 3), back).view_as(k)
        return torch.cat([self.position.moved(self.key_summary(k), begins), self.value_summary(v)], -1)

    def _choose(self, q: Tensor, means: Means, blocks: Blocks, units: Blocks) -> tuple[Tensor | None, Tensor]:
        """Return what ``compression`` attends to, [batch, heads, time, head_dim], and the chosen blocks; a summary
        begins at every block of ``units``."""
        length, shift = self.config.summary_and_stride[0], means.shift
        numbers = Numbers(units.begin, units.current, units.complete(length))
        if shift is not None:
            numbers = Numbers(*(number - shift for number in numbers))
        keys, values = means.table[..., : self.head_dim], means.table[..., self.head_dim :]
        call = numbers, self.scale, self.choosing
        cover = None if units.size == length == blocks.size else self._cover(blocks, units, shift)
        compressed = None
        if self.config.impl == "reference" or (self.config.impl == "auto" and transformed()):
            compressed, chosen = reference.means(q, keys, values if self.compression else keys, *call, cover)
        elif self.compression:
            compressed, chosen = attend_means(q, keys, values, *call, cover)
        else:
            chosen = choose(q, keys, *call)
        if shift is not None and cover is None:
            chosen = torch.where(chosen < 0, -1, chosen + shift[:, None, :, None])
        return compressed if self.compression else None, chosen

    def _cover(self, blocks: Blocks, units: Blocks, shift: Tensor | None) -> Cover:
        """Return how the blocks lie over summaries; the table's first summary has the number ``shift``."""
        first = torch.searchsorted(units.first.contiguous(), blocks.first.contiguous())
        length, stride = self.config.summary_and_stride
        first = first if shift is None else first - shift
        return Cover(first, blocks.begin, blocks.current, blocks.size // stride, length // stride)


PARTS = {"ChosenBlocks": ChosenBlocks.Config}
