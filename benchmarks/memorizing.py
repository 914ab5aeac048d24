"""A layer that looks up 65,536 memories, beside the same layer without: dim 512, 8 heads, a segment of 512, one row.

    layer     one segment forward and backward in training: no memory, the authors' bucketed search, and (where time
              allows) the exact one; and the step that puts memories away, which comes once in a while
    recall    the share of the 32 true nearest that each search finds, and of their weight in the softmax: of keys that
              lie in clusters, and of keys that do not

Products are oneDNN's, as `kinformer train` has them, for all. Each search must first find, of 4,096 memories, what all
scores at once find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from common import Contestant, arguments, interleave, prepare, save, show
from kinformer.core.attention_state import KeysValues
from kinformer.core.contract import Chunk
from kinformer.kernels.lookup import MemorySlice, Search, look_up
from kinformer.mixers.memory import Memorizing, MemorizingState

DIM, HEADS, SEGMENT, TOPK = 512, 8, 512, 32
WIDTH = DIM // HEADS
SEARCHES = ("bucketed",)
ASKED = {"bucketed": 5.0}
"""At most this often the time of the layer without memory."""


def layer(search: str, memories: int) -> Memorizing:
    torch.manual_seed(0)
    config = Memorizing.Config(
        num_heads=HEADS, window=SEGMENT, segment=SEGMENT, memory_size=memories, topk=TOPK, search="bucketed"
    )
    return (config if search == "none" else config.replace(search=search)).build(DIM)


def remembered(mixer: Memorizing, segments: int) -> MemorizingState:
    """A state whose memory is full, ``segments`` segments after memories were put away."""
    size, recent = mixer.config.memory_size, mixer.most_past
    seen = 4 * max(size, mixer.batch_of) + segments * SEGMENT
    new, old = (points(HEADS, count) for count in (recent, size))
    values = torch.randn_like(old)
    return MemorizingState(KeysValues(new, torch.randn_like(new), torch.tensor([seen])), old, values)


def points(heads: int, count: int, clusters: int = 0) -> Tensor:
    """Unit vectors [1, heads, count, WIDTH], around ``clusters`` centres or anywhere."""
    x = torch.randn(1, heads, count, WIDTH)
    if clusters:
        centres = torch.randn(1, heads, clusters, WIDTH, generator=torch.Generator().manual_seed(1))
        x = 0.5 * x + centres[:, :, torch.randint(clusters, (count,))]
    return normalize(x, dim=-1)


def gate() -> dict[str, float]:
    """Of 4,096 memories: every search finds as good ones as by all scores, but for the rounding that it admits."""
    k, q = points(2, 4096), points(2, 64)
    gaps = {}
    for name in ("exact", *SEARCHES):
        found, want = (find(name, q, k, impl)[0] for impl in ("chunked", "reference"))
        both = found.sort(dim=-1).values, want.sort(dim=-1).values
        gaps[name] = float((both[0] - both[1]).abs().max())
        if not gaps[name] < 0.01:
            raise SystemExit(f"{name}: finds memories that are {gaps[name]:.2g} worse than those of all scores.")
    return gaps


def find(name: str, q: Tensor, k: Tensor, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """The scores of the memories that a search returns, and their slots in ``k``."""
    found = look_up(q, [MemorySlice(k, k, 0, k.shape[2])], Search(name, TOPK, impl))
    return (q @ k.mT).gather(-1, found), found


def recall(memories: int, clusters: int, sharpness: float = 20.0) -> dict[str, dict[str, float]]:
    """Of the nearest: the share that is found, and of exp(sharpness * score) over all that is found."""
    torch.manual_seed(3)
    k, q = points(HEADS, memories, clusters), points(HEADS, 128, clusters)
    weight = (sharpness * (q @ k.mT)).softmax(dim=-1)
    nearest = find("exact", q, k)[1]
    told = {}
    for name in ("exact", *SEARCHES):
        found = find(name, q, k)[1]
        hit = (nearest[..., :, None] == found[..., None, :]).any(-1).float().mean()
        held = weight.gather(-1, found).sum(-1).mean()
        told[name] = {"found": float(hit), "weight": float(held)}
    return told


def race(memories: int, rounds: int, searches: tuple[str, ...]) -> dict[str, float]:
    """Median milliseconds of a segment of training, and of one after which memories are put away."""
    x = torch.randn(1, SEGMENT, DIM, requires_grad=True)
    upstream = torch.randn(1, SEGMENT, DIM)

    def once(mixer: Memorizing, state: MemorizingState) -> Callable[[], Any]:
        def step() -> None:
            y, _ = mixer(Chunk(x), state)
            y.backward(upstream)

        return step

    contestants = [Contestant("none", once(plain := layer("none", 0), remembered(plain, 3)), fast=True)]
    for name in searches:
        mixer = layer(name, memories)
        last = mixer.batch_of // SEGMENT - 1
        steps = {name: 0, f"{name}, and put away": last} if last else {f"{name}, and put away": 0}
        contestants += [Contestant(key, once(mixer, remembered(mixer, at)), fast=True) for key, at in steps.items()]
    interleave(contestants, rounds)
    return {contestant.name: contestant.median * 1000 for contestant in contestants}


def mean(found: dict[str, float], name: str, parts: int) -> float:
    """Milliseconds a segment takes on average: memories are put away once in ``parts`` segments."""
    away = found[f"{name}, and put away"]
    return ((parts - 1) * found.get(name, away) + away) / parts


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--memories", type=int, default=65_536, help="memories (65536)")
    parser.add_argument("--exact", action="store_true", help="also time the exact search, which is slow")
    options = prepare(parser)
    memories, rounds = (8192, 1) if options.quick else (options.memories, options.rounds or 11)
    gaps = gate()
    found = race(memories, rounds, (*SEARCHES, "exact") if options.exact else SEARCHES)
    parts = layer("bucketed", memories).batch_of // SEGMENT
    averages = {name: mean(found, name, parts) for name in SEARCHES}
    rows = [[name, each, each / found["none"], None] for name, each in found.items()]
    rows += [[f"{name}, on average", each, each / found["none"], ASKED[name]] for name, each in averages.items()]
    show(f"{SEGMENT} tokens, {memories} memories", ("search", "ms", "to none", "ratio asked"), rows)
    told = {"clusters": recall(memories // 4, 256), "no clusters": recall(memories // 4, 0)}
    parts_of = [(each, what) for each in told.values() for what in ("found", "weight")]
    rows = [[name, *(each[name][what] for each, what in parts_of)] for name in ("exact", *SEARCHES)]
    show(f"of {memories // 4} memories", ("search", "found, clusters", "weight", "found, none", "weight"), rows)
    shape = {"dim": DIM, "heads": HEADS, "segment": SEGMENT, "memories": memories, "topk": TOPK}
    save(
        options, "memorizing",
        {"shape": shape, "dtype": "float32", "gaps": gaps, "milliseconds": found, "average": averages, "recall": told},
    )  # fmt: skip


if __name__ == "__main__":
    main()
