"""Patterns of a sequence: which earlier tokens a query sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd
from operator import and_, or_
from typing import ClassVar, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from kinformer.core.config import check_unused
from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import ALL, NONE, SOME, Band, Boxes, Cover, Ints, Numbers, Pattern
from kinformer.runtime.errors import KinformerError, plural

# Patterns defined block of queries by block of queries: their covers, and patterns that choose key blocks.

MOST_BLOCKS = 256
"""A box of more query blocks than these is SOME; the executor's boxes are at most 128 queries tall."""


def by_query_block(boxes: Boxes, block: int, rule: Callable[[Boxes], Cover]) -> Cover:
    """Return the cover of ``boxes`` from ``rule``'s covers of their parts; each part has queries of one block only."""
    q_low, q_high, k_low, k_high, step = boxes
    if step <= block:
        count = q_high // block - q_low // block + 1
    else:
        count = (q_high - q_low) // step + 1
    lowest, highest = np.full(len(q_low), ALL, np.int8), np.full(len(q_low), NONE, np.int8)
    for number in range(min(int(count.max(initial=0)), MOST_BLOCKS)):
        still = np.flatnonzero((count > number) & ((lowest == ALL) | (highest == NONE)))
        low, high = q_low[still], q_high[still]
        if step <= block:
            start = (low // block + number) * block
            high = low + (np.minimum(high, start + block - 1) - low) // step * step
            low = low + (-((low - start) // step)).clip(0) * step
        else:
            low = high = low + number * step
        intervals = rule(Boxes(low, high, k_low[still], k_high[still], step))
        lowest[still] = np.minimum(lowest[still], intervals)
        highest[still] = np.maximum(highest[still], intervals)
    return np.where((lowest == highest) & (count <= MOST_BLOCKS), lowest, SOME).astype(np.int8)


class ChosenBlocks(Pattern):
    """A pattern over blocks of ``block`` positions, in which the queries of a block see the same few blocks of keys."""

    block: int

    def choices(self, blocks: Numbers) -> Sequence[Numbers]:
        """Return the key blocks that each of the query ``blocks`` sees, one array per choice; -1 chooses nothing."""
        raise NotImplementedError

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        keys = k // self.block
        first, *others = self.choices(q // self.block)
        seen = keys == first
        for choice in others:
            seen = seen | (keys == choice)
        return seen

    def cover(self, boxes: Boxes) -> Cover:
        if not len(boxes.q_low):
            return np.zeros(0, np.int8)
        origin = int(boxes.q_low.min()) // self.block
        table = np.stack(self.choices(np.arange(origin, int(boxes.q_high.max()) // self.block + 1)))

        def rule(part: Boxes) -> Cover:
            chosen = table[:, part.q_low // self.block - origin]
            low = part.k_low + (-((part.k_low - chosen * self.block) // part.step)).clip(0) * part.step
            some = low <= np.minimum(part.k_high, chosen * self.block + self.block - 1)
            every = (part.k_low // self.block == chosen) & (part.k_high // self.block == chosen)
            return np.where(every.any(0), ALL, np.where(some.any(0), SOME, NONE)).astype(np.int8)

        return by_query_block(boxes, self.block, rule)


class Full(Band):
    """The full pattern: every token sees every token, for encoders and cross-attention; a decoder refuses it."""

    class Config(PatternConfig):
        kind = "full"

        def build(self) -> Full:
            return Full(ahead=None)


class Causal(Band):
    """The causal pattern: every token sees itself and all earlier tokens, the pairs with 0 <= q - k."""

    class Config(PatternConfig):
        kind = "causal"


@dataclass(frozen=True)
class Comb(Pattern):
    """The pairs with -ahead <= q - k <= behind and q - k a multiple of ``stride``, for dilated windows and columns; a
    bound of None bounds nothing."""

    behind: int | None = None
    ahead: int | None = 0
    stride: int = 1

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        seen = distance % self.stride == 0
        seen = seen if self.behind is None else seen & (distance <= self.behind)
        return seen if self.ahead is None else seen & (distance >= -self.ahead)

    def cover(self, boxes: Boxes) -> Cover:
        """Return the exact cover: a box has the distances nearest + n * step, and either every ``period``-th distance
        is allowed or no distance is."""
        step = boxes.step
        nearest, farthest = boxes.q_low - boxes.k_high, boxes.q_high - boxes.k_low
        low = nearest if self.ahead is None else np.maximum(nearest, -self.ahead)
        high = farthest if self.behind is None else np.minimum(farthest, self.behind)
        common = gcd(step, self.stride)
        period = self.stride // common
        offset = -(nearest // common) * pow(step // common, -1, period) % period
        start = -((nearest - low) // step)
        first = start + (offset - start) % period
        some = (nearest % common == 0) & (first <= (high - nearest) // step)
        every = some & (low == nearest) & (high == farthest) & ((period == 1) | (nearest == farthest))
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)


@dataclass(frozen=True)
class PerHead(Pattern):
    """The pattern in which head h sees by ``patterns[h]``; ``at(h)`` alone says which pairs are allowed."""

    patterns: tuple[Pattern, ...]

    class Config(PatternConfig):
        kind = "per_head"
        patterns: tuple[PatternConfig, ...]

        def __post_init__(self) -> None:
            if not self.patterns:
                raise KinformerError("patterns must hold one pattern per head, but is empty.")

        def build(self) -> PerHead:
            return PerHead(tuple(pattern.build() for pattern in self.patterns))

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            if pattern.num_heads not in (None, len(self.patterns)):
                raise KinformerError(
                    f"a pattern for {plural(pattern.num_heads, 'head')} stands among patterns for "
                    f"{plural(len(self.patterns), 'head')}; give every head a pattern for one head."
                )

    @property
    def behind(self) -> int | None:  # type: ignore[override]
        return _farthest([pattern.behind for pattern in self.patterns])

    @property
    def ahead(self) -> int | None:  # type: ignore[override]
        return _farthest([pattern.ahead for pattern in self.patterns])

    @property
    def stride(self) -> int:  # type: ignore[override]
        return gcd(*(pattern.stride for pattern in self.patterns))

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        return len(self.patterns)

    @property
    def domain(self) -> str:  # type: ignore[override]
        return next((pattern.domain for pattern in self.patterns if pattern.domain != "sequence"), "sequence")

    def at(self, head: int) -> Pattern:
        return self.patterns[head].at(head)

    def sized(self, length: int) -> Pattern:
        return PerHead(tuple(pattern.sized(length) for pattern in self.patterns))


def per_head(patterns: Sequence[Pattern]) -> Pattern:
    """Return one pattern for each head, or for all heads where there is only one."""
    return PerHead(tuple(patterns)) if len(patterns) > 1 else patterns[0]


def _farthest(bounds: list[int | None]) -> int | None:
    finite_bounds = [bound for bound in bounds if bound is not None]
    return max(finite_bounds) if len(finite_bounds) == len(bounds) else None


class Window(PatternConfig):
    """Sliding window on both sides (Beltagy et al. 2020, Longformer, section 3.1), with gaps where dilated.

    The pairs with q - k = d * dilation for |d| <= window: ``window`` keys on either side, and the token itself.

    ``dilations`` has one dilation per head, instead of ``dilation``.
    """

    kind = "window"
    LEAST = {"window": 0}
    window: int = 256
    dilation: int = 1
    dilations: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_dilations(self.dilation, *self.dilations)

    def build(self) -> Pattern:
        return per_head([self._window(dilation) for dilation in self.dilations or (self.dilation,)])

    def _window(self, dilation: int) -> Pattern:
        far = self.window * dilation
        return Band(behind=far, ahead=far) if dilation == 1 else Comb(behind=far, ahead=far, stride=dilation)


def _check_dilations(*dilations: int) -> None:
    if min(dilations) < 1:
        raise KinformerError(f"a dilation must be 1 (no gaps) or more, but is {min(dilations)}.")


class Local(Band):
    """The local window: every token sees itself, the ``window - 1`` tokens before it and the ``ahead`` tokens after it,
    the pairs with -ahead <= q - k < window. With ``ahead = 0`` a decoder stores window - 1 past tokens."""

    class Config(PatternConfig):
        kind = "local"
        LEAST = {"window": 1, "ahead": 0}
        window: int = 256  # keys, the token itself counted
        ahead: int = 0

        def build(self) -> Local:
            return Local(behind=self.window - 1, ahead=self.ahead)


class Columns(Comb):
    """Columns of the Sparse Transformer (Child et al. 2019, section 4.3): every ``stride``-th earlier token.

    With the positions in rows of ``stride``, these are the column above a token.
    """

    class Config(PatternConfig):
        kind = "columns"
        LEAST = {"stride": 1}
        stride: int = 128


class Strided(PatternConfig):
    """Strided attention of the Sparse Transformer (Child et al. 2019, section 4.3): a window and the columns.

    The last ``stride`` tokens (the query included) and every ``stride``-th earlier one, together or either alone.

    As in the published code; the paper's formula has one more token in the window.
    """

    kind = "strided"
    LEAST = {"stride": 1}
    stride: int = 128
    part: Literal["both", "local", "columns"] = "both"

    def build(self) -> Pattern:
        window, columns = Local(behind=self.stride - 1), Columns(stride=self.stride)
        return {"both": window | columns, "local": window, "columns": columns}[self.part]


@dataclass(frozen=True)
class Blocks(Pattern):
    """Positions in blocks: a query sees its own block, ``back`` blocks before it and ``front`` blocks after it, the
    pairs with -front <= q // block - k // block <= back."""

    block: int
    back: int = 0
    front: int = 0

    class Config(PatternConfig):
        """The config; the pattern is two-sided, so a decoder takes it in an ``intersection`` with ``causal``."""

        kind = "blocks"
        LEAST = {"block": 1, "back": 0, "front": 0}
        block: int = 128
        back: int = 0
        front: int = 0

    @property
    def behind(self) -> int:  # type: ignore[override]
        return (self.back + 1) * self.block - 1

    @property
    def ahead(self) -> int:  # type: ignore[override]
        return (self.front + 1) * self.block - 1

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        blocks = q // self.block - k // self.block
        return (blocks <= self.back) & (blocks >= -self.front)

    def cover(self, boxes: Boxes) -> Cover:
        q_low, q_high, k_low, k_high = (side // self.block for side in boxes[:4])
        some = (q_low - k_high <= self.back) & (q_high - k_low >= -self.front)
        every = (q_high - k_low <= self.back) & (q_low - k_high >= -self.front)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)


@dataclass(frozen=True)
class Summaries(Pattern):
    """Summary columns of the Sparse Transformer (Child et al. 2019, section 4.3): every query sees the same few keys of
    every segment, low <= k mod segment < high."""

    segment: int
    low: int
    high: int

    ahead = None

    class Config(PatternConfig):
        """The config: the last ``summary`` keys of every ``segment``, or with ``skip`` the ``summary`` keys that end
        this many slices before.

        All queries see them: a decoder takes it in an ``intersection`` with ``causal``.
        """

        kind = "summaries"
        segment: int = 128
        summary: int = 8
        skip: int = 0

        def __post_init__(self) -> None:
            if self.summary < 1 or self.skip < 0 or (self.skip + 1) * self.summary > self.segment:
                raise KinformerError(
                    f"a slice of {plural(self.summary, 'key')} after {self.skip} others, from the end, does not fit "
                    f"into a segment of {self.segment}; choose a smaller summary or skip."
                )

        def build(self) -> Summaries:
            high = self.segment - self.skip * self.summary
            return Summaries(self.segment, high - self.summary, high)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        offset = k % self.segment
        return ((offset >= self.low) & (offset < self.high)) | (q != q)

    def cover(self, boxes: Boxes) -> Cover:
        step = boxes.step
        if step % self.segment == 0:
            offset = boxes.k_low % self.segment
            return np.where((offset >= self.low) & (offset < self.high), ALL, NONE).astype(np.int8)
        count = self._below(boxes.k_high + 1) - self._below(boxes.k_low)
        every = count == boxes.k_high - boxes.k_low + 1
        return np.where(every, ALL, np.where(count > 0, SOME, NONE)).astype(np.int8)

    def _below(self, end: Ints) -> Ints:
        """Return how many summary keys lie before ``end``."""
        return end // self.segment * (self.high - self.low) + (end % self.segment - self.low).clip(
            0, self.high - self.low
        )


class Fixed(PatternConfig):
    """Fixed attention of the Sparse Transformer (Child et al. 2019, section 4.3): a segment, and summaries of all.

    A query sees the earlier tokens of its segment and ``summary`` tokens of every segment, or only one of these parts.

    ``segment`` and ``summary`` are the paper's l and c. With ``slices`` the heads look at different summaries: head
    h of ``num_heads`` at slice h mod ``slices``, counted from the segment's end. A query of part "columns" without an
    earlier summary sees nothing.
    """

    kind = "fixed"
    segment: int = 128
    summary: int = 8
    slices: int = 1
    num_heads: int | None = None
    part: Literal["both", "local", "columns"] = "both"

    def __post_init__(self) -> None:
        if self.summary < 1 or self.slices < 1 or self.summary * self.slices > self.segment:
            raise KinformerError(
                f"{plural(self.slices, 'slice')} of {plural(self.summary, 'summary token')} cannot fit into a segment "
                f"of {self.segment}; each must be 1 or more, and their product at most segment."
            )
        if self.slices == 1:
            check_unused(self, "with slices = 1, where all heads see the same", "num_heads")
        elif self.num_heads is None:
            raise KinformerError(
                f"slices = {self.slices} gives the heads different summaries; say how many heads with num_heads."
            )
        if self.num_heads is not None and (self.num_heads < 1 or self.num_heads % self.slices):
            raise KinformerError(
                f"num_heads = {self.num_heads} cannot be shared evenly by {plural(self.slices, 'slice')}; choose a "
                "multiple."
            )

    def build(self) -> Pattern:
        heads = 1 if self.slices == 1 or self.part == "local" else self.num_heads or 1
        return per_head([Causal() & self._part(head % self.slices) for head in range(heads)])

    def _part(self, slice_number: int) -> Pattern:
        high = self.segment - slice_number * self.summary
        segment, columns = Blocks(self.segment), Summaries(self.segment, high - self.summary, high)
        return {"both": segment | columns, "local": segment, "columns": columns}[self.part]


class Dilated(Comb):
    """Dilated window (Beltagy et al. 2020, Longformer, section 3.1): a local window with gaps, wider at the same cost.

    The pairs with q - k = d * dilation for -ahead <= d < window: the token and every ``dilation``-th before it.
    """

    class Config(PatternConfig):
        """The config: ``window`` and ``ahead`` count keys; ``dilations`` has one
        dilation per head, instead of ``dilation``."""

        kind = "dilated"
        LEAST = {"window": 1, "ahead": 0}
        window: int = 256
        ahead: int = 0
        dilation: int = 2
        dilations: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            _check_dilations(self.dilation, *self.dilations)

        def build(self) -> Pattern:
            strides, behind = self.dilations or (self.dilation,), self.window - 1
            return per_head([Dilated(behind=behind * n, ahead=self.ahead * n, stride=n) for n in strides])


class Unsized(Pattern):
    """A pattern that depends on where the sequence ends: ``sized(length)`` returns the pattern of that length. Only
    encoders use it. ``name`` is the pattern's kind, and ``option`` the field that fixes it without a sequence."""

    name: str
    option: str
    ahead = None

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        self._refuse()

    def cover(self, boxes: Boxes) -> Cover:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise KinformerError(
            f"the pattern {self.name!r} depends on where a text ends, which only an encoder says; set its "
            f"{self.option}."
        )


@dataclass(frozen=True)
class Blockwise(ChosenBlocks):
    """Blockwise attention (Qiu et al. 2020, BlockBERT, section 3): a permutation of n blocks for every head. Query
    block i sees key block ``permutation[i]`` alone, and so for every next n blocks."""

    block: int
    permutation: tuple[int, ...]

    class Config(PatternConfig):
        """The config: ``permutations`` are one per head (a single one holds for all heads); the paper's are shifts, as
        (1, 2, 0).

        ``block``: None cuts each sequence into as many blocks as a permutation has, of equal length except for the last
        ones. Two-sided: a decoder takes it in an ``intersection`` with ``causal``.
        """

        kind = "blockwise"
        LEAST = {"block": 1}
        block: int | None = 128
        permutations: tuple[tuple[int, ...], ...] = ((0, 1),)

        def __post_init__(self) -> None:
            if not self.permutations:
                raise KinformerError("permutations must hold one permutation per head, or one for all, but is empty.")
            for permutation in self.permutations:
                if not permutation or sorted(permutation) != list(range(len(permutation))):
                    raise KinformerError(
                        f"{list(permutation)} is not a permutation of blocks; list 0, 1, ... in any order, each once."
                    )

        def build(self) -> Pattern:
            if self.block is None:
                return per_head([Parts(permutation) for permutation in self.permutations])
            return per_head([Blockwise(self.block, permutation) for permutation in self.permutations])

    @property
    def behind(self) -> int:  # type: ignore[override]
        return (max(i - seen for i, seen in enumerate(self.permutation)) + 1) * self.block - 1

    @property
    def ahead(self) -> int:  # type: ignore[override]
        return (max(seen - i for i, seen in enumerate(self.permutation)) + 1) * self.block - 1

    def choices(self, blocks: Numbers) -> Sequence[Numbers]:
        number = blocks % len(self.permutation)
        chosen = blocks
        for i, seen in enumerate(self.permutation):
            chosen = chosen + (number == i) * (seen - i)
        return [chosen]


@dataclass(frozen=True)
class Parts(Unsized):
    """The pattern :class:`Blockwise` with blocks that make up a full sequence, ceil(length / n) tokens in each."""

    permutation: tuple[int, ...]

    name = "blockwise"
    option = "block"

    def sized(self, length: int) -> Pattern:
        return Blockwise(max(1, -(-length // len(self.permutation))), self.permutation)


@dataclass(frozen=True)
class Documents(Pattern):
    """Document boundaries: tokens of one document see each other and nothing else. ``starts`` are the first positions
    of all documents but the document at 0."""

    starts: tuple[int, ...]

    ahead = None

    class Config(PatternConfig):
        """The config, for boundaries that are equal in all rows (a chunk's ``reset`` marks boundaries of single rows).
        The pattern is two-sided, so a decoder takes it in an ``intersection`` with ``causal``."""

        kind = "documents"
        starts: tuple[int, ...]

        def __post_init__(self) -> None:
            rising = all(a < b for a, b in zip((0, *self.starts), self.starts, strict=False))
            if not self.starts or not rising:
                raise KinformerError(
                    f"starts must be rising positions above 0, one or more, but is {list(self.starts)}."
                )

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        starts = torch.tensor(self.starts, device=q.device)
        return torch.bucketize(q.contiguous(), starts, right=True) == torch.bucketize(
            k.contiguous(), starts, right=True
        )

    def cover(self, boxes: Boxes) -> Cover:
        q_low, q_high, k_low, k_high = (np.searchsorted(self.starts, side, side="right") for side in boxes[:4])
        some = (q_low <= k_high) & (k_low <= q_high)
        every = (q_low == k_high) & (k_low == q_high)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)


@dataclass(frozen=True)
class Segments(Pattern):
    """Segments with a memory (Dai et al. 2019, Transformer-XL): a token sees its own segment up to itself, and the last
    tokens before that segment, start(q) - memory <= k <= q with start(q) = segment * (q // segment). Without
    ``same_segment`` it sees the tokens before its segment alone, k < start(q)."""

    segment: int
    memory: int
    same_segment: bool = True

    class Config(PatternConfig):
        kind = "segments"
        LEAST = {"segment": 1, "memory": 0}
        segment: int = 128
        memory: int = 128

    @property
    def behind(self) -> int:  # type: ignore[override]
        return self.memory + self.segment - 1

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        start = q // self.segment * self.segment
        return (k >= start - self.memory) & (k <= q if self.same_segment else k < start)

    def cover(self, boxes: Boxes) -> Cover:
        first, last = (side // self.segment * self.segment for side in boxes[:2])
        earliest, latest = (boxes.q_low, boxes.q_high) if self.same_segment else (first - 1, last - 1)
        some = (boxes.k_high >= first - self.memory) & (boxes.k_low <= latest)
        every = (boxes.k_low >= last - self.memory) & (boxes.k_high <= earliest)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)


@dataclass(frozen=True)
class Sinks(Pattern):
    """A window and the first tokens (Xiao et al. 2023, StreamingLLM), so that a trained model can read endless text.

    Query t sees the keys j with j < count or t - window < j <= t. A decoder keeps ``count`` + ``window`` - 1 keys,
    whatever the length, and counts positions inside this cache: a first token has position j, and a query has position
    min(t, count + window - 1) for it. Distances are therefore never larger than in a text of count + window tokens.
    Texts up to the length of the window are attended to in full. Parts of other patterns see the first tokens by
    absolute positions.
    """

    count: int
    window: int

    class Config(PatternConfig):
        """The config; ``window`` counts the token itself."""

        kind = "sinks"
        LEAST = {"window": 1}
        count: int = 4
        window: int = 256

        def __post_init__(self) -> None:
            if self.count < 1:
                raise KinformerError(f"count must be 1 first token or more, but is {self.count}; without, use 'local'.")

    @property
    def pinned(self) -> int:  # type: ignore[override]
        return self.count

    @property
    def recent(self) -> Pattern:
        return Band(behind=self.window - 1)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((k < self.count) | (q - k < self.window))

    def cover(self, boxes: Boxes) -> Cover:
        causal, near = Band().cover(boxes), Band(behind=self.window - 1).cover(boxes)
        every = np.where(boxes.k_high < self.count, ALL, np.where(boxes.k_low < self.count, SOME, NONE))
        return np.maximum(np.minimum(causal, every), near).astype(np.int8)


@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """Global tokens (Beltagy et al. 2020, Longformer; Zaheer et al. 2020, Big Bird): the first ``count`` tokens are
    seen by all and see all."""

    count: int

    ahead = None

    class Config(PatternConfig):
        """The config; the pattern is two-sided, so a decoder takes it in an ``intersection`` with ``causal``."""

        kind = "global_tokens"
        LEAST = {"count": 1}
        count: int = 1

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        return (q < self.count) | (k < self.count)

    def cover(self, boxes: Boxes) -> Cover:
        some = (boxes.q_low < self.count) | (boxes.k_low < self.count)
        every = (boxes.q_high < self.count) | (boxes.k_high < self.count)
        return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)


# A causal pattern cut to the window of each head, where spans are learnt.


def spanned(pattern: Pattern, windows: tuple[int, ...]) -> Pattern:
    """Return the pairs of ``pattern`` in which head h looks 1 ... windows[h] positions back."""
    heads = [_within(pattern.at(head), window) for head, window in enumerate(windows)]
    return heads[0] if all(one == heads[0] for one in heads) else PerHead(tuple(heads))


def _within(pattern: Pattern, window: int) -> Pattern:
    if pattern.band is None:
        return pattern & Band(behind=window, ahead=-1)
    behind = window if pattern.behind is None else min(pattern.behind, window)
    if behind < 1:
        raise KinformerError(
            "with a span no token sees itself, but the pattern lets it see nothing else; use another pattern (causal)."
        )
    return Band(behind=behind, ahead=-1)


# Patterns of patterns, so that any expression of ``|``, ``&`` and ``~`` can be written as data.


class Union(PatternConfig):
    """The pairs that at least one of ``patterns`` allows."""

    kind = "union"
    join: ClassVar[Callable[[Pattern, Pattern], Pattern]] = or_
    patterns: tuple[PatternConfig, ...]

    def __post_init__(self) -> None:
        if not self.patterns:
            raise KinformerError(f"the patterns of {self.kind!r} are an empty list; give one or more.")

    def build(self) -> Pattern:
        patterns = [pattern.build() for pattern in self.patterns]
        counts = sorted({pattern.num_heads for pattern in patterns if pattern.num_heads is not None})
        if len(counts) > 1:
            shown = " and for ".join(map(str, counts))
            raise KinformerError(f"the patterns of {self.kind!r} are for {shown} heads; give them one head count.")
        return reduce(type(self).join, patterns)


class Intersection(Union):
    """The pairs that all of ``patterns`` allow."""

    kind = "intersection"
    join = and_


class Complement(PatternConfig):
    """The pairs that ``pattern`` does not allow; a decoder takes it in an ``intersection`` with ``causal``."""

    kind = "complement"
    pattern: PatternConfig

    def build(self) -> Pattern:
        return ~self.pattern.build()


PARTS = {
    "FullPattern": Full.Config,
    "CausalPattern": Causal.Config,
    "LocalPattern": Local.Config,
    "SinksPattern": Sinks.Config,
    "DilatedPattern": Dilated.Config,
    "ColumnsPattern": Columns.Config,
    "StridedPattern": Strided,
    "BlocksPattern": Blocks.Config,
    "SegmentsPattern": Segments.Config,
    "SummariesPattern": Summaries.Config,
    "FixedPattern": Fixed,
    "GlobalTokensPattern": GlobalTokens.Config,
    "BlockwisePattern": Blockwise.Config,
    "DocumentsPattern": Documents.Config,
    "PerHeadPattern": PerHead.Config,
    "WindowPattern": Window,
    "UnionPattern": Union,
    "IntersectionPattern": Intersection,
    "ComplementPattern": Complement,
}
