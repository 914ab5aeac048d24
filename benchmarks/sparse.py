"""Sparse attention and positions, forward and backward at 1 x 8 heads x 4096 x 64 in float32, beside the usual ways.

    window      each token sees itself and 255 before: ours, the package local-attention (whose blocks show a query
                between 257 and 512 tokens), the four-line fold into masked SDPA, dense SDPA; and forward only,
                with compiled FlexAttention where there is a C++ compiler
    patterns    strided (window and columns in one softmax) and fixed with c = 8, both of stride 128
    positions   on top of causal attention, beside SDPA's causal attention, which has none
    explain     pairs computed for every pair attended, at 16,384 tokens

Products are oneDNN's, as `kinformer train` has them, for all. Ours must first equal the dense definition at 512 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from common import Contestant, arguments, gate_equal, interleave, peer, prepare, save, show
from kinformer.core.parts import PositionConfig
from kinformer.core.pattern import Band, Pattern
from kinformer.kernels import block_sparse as chunked
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.block_sparse import explain
from kinformer.parts.patterns.blocks import Image1D, Image2D, RandomBlocks
from kinformer.parts.patterns.sequence import Blockwise, Dilated, Fixed, GlobalTokens, Strided
from kinformer.parts.relative_positions import T5, Alibi, DistanceAware, Shaw, TransformerXL

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, HEAD_DIM, WINDOW, STRIDE, SUMMARY = 8, 64, 256, 128, 8
SCALE = HEAD_DIM**-0.5
TOLERANCE = 1e-4
ELSEWHERE = {"window": 65.0, "strided": 90.0, "fixed": 90.0}
"""Milliseconds to reach, from another machine of this kind: there dense SDPA took 358, local-attention 126."""
RATIOS = {"ALiBi": 1.15, "T5": 1.9, "DA": 1.9, "Shaw": 2.3, "XL": 2.3}
"""At most this often the time of SDPA's causal attention."""

PATTERNS: dict[str, Pattern] = {
    "causal": Band(),
    "window 256": Band(behind=WINDOW - 1),
    "two-sided window 2 x 256": Band(behind=256, ahead=256),
    "dilated window 256 x 4": Dilated.Config(window=256, dilation=4).build(),
    "strided 128": Strided(stride=STRIDE).build(),
    "fixed 128, c = 8": Fixed(segment=STRIDE, summary=SUMMARY).build(),
    "fixed 128, c = 8, heads apart": Fixed(segment=STRIDE, summary=SUMMARY, slices=4, num_heads=HEADS).build(),
    "window 2 x 128 and 16 global": GlobalTokens(16) | Band(behind=128, ahead=128),
    "random 3 of 64": RandomBlocks.Config(block=64, count=3).build(),
    "Big Bird (causal): window, global, random": (RandomBlocks.Config(block=64, count=3).build() | Band(behind=96))
    | (GlobalTokens(64) & Band()),
    "blockwise, 2 blocks swapped": Blockwise.Config(block=8192, permutations=((1, 0),)).build(),
    "image 1D, blocks of 256": Image1D(block=256).build(),
    "image 2D, 16 x 16 and flanges of 8": Image2D.Config(
        height=128, width=128, block_height=16, block_width=16, flange_height=8, flange_width=8
    ).build(),
}


def sparse(pattern: Pattern) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunked.attend(q, k, v, Visibility(pattern), Scoring(SCALE)).out

    return attend


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, Visibility(Band(behind=WINDOW - 1)), Scoring(SCALE)).out


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of 256 queries over their own and the previous block of keys, as one masked SDPA call."""
    batch, heads, time, width = q.shape
    q, k, v = (x.view(batch, heads, time // WINDOW, WINDOW, width) for x in (q, k, v))
    k, v = (torch.cat([functional.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], 3) for x in (k, v))
    distance = torch.arange(WINDOW)[:, None] + WINDOW - torch.arange(2 * WINDOW)
    seen = ((distance >= 0) & (distance < WINDOW)).expand(time // WINDOW, -1, -1).clone()
    seen[0, :, :WINDOW] = False
    y = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), attn_mask=seen.repeat(batch, 1, 1)[:, None]
    )
    return y.view(batch, time // WINDOW, heads, WINDOW, width).transpose(1, 2).reshape(batch, heads, time, width)


def local_package() -> Attention | None:
    """The peer's causal blocks of 256 over their own and the previous block."""
    package = peer("local_attention")
    if package is None:
        return None
    layer = package.LocalAttention(window_size=WINDOW, causal=True, look_backward=1, look_forward=0, autopad=False,
                                   use_rotary_pos_emb=False)  # fmt: skip
    return lambda q, k, v: layer(q, k, v)


def flex(length: int) -> Attention | None:
    """Compiled FlexAttention, forward only: it has no backward on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < WINDOW)

    mask = create_block_mask(seen, 1, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=mask, scale=SCALE)

    try:
        attend(*(torch.zeros(1, HEADS, length, HEAD_DIM) for _ in range(3)))
    except Exception as error:
        print(f"FlexAttention does not compile here ({type(error).__name__}), so it is left out.")
        return None
    return attend


class Positioned(nn.Module):
    """Causal attention under an encoding of positions, with its parameters."""

    def __init__(self, config: PositionConfig) -> None:
        super().__init__()
        self.position = config.build_heads(HEADS * HEAD_DIM, HEADS, HEAD_DIM)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])[None]
        q, k = self.position.rotate(q, k, places)
        relative = self.position.relative(0, q.shape[2] - 1)
        scoring = Scoring(SCALE, relative=relative)
        return chunked.attend(q, k, v, Visibility(Band(), places), scoring).out


def positions() -> dict[str, Positioned]:
    configs = {
        "ALiBi": Alibi.Config(),
        "T5": T5.Config(),
        "DA": DistanceAware.Config(),
        "Shaw": Shaw.Config(),
        "XL": TransformerXL.Config(),
    }
    return {name: Positioned(config) for name, config in configs.items()}


def inputs(length: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(1, HEADS, length, HEAD_DIM, generator=generator) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], upstream


def step(attend: Attention, qkv: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k, v and of the attention's own parameters."""
    y = attend(*qkv)
    own = list(attend.parameters()) if isinstance(attend, nn.Module) else []
    return y.detach(), *torch.autograd.grad(y, [*qkv, *own], upstream)


def gate(name: str, attend: Attention, pattern: Pattern) -> float:
    """Hold values and gradients to the dense definition at a length that it can afford."""
    qkv, upstream = inputs(512)

    def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(512)
        mask = torch.stack([pattern.at(head).allowed(at[:, None], at) for head in range(pattern.num_heads or 1)])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    pairs = zip(step(attend, qkv, upstream), step(truth, qkv, upstream), strict=True)
    return max(gate_equal(name, one, two, TOLERANCE) for one, two in pairs)


def race(field: dict[str, Attention | None], length: int, rounds: int, backward: bool = True) -> dict[str, float]:
    """Median milliseconds of each, measured in turn."""
    qkv, upstream = inputs(length)
    plain = [x.detach() for x in qkv]

    def once(attend: Attention) -> Callable[[], Any]:
        if backward:
            return lambda: step(attend, qkv, upstream)
        return lambda: torch.no_grad()(attend)(*plain)

    contestants = [Contestant(name, once(attend), fast=True) for name, attend in field.items() if attend is not None]
    interleave(contestants, rounds)
    return {contestant.name: contestant.median * 1000 for contestant in contestants}


def main() -> None:
    options = prepare(arguments(__doc__))
    length, rounds = (1024, 1) if options.quick else (4096, options.rounds or 11)
    band, strided, fixed = (PATTERNS[name] for name in ("window 256", "strided 128", "fixed 128, c = 8"))
    gaps = {
        "window": gate("window", window, band),
        "window by tiles": gate("window by tiles", sparse(band), band),
        "strided": gate("strided", sparse(strided), strided),
        "fixed": gate("fixed", sparse(fixed), fixed),
    }
    windows: dict[str, Attention | None] = {
        "window": window,
        "window by tiles": sparse(band),
        "local-attention": local_package(),
        "fold into SDPA": folded,
        "dense SDPA": dense,
    }
    others: dict[str, Attention | None] = {"strided": sparse(strided), "fixed": sparse(fixed), "dense SDPA": dense}
    encodings: dict[str, Attention | None] = {"SDPA causal, no positions": dense, "causal by tiles": sparse(Band())}
    results = {
        "window": race(windows, length, rounds),
        "window, forward": race(windows | {"compiled FlexAttention": flex(length)}, length, rounds, backward=False),
        "patterns": race(others, length, rounds),
        "positions": race(encodings | positions(), length, rounds),
    }
    for task, found in results.items():
        base = found.get("dense SDPA") or found["SDPA causal, no positions"]
        rows = [[name, each, each / base, ELSEWHERE.get(name), RATIOS.get(name)] for name, each in found.items()]
        show(f"{task} at {length}", ("contestant", "ms", "to dense", "ms asked elsewhere", "ratio asked"), rows)
    told = {name: explain(pattern, 16_384) for name, pattern in PATTERNS.items()}
    show("pairs at 16,384", ("pattern", "attended", "computed", "ratio"),
         [[name, each.attended, each.computed, each.ratio] for name, each in told.items()])  # fmt: skip
    ratios = {name: {"attended": each.attended, "computed": each.computed} for name, each in told.items()}
    shape = f"1 x {HEADS} x {length} x {HEAD_DIM}"
    save(
        options, "sparse", {"shape": shape, "dtype": "float32", "gaps": gaps, "milliseconds": results, "pairs": ratios}
    )


if __name__ == "__main__":
    main()
