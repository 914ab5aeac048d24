"""Decoders whose queries see some of the keys: windows, strides, images, buckets and chosen blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.core.parts import InputConfig, PatternConfig
    from kinformer.mixers.chosen_blocks import ChosenBlocks, Compression
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder_decoder import EncoderDecoder


# Sliding window: every token sees the last few, and a state of constant size remembers them.


def _recipe(shape: ModelShape, window: int) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.patterns.sequence import Local
        from kinformer.parts.relative_positions import Rope

        return decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(
                num_heads=shape.num_heads, position=Rope.Config(), pattern=Local.Config(window=window)
            ),
        )

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.residual import Initialisation, RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder
    from kinformer.parts.patterns.sequence import Local
    from kinformer.parts.positions import NoPosition
    from kinformer.parts.projections import Grouped
    from kinformer.parts.relative_positions import Rope

    norm = RMSNorm(eps=1e-5)
    mixer = SoftmaxAttention.Config(
        num_heads=32,
        projection=Grouped.Config(num_kv_heads=8, bias=False),
        position=Rope.Config(),
        pattern=Local.Config(window=4096),
        bias=False,
    )
    layer = DecoderLayer.Config(mixer=mixer, feed_forward=SwiGLU.Config(hidden_dim=14336), norm=norm)
    return Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 32000),
        dim=4096,
        layers=(layer,) * 32,
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
        initialisation=Initialisation(),
    )


LONGEST_WINDOW = 32768
"""The texts on which Longformer's authors evaluate have 32,256 characters."""
DILATED_HEADS = 2
PHASES = 5


def _windows(depth: int, phase: int) -> list[int]:
    """Keys that each layer of Longformer's language model sees in a phase (from 0): 32 in the lowest and 8192 in the
    highest layer in the first, twice as many in every later one."""
    return [min(2 ** (5 + round(8 * layer / (depth - 1)) + phase), LONGEST_WINDOW) for layer in range(depth)]


def _longformer(depth: int, dilations: tuple[int, ...], dropout: float) -> Recipe:
    """Longformer's language model of characters (Beltagy et al. 2020, section 4 and table 12) as its last phase leaves
    it; ``dilations``: the lowest of the layers in which two heads see every second, every third and every fourth
    token."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.patterns.sequence import Dilated, Local
        from kinformer.parts.relative_positions import TransformerXL

        shape = ModelShape(512, depth, 8)
        mixer = SoftmaxAttention.Config(num_heads=shape.num_heads, position=TransformerXL.Config(), dropout=dropout)
        config = decoder(shape, vocab or 256, mixer)
        layers = []
        for number, (layer, window) in enumerate(zip(config.layers, _windows(depth, PHASES - 1), strict=True)):
            gap = 1 + sum(number >= lowest for lowest in dilations)
            plain, dilated = (1,) * (shape.num_heads - DILATED_HEADS), (gap,) * DILATED_HEADS
            pattern: PatternConfig = Local.Config(window=window)
            if gap > 1:
                pattern = Dilated.Config(window=window, dilations=plain + dilated)
            layers.append(layer.replace(mixer=mixer.replace(pattern=pattern), dropout=dropout))
        return config.replace(layers=tuple(layers), dropout=dropout)

    return recipe


def _phases(depth: int, steps: tuple[int, ...]) -> dict[str, object]:
    """Return the training of :func:`_longformer` in five phases (table 12): windows and rows twice as long in each,
    half the learning rate, which rises again over a tenth of the phase, for 10,000 steps at most."""
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
    year=2023,
    axes=("pattern", "position"),
    causal=True,
    growth="window",
    departures=(
        "in all recipes but those of papers, layer norm, GELU and a key head per head, so that only window and "
        "positions differ from the plain decoder",
        "paper-longformer: windows grow from layer to layer by powers of two (the paper names the lowest and the "
        "highest), and count the keys that a token sees, itself included; its authors never released this model's "
        "code, and the sizes, the phases and their rates are recalled from the paper's table, not held to it again",
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
        "tiny": _recipe(ModelShape(32, 2, 2), window=8),
        "small": _recipe(ModelShape(256, 4, 4), window=256),
        "benchmark": _recipe(ModelShape(256, 4, 4), window=256),
        "paper": _paper,
        "paper-longformer": _longformer(12, (6, 8, 10), 0.2),
        "paper-longformer-large": _longformer(30, (15, 20, 25), 0.4),
    },
)


# Sparse Transformer: attention factorised into a local part and columns.

HeadLayout = Literal["merged", "interleaved", "heads"]


def _recipe_of_sparse_transformer(
    shape: ModelShape, use: HeadLayout = "merged", max_length: int = 4096, **pattern: object
) -> DecoderRecipe:
    """Return the recipe; ``use``: both parts in one softmax, or by turns in layers or in heads; ``pattern`` are the
    config's fields."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.residual import Initialisation
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.positions import Learned

        alike = [
            decoder(
                shape,
                vocab or 256,
                mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, pattern=one),
                position=Learned.Config(max_length=max_length),
                initialisation=Initialisation(std=0.125 / shape.dim**0.5),
            )
            for one in _patterns(use, shape.num_heads, pattern)
        ]
        return alike[0].replace(layers=tuple(alike[i % len(alike)].layers[i] for i in range(shape.depth)))

    return recipe


def _cifar(vocab: int | None) -> Decoder.Config:
    """Return the recipe of CIFAR-10: 128 layers, feed-forwards half as wide as usual, learned rows, columns and
    channels."""
    from kinformer.inputs.images import Pixels
    from kinformer.parts.positions import NoPosition

    shape = ModelShape(256, 128, 2, hidden_dim=512, activation="gelu_sigmoid")
    config = _recipe_of_sparse_transformer(shape, stride=128)(vocab)
    return config.replace(input=Pixels.Config(channels=3), position=NoPosition.Config())


def _patterns(use: HeadLayout, num_heads: int, fields: dict[str, object]) -> Sequence[PatternConfig]:
    """Return the patterns that the layers take by turns."""
    from kinformer.parts.patterns.sequence import Fixed, PerHead, Strided

    both: PatternConfig = Strided(**fields) if "stride" in fields else Fixed(**fields)  # type: ignore[arg-type]
    parts = [both.replace(part="local"), both.replace(part="columns")]
    if use == "heads":
        return [PerHead.Config(patterns=tuple(parts[head % 2] for head in range(num_heads)))]
    return parts if use == "interleaved" else [both]


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="gelu_sigmoid")


_TINY, _SMALL = _shape(32, 2, 2), _shape(256, 4, 4)

SPARSE_TRANSFORMER = Member(
    name="sparse-transformer",
    title="Sparse Transformer",
    paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers (arXiv 1904.10509)",
    year=2019,
    axes=("pattern",),
    causal=True,
    growth="linear",
    cost="between",
    departures=(
        "the strided window has as many tokens as the published code's, one fewer than the paper's formula",
        "one learned table of positions of text (the paper adds one of rows and one of columns)",
        "images (paper-cifar): both parts in one softmax, since the paper does not say which use it is; queries and "
        "keys as wide as values (the paper: half as wide), which makes 67 million parameters instead of 59",
        "one standard deviation, 0.125 / sqrt(dim), for all weights but those that write into the residual stream",
        "the output shares the embedding's weights; no dropout unless asked for (the paper: 0.4 on enwik8)",
    ),
    exact_limit="stride or segment >= length",
    parity=(
        "openai/sparse_attention, the authors' code: masks, outputs and gradients (tests/patterns/test_published.py)",
    ),
    results=("sparse",),
    use_when="texts or images have a period (lines, columns) that a stride can follow",
    avoid_when="the structure has no fixed period, or the state must not grow",
    training={"paper": {"warmup": 5000, "clip": 1.0}},  # section 7: then a cosine
    recipes={
        "tiny": _recipe_of_sparse_transformer(_TINY, max_length=128, segment=8, summary=2),
        "tiny-strided": _recipe_of_sparse_transformer(_TINY, max_length=128, stride=6),
        "tiny-interleaved": _recipe_of_sparse_transformer(_TINY, use="interleaved", max_length=128, stride=6),
        "tiny-heads": _recipe_of_sparse_transformer(_TINY, use="heads", max_length=128, stride=6),
        "small": _recipe_of_sparse_transformer(_SMALL, segment=128, summary=8),
        "small-slices": _recipe_of_sparse_transformer(_SMALL, segment=128, summary=8, slices=4, num_heads=4),
        "small-interleaved": _recipe_of_sparse_transformer(_SMALL, use="interleaved", segment=128, summary=8),
        "small-heads": _recipe_of_sparse_transformer(_SMALL, use="heads", segment=128, summary=8),
        "small-strided": _recipe_of_sparse_transformer(_SMALL, stride=128),
        "small-strided-interleaved": _recipe_of_sparse_transformer(_SMALL, use="interleaved", stride=128),
        "small-strided-heads": _recipe_of_sparse_transformer(_SMALL, use="heads", stride=128),
        "benchmark": _recipe_of_sparse_transformer(_SMALL, segment=128, summary=8),
        "benchmark-strided": _recipe_of_sparse_transformer(_SMALL, stride=128),
        "paper": _recipe_of_sparse_transformer(
            _shape(512, 30, 8), max_length=12288, segment=128, summary=32, slices=4, num_heads=8
        ),
        "paper-cifar": _cifar,
    },
)


# Image Transformer: pixels one after the other, each seeing the block around it.


def _recipe_of_image_transformer(shape: ModelShape, pixels: bool = False, **pattern: Any) -> DecoderRecipe:
    """Return the recipe; ``pattern``: ``block`` of the 1D form, or all sizes of the 2D form; ``pixels``: of colours, as
    published, instead of tokens."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.residual import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.patterns.images import Image1D, Image2D
        from kinformer.parts.positions import NoPosition, Sinusoidal

        chosen = Image1D(**pattern) if "block" in pattern else Image2D.Config(**pattern)
        config = decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, pattern=chosen),
            position=Sinusoidal.Config(),
            head=LanguageModelHead.Config(tied=False, bias=True),
            initialisation=Initialisation(scheme="xavier"),
            scale=True,
        ).replace(norm=None)
        return config.replace(input=_pixels(pattern), position=NoPosition.Config()) if pixels else config

    return recipe


def _super_resolution(shape: ModelShape, encoder_depth: int, source: int, size: int, block: int) -> Recipe:
    """Return the recipe of an encoder-decoder that enlarges ``source`` x ``source`` pixels to ``size`` x ``size``; the
    attention of both is local, in blocks of one dimension."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.family.assemble import encoder_decoder
        from kinformer.inputs.images import Pixels
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.parts.patterns.images import Image1D

        base = _recipe_of_image_transformer(shape, pixels=True, block=block)(None)
        mixer = BidirectionalAttention.Config(num_heads=shape.num_heads, pattern=Image1D(block=block, masked=False))
        read = base.input
        assert isinstance(read, Pixels.Config)
        low = read.replace(height=source, width=source, shifted=False)
        config = encoder_decoder(base, mixer, depth=encoder_depth, source=low)
        return config.replace(input=read.replace(height=size, width=size))

    return recipe


def _pixels(pattern: dict[str, int]) -> InputConfig:
    """Return the input: a table of values for each channel, times the root of the width, and timing signals of rows and
    columns; in 2D every block restarts."""
    from kinformer.inputs.images import Pixels

    sizes = {"height": pattern.get("height", 32), "width": pattern.get("width", 96) // 3}
    blocks = {name: size for name, size in pattern.items() if name in ("block_height", "block_width")}
    shown: dict[str, Any] = sizes | blocks | {"restart": True} if blocks else sizes
    return Pixels.Config(channels=3, per_channel=True, scale=True, places="sinusoid_2d", **shown)


def _shape_of_image_transformer(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post", activation="relu")


def _image(height: int, width: int, block: tuple[int, int], flange: tuple[int, int]) -> dict[str, Any]:
    """Return sizes as (height, width), in values: a colour pixel is three in a row."""
    names = ("block_height", "block_width", "flange_height", "flange_width")
    return {"height": height, "width": width} | dict(zip(names, block + flange, strict=True))


IMAGE_TRANSFORMER = Member(
    name="image-transformer",
    title="Image Transformer",
    paper="Parmar et al. 2018, Image Transformer (arXiv 1802.05751)",
    year=2018,
    axes=("pattern", "domain"),
    causal=True,
    growth="window",
    departures=(
        "recipes of tokens (tiny, small, benchmark) have one table, sinusoids of the sequence, and in 2D predict from "
        "one block to the next; those of pixels have what the published code has: a table for each channel, signals of "
        "rows and columns, and 2D blocks that begin without their predecessor",
        "what stands before an image or a block is learned and begins as noughts (the published code: noughts)",
        "a sequence of less than two blocks in 1D is cut into blocks like any other (the published code: one block)",
        "no dropout unless asked for (the paper: 0.3 on CIFAR-10)",
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
    recipes={
        "tiny": _recipe_of_image_transformer(_shape_of_image_transformer(32, 2, 2), block=8),
        "tiny-2d": _recipe_of_image_transformer(
            _shape_of_image_transformer(32, 2, 2), **_image(4, 6, block=(2, 3), flange=(1, 2))
        ),
        "tiny-pixels": _recipe_of_image_transformer(_shape_of_image_transformer(32, 2, 2), pixels=True, block=8),
        "tiny-pixels-2d": _recipe_of_image_transformer(
            _shape_of_image_transformer(32, 2, 2), pixels=True, **_image(4, 6, block=(2, 3), flange=(1, 2))
        ),
        "small": _recipe_of_image_transformer(_shape_of_image_transformer(256, 4, 4), block=256),
        "small-2d": _recipe_of_image_transformer(
            _shape_of_image_transformer(256, 4, 4), **_image(32, 96, block=(8, 16), flange=(8, 32))
        ),
        "small-pixels": _recipe_of_image_transformer(_shape_of_image_transformer(256, 4, 4), pixels=True, block=256),
        "small-pixels-2d": _recipe_of_image_transformer(
            _shape_of_image_transformer(256, 4, 4), pixels=True, **_image(32, 96, block=(8, 16), flange=(8, 32))
        ),
        "benchmark": _recipe_of_image_transformer(_shape_of_image_transformer(256, 4, 4), block=256),
        "paper": _recipe_of_image_transformer(_shape_of_image_transformer(512, 12, 4), pixels=True, block=256),
        "tiny-super-resolution": _super_resolution(
            _shape_of_image_transformer(32, 2, 2), 1, source=2, size=8, block=12
        ),
        "super-resolution": _super_resolution(_shape_of_image_transformer(256, 4, 4), 2, source=8, size=32, block=256),
        "paper-super-resolution": _super_resolution(
            _shape_of_image_transformer(512, 8, 8), 4, source=8, size=32, block=256
        ),
        "paper-2d": _recipe_of_image_transformer(
            _shape_of_image_transformer(512, 8, 8), pixels=True, **_image(64, 192, block=(8, 64), flange=(4, 32))
        ),
    },
)


# Reformer: attention within the buckets of locality-sensitive hashing, and a reversible stack.


def _recipe_of_reformer(
    shape: ModelShape, num_buckets: int, chunk_size: int, rounds: int, recompute: bool = True
) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.buckets import LSHAttention
        from kinformer.parts.positions import Sinusoidal
        from kinformer.stacks.reversible import Reversible

        mixer = LSHAttention.Config(
            num_heads=shape.num_heads, num_buckets=num_buckets, chunk_size=chunk_size, rounds=rounds
        )
        config = decoder(shape, vocab or 256, mixer=mixer, position=Sinusoidal.Config())
        return config.replace(stack=Reversible.Config(join="mean", recompute=recompute))

    return recipe


def _paper_of_reformer(vocab: int | None) -> Decoder.Config:
    """Return the authors' configuration for 64k bytes of enwik8: of four layers the third hashes, the others see a
    window."""
    from kinformer.heads.language import LanguageModelHead
    from kinformer.mixers.buckets import LSHAttention
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.parts.patterns.sequence import Local
    from kinformer.parts.positions import Sinusoidal
    from kinformer.stacks.reversible import Reversible

    heads = {"num_heads": 8, "head_dim": 64, "bias": False}
    lsh = LSHAttention.Config(num_buckets=512, chunk_size=128, rounds=2, **heads)  # type: ignore[arg-type]
    local = SoftmaxAttention.Config(pattern=Local.Config(window=256), **heads)  # type: ignore[arg-type]
    config = decoder(
        ModelShape(1024, 12, 8, activation="relu"),
        vocab or 256,
        mixer=lsh,
        position=Sinusoidal.Config(),
        head=LanguageModelHead.Config(tied=False),
    )
    first = config.layers[0]
    hashed = first.replace(feed_forward=first.feed_forward.replace(chunks=16))  # type: ignore[attr-defined]
    layers = (hashed if number % 4 == 2 else hashed.replace(mixer=local) for number in range(12))
    return config.replace(layers=tuple(layers), stack=Reversible.Config())


REFORMER = Member(
    name="reformer",
    title="Reformer (LSH attention, reversible layers)",
    paper="Kitaev et al. 2020, Reformer: The Efficient Transformer (arXiv 2001.04451)",
    year=2020,
    axes=("pattern", "projection", "depth"),
    causal=True,
    growth="window",
    departures=(
        "a chunk holds tokens of one bucket, by their rank there, so that what a token sees depends on the past alone "
        "(the authors': tokens of the whole text, sorted by bucket, where later tokens move what earlier ones see)",
        "the published form, sorted, is the encoder mixer lsh; masked for a decoder it leaks: with other later tokens "
        "40 % of the outputs before them change, by 48 % of their norm (tests/mixers/test_bidirectional_lsh.py)",
        "tokens see no other buckets than their own, and a key that several rounds find counts once, as in the paper's "
        "equations; the authors' code has neither",
        "rotations are drawn once, with the weights (the authors' code: in every pass), so that a text can go on",
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
    recipes={
        "tiny": _recipe_of_reformer(ModelShape(32, 2, 2), num_buckets=4, chunk_size=4, rounds=2, recompute=False),
        "small": _recipe_of_reformer(ModelShape(256, 4, 4), num_buckets=16, chunk_size=32, rounds=2),
        "benchmark": _recipe_of_reformer(
            ModelShape(256, 4, 4, activation="relu"), num_buckets=64, chunk_size=64, rounds=4, recompute=False
        ),
        "paper": _paper_of_reformer,
    },
)


# Routing Transformer: half of the heads see their cluster of content, half a window.


def _recipe_of_routing(shape: ModelShape, num_clusters: int, window: int) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.buckets import RoutingAttention
        from kinformer.parts.positions import Sinusoidal

        mixer = RoutingAttention.Config(
            num_heads=shape.num_heads, local_heads=shape.num_heads // 2, num_clusters=num_clusters, window=window
        )
        return decoder(shape, vocab or 256, mixer=mixer, position=Sinusoidal.Config())

    return recipe


def _upper(shape: ModelShape, num_clusters: int, window: int) -> Recipe:
    """Return the recipe of routing in the last two layers above windows, as in the authors' model of PG-19."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.patterns.sequence import Local

        config = _recipe_of_routing(shape, num_clusters, window)(vocab)
        local = SoftmaxAttention.Config(num_heads=shape.num_heads, pattern=Local.Config(window=window))
        below = tuple(layer.replace(mixer=local) for layer in config.layers[:-2])
        return config.replace(layers=below + config.layers[-2:])

    return recipe


ROUTING = Member(
    name="routing",
    title="Routing Transformer (online k-means)",
    paper="Roy et al. 2021, Efficient Content-Based Sparse Attention with Routing Transformers (arXiv 2003.05997)",
    year=2021,
    axes=("pattern", "projection"),
    causal=True,
    growth="window",
    departures=(
        "a token is in the cluster of its nearest centroid and sees the cluster's last window, cut by rank, so that "
        "what it sees depends on the past alone; the authors' clusters take the most similar tokens of the whole "
        "text, later ones included; masked for a decoder they leak: with other later tokens 43 % of the outputs "
        "before them change, by 66 % of their norm (tests/family/test_routing.py)",
        "keys are queries of length 1, scores are divided by sqrt(head_dim), and a token sees itself only where it "
        "sees nothing else, as in routing-transformer (the authors: layer norms of q and k, and no such rule)",
        "centroids begin as random directions and move once after each training step, by the tokens of all processes",
        "sinusoidal positions (the authors': relative ones in the local heads), pre-norm, GELU in all recipes but "
        "benchmark and paper",
    ),
    exact_limit="attention over the past with shared queries and keys: no local heads, one cluster, window >= length",
    parity=("routing-transformer 1.6.1: clusters over whole texts, in float64 (tests/family/test_routing.py)",),
    use_when="long texts fall into topics, and a token should see the last tokens of its own",
    avoid_when="exact recall counts, or training is brief: its clusters must form first",
    recipes={
        "tiny": _recipe_of_routing(ModelShape(32, 2, 2), num_clusters=3, window=8),
        "small": _recipe_of_routing(ModelShape(256, 4, 4), num_clusters=16, window=128),
        "tiny-upper": _upper(ModelShape(32, 3, 2), num_clusters=3, window=8),
        "upper": _upper(ModelShape(256, 6, 4), num_clusters=16, window=128),
        "benchmark": _recipe_of_routing(ModelShape(256, 4, 4, activation="relu"), num_clusters=32, window=128),
        "paper": _recipe_of_routing(ModelShape(1024, 10, 16, activation="relu"), num_clusters=16, window=256),
    },
)


# Mixture of block attention: a token chooses blocks of earlier tokens by the mean of their keys.


def _recipe_of_moba(shape: ModelShape, block: int, count: int) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.chosen_blocks import ChosenBlocks
        from kinformer.parts.relative_positions import Rope

        mixer = ChosenBlocks.Config(num_heads=shape.num_heads, position=Rope.Config(), block=block, count=count)
        return decoder(shape, vocab or 256, mixer=mixer)

    return recipe


MOBA = Member(
    name="moba",
    title="Mixture of block attention (MoBA)",
    paper="Lu et al. 2025, MoBA: Mixture of Block Attention for Long-Context LLMs (arXiv 2502.13189)",
    year=2025,
    axes=("pattern",),
    causal=True,
    growth="linear",
    cost="between",
    departures=(
        "of blocks that are equally important up to rounding the last is chosen, so that the choice does not depend "
        "on how a text is cut",
        "layer norm and GELU, and every head has keys of its own (the authors' models: LLaMA's blocks); the recipe "
        "paper has the sizes of the first model of their scaling laws",
    ),
    exact_limit="with as many blocks to see as the text has it is softmax attention, with the same weights",
    parity=("moba_attn_varlen_naive of MoonshotAI/MoBA, in float32 (tests/mixers/test_chosen_blocks.py)",),
    results=("chosen_blocks",),
    use_when="texts have many thousands of tokens, a token needs few places of them, and the cache may grow",
    avoid_when="texts are short, or the state must not grow: the cache is that of full attention",
    recipes={
        "tiny": _recipe_of_moba(ModelShape(32, 2, 2), block=4, count=2),
        "small": _recipe_of_moba(ModelShape(256, 4, 4), block=32, count=4),
        "benchmark": _recipe_of_moba(ModelShape(256, 4, 4), block=128, count=4),
        "paper": _recipe_of_moba(ModelShape(1792, 14, 14), block=512, count=3),
    },
)


# Native sparse attention: a coarse look at all blocks, a fine look at those that it finds important, and a window.


def _mixer(
    num_heads: int, kv_heads: int, block: int, count: int, window: int, compression: Compression = "mean"
) -> ChosenBlocks.Config:
    from kinformer.mixers.chosen_blocks import ChosenBlocks
    from kinformer.parts.projections import Grouped
    from kinformer.parts.relative_positions import Rope

    return ChosenBlocks.Config(
        num_heads=num_heads,
        projection=Grouped.Config(num_kv_heads=kv_heads, bias=False),
        position=Rope.Config(),
        block=block,
        count=count,
        first=1,
        near=1,
        shared_choice=True,
        compression=compression,
        window=window,
        bias=False,
    )


def _recipe_of_nsa(shape: ModelShape, block: int, count: int, window: int) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        mixer = _mixer(shape.num_heads, max(1, shape.num_heads // 4), block, count, window)
        return decoder(shape, vocab or 256, mixer=mixer)

    return recipe


def _paper_of_nsa(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.experts import Experts
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.residual import RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.models.decoder import Decoder
    from kinformer.parts.positions import NoPosition

    norm = RMSNorm(eps=1e-6)
    mixer = _mixer(64, 4, 64, 16, 512, "mlp").replace(head_dim=192, summary_length=32, summary_stride=16)
    layer = DecoderLayer.Config(mixer=mixer, feed_forward=SwiGLU.Config(hidden_dim=10240), norm=norm)
    experts = Experts.Config(num_experts=72, topk=6, hidden_dim=1408, shared_dim=2 * 1408)
    return Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 102_400),
        dim=2560,
        layers=(layer, *(layer.replace(feed_forward=experts),) * 29),
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
    )


NSA = Member(
    name="nsa",
    title="Native sparse attention (NSA)",
    paper="Yuan et al. 2025, Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention "
    "(arXiv 2502.11089)",
    year=2025,
    axes=("pattern", "rank"),
    causal=True,
    growth="linear",
    cost="between",
    departures=(
        "blocks that are summed up are those that are chosen, and by their means, in all recipes but paper, as in "
        "fla-org/native-sparse-attention (the paper and that recipe: a perceptron over 32 tokens, one every 16)",
        "the perceptron of a block is ours where the paper leaves it open: twice as wide as a head within, one for all "
        "heads except for the positions in the block, the mean at first, and blind to where the block lies",
        "the three branches share one projection of keys and values, as there (the paper: each its own)",
        "values are as wide as keys in the recipe paper (the paper: 128 and 192); the widths of its feed-forwards and "
        "its vocabulary are our choice, as the paper does not state them",
        "layer norm and GELU in all recipes but paper",
    ),
    exact_limit="with blocks of one token, all of them seen, and a window as long as the text, every branch is softmax "
    "attention",
    parity=(
        "naive_nsa_with_compression of fla-org/native-sparse-attention, in float32 "
        "(tests/mixers/test_chosen_blocks.py)",
    ),
    results=("chosen_blocks",),
    use_when="texts have many thousands of tokens, several heads can share keys, and the cache may grow",
    avoid_when="texts are short: three branches then cost more than full attention",
    recipes={
        "tiny": _recipe_of_nsa(ModelShape(32, 2, 2), block=4, count=4, window=6),
        "small": _recipe_of_nsa(ModelShape(256, 4, 4), block=16, count=6, window=64),
        "benchmark": _recipe_of_nsa(ModelShape(256, 4, 4), block=64, count=8, window=256),
        "paper": _paper_of_nsa,
    },
)
