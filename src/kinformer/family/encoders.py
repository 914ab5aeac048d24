"""Encoders of text: full, sparse, low-rank and star-shaped attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder, encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder


# BERT: the plain encoder, what the long-document encoders are compared with.


def _recipe(shape: ModelShape, max_length: int = 512, vocab_size: int = 259, types: int = 0) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.parts.positions import Learned

        return encoder(
            shape,
            vocab or vocab_size,
            mixers=[BidirectionalAttention.Config(num_heads=shape.num_heads)],
            position=Learned.Config(max_length=max_length),
            types=types,
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post")


BERT = Member(
    name="bert",
    title="BERT (plain encoder)",
    paper="Devlin et al. 2018, BERT: Pre-training of Deep Bidirectional Transformers",
    year=2018,
    axes=(),
    causal=False,
    growth="none",
    departures=(
        "no next-sentence prediction (as RoBERTa)",
        "masks are drawn again at every step (as RoBERTa)",
        "bytes are the default vocabulary, and the small recipes have no token types",
        "no dropout unless asked for",
    ),
    exact_limit="is exact attention",
    parity=("BERT and RoBERTa of transformers: imported checkpoints (tests/interop/test_encoders.py)",),
    use_when="texts of up to some hundred tokens are classified, or masked tokens predicted",
    avoid_when="texts are long, or are to be continued",
    training={  # appendix A.2
        name: {
            "steps": 1_000_000,
            "batch_size": 256,
            "length": 512,
            "lr": 1e-4,
            "schedule": "linear",
            "warmup": 10_000,
            "beta2": 0.999,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.01,
            "clip": 1.0,
        }
        for name in ("paper", "paper-large")
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), max_length=128),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4), max_length=4096),
        "paper": _recipe(_shape(768, 12, 12), vocab_size=30522, types=2),
        "paper-large": _recipe(_shape(1024, 24, 16), vocab_size=30522, types=2),
    },
)


# Big Bird: windows of blocks, global tokens and random blocks.


def _recipe_of_big_bird(
    shape: ModelShape,
    block: int,
    random: int,
    max_length: int,
    extra: int = 0,
    vocab_size: int = 259,
    types: int = 0,
) -> Recipe:
    """Return the recipe with a global input of ``extra`` tokens, or else the first and the last block for all."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.global_input import ExtraTokens
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.parts.patterns.big_bird import BigBird
        from kinformer.parts.positions import Learned

        patterns = [
            BigBird.Config(block=block, random=random, seed=layer, num_heads=shape.num_heads, edges=not extra)
            for layer in range(shape.depth)
        ]
        return encoder(
            shape,
            vocab or vocab_size,
            mixers=[BidirectionalAttention.Config(num_heads=shape.num_heads, pattern=pattern) for pattern in patterns],
            position=Learned.Config(max_length=max_length),
            global_input=ExtraTokens.Config(count=extra) if extra else None,
            types=types,
        )

    return recipe


def _shape_of_big_bird(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post")


BIG_BIRD = Member(
    name="big-bird",
    title="Big Bird",
    paper="Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences",
    year=2020,
    axes=("pattern",),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "a block that the authors' tables name twice, or that all see anyway, counts once, and not as often as named",
        "any length: the last block is that of each text, and may be short",
        "the tables are the same in training and evaluation",
        "the paper's 2 global blocks are the first and the last, as in the authors' code",
        "the extended construction, of which there is no code, takes the authors' tables of random blocks",
        "no dropout unless asked for",
    ),
    exact_limit="5 + 2 * random blocks or fewer",
    parity=(
        "google-research/bigbird, the authors' code: tables, outputs and gradients "
        "(tests/patterns/test_big_bird.py), Big Bird of transformers: imported checkpoints "
        "(tests/interop/test_big_bird.py)",
    ),
    use_when="long documents need far links besides a window and global tokens",
    avoid_when="texts have fewer than a few thousand tokens: its blocks cover everything then",
    recipes={
        "tiny": _recipe_of_big_bird(_shape_of_big_bird(32, 2, 2), 4, 1, 128),
        "tiny-etc": _recipe_of_big_bird(_shape_of_big_bird(32, 2, 2), 4, 1, 128, extra=3),
        "small": _recipe_of_big_bird(_shape_of_big_bird(256, 4, 4), 16, 3, 4096),
        "benchmark": _recipe_of_big_bird(_shape_of_big_bird(256, 4, 4), 64, 3, 4096),
        "paper": _recipe_of_big_bird(_shape_of_big_bird(768, 12, 12), 64, 3, 4096, vocab_size=50358, types=2),
        "paper-etc": _recipe_of_big_bird(
            _shape_of_big_bird(768, 12, 12), 84, 0, 4096, extra=256, vocab_size=50358, types=2
        ),
        "paper-large": _recipe_of_big_bird(_shape_of_big_bird(1024, 24, 16), 64, 3, 4096, vocab_size=50358, types=2),
    },
)


# BlockBERT: every head sees one block for each block, its own or another.


def _recipe_of_blockbert(
    shape: ModelShape, heads: Sequence[int], max_length: int = 512, vocab_size: int = 259, types: int = 0
) -> Recipe:
    """Return the recipe; ``heads``: how many see their own block, how many the next, and so on round all blocks."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.parts.patterns.sequence import Blockwise
        from kinformer.parts.positions import Learned

        blocks = len(heads)
        permutations = tuple(
            tuple((block + shift) % blocks for block in range(blocks))
            for shift, count in enumerate(heads)
            for _ in range(count)
        )
        return encoder(
            shape,
            vocab or vocab_size,
            mixers=[
                BidirectionalAttention.Config(
                    num_heads=shape.num_heads, pattern=Blockwise.Config(block=None, permutations=permutations)
                )
            ],
            position=Learned.Config(max_length=max_length),
            types=types,
        )

    return recipe


def _shape_of_blockbert(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post")


BLOCKBERT = Member(
    name="blockbert",
    title="BlockBERT",
    paper="Qiu et al. 2020, Blockwise Self-Attention for Long Document Understanding",
    year=2020,
    axes=("pattern",),
    causal=False,
    growth="none",
    departures=(
        "each text is cut into blocks of its own, of ceil(length / blocks) tokens, without its padding",
        "a token whose block is beyond the end of a text sees nothing in that head",
        "the paper's vocabulary is not published; the paper recipes take that of BERT",
        "no next-sentence prediction, and no dropout unless asked for",
    ),
    exact_limit="one block",
    use_when="a BERT must fit into less memory, heads seeing blocks of the text",
    avoid_when="length should cost linearly: its blocks grow with the text",
    recipes={
        "tiny": _recipe_of_blockbert(_shape_of_blockbert(32, 2, 2), (1, 1), max_length=128),
        "small": _recipe_of_blockbert(_shape_of_blockbert(256, 4, 4), (3, 1)),
        "benchmark": _recipe_of_blockbert(_shape_of_blockbert(256, 4, 4), (3, 1), max_length=4096),
        "paper": _recipe_of_blockbert(
            _shape_of_blockbert(768, 12, 12), (10, 2), max_length=1024, vocab_size=30522, types=2
        ),
        "paper-three": _recipe_of_blockbert(
            _shape_of_blockbert(768, 12, 12), (8, 2, 2), max_length=1024, vocab_size=30522, types=2
        ),
    },
)


# ETC: a long input with a window, and a global one that stands for its sentences and sees all.

EPS = 1e-12


def _recipe_of_etc(
    shape: ModelShape,
    radius: int,
    max_distance: int,
    sentence: int,
    *,
    ids: int | None = None,
    vocab_size: int = 259,
    types: int = 0,
) -> Recipe:
    """Return the recipe; ``radius``: how far a token sees to the left and right; ``sentence``: how many tokens a global
    one stands for."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.global_input import Sentences
        from kinformer.blocks.residual import LayerNorm
        from kinformer.mixers.encoders import EtcAttention
        from kinformer.parts.patterns.sequence import Window
        from kinformer.parts.positions import NoPosition

        config = encoder(
            shape,
            vocab or vocab_size,
            mixers=[
                EtcAttention.Config(
                    num_heads=shape.num_heads, pattern=Window(window=radius), max_distance=max_distance, ids=ids
                )
            ],
            position=NoPosition.Config(),
            global_input=Sentences.Config(length=sentence),
            embedding_norm=LayerNorm(eps=EPS),
            types=types,
        )
        return config.replace(
            layers=tuple(layer.replace(norm=LayerNorm(eps=EPS)) for layer in config.layers),
            head=config.head.replace(eps=EPS),
        )

    return recipe


def _shape_of_etc(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post")


ETC = Member(
    name="etc",
    title="ETC (global and long input)",
    paper="Ainslie et al. 2020, ETC: Encoding Long and Structured Inputs in Transformers",
    year=2020,
    axes=("pattern", "position", "projection"),
    causal=False,
    growth="none",
    departures=(
        "any length, no padding to blocks; the window is exact",
        "a sentence is a run of tokens of one length unless the caller gives them by model(tokens, sentences=...)",
        "contrastive prediction (`objective` mlm-cpc), whose code is not released, standardises features over a batch",
        "long and global input are normed by one layer norm at the embedding",
        "no dropout unless asked for",
    ),
    exact_limit="window >= length, shared output projection and relations of nothing (over global and long input)",
    use_when="documents have structure (sentences, questions) that a global input can stand for",
    avoid_when="texts are flat: `longformer` needs less care",
    recipes={
        "tiny": _recipe_of_etc(_shape_of_etc(32, 2, 2), radius=4, max_distance=3, sentence=8),
        "small": _recipe_of_etc(_shape_of_etc(256, 4, 4), radius=64, max_distance=12, sentence=64),
        "benchmark": _recipe_of_etc(_shape_of_etc(256, 4, 4), radius=84, max_distance=12, sentence=64),
        "paper": _recipe_of_etc(_shape_of_etc(768, 12, 12), 84, 12, sentence=16, ids=32, vocab_size=30522, types=16),
        "paper-large": _recipe_of_etc(_shape_of_etc(1024, 24, 16), 169, 24, sentence=16, vocab_size=50265, types=16),
    },
)


# Longformer: a window for all, a few global tokens with projections of their own.


def _recipe_of_longformer(
    shape: ModelShape, windows: Sequence[int], max_length: int, vocab_size: int = 259, global_tokens: int = 1
) -> Recipe:
    """Return the recipe; ``windows``: how far a token sees on either side, layer by layer (in turns)."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.parts.patterns.sequence import Window
        from kinformer.parts.positions import Learned
        from kinformer.parts.projections import MultiHeadGlobal

        return encoder(
            shape,
            vocab or vocab_size,
            mixers=[
                BidirectionalAttention.Config(
                    num_heads=shape.num_heads,
                    projection=MultiHeadGlobal.Config(),
                    pattern=Window(window=window),
                )
                for window in windows
            ],
            position=Learned.Config(max_length=max_length),
            global_tokens=global_tokens,
        )

    return recipe


def _shape_of_longformer(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual="post")


LONGFORMER = Member(
    name="longformer",
    title="Longformer",
    paper="Beltagy et al. 2020, Longformer: The Long-Document Transformer",
    year=2020,
    axes=("pattern", "projection"),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "any length, no padding to a multiple of the window",
        "dilation on a CPU and in training (`set` layers.*.mixer.pattern.dilation); the authors' is a GPU kernel",
        "the first token is global unless kinds say otherwise",
        "the language model of characters, with its windows, dilated heads and five phases, is the recipe "
        "paper-longformer of the member local",
    ),
    exact_limit="window >= length without global tokens",
    parity=(
        "the authors' attention (tests/mixers/test_longformer_golden.py), Longformer of transformers: imported "
        "checkpoints (tests/interop/test_encoders.py)",
    ),
    use_when="documents of thousands of tokens are classified, or a BERT is to read them",
    avoid_when="texts fit into a few windows: `bert` is faster",
    training={  # section 5: masked language modelling that goes on from RoBERTa
        "paper": {"steps": 65_000, "batch_size": 64, "length": 4096, "lr": 3e-5, "warmup": 500, "beta2": 0.999},
    },
    recipes={
        "tiny": _recipe_of_longformer(_shape_of_longformer(32, 2, 2), (4, 8), 128),
        "small": _recipe_of_longformer(_shape_of_longformer(256, 4, 4, hidden_dim=640), (32, 64, 128, 128), 4096),
        "benchmark": _recipe_of_longformer(_shape_of_longformer(256, 4, 4), (128,), 4096, global_tokens=16),
        "paper": _recipe_of_longformer(_shape_of_longformer(768, 12, 12), (256,), 4096, vocab_size=50265),
        "paper-large": _recipe_of_longformer(_shape_of_longformer(1024, 24, 16), (256,), 4096, vocab_size=50265),
    },
)


# Linformer: keys and values of the whole text, projected to a fixed number of summaries.


def _recipe_of_linformer(
    shape: ModelShape, ranks: Sequence[int], max_length: int, layerwise: bool = True, vocab_size: int = 259
) -> Recipe:
    """Return the recipe; ``ranks``: how many summaries a sequence has, layer by layer (in turns); ``layerwise``: one
    projection for keys and values of all layers, else two per layer."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.encoders import Linformer
        from kinformer.parts.positions import Learned

        return encoder(
            shape,
            vocab or vocab_size,
            mixers=[
                Linformer.Config(
                    num_heads=shape.num_heads,
                    rank=rank,
                    max_length=max_length,
                    sharing="keys_values" if layerwise else "heads",
                    shared=layerwise,
                )
                for rank in ranks
            ],
            position=Learned.Config(max_length=max_length),
        )

    return recipe


def _shape_of_linformer(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, residual="post")


LINFORMER = Member(
    name="linformer",
    title="Linformer (low-rank attention)",
    paper="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity (arXiv 2006.04768)",
    year=2020,
    axes=("rank",),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "padding weighs nothing (the authors' code accepts a padding mask and ignores it)",
        "windows of a mean or a convolution that begin beyond the end of a text are not attended to",
        "bytes are the default vocabulary",
        "no dropout unless asked for",
    ),
    exact_limit="rank = max_length = length with E = F = 1, or windows of one token",
    parity=("another implementation, in float64 (tests/mixers/test_linformer.py)",),
    use_when="all texts have nearly one length and speed counts",
    avoid_when="lengths vary, or exactness counts: its projections are the same for every text",
    recipes={
        "tiny": _recipe_of_linformer(_shape_of_linformer(32, 2, 2), (16,), 128),
        "small": _recipe_of_linformer(_shape_of_linformer(256, 4, 4), (128,), 512),
        "benchmark": _recipe_of_linformer(_shape_of_linformer(256, 4, 4), (256,), 4096),
        "paper": _recipe_of_linformer(_shape_of_linformer(768, 12, 12), (256,), 512, vocab_size=50265),
        "paper-heads": _recipe_of_linformer(
            _shape_of_linformer(768, 12, 12), (128,), 512, layerwise=False, vocab_size=50265
        ),
    },
)


# Sparse Sinkhorn Transformer: blocks that see themselves, and one that a learned sorting brings.


def _recipe_of_sinkhorn(
    shape: ModelShape, block: int, max_length: int, *, iterations: int = 5, cut: int = 0, vocab_size: int = 259
) -> Recipe:
    """Return the recipe; ``cut``: how many sorted blocks all tokens see (SortCut); 0: every block sees its own and
    itself."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.sinkhorn import SinkhornAttention
        from kinformer.parts.positions import Learned

        mixer = SinkhornAttention.Config(
            num_heads=shape.num_heads, block=block, max_length=max_length, iterations=iterations, cut=cut
        )
        return encoder(shape, vocab or vocab_size, mixers=[mixer], position=Learned.Config(max_length=max_length))

    return recipe


def _causal(shape: ModelShape, block: int, max_length: int, *, iterations: int = 5, vocab_size: int = 256) -> Recipe:
    """Return the recipe of a decoder whose blocks are sorted within the past."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.sinkhorn import CausalSinkhornAttention
        from kinformer.parts.positions import Learned

        mixer = CausalSinkhornAttention.Config(
            num_heads=shape.num_heads, block=block, max_length=max_length, iterations=iterations
        )
        return decoder(shape, vocab or vocab_size, mixer, Learned.Config(max_length=max_length))

    return recipe


def _shape_of_sinkhorn(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual="post")


SINKHORN = Member(
    name="sinkhorn",
    title="Sparse Sinkhorn Transformer (sorted blocks)",
    paper="Tay et al. 2020, Sparse Sinkhorn Attention (arXiv 2002.11296)",
    year=2020,
    axes=("pattern",),
    causal=False,
    growth="none",
    cost="between",
    departures=(
        "decoders (recipes causal, mixer causal_sinkhorn): a block ranks the blocks before it with those that are no "
        "later than itself; the published form balances all blocks under a mask and divides by sums over later ones, "
        "which leaks (tested)",
        "a causal block is ranked by the sum of the tokens before it (the paper: and its first one)",
        "the own and the sorted block are in one softmax",
        "a last block that is not full, and texts of any length up to max_length: what is missing has no weight",
        "Gumbel noise in training alone",
        "the mixture with plain attention is a list of layers (`set` layers.0.mixer=bidirectional)",
        "the recipes predict masked tokens; the paper's encoders classify",
    ),
    exact_limit="one block (block >= length), or two that change places; causal: two blocks",
    parity=("another implementation: sorting, in float64 (tests/mixers/test_sinkhorn.py)",),
    use_when="far blocks should meet, and which ones is to be learnt",
    avoid_when="texts are short, or training is brief: sorting must be learnt first",
    recipes={
        "tiny": _recipe_of_sinkhorn(_shape_of_sinkhorn(32, 2, 2), 16, 128),
        "small": _recipe_of_sinkhorn(_shape_of_sinkhorn(256, 4, 4, hidden_dim=896), 64, 512),
        "benchmark": _recipe_of_sinkhorn(_shape_of_sinkhorn(256, 4, 4), 64, 4096),
        "sortcut": _recipe_of_sinkhorn(_shape_of_sinkhorn(256, 4, 4, hidden_dim=896), 64, 512, cut=2),
        "tiny-causal": _causal(ModelShape(32, 2, 2), 16, 128),
        "causal": _causal(ModelShape(256, 4, 4, hidden_dim=896), 64, 512),
        "paper": _recipe_of_sinkhorn(_shape_of_sinkhorn(512, 6, 8, hidden_dim=2048), 32, 2048, vocab_size=32000),
    },
)


# Star-Transformer: tokens in a ring, and a relay between all of them.


def _published(dim: int, num_heads: int, max_length: int, iterations: int, vocab_size: int = 259) -> Recipe:
    """Return the recipe of one layer of ``iterations`` updates, without residual and feed-forward."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.layer import BareLayer
        from kinformer.blocks.residual import Initialisation
        from kinformer.mixers.encoders import StarAttention
        from kinformer.parts.positions import Learned

        mixer = StarAttention.Config(num_heads=num_heads, iterations=iterations)
        config = encoder(
            ModelShape(dim, 1, num_heads),
            vocab or vocab_size,
            mixers=[mixer],
            position=Learned.Config(max_length=max_length),
            embedding_norm=None,
            initialisation=Initialisation(scheme="xavier", residual="plain"),
        )
        return config.replace(layers=(BareLayer.Config(mixer=mixer),))

    return recipe


def _deep(shape: ModelShape, max_length: int) -> Recipe:
    """Return the recipe with two updates with one set of weights in place of every layer's attention."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.encoders import StarAttention
        from kinformer.parts.positions import Learned

        mixer = StarAttention.Config(num_heads=shape.num_heads, iterations=2, tied=True)
        return encoder(shape, vocab or 259, mixers=[mixer], position=Learned.Config(max_length=max_length))

    return recipe


STAR = Member(
    name="star",
    title="Star-Transformer (ring and relay)",
    paper="Guo et al. 2019, Star-Transformer (arXiv 1902.09113)",
    year=2019,
    axes=("pattern", "recurrence"),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "the relay begins as the mean of the real tokens, and the ring closes over them: in the authors' code both see "
        "padding in the first update, and both ends of a text look at zeros (`set` layers.*.mixer.ends=zeros)",
        "a token's output is its mean with the relay; `set` head.pooling=max is what the authors' classifier reads",
        "small and benchmark have the updates in place of attention, in layers with residuals and feed-forwards",
        "masked tokens are predicted, which the paper does not",
        "no dropout unless asked for",
    ),
    exact_limit="3 tokens or fewer: each sees all of them, beside its own input and the relay; the relay always does",
    parity=("the authors' code (tests/mixers/test_star.py)",),
    use_when="texts are short to medium, data is small and a light model is enough",
    avoid_when="any two tokens must meet directly",
    recipes={
        "tiny": _published(32, 2, 128, iterations=2),
        "small": _deep(ModelShape(256, 4, 4, hidden_dim=512, residual="post"), 512),
        "benchmark": _deep(ModelShape(256, 4, 4, residual="post"), 4096),
        "paper": _published(300, 6, 512, iterations=2, vocab_size=30000),
    },
)
