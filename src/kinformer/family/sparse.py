"""Decoders whose queries see some of the keys: windows, strides, images, buckets, chosen blocks and tokens."""

from __future__ import annotations

from typing import Any

from kinformer.family.record import (
    POST_NORM,
    Member,
    Recipe,
    Settings,
    drop,
    llama,
    noam,
    part,
    sizes,
    translating,
    unconfirmed,
    usual_training,
)

# Sliding window: every token sees the last few tokens, which a state of constant size holds.

_LOCAL: Settings = {"mixer": part("softmax", position="rope", pattern=part("local", window=256))}
LONGEST_WINDOW = 32768
"""The texts on which Longformer's authors evaluate have 32,256 characters."""
DILATED_HEADS = 2
PHASES = 5


def _windows(depth: int, phase: int) -> list[int]:
    """Return the number of keys that each layer of Longformer's language model sees in a phase (from 0): 32 in the
    lowest and 8192 in the highest layer in the first phase, and twice as many in every later phase."""
    return [min(2 ** (5 + round(8 * layer / (depth - 1)) + phase), LONGEST_WINDOW) for layer in range(depth)]


def _longformer_decoder(depth: int, dilations: tuple[int, ...], dropout: float) -> Recipe:
    """Return Longformer's language model of characters (Beltagy et al. 2020, section 4 and table 12) after its last
    phase; ``dilations``: the lowest layers from which two heads see every second, every third and every fourth
    token."""
    patterns = {}
    for number, window in enumerate(_windows(depth, PHASES - 1)):
        gap = 1 + sum(number >= lowest for lowest in dilations)
        gaps = (1,) * (8 - DILATED_HEADS) + (gap,) * DILATED_HEADS
        pattern = part("local", window=window) if gap == 1 else part("dilated", window=window, dilations=gaps)
        patterns[f"layers.{number}.mixer.pattern"] = pattern
    return Recipe(512, depth, 8, patterns, drop(dropout), mixer=part("softmax", position="xl"))


def _phases(depth: int, steps: tuple[int, ...]) -> dict[str, object]:
    """Return the training of :func:`_longformer_decoder` in five phases (table 12): windows and rows twice as
    long in each, half the learning rate, which rises again over a tenth of the phase, for 10,000 steps at most."""
    lengths, rows = (2048, 4096, 8192, 16384, 23040), (32, 32, 16, 16, 16)
    stages: list[dict[str, object]] = []
    for phase, (count, length, batch) in enumerate(zip(steps, lengths, rows, strict=True)):
        rate = {"lr": 2.5e-4 / 2**phase, "warmup": min(count // 10, 10_000)}
        windows = {f"layers.{layer}.mixer.pattern.window": item for layer, item in enumerate(_windows(depth, phase))}
        stages.append({"steps": count, "length": length, "batch_size": batch, **rate, "set": windows})
    last = stages[-1]
    stages[-1] = {name: last[name] for name in ("lr", "warmup")}
    return {
        "steps": sum(steps),
        "length": last["length"],
        "batch_size": last["batch_size"],
        "stages": tuple(stages),
        "schedule": "constant",
        "lr": 2.5e-4,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "clip": 0.25,
    }


LOCAL = Member(
    name="local",
    title="Local attention (sliding window)",
    paper="Jiang et al. 2023, Mistral 7B (arXiv 2310.06825); Liu et al. 2018 (arXiv 1801.10198) for local attention",
    axes=("pattern", "position"),
    growth="window",
    departures=(
        "in all recipes except the recipes paper, layer norm, GELU and a key head per head, so that only window and "
        "positions differ from the plain decoder",
        "paper-longformer: windows grow from layer to layer by powers of two (the paper names the lowest and the "
        "highest), and count the keys that a token sees, itself included; its authors never released this model's "
        "code, and the sizes, the phases and their rates are recalled from the paper's table, not held to it again",
        usual_training("paper", why="Mistral's are not published"),
    ),
    exact_limit="window >= length",
    parity=("openai/sparse_attention: the mask of its window (tests/patterns/test_published.py)",),
    results=("sparse",),
    use_when="the recent past decides, in texts of any length and with a constant state",
    avoid_when="a token far beyond the windows of all layers must be recalled exactly",
    training={
        "paper-longformer": _phases(12, (430_000, 50_000, 50_000, 35_000, 5_000)),
        "paper-longformer-large": _phases(30, (350_000, 25_000, 10_000, 5_000, 5_000)),
    },
    recipes={
        **sizes(_LOCAL, tiny={"mixer.pattern.window": 8}),
        "paper": Recipe(4096, 32, 32).but(
            _LOCAL,
            llama(1e-5, "swiglu", hidden_dim=14336),
            {
                "mixer.pattern.window": 4096,
                "mixer.projection": part("grouped", num_kv_heads=8, bias=False),
                "mixer.bias": False,
            },
            vocab_size=32000,
        ),
        "paper-longformer": _longformer_decoder(12, (6, 8, 10), 0.2),
        "paper-longformer-large": _longformer_decoder(30, (15, 20, 25), 0.4),
    },
)


# Sparse Transformer: attention factorised into a local part and columns.

_INTERLEAVED: Settings = {"layers.0::2.mixer.pattern.part": "local", "layers.1::2.mixer.pattern.part": "columns"}
"""The two parts of a pattern are used by turns in layers; otherwise both are in one softmax."""


def _by_heads(num_heads: int, pattern: Settings) -> dict[str, Any]:
    """Return the pattern whose two parts are used by turns in heads."""
    return part("per_head", patterns=[{**pattern, "part": ("local", "columns")[head % 2]} for head in range(num_heads)])


def _sparse(dim: int, depth: int, num_heads: int, pattern: Settings, *settings: Settings, **more: object) -> Recipe:
    return Recipe(dim, depth, num_heads).but(
        {
            "mixer": part("softmax", pattern=pattern),
            "position": part("learned", max_length=4096),
            "activation": "gelu_sigmoid",
            "initialisation": {"std": 0.125 / dim**0.5},
        },
        *settings,
        **more,
    )


_SHORT: Settings = {"position.max_length": 128}
_FIXED = part("fixed", segment=128, summary=8)
_STRIDED = part("strided", stride=128)
_TINY_STRIDED = part("strided", stride=6)

SPARSE_TRANSFORMER = Member(
    name="sparse-transformer",
    title="Sparse Transformer",
    paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers (arXiv 1904.10509)",
    axes=("pattern",),
    cost="between",
    departures=(
        "the strided window has as many tokens as the published code's, one fewer than the paper's formula",
        "one learned table of positions of text (the paper adds one of rows and one of columns)",
        "images (paper-cifar): both parts in one softmax, since the paper does not say which use it is; queries and "
        "keys as wide as values (the paper: half as wide), which makes 67 million parameters instead of 59",
        "one standard deviation, 0.125 / sqrt(dim), for all weights except the weights into the residual stream",
        "the output shares the embedding's weights; no dropout unless asked for (the paper: 0.4 on enwik8)",
    ),
    exact_limit="stride or segment >= length",
    parity=(
        "openai/sparse_attention, the authors' code: masks, outputs and gradients (tests/patterns/test_published.py)",
    ),
    results=("sparse",),
    use_when="texts or images have a period (lines, columns) that a stride can follow",
    avoid_when="the structure does not have a fixed period, or the state must not grow",
    training={  # section 7
        name: {"lr": 3.5e-4, "warmup": 5000, "beta2": 0.999, "min_lr_ratio": 0.0, "weight_decay": 0.01}
        for name in ("paper", "paper-cifar")
    },
    recipes={
        "tiny": _sparse(32, 2, 2, part("fixed", segment=8, summary=2), _SHORT),
        "tiny-strided": _sparse(32, 2, 2, _TINY_STRIDED, _SHORT),
        "tiny-interleaved": _sparse(32, 2, 2, _TINY_STRIDED, _SHORT, _INTERLEAVED),
        "tiny-heads": _sparse(32, 2, 2, _by_heads(2, _TINY_STRIDED), _SHORT),
        "small": _sparse(256, 4, 4, _FIXED),
        "small-slices": _sparse(256, 4, 4, {**_FIXED, "slices": 4, "num_heads": 4}),
        "small-interleaved": _sparse(256, 4, 4, _FIXED, _INTERLEAVED),
        "small-heads": _sparse(256, 4, 4, _by_heads(4, _FIXED)),
        "small-strided": _sparse(256, 4, 4, _STRIDED),
        "small-strided-interleaved": _sparse(256, 4, 4, _STRIDED, _INTERLEAVED),
        "small-strided-heads": _sparse(256, 4, 4, _by_heads(4, _STRIDED)),
        "benchmark": _sparse(256, 4, 4, _FIXED),
        "benchmark-strided": _sparse(256, 4, 4, _STRIDED),
        "paper": _sparse(
            512, 30, 8, part("fixed", segment=128, summary=32, slices=4, num_heads=8), {"position.max_length": 12288}
        ),
        # feed-forwards half as wide as usual, learned rows, columns and channels
        "paper-cifar": _sparse(
            256, 128, 2, _STRIDED, input=part("pixels", channels=3), position="none", hidden_dim=512
        ),
    },
)


# Image Transformer: pixels one after the other, each seeing the block around it.

_IMAGE_TRANSFORMER: Settings = {
    **POST_NORM,
    "input": part("tokens", scale=True),
    "position": "sinusoidal",
    "norm": None,
    "head": part("language", tied=False, bias=True),
    "initialisation": {"scheme": "xavier"},
}


def _blocks(block: int, **more: object) -> Settings:
    return {"mixer": part("softmax", pattern=part("image_1d", block=block, **more))}


def _areas(height: int, width: int, block: tuple[int, int], flange: tuple[int, int]) -> Settings:
    """Return the settings of blocks. Sizes are (height, width), in values: a colour pixel is three in a row."""
    names = ("block_height", "block_width", "flange_height", "flange_width")
    pattern = part("image_2d", height=height, width=width, **dict(zip(names, block + flange, strict=True)))
    return {"mixer": part("softmax", pattern=pattern)}


def _pixels(height: int = 32, width: int = 32, block: tuple[int, int] | None = None, **more: object) -> dict[str, Any]:
    """Return an input of a table per channel, with signals of rows and columns; blocks of two dimensions restart."""
    blocks = {} if block is None else {"block_height": block[0], "block_width": block[1], "restart": True}
    image = {"height": height, "width": width, "channels": 3}
    return part("pixels", per_channel=True, scale=True, places="sinusoid_2d", **image, **blocks, **more)


def _colours(dim: int, depth: int, num_heads: int, blocks: Settings, **pixels: Any) -> Recipe:
    read: Settings = {"input": _pixels(**pixels), "position": "none"}
    return Recipe(dim, depth, num_heads, _IMAGE_TRANSFORMER, blocks, read)


def _enlarging(dim: int, depth: int, num_heads: int, encoder_depth: int, source: int, size: int, block: int) -> Recipe:
    """Return the recipe of an encoder-decoder that enlarges images of ``source`` to ``size`` pixels a side."""
    small = _pixels(source, source, shifted=False)
    encoder = {**_blocks(block, masked=False)["mixer"], "kind": "bidirectional"}
    return _colours(dim, depth, num_heads, _blocks(block), height=size, width=size).but(
        translating(mixer=encoder, depth=encoder_depth, input=small)
    )


_TINY_AREAS = _areas(4, 6, block=(2, 3), flange=(1, 2))
_AREAS = _areas(32, 96, block=(8, 16), flange=(8, 32))

IMAGE_TRANSFORMER = Member(
    name="image-transformer",
    title="Image Transformer",
    paper="Parmar et al. 2018, Image Transformer (arXiv 1802.05751)",
    axes=("pattern", "domain"),
    growth="window",
    departures=(
        "recipes of tokens (tiny, small, benchmark) have one table, sinusoids of the sequence, and in 2D predict from "
        "one block to the next; recipes of pixels follow the published code: a table for each channel, signals of "
        "rows and columns, and 2D blocks that begin without their predecessor",
        "the vector before an image or a block is learned and begins as zeros (the published code: zeros)",
        "a sequence of less than two blocks in 1D is cut into blocks like any other (the published code: one block)",
        "no dropout unless asked for (the paper: 0.3 on CIFAR-10)",
        unconfirmed("paper", "paper-2d", "paper-super-resolution"),
        "recipes of super-resolution have norms behind sublayers, as the other recipes; the published code's "
        "(img2img_transformer_base) before them. The decoder attends to all of the source",
    ),
    exact_limit="1D: 2 * block >= length; 2D: a block as large as the image",
    parity=(
        "tensor2tensor, the authors' code: blocks of one and two dimensions, in 2D without a mask, too "
        "(tests/patterns/test_published.py), "
        "the shift of pixels (tests/inputs/test_pixels.py)",
    ),
    use_when="images are drawn value by value, and neighbours decide",
    avoid_when="the input is text",
    training={name: noam(512) for name in ("paper", "paper-2d", "paper-super-resolution")},  # section 5
    recipes={
        "tiny": Recipe(32, 2, 2, _IMAGE_TRANSFORMER, _blocks(8)),
        "tiny-2d": Recipe(32, 2, 2, _IMAGE_TRANSFORMER, _TINY_AREAS),
        "tiny-pixels": _colours(32, 2, 2, _blocks(8)),
        "tiny-pixels-2d": _colours(32, 2, 2, _TINY_AREAS, height=4, width=2, block=(2, 3)),
        "small": Recipe(256, 4, 4, _IMAGE_TRANSFORMER, _blocks(256)),
        "small-2d": Recipe(256, 4, 4, _IMAGE_TRANSFORMER, _AREAS),
        "small-pixels": _colours(256, 4, 4, _blocks(256)),
        "small-pixels-2d": _colours(256, 4, 4, _AREAS, block=(8, 16)),
        "benchmark": Recipe(256, 4, 4, _IMAGE_TRANSFORMER, _blocks(256)),
        "paper": _colours(512, 12, 4, _blocks(256)),
        "tiny-super-resolution": _enlarging(32, 2, 2, 1, source=2, size=8, block=12),
        "super-resolution": _enlarging(256, 4, 4, 2, source=8, size=32, block=256),
        "paper-super-resolution": _enlarging(512, 8, 8, 4, source=8, size=32, block=256),
        "paper-2d": _colours(
            512, 8, 8, _areas(64, 192, block=(8, 64), flange=(4, 32)), height=64, width=64, block=(8, 64)
        ),
    },
)


# Reformer: attention within the buckets of locality-sensitive hashing, and a reversible stack.


def _reformer(
    dim: int, depth: int, num_heads: int, num_buckets: int, chunk_size: int, rounds: int, recompute: bool = True,
    **more: object,
) -> Recipe:  # fmt: skip
    mixer = part("lsh", num_buckets=num_buckets, chunk_size=chunk_size, rounds=rounds)
    stack = part("reversible", join="mean", recompute=recompute)
    return Recipe(dim, depth, num_heads, mixer=mixer, position="sinusoidal", stack=stack, **more)


_HEADS: Settings = {"num_heads": 8, "head_dim": 64, "bias": False}

REFORMER = Member(
    name="reformer",
    title="Reformer (LSH attention, reversible layers)",
    paper="Kitaev et al. 2020, Reformer: The Efficient Transformer (arXiv 2001.04451)",
    axes=("pattern", "projection", "depth"),
    growth="window",
    departures=(
        "a chunk holds tokens of one bucket, by their rank there, so that the keys of a token depend on the past alone "
        "(the authors': tokens of the whole text, sorted by bucket, where later tokens change what earlier tokens see)",
        "the published form, sorted, is the encoder mixer lsh; masked for a decoder it leaks: with other later tokens "
        "40 % of the outputs before them change, by 48 % of their norm (tests/mixers/test_bidirectional_lsh.py)",
        "tokens see no other buckets than their own, and a key that several rounds find counts once, as in the paper's "
        "equations; the authors' code has neither",
        "rotations are drawn once, with the weights, so that a text can continue (the authors' code: in every pass)",
        "num_buckets is a setting (the authors' code: from the length)",
        "sinusoidal positions (the authors': axial ones, learned)",
        "GELU in the recipes tiny and small",
        "buckets are hashed again in the backward pass of the reversible stack (the authors' code keeps them); recipes "
        "tiny and benchmark keep activations instead, and compute the same function",
        "but in the recipe paper the two streams are joined by their mean, so that the head is as wide as the model",
    ),
    exact_limit="attention over the past with shared queries and keys: one bucket, one round, chunk_size >= length",
    parity=(
        "Reformer of transformers 5.23.0: attention over whole texts, in float64 "
        "(tests/mixers/test_bidirectional_lsh.py), reversible layers (tests/stacks/test_reversible_parity.py)",
    ),
    use_when=(
        "long sequences repeat themselves, so that similar tokens must find each other anywhere, or memory bounds the "
        "depth"
    ),
    avoid_when="texts are short or training is brief: of all members of text it learnt least in equal minutes",
    training={  # the authors' configuration
        "paper": noam(1024, 2000, steps=100_000, batch_size=8, length=65_536)
    },
    recipes={
        "tiny": _reformer(32, 2, 2, num_buckets=4, chunk_size=4, rounds=2, recompute=False),
        "small": _reformer(256, 4, 4, num_buckets=16, chunk_size=32, rounds=2),
        "benchmark": _reformer(256, 4, 4, num_buckets=64, chunk_size=64, rounds=4, recompute=False, activation="relu"),
        # the authors' configuration for 64k bytes of enwik8: of four layers the third hashes, the others see a window
        "paper": Recipe(1024, 12, 8).but(
            {
                "mixer": part("softmax", pattern=part("local", window=256), **_HEADS),
                "layers.2::4.mixer": part("lsh", num_buckets=512, chunk_size=128, rounds=2, **_HEADS),
                "feed_forward.chunks": 16,
                "activation": "relu",
                "position": "sinusoidal",
                "head": part("language", tied=False),
                "stack": "reversible",
            },
        ),
    },
)


# Routing Transformer: half of the heads see their cluster of content, half a window.


def _routing(dim: int, depth: int, num_heads: int, num_clusters: int, window: int, *more: Settings) -> Recipe:
    mixer = part("routing", local_heads=num_heads // 2, num_clusters=num_clusters, window=window)
    return Recipe(dim, depth, num_heads, {"mixer": mixer, "position": "sinusoidal"}, *more)


def _below(window: int) -> Settings:
    """Return the settings of windows in all layers but the last two, as in the authors' model of PG-19."""
    return {"layers.:-2.mixer": part("softmax", pattern=part("local", window=window))}


_RELU: Settings = {"activation": "relu"}

ROUTING = Member(
    name="routing",
    title="Routing Transformer (online k-means)",
    paper="Roy et al. 2021, Efficient Content-Based Sparse Attention with Routing Transformers (arXiv 2003.05997)",
    axes=("pattern", "projection"),
    growth="window",
    departures=(
        "a token is in the cluster of its nearest centroid and sees the cluster's last window, cut by rank, so that "
        "its keys depend on the past alone; the authors' clusters take the most similar tokens of the whole "
        "text, later ones included; masked for a decoder they leak: with other later tokens 43 % of the outputs "
        "before them change, by 66 % of their norm (tests/family/test_routing.py)",
        "keys are queries of length 1, scores are divided by sqrt(head_dim), and a token sees itself only where it "
        "sees nothing else, as in routing-transformer (the authors: layer norms of q and k, and no such rule)",
        unconfirmed("paper"),
        "centroids begin as random directions and move once after each training step, by the tokens of all processes",
        "sinusoidal positions (the authors': relative ones in the local heads), pre-norm, GELU in all recipes but "
        "benchmark and paper",
    ),
    exact_limit="attention over the past with shared queries and keys: no local heads, one cluster, window >= length",
    parity=("routing-transformer 1.6.1: clusters over whole texts, in float64 (tests/family/test_routing.py)",),
    use_when="long texts fall into topics, and a token should see the last tokens of its topic",
    avoid_when="exact recall counts, or training is brief: its clusters must form first",
    training={"paper": noam(1024, lr=2e-4)},  # section 5
    recipes={
        "tiny": _routing(32, 2, 2, 3, 8),
        "small": _routing(256, 4, 4, 16, 128),
        "tiny-upper": _routing(32, 3, 2, 3, 8, _below(8)),
        "upper": _routing(256, 6, 4, 16, 128, _below(128)),
        "benchmark": _routing(256, 4, 4, 32, 128, _RELU),
        "paper": _routing(1024, 10, 16, 16, 256, _RELU),
    },
)


# Mixture of block attention: a token chooses blocks of earlier tokens by the mean of their keys.


def _moba(block: int, count: int) -> Settings:
    return {"mixer": part("chosen_blocks", position="rope", block=block, count=count)}


MOBA = Member(
    name="moba",
    title="Mixture of block attention (MoBA)",
    paper="Lu et al. 2025, MoBA: Mixture of Block Attention for Long-Context LLMs (arXiv 2502.13189)",
    axes=("pattern",),
    cost="between",
    departures=(
        "between blocks of equal importance up to rounding the last block is chosen, so that the choice does not "
        "depend on the cut of a text into chunks",
        "layer norm and GELU, and separate keys for every head (the authors' models: LLaMA's blocks); the recipe "
        "paper has the sizes of the first model of their scaling laws",
        usual_training("paper"),
    ),
    exact_limit="with as many blocks to see as the text has it is softmax attention, with the same weights",
    parity=("moba_attn_varlen_naive of MoonshotAI/MoBA, in float32 (tests/mixers/test_chosen_blocks.py)",),
    results=("chosen_blocks",),
    use_when="texts have many thousands of tokens, a token needs only a few places, and the cache may grow",
    avoid_when="texts are short, or the state must not grow: the cache is as large as in full attention",
    recipes={
        **sizes(tiny=_moba(4, 2), small=_moba(32, 4), benchmark=_moba(128, 4)),
        "paper": Recipe(1792, 14, 14, _moba(512, 3)),
    },
)


# Native sparse attention: a coarse look at all blocks, a fine look at the important blocks, and a window.


def _nsa(block: int, count: int, window: int, kv_heads: int = 1, **more: object) -> Settings:
    return {
        "mixer": part(
            "chosen_blocks",
            projection=part("grouped", num_kv_heads=kv_heads, bias=False),
            position="rope",
            block=block,
            count=count,
            first=1,
            near=1,
            shared_choice=True,
            window=window,
            bias=False,
            **{"compression": "mean", **more},
        )
    }


NSA = Member(
    name="nsa",
    title="Native sparse attention (NSA)",
    paper="Yuan et al. 2025, Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention "
    "(arXiv 2502.11089)",
    axes=("pattern", "rank"),
    cost="between",
    departures=(
        "in all recipes but paper, the same blocks are summarised and chosen, and a summary is a mean, as in "
        "fla-org/native-sparse-attention (the paper and the recipe paper: a perceptron over 32 tokens, one every 16)",
        "the perceptron of a block is ours where the paper leaves it open: twice as wide as a head within, one for all "
        "heads except for the positions in the block, the mean at first, and blind to where the block lies",
        "the three branches share one projection of keys and values, as there (the paper: each its own)",
        "values are as wide as keys in the recipe paper (the paper: 128 and 192); the widths of its feed-forwards and "
        "its vocabulary are our choice, as the paper does not state them",
        "layer norm and GELU in all recipes but paper",
        usual_training("paper", why="the paper does not state them"),
    ),
    exact_limit="with blocks of one token, all blocks seen, and a window as long as the text, every branch is softmax "
    "attention",
    parity=(
        "naive_nsa_with_compression of fla-org/native-sparse-attention, in float32 "
        "(tests/mixers/test_chosen_blocks.py)",
    ),
    results=("chosen_blocks",),
    use_when="texts have many thousands of tokens, several heads can share keys, and the cache may grow",
    avoid_when="texts are short: three branches then cost more than full attention",
    recipes={
        **sizes(tiny=_nsa(4, 4, 6), small=_nsa(16, 6, 64), benchmark=_nsa(64, 8, 256)),
        "paper": Recipe(2560, 30, 64).but(
            llama(1e-6, "swiglu", hidden_dim=10240),
            _nsa(64, 16, 512, kv_heads=4, compression="mlp", head_dim=192, summary_length=32, summary_stride=16),
            {"layers.1:.feed_forward": part("experts", num_experts=72, topk=6, hidden_dim=1408, shared_dim=2 * 1408)},
            vocab_size=102_400,
        ),
    },
)


# DeepSeek's sparse attention: a small indexer chooses single tokens, and learns from the attention's weights.


def _dsa(topk: int, **sizes: object) -> Settings:
    return {"mixer": part("indexed", topk=topk, **sizes)}


_V3_EXPERTS: Settings = {
    "num_experts": 256, "topk": 8, "groups": 8, "topk_groups": 4, "hidden_dim": 2048, "shared_dim": 2048,
    "router": "sigmoid", "scale": 2.5, "balance": 0.0001, "bias_rate": 0.001,
}  # fmt: skip
_DSA_TRAINING: Settings = {
    "steps": 16_000, "length": 131_072, "batch_size": 480, "schedule": "constant", "warmup": 0, "lr": 1e-3,
    "stages": ({"steps": 1000, "batch_size": 16, "set": {"layers.*.mixer.topk": None}}, {"lr": 7.3e-6}),
}  # fmt: skip

DSA = Member(
    name="dsa",
    title="DeepSeek sparse attention (DSA)",
    paper="DeepSeek-AI 2025, DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models (arXiv 2512.02556)",
    axes=("pattern", "projection"),
    departures=(
        "in the warm-up (topk None) all weights learn (the paper freezes all but the indexer's)",
        "between tokens of equal scores up to rounding the last are chosen, so that the choice does not depend on the "
        "cut of a text into chunks",
        "queries and keys of the indexer are not rounded to 8 bits, nor turned by a Hadamard matrix before that",
        "the recipe paper is without YaRN and without the layer that predicts a further token; its stages have "
        "constant learning rates and begin, unless told otherwise, from new weights (the paper: from DeepSeek-V3.1's)",
        "layer norm and GELU in all recipes but paper",
    ),
    exact_limit="while the text has at most topk tokens it is multi-head latent attention, with the same weights",
    parity=(
        "DeepseekV32Attention and DeepseekV32Indexer of transformers, in float64; the paper's formulas token by token "
        "(tests/mixers/test_indexed.py)",
    ),
    results=("indexer",),
    use_when="texts have many thousands of tokens, a token needs single places among them, and the cache may grow",
    avoid_when="texts are short, or the state must not grow: the indexer still scores every pair of tokens",
    training={"paper": _DSA_TRAINING},
    recipes={
        "tiny": Recipe(32, 2, 2, _dsa(8, latent_dim=16, index_heads=2, index_dim=8)),
        "small": Recipe(256, 4, 4, _dsa(64, latent_dim=128, index_dim=32)),
        "benchmark": Recipe(256, 4, 4, _dsa(256, latent_dim=128, index_dim=32)),
        "paper": Recipe(7168, 61, 128).but(
            llama(1e-6, "swiglu", hidden_dim=18432),
            _dsa(2048, head_dim=128, rotary_dim=64, latent_dim=512, query_latent_dim=1536, index_heads=64),
            {"layers.3:.feed_forward": part("experts", **_V3_EXPERTS)},
            initialisation={"std": 0.006, "residual": "plain"},
            vocab_size=129_280,
        ),
    },
)

MEMBERS = (LOCAL, SPARSE_TRANSFORMER, IMAGE_TRANSFORMER, REFORMER, ROUTING, MOBA, NSA, DSA)
