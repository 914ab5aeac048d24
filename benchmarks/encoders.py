"""Long-document encoders beside transformers', with the same weights, at 1 x 4096, dim 512, 8 heads, fp32.

Forward and backward of

    longformer  window of 128 to the left and right, 16 global tokens with their own projections
    big-bird    blocks of 64: window of 3, first and last, 3 random ones by the same table
    bert        all pairs, for comparison

Each as its attention alone (projections, attention, output) and as the whole layer (with the feed-forward, which is the
same work for all). Ours runs with `kinformer train`'s products, the peer with PyTorch's default and with ours. Then the
memory of our layers up to 32,768 tokens, each length in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common import Contestant, arguments, gate_equal, interleave, memory, peer, prepare, products, save, show, slope
from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.layer import EncoderLayer
from kinformer.blocks.residual import LayerNorm
from kinformer.core.encoder import SequenceContext
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.parts.patterns.blocks import BigBird
from kinformer.parts.patterns.sequence import Window
from kinformer.parts.projections import MultiHeadGlobal

DIM, HEADS, HIDDEN, WINDOW, GLOBALS, BLOCK, RANDOM = 512, 8, 2048, 128, 16, 64, 3
TOLERANCE = 2e-4
GOAL = 3.0
"""Times faster than the peer."""

Step = Callable[[Tensor], Tensor]


def ours(name: str) -> tuple[EncoderLayer, SequenceContext]:
    attention: dict[str, Any] = {
        "longformer": {"pattern": Window(window=WINDOW), "projection": MultiHeadGlobal.Config()},
        "big-bird": {"pattern": BigBird.Config(block=BLOCK, random=RANDOM, num_heads=HEADS, seed=0)},
        "bert": {},
    }[name]
    config = EncoderLayer.Config(
        mixer=BidirectionalAttention.Config(num_heads=HEADS, **attention),
        feed_forward=MLP.Config(hidden_dim=HIDDEN),
        norm=LayerNorm(eps=1e-12),
    )
    positions = torch.arange(GLOBALS)[None] if name == "longformer" else None
    return config.build(DIM), SequenceContext(global_positions=positions)


def longformer(length: int) -> tuple[nn.Module, Step, Step]:
    """The peer's layer, and steps of its attention and of all of it."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerLayer

    layer = LongformerLayer(
        LongformerConfig(
            hidden_size=DIM, num_attention_heads=HEADS, intermediate_size=HIDDEN, attention_window=[2 * WINDOW],
            num_hidden_layers=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-12,
        )
    ).train()  # fmt: skip
    mask = torch.zeros(1, length)
    mask[:, :GLOBALS] = 10000.0
    given = {
        "attention_mask": mask, "is_index_masked": mask < 0, "is_index_global_attn": mask > 0,
        "is_global_attn": True,
    }  # fmt: skip
    return layer, lambda x: layer.attention(x, **given)[0], lambda x: first(layer(x, **given))


def big_bird(length: int) -> tuple[nn.Module, Step, Step]:
    import numpy as np
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdLayer, BigBirdModel

    layer = BigBirdLayer(
        BigBirdConfig(
            hidden_size=DIM, num_attention_heads=HEADS, intermediate_size=HIDDEN, block_size=BLOCK, hidden_act="gelu",
            num_random_blocks=RANDOM, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            max_position_embeddings=length,
        ),
        seed=0,
    ).train()  # fmt: skip
    names = ("blocked_encoder_mask", "band_mask", "from_mask", "to_mask")
    masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, length), BLOCK)
    given = dict(zip(names, masks, strict=True))

    def attention(x: Tensor) -> Tensor:
        np.random.seed(0)
        inner = {name: mask for name, mask in given.items() if name != "blocked_encoder_mask"}
        blocked = given["blocked_encoder_mask"]
        return layer.attention(x, from_blocked_mask=blocked, to_blocked_mask=blocked, **inner)[0]

    return layer, attention, lambda x: first(layer(x, **given))


def bert(length: int) -> tuple[nn.Module, Step, Step]:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(
        hidden_size=DIM, num_attention_heads=HEADS, intermediate_size=HIDDEN, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    layer = BertLayer(config).train()

    def attention(x: Tensor) -> Tensor:
        return layer.attention(x)[0]

    return layer, attention, lambda x: first(layer(x))


def first(y: Any) -> Tensor:
    """The output of a layer, which some versions put into a tuple."""
    return y[0] if isinstance(y, tuple) else y


PEERS = {"longformer": longformer, "big-bird": big_bird, "bert": bert}


def copy(theirs: nn.Module, mine: EncoderLayer) -> None:
    """The peer's weights in our layer."""
    source = dict(theirs.named_parameters())
    mixer: Any = mine.mixer

    def fill(target: nn.Module, *names: str) -> None:
        for kind in ("weight", "bias"):
            getattr(target, kind).copy_(torch.cat([source[f"{name}.{kind}"] for name in names]))

    with torch.no_grad():
        fill(mixer.projection.qkv, *(f"attention.self.{name}" for name in ("query", "key", "value")))
        if isinstance(mixer.projection, MultiHeadGlobal.Config) or mixer.projection.for_globals() is not None:
            apart = mixer.projection.for_globals()
            for name in ("query", "key", "value"):
                fill(getattr(apart, name), f"attention.self.{name}_global")
        fill(mixer.out, "attention.output.dense")
        fill(mine.mixer_residual.norm, "attention.output.LayerNorm")
        fill(mine.feed_forward.up, "intermediate.dense")
        fill(mine.feed_forward.down, "output.dense")
        fill(mine.feed_forward_residual.norm, "output.LayerNorm")


def step(run: Step, x: Tensor, upstream: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the input, those of all weights thrown away."""
    y = run(x)
    gradients = torch.autograd.grad(y, [x, *weights], upstream, allow_unused=True)
    return y.detach(), gradients[0]


def race(name: str, length: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of ours and of the peer, in turn, after both gave the same."""
    generator = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(1, length, DIM, generator=generator) for _ in range(2))
    x.requires_grad_()
    theirs, attention, whole = PEERS[name](length)
    mine, text = ours(name)
    copy(theirs, mine)
    own = {
        "attention": lambda y: mine.mixer_residual.norm(mine.mixer(y, text) + y),
        "layer": lambda y: mine(y, text),
    }
    result: dict[str, Any] = {}
    for part, run in (("attention", attention), ("layer", whole)):
        module = theirs.attention if part == "attention" else theirs
        used = [mine.mixer, mine.mixer_residual.norm] if part == "attention" else [mine]
        pairs = {
            "kinformer": (own[part], [p for each in used for p in each.parameters()], True),  # type: ignore[attr-defined]
            "transformers": (run, list(module.parameters()), False),  # type: ignore[operator,union-attr]
            "transformers, our products": (run, list(module.parameters()), True),  # type: ignore[operator,union-attr]
        }
        got, want = (step(pairs[who][0], x, upstream, pairs[who][1]) for who in ("kinformer", "transformers"))
        gaps = [gate_equal(f"{name} {part}", one, two, TOLERANCE) for one, two in zip(got, want, strict=True)]
        field = [
            Contestant(who, lambda run=run, w=weights: step(run, x, upstream, w), fast=fast)
            for who, (run, weights, fast) in pairs.items()
        ]
        interleave(field, rounds)
        times = {one.name: one.median * 1000 for one in field}
        speed = times["transformers"] / times["kinformer"]
        result[part] = {"milliseconds": times, "times_faster": speed, "largest_gap": max(gaps)}
    return result


def point(name: str, length: int) -> dict[str, float]:
    """Peak memory above what was resident before, of forward and backward of our layer, in this process."""
    layer, text = ours(name)
    x = torch.randn(1, length, DIM, requires_grad=True)
    layer(x[:, :1024], text).sum().backward()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = memory("VmRSS")
    with products(True):
        layer(x, text).sum().backward()
    return {"peak_bytes": memory("VmHWM") - before}


def memories(lengths: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("longformer", "big-bird"):
        peaks = []
        for length in lengths:
            command = [sys.executable, __file__, "--point", name, str(length)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            peaks.append(json.loads(done.stdout)["peak_bytes"])
        found[name] = {"lengths": lengths, "peak_bytes": peaks, "slope": slope(lengths, peaks)}
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--point", nargs=2, metavar=("NAME", "LENGTH"), help="memory of one layer at one length")
    options = prepare(parser)
    if options.point:
        print(json.dumps(point(options.point[0], int(options.point[1]))))
        return
    if peer("transformers") is None:
        return
    length, rounds = (1536, 1) if options.quick else (4096, options.rounds or 9)
    results = {name: race(name, length, rounds) for name in PEERS}
    rows = [
        [f"{name} {part}", *one["milliseconds"].values(), one["times_faster"]]
        for name, parts in results.items()
        for part, one in parts.items()
    ]
    header = ("ms, forward and backward", "kinformer", "transformers", "with our products", "times faster")
    show(f"1 x {length}, dim {DIM}, fp32", header, rows)
    held = memories([1024, 2048] if options.quick else [4096, 8192, 16_384, 32_768])
    for name, one in held.items():
        peaks = ", ".join(f"{peak / 2**20:,.0f}" for peak in one["peak_bytes"])
        print(f"{name}: peak MiB {peaks} at {one['lengths']} tokens, log-log slope {one['slope']:.3f}")
    save(options, "encoders", {"length": length, "goal": GOAL, "results": results, "memory": held})


if __name__ == "__main__":
    main()
