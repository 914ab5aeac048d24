"""Decoders with a memory of earlier text, or with a large memory of keys and values."""

from __future__ import annotations

from kinformer.family.record import (
    ENCODER,
    POST_NORM,
    T5_TRAINING,
    Member,
    Recipe,
    Settings,
    noam,
    part,
    sizes,
    translating,
    unconfirmed,
    usual_training,
    words_training,
    xl_training,
)

# Transformer-XL: segments that see a memory of earlier segments, with positions by distance.

_SEGMENTS: Settings = {
    **POST_NORM,
    "input": part("tokens", scale=True),
    "norm": None,
    "head": part("language", tied=True, bias=True),
    "initialisation": {"residual": "plain"},
}


def _xl(segment: int, memory: int | None = None, **more: object) -> Settings:
    return _SEGMENTS | {"mixer": part("segment_memory", segment=segment, memory=memory or segment, **more)}


def _words(divisor: int, embedding: object) -> Settings:
    """Return the settings of words numbered by falling frequency: clusters in the softmax."""
    clusters: Settings = {"cutoffs": WORD_CUTOFFS, "divisor": divisor}
    read = part("tokens", embedding=embedding, scale=True)
    return {"input": read, "head": part("adaptive", **clusters), "vocab_size": 267735}


WORD_CUTOFFS = (20000, 40000, 200000)
_ADAPTIVE = part("adaptive", cutoffs=WORD_CUTOFFS, divisor=4)

TRANSFORMER_XL = Member(
    name="transformer-xl",
    title="Transformer-XL (segment memory)",
    paper="Dai et al. 2019, Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context (arXiv 1901.02860)",
    axes=("memory", "position"),
    growth="window",
    departures=(
        "segments are counted by positions, not by the chunks that a caller passes, so outputs and gradients do not "
        "depend on the cut; with chunks of one segment each they are the authors'",
        "no dropout unless asked for (the authors: 0.1; 0.15 in paper-large, 0.2 in paper-words-large)",
        "the recipes of words compute all of the adaptive softmax's log-probabilities, of every token, in training too",
        "norms begin at 1 (the authors: N(1, 0.02)), and the last hidden states are not dropped a second time",
    ),
    exact_limit="segment >= length: exact attention with relative positions; memory >= length: its values, with "
    "gradients that end at segments",
    needs={"segments": True},
    parity=("the authors' code: the whole model, segment by segment (tests/mixers/test_segment_memory.py)",),
    results=("extrapolation", "xl_evaluation"),
    use_when="long texts are read segment by segment, and a segment should see the segment before",
    avoid_when="training is short: the plain decoder makes more steps and is ahead",
    training={  # the authors' scripts of enwik8 and WikiText-103
        "paper": xl_training(400_000, 22, 512),
        "paper-large": xl_training(400_000, 64, 768, warmup=4000),
        "paper-words": xl_training(200_000, 60, 150),
        "paper-words-large": xl_training(4_000_000, 128, 384, warmup=16_000),
    },
    recipes={
        **sizes(_xl(256), tiny=_xl(8, 12)),
        "paper": Recipe(512, 12, 8, _xl(512)),
        "paper-large": Recipe(1024, 24, 8, _xl(768, head_dim=128), hidden_dim=3072),
        # words numbered by falling frequency: clusters in the softmax and, in the large model, in the tables
        "paper-words": Recipe(410, 16, 10, _xl(150, head_dim=41), _words(1, "lookup"), hidden_dim=2100),
        "paper-words-large": Recipe(1024, 18, 16, _xl(384, head_dim=64), _words(4, _ADAPTIVE)),
    },
)


# Compressive Transformer: Transformer-XL whose oldest memories are compressed instead of forgotten.


def _compressive(segment: int, memory: int, compressed: int, rate: int = 2, **more: object) -> Settings:
    more |= {"segment": segment, "memory": memory, "compressed": compressed}
    return _SEGMENTS | {"mixer": part("compressive", compression=part("convolution", rate=rate), **more)}


_COMPRESSIVE_RATES: Settings = {"lr": 3e-4, "beta2": 0.999, "min_lr_ratio": 1 / 300, "weight_decay": 0.0, "clip": 0.1}

COMPRESSIVE = Member(
    name="compressive",
    title="Compressive Transformer",
    paper="Rae et al. 2019, Compressive Transformers for Long-Range Sequence Modelling (arXiv 1911.05507)",
    axes=("memory", "position"),
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
    avoid_when="training is short, or the memory must be exact",
    training={  # section 5: Adam, whose rate falls as a cosine from 3e-4 to 1e-6
        "paper": _COMPRESSIVE_RATES | {"steps": 104_000, "warmup": 4000},
        "paper-books": _COMPRESSIVE_RATES | {"steps": 516_000, "warmup": 16_000, "batch_size": 512},
    },
    recipes={
        "tiny": Recipe(32, 2, 2, _compressive(16, 8, 4)),
        "small": Recipe(256, 4, 4, _compressive(256, 256, 256), hidden_dim=768),
        "benchmark": Recipe(256, 4, 4, _compressive(256, 256, 256)),
        "paper": Recipe(1024, 24, 8, _compressive(768, 1152, 1152, rate=3, head_dim=128), hidden_dim=3072),
        "paper-books": Recipe(1024, 36, 16, _compressive(512, 512, 512)),
    },
)


# Memorizing Transformer: one layer near the top looks up keys and values of the distant past of a document.


def _memorizing(layer: int, window: int, memory_size: int, **more: object) -> Settings:
    """Return the settings of a window of ``window`` tokens in all layers, and of memories in the layer ``layer``."""
    local = part(
        "softmax",
        projection=part("multi_head", bias=False),
        position="t5",
        pattern=part("local", window=window),
        bias=False,
    )
    memories = part("memorizing", window=window, segment=window, memory_size=memory_size, **more)
    return {"mixer": local, f"layers.{layer}.mixer": memories}


MEMORIZING = Member(
    name="memorizing",
    title="Memorizing Transformer",
    paper="Wu et al. 2022, Memorizing Transformers (arXiv 2203.08913)",
    axes=("memory", "pattern", "position"),
    growth="window",
    departures=(
        "the window of every layer is counted back from each token; the authors' tokens see their segment and the "
        "segment before, and attend to zeros where a document begins",
        "a token sees itself in its window, but in the recipe paper, where the layer with memories leaves it out",
        "the layer with memories has T5's biases in its window in the recipe paper alone; elsewhere by "
        "layers.N.mixer.position=t5",
        "only the layer with memories norms its queries and keys (the authors: all)",
        "AdamW, but in the recipe paper, which has Adafactor as published",
        unconfirmed("paper"),
    ),
    exact_limit="memory_size = 0 or a closed gate: windowed attention; topk >= memories: attention to all memories",
    needs={"segments": True},
    parity=("the authors' code (tests/mixers/test_memorizing.py)",),
    layer=2,
    use_when="exact look-ups in a long document are needed, by a small model",
    avoid_when="speed decides, or documents are shorter than the window",
    training={"paper": T5_TRAINING | {"steps": 500_000, "batch_size": 256, "lr": 1000**-0.5, "warmup": 1000}},
    recipes={
        "tiny": Recipe(32, 2, 2, _memorizing(1, window=8, memory_size=32, topk=4)),
        "small": Recipe(256, 4, 4, _memorizing(2, window=256, memory_size=8192, topk=32)),
        "benchmark": Recipe(256, 4, 4, _memorizing(2, window=256, memory_size=8192, topk=32)),
        "paper": Recipe(1024, 12, 8).but(
            _memorizing(8, window=512, memory_size=65536, head_dim=128, sees_itself=False, position="t5"),
            activation="relu",
            vocab_size=32000,
        ),
    },
)


# kNN-LM: a trained decoder whose predictions are mixed with the tokens after the most similar contexts of a datastore.

_KNN: Settings = {"input": part("tokens", scale=True), "position": "sinusoidal", "activation": "relu"}

KNN_LM = Member(
    name="knn-lm",
    title="kNN-LM (a datastore at the output)",
    paper="Khandelwal et al. 2020, Generalization through Memorization: Nearest Neighbor Language Models "
    "(arXiv 1911.00172)",
    axes=("memory",),
    growth="store",
    departures=(
        "only the decoder is trained; kinformer index writes the datastore of this or of any other causal run, and "
        "evaluate and generate take it by `datastore`",
        "one embedding table and a full softmax, where the authors' model has adaptive ones",
        "keys in float16 beside int32 tokens (the authors' float16 store cuts tokens to int16); lists of one byte per "
        "number, or product-quantised where `key_bytes` says so, distances always computed from the stored keys",
        "a temperature and the number of neighbours are tuned beside the weight (the authors' temperature is 1)",
        "paper: momentum without Nesterov's step",
    ),
    exact_limit="weight 0, or no datastore: the decoder alone",
    parity=("the official code: the mixture of both distributions (tests/heads/test_knn.py)",),
    results=("datastore", "quantised_lists"),
    use_when="a text is to be added to a trained model without training",
    avoid_when="memory and search time at every token are too dear",
    training={"paper": words_training(3072)},
    recipes={**sizes(_KNN), "paper": Recipe(1024, 16, 8, _KNN, {"layers.*.dropout": 0.3}, vocab_size=267_744)},
)


# SPALM: Transformer-XL with a gate that adds the neighbours that a frozen retriever finds in a datastore.

SPALM = Member(
    name="spalm",
    title="SPALM (gated long-term memory)",
    paper="Yogatama et al. 2021, Adaptive Semiparametric Language Models (arXiv 2102.02557)",
    axes=("memory",),
    growth="window",
    departures=(
        "the growth is the growth of the model alone: with a datastore, the retriever's state comes beside it",
        "without `datastore` the gate and the long-term memory are left out: the trained model is Transformer-XL",
        "the keys come from kinformer index of any causal run (the input of its last feed-forward), searched by "
        "squared distance, exactly or with `probes` in lists (the authors: quantised search)",
        "a text is looked up as a stream, as the datastore was made; a token's own entry is left out in training, and "
        "only there",
        "the gate is one number a token, as printed; elementwise=true gives each feature its own, as the blog's sign "
        "suggests",
        "the recipe paper is Transformer-XL's recipe of characters; its clusters of words do not have a gate",
    ),
    exact_limit="a gate of 1, no neighbour, or no datastore: Transformer-XL",
    use_when="a datastore is at hand while you train, and a gate should decide when to use it",
    avoid_when="training is brief: mixing neighbours in, as `knn-lm` does, gained more",
    training={"paper": TRANSFORMER_XL.training["paper"]},
    recipes={
        name: TRANSFORMER_XL.recipes[name].but(  # type: ignore[attr-defined]
            head=part("spalm", bias=True)
        )
        for name in ("tiny", "small", "benchmark", "paper")
    },
)


# Product-key memory: feed-forwards at chosen depths are replaced by a look-up among very many values.


def _pkm(layer: int, **memory: object) -> Settings:
    """Return the settings of a memory in place of the feed-forward of one layer; ``num_keys``: in each half."""
    return {"mixer": part("softmax", position="rope"), f"layers.{layer}.feed_forward": part("product_keys", **memory)}


PKM = Member(
    name="pkm",
    title="Product-key memory",
    paper="Lample et al. 2019, Large Memory Layers with Product Keys (arXiv 1907.05242)",
    axes=("memory",),
    departures=(
        "the memory takes the place of a feed-forward (the authors' may also stand behind a layer)",
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
    training={  # section 4.2; warm-up and clipping as in the authors' code
        "paper": noam(1024, lr=2.5e-4, clip=5.0)
    },
    recipes={
        "tiny": Recipe(32, 2, 2, _pkm(1, num_keys=8, topk=4, key_dim=16, num_heads=2)),
        "small": Recipe(256, 4, 4, _pkm(2, num_keys=40)),
        "benchmark": Recipe(256, 4, 4, _pkm(2, num_keys=128)),
        "paper": Recipe(1024, 12, 16).but(
            _pkm(4, num_keys=512, num_heads=4, topk=32, key_dim=512, norm="batch"),
            mixer="softmax",
            position=part("learned", max_length=512),
            head=part("language", tied=True, bias=True),
            residual="post",
            vocab_size=60_000,
        ),
    },
)


# Tensorized Transformer: products of three factors in place of softmax attention.


def _tensorized(rank: int, max_length: int) -> Settings:
    return {"mixer": part("tensorized", rank=rank, blocks=2, max_length=max_length)}


def _remembering(rank: int, segment: int, memory: int) -> Settings:
    """Return the settings of a language model with the memory of Transformer-XL (the paper's section 5.1)."""
    return {"mixer": part("tensorized_memory", rank=rank, blocks=2, segment=segment, memory=memory)}


def _translating(rank: int, max_length: int) -> Settings:
    """Return the settings of tensorized attention on both sides (section 5.2), and exact attention between them."""
    mixer = _tensorized(rank, max_length)["mixer"]
    return {"mixer": mixer, **translating(mixer=mixer)}


_PAPER: Settings = POST_NORM | {"hidden_dim": 2100}

TENSORIZED = Member(
    name="tensorized",
    title="Tensorized Transformer (block-term attention)",
    paper="Ma et al. 2019, A Tensorized Transformer for Language Modeling (arXiv 1906.09777)",
    axes=("rank", "score"),
    departures=(
        "causal: the authors' code has a mask that it never applies, so that published perplexities saw later tokens",
        "the tensor of length^3 elements is not made: pairs before a block of 32 queries are summed first, at some "
        "2 length^2 dim (rank + 32) operations a layer and term",
        "positions count from the beginning of a sequence, or of a token's window of segment and memory (recipes "
        "memory), whose slots are empty at the beginning of a text",
        "recipe paper-memory: 80 slots as on WikiText-103; a memory of half of the slots is our choice",
        "encoders and translators (recipes encoder and translate) sum every pair of a text, so that the sum is the "
        "same for all queries; attention to the source is exact",
        "blocks share their factors, as in the authors' code, so that more blocks do not add capacity (tested)",
        "cores begin as softmax of noise; the authors' are uninitialised memory",
        "dim * max_length^2 weights a layer, so that the recipes read 32 to 128 tokens (`length`)",
        "no dropout unless asked for (the authors: 0.3 on the Penn Treebank, 0.1 on WikiText-103), and three layers in "
        "paper-memory (the authors' script: six)",
    ),
    exact_limit="none with softmax: values of ones make every slice of the tensor the scores Q K^T",
    needs={"length": 32},
    parity=("the authors' code (tests/mixers/test_tensorized.py, with memory test_tensorized_memory.py)",),
    results=("encoder_costs",),
    use_when="you study attention as a tensor of few blocks",
    avoid_when="texts are longer than some hundred tokens",
    training={  # the authors' scripts
        "paper": xl_training(20_000, 120, 32),
        "paper-memory": xl_training(200_000, 60, 80),
    },
    recipes={
        "tiny": Recipe(32, 2, 2, _tensorized(8, 128)),
        "small": Recipe(256, 4, 4, _tensorized(40, 32), hidden_dim=896),
        "benchmark": Recipe(256, 4, 4, _tensorized(40, 128)),
        "tiny-memory": Recipe(32, 2, 2, _remembering(8, 12, 12)),
        "memory": Recipe(256, 4, 4, _remembering(40, 32, 32), hidden_dim=896),
        "tiny-encoder": Recipe(32, 2, 2, ENCODER, _tensorized(8, 128)),
        "encoder": Recipe(256, 4, 4, ENCODER, _tensorized(40, 64), hidden_dim=896),
        "tiny-translate": Recipe(32, 2, 2, _translating(8, 128)),
        "translate": Recipe(256, 4, 4, _translating(40, 64)),
        "paper-memory": Recipe(256, 3, 1, _remembering(40, 40, 40), _PAPER, vocab_size=267735),
        # of the Penn Treebank, as far as the authors' code says: one head, rank 40, 32 tokens
        "paper": Recipe(256, 3, 1, _tensorized(40, 32), _PAPER, vocab_size=10000),
    },
)


# SHA-RNN: LSTMs with one head of attention, in one layer, over a long memory.


def _sha_rnn(dim: int, depth: int, memory: int, dropout: float = 0.0, **more: object) -> Recipe:
    """Return the recipe of ``depth`` layers; the last layer but one attends."""
    return Recipe(dim, depth, 1).but(
        {
            "layer": "sha_rnn",
            "mixer": "lstm",
            "feed_forward": part("boom", dropout=dropout),
            "layers.-2.attention": part("single_head", memory=memory, dropout=dropout),
            "layers.*.dropout": dropout,
            "dropout": dropout,
            "head": part("language", tied=True, bias=True),
            "norm": None,
            "initialisation": {"std": 0.1 * dim**-0.5, "residual": "plain"},
        },
        **more,
    )


SHA_RNN = Member(
    name="sha-rnn",
    title="SHA-RNN (single headed attention RNN)",
    paper="Merity 2019, Single Headed Attention RNN: Stop Thinking With Your Head (arXiv 1911.11423)",
    axes=("recurrence", "memory", "projection"),
    growth="window",
    departures=(
        "every query sees the same number of past tokens, counted by positions; the authors cut the memory to its last "
        "max - segment slots when a segment begins, so that later tokens of a segment see more than earlier ones",
        "AdamW unless `optimizer` lamb is given, with which the authors train, but in the recipe paper",
        "no dropout unless asked for, but in the recipe paper",
    ),
    exact_limit="memory >= length: attention over everything; without attention a stack of LSTMs",
    needs={"segments": True},
    parity=("the author's code (tests/blocks/test_sha_rnn.py)",),
    layer=2,
    use_when="you want a recurrent model with a little attention on one processor",
    avoid_when="long sequences are to be trained in parallel: its recurrence goes token by token",
    training={  # the author's commands: 32 epochs of enwik8, and 5 at half the rate
        "paper": {
            "steps": 203_241,
            "batch_size": 16,
            "length": 1024,
            "optimizer": "lamb",
            "lr": 2e-3,
            "schedule": "constant",
            "warmup": 800,
            "stages": ({"steps": 175_776, "lr": 2e-3, "warmup": 800}, {"lr": 1e-3, "warmup": 800}),
            "beta2": 0.999,
            "weight_decay": 1.2e-6,
            "clip": 0.25,
        }
    },
    recipes={
        "tiny": _sha_rnn(32, 2, memory=8),
        "small": _sha_rnn(256, 4, memory=1024),
        "benchmark": _sha_rnn(256, 4, memory=1024),
        "paper": _sha_rnn(1024, 4, memory=5000, dropout=0.1, vocab_size=205),
    },
)


# GTrXL: Transformer-XL whose residuals are gates that begin nearly closed.


def _gtrxl(segment: int, memory: int, head_dim: int | None = None) -> Settings:
    return {
        "mixer": part(
            "segment_memory", head_dim=head_dim, segment=segment, memory=memory, position=part("xl", share_biases=False)
        ),
        "feed_forward": part("mlp", bias=False),
        "activation": "relu",
        "residual": "gated",
        "norm": None,
        "initialisation": {"residual": "plain"},
    }


GTRXL = Member(
    name="gtrxl",
    title="GTrXL (gated Transformer-XL)",
    paper="Parisotto et al. 2019, Stabilizing Transformers for Reinforcement Learning (arXiv 1910.06764)",
    axes=("memory", "depth"),
    growth="window",
    departures=(
        "recipes read tokens and predict the next one; agents learn by PPO (`task` control; the paper's by V-MPO), or "
        "from trajectories (`task` trajectories)",
        "memory begins empty, where other implementations let tokens attend zeros",
        "every layer has separate u and v, and feed-forwards without biases, as in RLlib; official code does not exist",
        "recipe small is narrower than in other members, since gates double a layer's weights",
        "of the recipe paper the width (256), the depth, the heads and the memory are recalled from the paper, not "
        "held to it again; segments, and feed-forwards four times as wide, are ours",
        usual_training("paper", why="the paper's are settings of V-MPO"),
    ),
    exact_limit="segment >= length: exact attention with relative positions, behind gates",
    needs={"segments": True},
    parity=("RLlib 2.9.3: the whole network, in float64 (tests/blocks/test_gated.py)",),
    use_when="an agent must remember, in many layers, and training must be reliable",
    avoid_when="the task is text: its gates cost time without gain there",
    recipes={
        "tiny": Recipe(32, 2, 2, _gtrxl(8, 12)),
        "small": Recipe(192, 4, 4, _gtrxl(256, 256), hidden_dim=576),
        "benchmark": Recipe(256, 4, 4, _gtrxl(256, 256)),
        "paper": Recipe(256, 12, 8, _gtrxl(128, 512, head_dim=64)),
    },
)

MEMBERS = (TRANSFORMER_XL, COMPRESSIVE, MEMORIZING, KNN_LM, SPALM, PKM, TENSORIZED, SHA_RNN, GTRXL)
