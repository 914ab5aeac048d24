"""Decoders with a memory of earlier text, or with a large memory of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder, encoder, encoder_decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.blocks.feed_forward import ProductKeys
    from kinformer.core.stack import ModelConfig
    from kinformer.mixers.memorizing import Memorizing
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder
    from kinformer.models.encoder_decoder import EncoderDecoder


# Transformer-XL: segments that see a memory of those before, with positions given by distance.


def _recipe(shape: ModelShape, segment: int, memory: int | None = None, head_dim: int | None = None) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.residual import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.segment_memory import SegmentMemory

        return decoder(
            shape,
            vocab or 256,
            mixer=SegmentMemory.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                segment=segment,
                memory=segment if memory is None else memory,
            ),
            head=LanguageModelHead.Config(tied=True, bias=True),
            initialisation=Initialisation(residual="plain"),
            scale=True,
        ).replace(norm=None)

    return recipe


WORD_CUTOFFS = (20000, 40000, 200000)


def _words(shape: ModelShape, segment: int, head_dim: int, divisor: int) -> Recipe:
    """Return the recipe of words numbered by falling frequency: clusters in the softmax and, with ``divisor`` above 1,
    in the tables."""
    letters = _recipe(shape, segment, head_dim=head_dim)

    def recipe(vocab: int | None) -> ModelConfig:
        from kinformer.heads.language import AdaptiveSoftmax
        from kinformer.inputs.tokens import AdaptiveEmbedding, Lookup

        size = vocab or 267735
        cutoffs = tuple(cutoff for cutoff in WORD_CUTOFFS if cutoff < size)
        table = Lookup.Config() if divisor == 1 else AdaptiveEmbedding.Config(cutoffs=cutoffs, divisor=divisor)
        config = letters(size)
        return config.replace(
            input=config.input.replace(embedding=table), head=AdaptiveSoftmax.Config(cutoffs=cutoffs, divisor=divisor)
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual="post", activation="relu")


TRANSFORMER_XL = Member(
    name="transformer-xl",
    title="Transformer-XL (segment memory)",
    paper="Dai et al. 2019, Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context (arXiv 1901.02860)",
    year=2019,
    axes=("memory", "position"),
    causal=True,
    growth="window",
    departures=(
        "segments are counted by positions, not by the chunks that a caller passes, so outputs and gradients do not "
        "depend on the cut; with chunks of one segment each they are the authors'",
        "no dropout unless asked for (the authors: 0.1 on embeddings, distances and sublayers)",
        "the recipes of words compute all of the adaptive softmax's log-probabilities, of every token, in training too",
        "norms begin at 1 (the authors: N(1, 0.02)), and the last hidden states are not dropped a second time",
    ),
    exact_limit="segment >= length: exact attention with relative positions; memory >= length: its values, with "
    "gradients that end at segments",
    needs={"segments": True},
    parity=("the authors' code: the whole model, segment by segment (tests/mixers/test_segment_memory.py)",),
    results=(
        "extrapolation",
        "xl_evaluation",
    ),
    use_when="long texts are read segment by segment and should remember the one before",
    avoid_when="training is short: the plain decoder makes more steps and is ahead",
    training={  # the authors' scripts of enwik8 and WikiText-103
        name: {
            "steps": steps,
            "batch_size": rows,
            "length": length,
            "lr": 2.5e-4,
            "warmup": warmup,
            "beta2": 0.999,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.0,
            "clip": 0.25,
        }
        for name, rows, length, warmup, steps in (
            ("paper", 22, 512, 0, 400_000),
            ("paper-large", 64, 768, 4000, 400_000),
            ("paper-words", 60, 150, 0, 200_000),
            ("paper-words-large", 128, 384, 16_000, 4_000_000),
        )
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), segment=8, memory=12),
        "small": _recipe(_shape(256, 4, 4), segment=256),
        "benchmark": _recipe(_shape(256, 4, 4), segment=256),
        "paper": _recipe(_shape(512, 12, 8, hidden_dim=2048), segment=512),
        "paper-large": _recipe(_shape(1024, 24, 8, hidden_dim=3072), segment=768, head_dim=128),
        "paper-words": _words(_shape(410, 16, 10, hidden_dim=2100), segment=150, head_dim=41, divisor=1),
        "paper-words-large": _words(_shape(1024, 18, 16, hidden_dim=4096), segment=384, head_dim=64, divisor=4),
    },
)


# Compressive Transformer: Transformer-XL whose oldest memories are compressed instead of forgotten.


def _recipe_of_compressive(
    shape: ModelShape, sizes: tuple[int, int, int], rate: int, head_dim: int | None = None
) -> Recipe:
    """Return the recipe; ``sizes`` are those of segment, memory and compressed memory."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.residual import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.compressive import Compressive, Convolution

        segment, memory, compressed = sizes
        return decoder(
            shape,
            vocab or 256,
            mixer=Compressive.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                segment=segment,
                memory=memory,
                compressed=compressed,
                compression=Convolution.Config(rate=rate),
            ),
            head=LanguageModelHead.Config(tied=True, bias=True),
            initialisation=Initialisation(residual="plain"),
            scale=True,
        ).replace(norm=None)

    return recipe


def _shape_of_compressive(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual="post", activation="relu")


COMPRESSIVE = Member(
    name="compressive",
    title="Compressive Transformer",
    paper="Rae et al. 2019, Compressive Transformers for Long-Range Sequence Modelling (arXiv 1911.05507)",
    year=2019,
    axes=("memory", "position"),
    causal=True,
    growth="window",
    departures=(
        "segments and compression are counted by positions, not by the chunks that a caller passes",
        "both reconstruction losses are mean squares (the paper writes norms), attention before its output product, "
        "all tokens of the segment asking; rate divides segment and memory, so that nothing is left over",
        "no compression through time (the paper's BPTT variant), and no larger batch late in training",
        "post-norm and sizes of layers as in Transformer-XL, where the paper gives none; no dropout unless asked for",
        "recipe small: feed-forwards of 768, because the compression has weights too",
    ),
    exact_limit="segment >= length: exact attention with relative positions; compressed = 0: Transformer-XL",
    needs={"segments": True},
    use_when="a Transformer-XL should remember further back in a small state",
    avoid_when="training is short, or what is remembered must be exact",
    training={  # section 4: Adam, whose rate falls as a cosine from 3e-4 to 1e-6
        name: {"lr": 3e-4, "min_lr_ratio": 1 / 300, "weight_decay": 0.0, "clip": 0.1}
        for name in ("paper", "paper-books")
    },
    recipes={
        "tiny": _recipe_of_compressive(_shape_of_compressive(32, 2, 2), (16, 8, 4), rate=2),
        "small": _recipe_of_compressive(_shape_of_compressive(256, 4, 4, hidden_dim=768), (256, 256, 256), rate=2),
        "benchmark": _recipe_of_compressive(_shape_of_compressive(256, 4, 4), (256, 256, 256), rate=2),
        "paper": _recipe_of_compressive(
            _shape_of_compressive(1024, 24, 8, hidden_dim=3072), (768, 1152, 1152), rate=3, head_dim=128
        ),
        "paper-books": _recipe_of_compressive(
            _shape_of_compressive(1024, 36, 16, hidden_dim=4096), (512, 512, 512), rate=2
        ),
    },
)


# Memorizing Transformer: one layer near the top looks up what the document said long ago.


def _recipe_of_memorizing(shape: ModelShape, layer: int, window: int, memory_size: int, topk: int = 32) -> Recipe:
    """Return the recipe with a window of ``window`` tokens in all layers, and memories in one of them."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.memorizing import Memorizing

        memory = Memorizing.Config(
            num_heads=shape.num_heads, window=window, segment=window, memory_size=memory_size, topk=topk
        )
        return _with_memory(shape, vocab or 256, layer, memory)

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.mixers.memorizing import Memorizing
    from kinformer.parts.relative_positions import T5

    memory = Memorizing.Config(
        num_heads=8,
        head_dim=128,
        window=512,
        segment=512,
        memory_size=65536,
        sees_itself=False,
        position=T5.Config(),
    )
    return _with_memory(ModelShape(1024, 12, 8, activation="relu"), vocab or 32000, 8, memory)


def _with_memory(shape: ModelShape, vocab: int, layer: int, memory: Memorizing.Config) -> Decoder.Config:
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.parts.patterns.sequence import Local
    from kinformer.parts.projections import MultiHead
    from kinformer.parts.relative_positions import T5

    config = decoder(
        shape,
        vocab,
        mixer=SoftmaxAttention.Config(
            num_heads=shape.num_heads,
            projection=MultiHead.Config(bias=False),
            position=T5.Config(),
            pattern=Local.Config(window=memory.window),
            bias=False,
        ),
    )
    layers = list(config.layers)
    layers[layer] = layers[layer].replace(mixer=memory)
    return config.replace(layers=tuple(layers))


MEMORIZING = Member(
    name="memorizing",
    title="Memorizing Transformer",
    paper="Wu et al. 2022, Memorizing Transformers (arXiv 2203.08913)",
    year=2022,
    axes=("memory", "pattern", "position"),
    causal=True,
    growth="window",
    departures=(
        "the window of every layer is counted back from each token; the authors see the segment and the one before it, "
        "and attend to zeros where a document begins",
        "a token sees itself in its window, but in the recipe paper, where the layer with memories leaves it out",
        "the layer with memories has T5's biases in its window in the recipe paper alone; elsewhere by "
        "layers.N.mixer.position=t5",
        "only the layer with memories norms its queries and keys (the authors: all)",
        "AdamW unless set otherwise (the authors train with Adafactor)",
    ),
    exact_limit="memory_size = 0 or a closed gate: windowed attention; topk >= memories: attention to all of them",
    needs={"segments": True},
    parity=("the authors' code (tests/mixers/test_memorizing.py)",),
    layer=2,
    use_when="exact look-ups in a long document are needed, by a small model",
    avoid_when="speed decides, or documents are shorter than the window",
    recipes={
        "tiny": _recipe_of_memorizing(ModelShape(32, 2, 2), 1, window=8, memory_size=32, topk=4),
        "small": _recipe_of_memorizing(ModelShape(256, 4, 4), 2, window=256, memory_size=8192),
        "benchmark": _recipe_of_memorizing(ModelShape(256, 4, 4), 2, window=256, memory_size=8192),
        "paper": _paper,
    },
)


# kNN-LM: a trained decoder whose predictions are mixed with the tokens after the
# most similar contexts of a datastore.


def _recipe_of_knn_lm(shape: ModelShape, vocab_size: int = 256, dropout: float = 0.0) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.positions import Sinusoidal

        config = decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads),
            position=Sinusoidal.Config(),
            scale=True,
        )
        layers = tuple(layer.replace(dropout=dropout) for layer in config.layers)
        return config.replace(layers=layers)

    return recipe


def _shape_of_knn_lm(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="relu")


KNN_LM = Member(
    name="knn-lm",
    title="kNN-LM (a datastore at the output)",
    paper="Khandelwal et al. 2020, Generalization through Memorization: Nearest Neighbor Language Models "
    "(arXiv 1911.00172)",
    year=2020,
    axes=("memory",),
    causal=True,
    growth="store",
    departures=(
        "what is trained is the decoder alone; kinformer index writes the datastore of this or of any other causal "
        "run, and evaluate and generate take it by `datastore`",
        "one embedding table and a full softmax, where the authors' model has adaptive ones",
        "keys in float16 beside int32 tokens (the authors' float16 store cuts tokens to int16); lists of one byte per "
        "number, or product-quantised where `key_bytes` says so, distances always computed from the stored keys",
        "a temperature and the number of neighbours are tuned beside the weight (the authors' temperature is 1)",
    ),
    exact_limit="weight 0, or no datastore: the decoder alone",
    parity=("the official code: the mixture of both distributions (tests/heads/test_knn.py)",),
    results=("datastore", "quantised_lists"),
    use_when="a text is to be added to a trained model without training",
    avoid_when="memory and search time at every token are too dear",
    recipes={
        "tiny": _recipe_of_knn_lm(_shape_of_knn_lm(32, 2, 2)),
        "small": _recipe_of_knn_lm(_shape_of_knn_lm(256, 4, 4)),
        "benchmark": _recipe_of_knn_lm(_shape_of_knn_lm(256, 4, 4)),
        "paper": _recipe_of_knn_lm(_shape_of_knn_lm(1024, 16, 8), vocab_size=267_744, dropout=0.3),
    },
)


# SPALM: Transformer-XL with a gate at the output to what a frozen retriever finds in a datastore.


def _recipe_of_spalm(name: str) -> Recipe:
    """Return the recipe of Transformer-XL with the same name, with the gate in its head."""
    base = TRANSFORMER_XL.recipes[name]

    def recipe(vocab: int | None) -> ModelConfig:
        from kinformer.heads.language import SpalmHead

        return base(vocab).replace(head=SpalmHead.Config(bias=True))

    return recipe


SPALM = Member(
    name="spalm",
    title="SPALM (gated long-term memory)",
    paper="Yogatama et al. 2021, Adaptive Semiparametric Language Models (arXiv 2102.02557)",
    year=2021,
    axes=("memory",),
    causal=True,
    growth="window",
    departures=(
        "the growth is that of the model itself: with a datastore, the retriever's state is carried beside it",
        "without `datastore` there is no gate and no long-term memory: what is trained is Transformer-XL",
        "keys are those that kinformer index makes of any causal run (the input of its last feed-forward), searched by "
        "squared distance, exactly or with `probes` in lists (the authors: quantised search)",
        "a text is looked up as a stream, as the datastore was made; a token's own entry is left out in training, and "
        "only there",
        "the gate is one number a token, as printed; elementwise=true gives each feature its own, as the blog's sign "
        "suggests",
        "the recipe paper is Transformer-XL's of characters; its clusters of words have no gate",
    ),
    exact_limit="a gate of 1, no neighbour, or no datastore: Transformer-XL",
    use_when="a datastore is at hand while you train, and a gate should decide when to use it",
    avoid_when="training is brief: mixing neighbours in, as `knn-lm` does, gained more",
    recipes={name: _recipe_of_spalm(name) for name in ("tiny", "small", "benchmark", "paper")},
)


# Product-key memory: feed-forwards at chosen depths are replaced by a look-up among very many values.


def _recipe_of_pkm(shape: ModelShape, depths: tuple[int, ...], num_keys: int, **sizes: int) -> Recipe:
    """Return the recipe with a memory of ``num_keys`` keys in each half at each of ``depths``."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import ProductKeys

        return _with_memories(shape, vocab or 256, depths, ProductKeys.Config(num_keys=num_keys).replace(**sizes))

    return recipe


def _paper_of_pkm(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.feed_forward import ProductKeys

    memory = ProductKeys.Config(num_keys=512, num_heads=4, topk=32, key_dim=512, norm="batch")
    return _with_memories(ModelShape(1024, 12, 16, residual="post"), vocab or 60_000, (4,), memory, max_length=512)


def _with_memories(
    shape: ModelShape, vocab: int, depths: tuple[int, ...], memory: ProductKeys.Config, max_length: int = 2048
) -> Decoder.Config:
    from kinformer.heads.language import LanguageModelHead
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.parts.positions import Learned, NoPosition
    from kinformer.parts.relative_positions import Rope

    published = shape.residual == "post"
    config = decoder(
        shape,
        vocab,
        mixer=SoftmaxAttention.Config(
            num_heads=shape.num_heads, position=NoPosition.Config() if published else Rope.Config()
        ),
        position=Learned.Config(max_length=max_length) if published else NoPosition.Config(),
        head=LanguageModelHead.Config(tied=True, bias=published),
    )
    layers = list(config.layers)
    for depth in depths:
        layers[depth] = layers[depth].replace(feed_forward=memory)
    return config.replace(layers=tuple(layers))


PKM = Member(
    name="pkm",
    title="Product-key memory",
    paper="Lample et al. 2019, Large Memory Layers with Product Keys (arXiv 1907.05242)",
    year=2019,
    axes=("memory",),
    causal=True,
    growth="linear",
    departures=(
        "queries are normed by layer norm in each half, which looks at no other token; the recipe paper has the "
        "published batch norm",
        "in all recipes but paper, pre-norm and rotary positions",
        "the recipe small has few values, so that it costs as many weights as the plain decoder; benchmark has 16,384",
    ),
    exact_limit="topk = num_keys ** 2: a softmax over all products of keys; values of zero: no feed-forward there",
    parity=("the authors' code (tests/memory/test_product_keys.py)",),
    layer=2,
    use_when="a model should know more without computing more per token",
    avoid_when="memory for parameters and their optimiser is short",
    recipes={
        "tiny": _recipe_of_pkm(ModelShape(32, 2, 2), (1,), num_keys=8, topk=4, key_dim=16, num_heads=2),
        "small": _recipe_of_pkm(ModelShape(256, 4, 4), (2,), num_keys=40),
        "benchmark": _recipe_of_pkm(ModelShape(256, 4, 4), (2,), num_keys=128),
        "paper": _paper_of_pkm,
    },
)


# Tensorized Transformer: products of three factors in place of softmax attention.


def _recipe_of_tensorized(
    shape: ModelShape, rank: int, max_length: int, *, blocks: int = 2, vocab_size: int = 256
) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.tensorized import TensorizedAttention

        mixer = TensorizedAttention.Config(rank=rank, blocks=blocks, max_length=max_length)
        return decoder(shape, vocab or vocab_size, mixer)

    return recipe


def _remembering(shape: ModelShape, rank: int, segment: int, memory: int, vocab_size: int = 256) -> Recipe:
    """Return the recipe of a language model with the memory of Transformer-XL (the paper's section 5.1)."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.tensorized import TensorizedMemory

        mixer = TensorizedMemory.Config(rank=rank, blocks=2, segment=segment, memory=memory)
        return decoder(shape, vocab or vocab_size, mixer)

    return recipe


def _encoding(shape: ModelShape, rank: int, max_length: int) -> Recipe:
    """Return the recipe of an encoder below a masked-language-model head."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.tensorized import BidirectionalTensorized
        from kinformer.parts.positions import NoPosition

        mixer = BidirectionalTensorized.Config(rank=rank, blocks=2, max_length=max_length)
        return encoder(shape, vocab or 259, [mixer], NoPosition.Config())

    return recipe


def _translating(shape: ModelShape, rank: int, max_length: int, vocab_size: int = 258) -> Recipe:
    """Return the recipe of tensorized attention on both sides (the paper's section 5.2), and exact attention between
    them."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.mixers.cross import CrossAttention
        from kinformer.mixers.tensorized import BidirectionalTensorized

        base = _recipe_of_tensorized(shape, rank, max_length)(vocab or vocab_size)
        mixer = BidirectionalTensorized.Config(rank=rank, blocks=2, max_length=max_length)
        return encoder_decoder(base, mixer, cross=CrossAttention.Config(num_heads=shape.num_heads))

    return recipe


TENSORIZED = Member(
    name="tensorized",
    title="Tensorized Transformer (block-term attention)",
    paper="Ma et al. 2019, A Tensorized Transformer for Language Modeling (arXiv 1906.09777)",
    year=2019,
    axes=("rank", "score"),
    causal=True,
    growth="linear",
    departures=(
        "causal: the authors' code has a mask that it never applies, so that published perplexities saw later tokens",
        "the tensor of length^3 elements is not made: pairs before a block of 32 queries are summed first, at some "
        "2 length^2 dim (rank + 32) operations a layer and term",
        "positions count from the beginning of a sequence, or of a token's window of segment and memory (recipes "
        "memory), whose slots are empty at the beginning of a text",
        "recipe paper-memory: 80 slots as on WikiText-103, of which half are memory, which is ours",
        "encoders and translators (recipes encoder and translate) sum every pair of a text, so that the sum is the "
        "same for all queries; attention to the source is exact",
        "blocks share their factors, as in the authors' code, so that more of them add no capacity (tested)",
        "cores begin as softmax of noise; the authors' are uninitialised memory",
        "dim * max_length^2 weights a layer, so that the recipes read 32 to 128 tokens (`length`)",
    ),
    exact_limit="none with softmax: values of ones make every slice of the tensor the scores Q K^T",
    needs={"length": 32},
    parity=("the authors' code (tests/mixers/test_tensorized.py, with memory test_tensorized_memory.py)",),
    results=("encoder_costs",),
    use_when="you study attention as a tensor of few blocks",
    avoid_when="texts are longer than some hundred tokens",
    recipes={
        "tiny": _recipe_of_tensorized(ModelShape(32, 2, 2), 8, 128),
        "small": _recipe_of_tensorized(ModelShape(256, 4, 4, hidden_dim=896), 40, 32),
        "benchmark": _recipe_of_tensorized(ModelShape(256, 4, 4), 40, 128),
        "tiny-memory": _remembering(ModelShape(32, 2, 2), 8, 12, 12),
        "memory": _remembering(ModelShape(256, 4, 4, hidden_dim=896), 40, 32, 32),
        "tiny-encoder": _encoding(ModelShape(32, 2, 2, residual="post"), 8, 128),
        "encoder": _encoding(ModelShape(256, 4, 4, hidden_dim=896, residual="post"), 40, 64),
        "tiny-translate": _translating(ModelShape(32, 2, 2), 8, 128),
        "translate": _translating(ModelShape(256, 4, 4), 40, 64),
        "paper-memory": _remembering(
            ModelShape(256, 3, 1, hidden_dim=2100, residual="post", activation="relu"), 40, 40, 40, vocab_size=267735
        ),
        # of the Penn Treebank, as far as the authors' code says: one head, rank 40, 32 tokens
        "paper": _recipe_of_tensorized(
            ModelShape(256, 3, 1, hidden_dim=2100, residual="post", activation="relu"), 40, 32, vocab_size=10000
        ),
    },
)


# SHA-RNN: LSTMs with one head of attention, in one layer, over a long memory.


def _recipe_of_sha_rnn(dim: int, depth: int, memory: int, dropout: float = 0.0, vocab_size: int = 256) -> Recipe:
    """Return the recipe of ``depth`` layers, of which the last but one attends."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import Boom
        from kinformer.blocks.residual import Initialisation
        from kinformer.blocks.sha_rnn import ShaRnnLayer
        from kinformer.heads.language import LanguageModelHead
        from kinformer.inputs.tokens import Tokens
        from kinformer.mixers.latent import SingleHead
        from kinformer.mixers.recurrent import LSTM
        from kinformer.models.decoder import Decoder
        from kinformer.parts.positions import NoPosition

        boom = Boom.Config(hidden_dim=4 * dim, dropout=dropout)
        layer = ShaRnnLayer.Config(mixer=LSTM.Config(), feed_forward=boom, dropout=dropout)
        layers = [layer] * depth
        layers[-2] = layer.replace(attention=SingleHead.Config(memory=memory, dropout=dropout))
        return Decoder.Config(
            input=Tokens.Config(vocab_size=vocab or vocab_size),
            dim=dim,
            layers=tuple(layers),
            position=NoPosition.Config(),
            head=LanguageModelHead.Config(tied=True, bias=True),
            norm=None,
            dropout=dropout,
            initialisation=Initialisation(std=0.1 * dim**-0.5, residual="plain"),
        )

    return recipe


SHA_RNN = Member(
    name="sha-rnn",
    title="SHA-RNN (single headed attention RNN)",
    paper="Merity 2019, Single Headed Attention RNN: Stop Thinking With Your Head (arXiv 1911.11423)",
    year=2019,
    axes=("recurrence", "memory", "projection"),
    causal=True,
    growth="window",
    departures=(
        "every query sees the same number of past tokens, counted by positions; the authors cut the memory to its last "
        "max - segment slots when a segment begins, so that later tokens of a segment see more than earlier ones",
        "AdamW unless `optimizer` lamb is given, with which the authors train",
        "no dropout unless asked for, but in the recipe paper",
    ),
    exact_limit="memory >= length: attention over everything; without attention a stack of LSTMs",
    needs={"segments": True},
    parity=("the author's code (tests/blocks/test_sha_rnn.py)",),
    layer=2,
    use_when="you want a recurrent model with a little attention on one processor",
    avoid_when="long sequences are to be trained in parallel: its recurrence goes token by token",
    recipes={
        "tiny": _recipe_of_sha_rnn(32, 2, memory=8),
        "small": _recipe_of_sha_rnn(256, 4, memory=1024),
        "benchmark": _recipe_of_sha_rnn(256, 4, memory=1024),
        "paper": _recipe_of_sha_rnn(1024, 4, memory=5000, dropout=0.1, vocab_size=205),
    },
)
