"""Buckets (reformer) and clusters (routing): the speed of a training step, its growth, and what leaks.

    python benchmarks/hashing.py

Members of the recipe benchmark (4 layers, dim 256, 4 heads x 64; 4 rounds of 64 buckets, chunks of 64; 32 clusters,
window 128) in fp32 as `kinformer train` computes, with AdamW, on real text. The first part times 1 x 4096 tokens in
rounds, beside gpt and the peers of equal sizes; the second one row of every length, and gives the slope of log seconds
against log length. Before either, the kernel must give the values and gradients of its reference, and each model must
learn. Beside the clock's seconds stand the processor's, over all threads, which the slope is of, as others disturb them
less: with `--threads 1` they are what a step takes on a quiet core.

The last part masks the published forms, which sort or rank the whole text, as a decoder would: it changes the later
half of 1,024 tokens and counts which outputs before them change, and by how much of their norm. The same of the
members' own forms is 0.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import kinformer
from common import (
    Contestant,
    arguments,
    gate_equal,
    gate_learning,
    interleave,
    peer,
    prepare,
    products,
    save,
    show,
    slope,
    text_bytes,
)
from kinformer.core.contract import state_dtype, width_of
from kinformer.kernels.bucketed import bucketed_attention, members
from kinformer.kernels.bucketed.chunked import gathered, sorted_attention
from kinformer.mixers.buckets import Centroids, Hashes, normalised
from kinformer.runtime.autograd import no_autocast

MEMBERS = ("reformer", "routing", "gpt")
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
GPT_LENGTHS = (1024, 2048, 4096, 8192)
PEERS = {"reformer": "reformer-pytorch", "routing": "routing-transformer"}
"""Of equal sizes, in the same rounds, where they are installed."""
STEEPEST = {"reformer": 1.1, "routing": 1.5}


# Attention within clusters of equal size, as the Routing Transformer is published (Roy et al. 2021, section 4.1).
#
# A cluster takes the ``cluster_size`` queries and the ``cluster_size`` keys that are most similar to its centroid. So a
# token may be in several clusters, whose outputs are averaged, or in none: then its output is 0. The members of a
# cluster depend on the full sequence, so a decoder must not use it even with later tokens masked (``causal``).

ITSELF, EPS = -5e4, 1e-5
"""As in routing-transformer: the score of a token with itself where queries are keys, and a number added to counts."""


def balanced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    similar: tuple[Tensor, Tensor | None],
    cluster_size: int,
    *,
    valid: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return attention within clusters of equal size, [batch, heads, time, head_dim].

    q, k, v: [batch, heads, time, head_dim]; scores are q . k / sqrt(head_dim). similar: [batch, heads, time, clusters]
        of queries and of keys, whose second is None where both are the same tokens; then a token sees itself only
        where it sees nothing else. valid: [batch, time] bool, of keys.
    """
    wide = state_dtype(q.dtype)
    asking = most_similar(similar[0], cluster_size)
    keys = asking if similar[1] is None else most_similar(similar[1], cluster_size)
    with no_autocast(q.device):
        scores = gathered(q.to(wide), asking) @ gathered(k.to(wide), keys).mT * width_of(q) ** -0.5
    hidden = torch.zeros((), dtype=torch.bool, device=q.device)
    if valid is not None:
        real = valid[:, None, None].expand(-1, *keys.shape[1:3], -1)
        hidden = ~(real.gather(3, asking).unsqueeze(-1) & real.gather(3, keys).unsqueeze(-2))
    if causal:
        hidden = hidden | (asking.unsqueeze(-1) < keys.unsqueeze(-2))
    # The lowest number, not -inf: a row whose keys are all hidden stays finite.
    scores = scores.masked_fill(hidden, torch.finfo(wide).min)
    if similar[1] is None:
        scores = scores.masked_fill(asking.unsqueeze(-1) == keys.unsqueeze(-2), ITSELF)
    with no_autocast(q.device):
        output = (scores.softmax(-1) @ gathered(v.to(wide), keys)).flatten(2, 3)
    index = asking.flatten(2, 3).unsqueeze(-1)
    out = torch.zeros_like(v, dtype=wide).scatter_add(2, index.expand_as(output), output)
    counts = out.new_zeros(*out.shape[:3], 1).scatter_add_(2, index, torch.ones_like(index, dtype=wide))
    # The mean over the clusters that took the token, as in the authors' code; a token in none has output 0.
    return (out / (counts + EPS)).to(v.dtype)


def most_similar(similar: Tensor, cluster_size: int) -> Tensor:
    """Return the most similar tokens of each cluster, [batch, heads, clusters, cluster_size] int64; of equal tokens the
    first.

    Equal means equal up to rounding: the same word without a position, in another batch, or computed again by a
    reversible stack, differs in the last digits.
    """
    steps = (similar / torch.finfo(similar.dtype).eps ** 0.75).round()
    return steps.sort(dim=2, descending=True, stable=True).indices[:, :, :cluster_size].mT


class Training:
    """A model and its AdamW; a call makes a step and returns the loss before it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.processor: dict[int, list[float]] = {}
        """Processor seconds of all steps, by length."""

    def __call__(self, window: Tensor) -> float:
        begun = time.process_time()
        loss = self._step(window)
        self.processor.setdefault(window.shape[1] - 1, []).append(time.process_time() - begun)
        return loss

    def _step(self, window: Tensor) -> float:
        found = self.model(window[:, :-1])
        logits, *rest = found if isinstance(found, tuple) else (found,)
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        del logits, found
        cost = rest[0] if rest and isinstance(rest[0], Tensor) else 0.0  # the peer's commitment to its centroids
        (loss + cost).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(loss.detach())


def ours(member: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"position.max_length": max(GPT_LENGTHS)} if member == "gpt" else {}
    return kinformer.build(member, recipe="benchmark", vocab_size=256, set=sizes)


def peers(length: int) -> dict[str, nn.Module]:
    """Those that are installed, causal as they call it."""
    sizes = {"num_tokens": 256, "dim": 256, "depth": 4, "heads": 4, "max_seq_len": length, "causal": True}
    found = {}
    if peer("reformer_pytorch"):
        from reformer_pytorch import ReformerLM

        found[PEERS["reformer"]] = ReformerLM(**sizes, bucket_size=64, n_hashes=4)
    if peer("routing_transformer"):
        from routing_transformer import RoutingTransformerLM

        found[PEERS["routing"]] = RoutingTransformerLM(**sizes, window_size=128)
    return found


def kernel_gap() -> float:
    """The largest gap of the kernel's values and gradients to the reference's, in float64, at 1,024 tokens."""
    inputs = [torch.randn(1, 2, 1024, 64, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    buckets = torch.randint(16, (1, 2, 4, 1024))
    membership = members(buckets, buckets.new_zeros(1, 2, 4, 16), 0, 64)
    found = []
    for impl in ("chunked", "reference"):
        out = bucketed_attention(*inputs, membership, impl=impl).out
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    return max(gate_equal("bucketed attention", *pair, 1e-9) for pair in zip(*found, strict=True))


def race(length: int, rounds: int) -> dict[str, Any]:
    """All members, and their peers, at 1 x ``length``, in turns."""
    window = text_bytes(None, length + 1)[None]
    contestants, rows = [], {}
    models = {name: Training(model) for name, model in ({each: ours(each) for each in MEMBERS} | peers(length)).items()}
    for name, training in models.items():
        fast = name in MEMBERS
        with products(fast):
            rows[name] = {"gate": gate_learning(name, [training(window) for _ in range(3)])}
        contestants.append(Contestant(name, lambda training=training: training(window), fast=fast))
    interleave(contestants, rounds)
    for each in contestants:
        speed = length / each.median
        processor = statistics.median(models[each.name].processor[length][-rounds:])
        rows[each.name] |= {"seconds": each.median, "processor_seconds": processor, "tokens_per_second": speed}
    for member, name in PEERS.items():
        if name in rows:
            times = rows[member]["tokens_per_second"] / rows[name]["tokens_per_second"]
            rows[member] |= {"peer": name, "times_peer": times}
    return rows


def growth(lengths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Of every member the medians of a step at 1 x each length, the lengths in turns, and the slope."""
    found = {}
    for member in MEMBERS:
        own = [length for length in lengths if member != "gpt" or length in GPT_LENGTHS]
        training = Training(ours(member))
        windows = {length: text_bytes(None, length + 1)[None] for length in own}
        contestants = [Contestant(str(n), lambda n=n: training(windows[n]), fast=True) for n in own]  # noqa: B023
        interleave(contestants, rounds)
        seconds = [statistics.median(training.processor[length][-rounds:]) for length in own]
        clock = [each.median for each in contestants]
        found[member] = {"lengths": own, "processor_seconds": seconds, "seconds": clock}
        found[member] |= {"slope": slope(own, seconds), "asked": STEEPEST.get(member)}
    return found


def leaks(time: int = 1024) -> dict[str, dict[str, float]]:
    """Of each form, masked, the share of outputs before ``time`` / 2 that later tokens change, and by how much."""
    q, v = torch.randn(2, 1, 4, time, 64, dtype=torch.float64).unbind()
    half = time // 2
    others = torch.cat([q[:, :, :half], 6 * torch.randn(1, 4, half, 64, dtype=torch.float64)], 2)
    hashes, centroids = Hashes(4, 64, 4, 32).double(), Centroids(4, 64, 8, 0.999).double()

    def by_rank(q: Tensor, key: Tensor, buckets: Tensor, number: int) -> Tensor:
        counts = buckets.new_zeros(*buckets.shape[:3], number)
        return bucketed_attention(q, key, v, members(buckets, counts, 0, 64)).out

    def forms(q: Tensor) -> dict[str, Tensor]:
        key, unit = normalised(q), functional.normalize(q, dim=-1)
        buckets, similar = hashes(q), centroids(unit)
        return {
            "reformer, published": sorted_attention(q, key, v, buckets, 64, causal=True),
            "reformer": by_rank(q, key, buckets, 32),
            "routing, published": balanced_attention(q, unit, v, (similar, None), 128, causal=True),
            "routing": by_rank(q, unit, similar.argmax(-1).unsqueeze(2), 8),
        }

    found = {}
    for name, before, after in (
        (name, x[:, :, :half], forms(others)[name][:, :, :half]) for name, x in forms(q).items()
    ):
        changed = (before - after).norm(dim=-1) > 1e-9 * before.norm(dim=-1)
        found[name] = {
            "outputs_that_change": float(changed.double().mean()),
            "change_of_norm": float((before - after).norm() / before.norm()),
        }
    return found


def main() -> None:
    parser = arguments(__doc__)
    options = prepare(parser)
    rounds = options.rounds or (1 if options.quick else 7)
    gap = kernel_gap()
    length, lengths = (512, LENGTHS[:2]) if options.quick else (4096, LENGTHS)
    speeds = race(length, rounds)
    columns = ("seconds", "processor_seconds", "tokens_per_second", "times_peer")
    rows = [[name, *(row.get(column) for column in columns)] for name, row in speeds.items()]
    show(f"training step at 1 x {length}", ("member", "seconds", "of the processor", "tokens/s", "x peer"), rows)
    grown = growth(lengths, max(1, rounds // 2))
    rows = []
    for name, row in grown.items():
        missing = [None] * (len(lengths) - len(row["lengths"]))
        rows.append([name, *row["processor_seconds"], *missing, row["slope"]])
    show("processor seconds of a step at 1 x length", ("member", *map(str, lengths), "slope"), rows)
    leaked = leaks()
    rows = [[name, *row.values()] for name, row in leaked.items()]
    show("outputs that later tokens change", ("form, masked", "share", "of their norm"), rows)
    result = {"length": length, "rounds": rounds, "dtype": "float32", "kernel_gap": gap}
    save(options, "hashing", result | {"speed": speeds, "growth": grown, "leaks": leaked})


if __name__ == "__main__":
    main()
