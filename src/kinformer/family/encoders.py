"""Encoders of text: full, sparse, low-rank and star-shaped attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kinformer.family.record import ENCODER, Member, Recipe, Settings, part, sizes, unconfirmed, usual_training

# BERT: the plain encoder, the baseline of the encoders of long documents.

_BERT: Settings = ENCODER | {"position": part("learned", max_length=512)}
_LONG: Settings = ENCODER | {"position": part("learned", max_length=4096)}
_PUBLISHED: Settings = {"vocab_size": 30522, "input": part("tokens", types=2)}
_BERT_RATES: Settings = {
    "lr": 1e-4,
    "schedule": "linear",
    "warmup": 10_000,
    "beta2": 0.999,
    "min_lr_ratio": 0.0,
    "weight_decay": 0.01,
    "clip": 1.0,
}

_ROBERTA_RATES: Settings = _BERT_RATES | {"lr": 5e-4, "beta2": 0.98, "clip": 0.0}
"""The rates of RoBERTa in its authors' code."""

BERT = Member(
    name="bert",
    title="BERT (plain encoder)",
    paper="Devlin et al. 2018, BERT: Pre-training of Deep Bidirectional Transformers (arXiv 1810.04805)",
    axes=(),
    causal=False,
    departures=(
        "no next-sentence prediction (as RoBERTa)",
        "masks are drawn again at every step (as RoBERTa)",
        "bytes are the default vocabulary, and the small recipes are without token types",
        "no dropout unless asked for",
    ),
    exact_limit="is exact attention",
    parity=("BERT and RoBERTa of transformers: imported checkpoints (tests/interop/test_encoders.py)",),
    use_when="texts of up to some hundred tokens are classified, or masked tokens predicted",
    avoid_when="texts are long, or are to be continued",
    training={  # appendix A.2
        name: {**_BERT_RATES, "steps": 1_000_000, "batch_size": 256, "length": 512} for name in ("paper", "paper-large")
    },
    recipes={
        **sizes(_BERT, tiny={"position.max_length": 128}, benchmark=_LONG),
        "paper": Recipe(768, 12, 12, _BERT, _PUBLISHED),
        "paper-large": Recipe(1024, 24, 16, _BERT, _PUBLISHED),
    },
)


# Big Bird: windows of blocks, global tokens and random blocks.


def _big_bird(dim: int, depth: int, num_heads: int, block: int, random: int, extra: int = 0, **more: object) -> Recipe:
    """Return the recipe with a global input of ``extra`` tokens, or else the first and the last block for all."""
    pattern = part("big_bird", block=block, random=random, num_heads=num_heads, edges=not extra)
    seeds = {f"layers.{layer}.mixer.pattern.seed": layer for layer in range(depth)}
    tokens = part("extra", count=extra) if extra else None
    mixer = part("bidirectional", pattern=pattern)
    return Recipe(dim, depth, num_heads, _LONG, seeds, mixer=mixer, global_input=tokens, **more)


_BIRD: dict[str, Any] = {"vocab_size": 50358, "input": part("tokens", types=2)}

BIG_BIRD = Member(
    name="big-bird",
    title="Big Bird",
    paper="Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences (arXiv 2007.14062)",
    axes=("pattern",),
    causal=False,
    cost="linear",
    departures=(
        "a block that the authors' tables name twice, or that all see anyway, counts once, and not as often as named",
        "texts of any length: the last block of each text may be short",
        "the tables are the same in training and evaluation",
        "the paper's 2 global blocks are the first and the last, as in the authors' code",
        unconfirmed("paper", "paper-etc", "paper-large", what="the number of steps and rows"),
        "the extended construction, whose code is not published, takes the authors' tables of random blocks",
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
    training={  # the authors' code; steps and batch: appendix E.1
        name: {**_BERT_RATES, "steps": 500_000, "batch_size": 256, "length": 4096}
        for name in ("paper", "paper-etc", "paper-large")
    },
    recipes={
        "tiny": _big_bird(32, 2, 2, 4, 1, position=part("learned", max_length=128)),
        "tiny-etc": _big_bird(32, 2, 2, 4, 1, extra=3, position=part("learned", max_length=128)),
        "small": _big_bird(256, 4, 4, 16, 3),
        "benchmark": _big_bird(256, 4, 4, 64, 3),
        "paper": _big_bird(768, 12, 12, 64, 3, **_BIRD),
        "paper-etc": _big_bird(768, 12, 12, 84, 0, extra=256, **_BIRD),
        "paper-large": _big_bird(1024, 24, 16, 64, 3, **_BIRD),
    },
)


# BlockBERT: in every head, each block sees one block, itself or another.


def _blockbert(*heads: int) -> Settings:
    """Return the settings; ``heads``: in how many heads a block sees itself, the next block, and so on."""
    blocks = len(heads)
    permutations = [
        [(block + shift) % blocks for block in range(blocks)] for shift, count in enumerate(heads) for _ in range(count)
    ]
    return _BERT | {"mixer": part("bidirectional", pattern=part("blockwise", block=None, permutations=permutations))}


BLOCKBERT = Member(
    name="blockbert",
    title="BlockBERT",
    paper="Qiu et al. 2020, Blockwise Self-Attention for Long Document Understanding (arXiv 1911.02972)",
    axes=("pattern",),
    causal=False,
    departures=(
        "each text is cut into blocks separately, of ceil(length / blocks) tokens, without its padding",
        "a token whose block is beyond the end of a text sees nothing in that head",
        "the paper's vocabulary is not published; the paper recipes take BERT's vocabulary",
        "no next-sentence prediction, and no dropout unless asked for",
        usual_training("paper", "paper-three"),
    ),
    exact_limit="one block",
    use_when="a BERT must fit into less memory, with heads that see blocks of the text",
    avoid_when="length should cost linearly: its blocks grow with the text",
    recipes={
        "tiny": Recipe(32, 2, 2, _blockbert(1, 1), {"position.max_length": 128}),
        "small": Recipe(256, 4, 4, _blockbert(3, 1)),
        "benchmark": Recipe(256, 4, 4, _blockbert(3, 1), {"position.max_length": 4096}),
        "paper": Recipe(768, 12, 12, _blockbert(10, 2), _PUBLISHED, {"position.max_length": 1024}),
        "paper-three": Recipe(768, 12, 12, _blockbert(8, 2, 2), _PUBLISHED, {"position.max_length": 1024}),
    },
)


# ETC: a long input with a window, and a global input whose tokens stand for sentences and see all tokens.

_NORM = part("layer_norm", eps=1e-12)


def _etc(radius: int, max_distance: int, sentence: int, ids: int | None = None, types: int = 0) -> Settings:
    """Return the settings; ``radius``: tokens that a token sees on either side; ``sentence``: tokens of a sentence."""
    return {
        **ENCODER,
        "mixer": part("etc", pattern=part("window", window=radius), max_distance=max_distance, ids=ids),
        "global_input": part("sentences", length=sentence),
        "input": part("tokens", types=types),
        "embedding_norm": _NORM,
        "layers.*.norm": _NORM,
        "head": part("masked_language", eps=1e-12),
    }


ETC = Member(
    name="etc",
    title="ETC (global and long input)",
    paper="Ainslie et al. 2020, ETC: Encoding Long and Structured Inputs in Transformers (arXiv 2004.08483)",
    axes=("pattern", "position", "projection"),
    causal=False,
    departures=(
        "any length, no padding to blocks; the window is exact",
        "a sentence is a run of tokens of one length unless the caller gives them by model(tokens, sentences=...)",
        "contrastive prediction (`objective` mlm-cpc), whose code is not released, standardises features over a batch",
        "long and global input are normed by one layer norm at the embedding",
        "no dropout unless asked for",
        "paper and paper-large bring the authors' optimiser and batch, and the usual schedule",
        unconfirmed("paper", "paper-large"),
    ),
    exact_limit="window >= length, shared output projection and relations of nothing (over global and long input)",
    use_when="documents have structure (sentences, questions) that a global input can stand for",
    avoid_when="texts are flat: `longformer` needs less care",
    training={  # section 4: LAMB, as "large batch optimization" has it
        name: {"optimizer": "lamb", "batch_size": 512, "length": 4096, "beta2": 0.999, "weight_decay": 0.01}
        for name in ("paper", "paper-large")
    },
    recipes={
        **sizes(tiny=_etc(4, 3, sentence=8), small=_etc(64, 12, sentence=64), benchmark=_etc(84, 12, sentence=64)),
        "paper": Recipe(768, 12, 12, _etc(84, 12, sentence=16, ids=32, types=16), vocab_size=30522),
        "paper-large": Recipe(1024, 24, 16, _etc(169, 24, sentence=16, types=16), vocab_size=50265),
    },
)


# Longformer: a window for all tokens, and a few global tokens with separate projections.


def _longformer(windows: Sequence[int], global_tokens: int = 1) -> Settings:
    """Return the settings; ``windows``: the number of tokens that a token sees on either side, by layer in turns."""
    count = len(windows)
    return {
        **_LONG,
        "mixer": part("bidirectional", projection="multi_head_global"),
        **{f"layers.{first}::{count}.mixer.pattern": part("window", window=size) for first, size in enumerate(windows)},
        "global_tokens": global_tokens,
    }


LONGFORMER = Member(
    name="longformer",
    title="Longformer",
    paper="Beltagy et al. 2020, Longformer: The Long-Document Transformer (arXiv 2004.05150)",
    axes=("pattern", "projection"),
    causal=False,
    cost="linear",
    departures=(
        "any length, no padding to a multiple of the window",
        "dilation on a CPU and in training (`set` layers.*.mixer.pattern.dilation); the authors' is a GPU kernel",
        "the first token is global unless kinds say otherwise",
        "paper: the rate falls as a cosine (the authors': as the third power of the steps left)",
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
    training={  # section 5: masked language modelling that continues from RoBERTa
        name: _ROBERTA_RATES
        | {"steps": 65_000, "batch_size": 64, "length": 4096, "lr": 3e-5, "warmup": 500, "schedule": "cosine"}
        for name in ("paper", "paper-large")
    },
    recipes={
        "tiny": Recipe(32, 2, 2, _longformer((4, 8)), {"position.max_length": 128}),
        "small": Recipe(256, 4, 4, _longformer((32, 64, 128, 128)), hidden_dim=640),
        "benchmark": Recipe(256, 4, 4, _longformer((128,), global_tokens=16)),
        "paper": Recipe(768, 12, 12, _longformer((256,)), vocab_size=50265),
        "paper-large": Recipe(1024, 24, 16, _longformer((256,)), vocab_size=50265),
    },
)


# Linformer: keys and values of the whole text, projected to a fixed number of summaries.


def _linformer(rank: int, max_length: int, layerwise: bool = True) -> Settings:
    """Return the settings; ``rank``: the number of summaries; ``layerwise``: one projection for all layers."""
    sharing = "keys_values" if layerwise else "heads"
    return {
        **ENCODER,
        "mixer": part("linformer", rank=rank, max_length=max_length, sharing=sharing, shared=layerwise),
        "position": part("learned", max_length=max_length),
    }


LINFORMER = Member(
    name="linformer",
    title="Linformer (low-rank attention)",
    paper="Wang et al. 2020, Linformer: Self-Attention with Linear Complexity (arXiv 2006.04768)",
    axes=("rank",),
    causal=False,
    cost="linear",
    departures=(
        "padding weighs nothing (the authors' code accepts a padding mask and ignores it)",
        "windows of a mean or a convolution that begin beyond the end of a text are not attended to",
        "bytes are the default vocabulary",
        "no dropout unless asked for",
        "paper: the usual batch (the authors': from 64 devices, of a size that the paper does not state)",
    ),
    exact_limit="rank = max_length = length with E = F = 1, or windows of one token",
    parity=("another implementation, in float64 (tests/mixers/test_linformer.py)",),
    use_when="all texts have nearly one length and speed counts",
    avoid_when="lengths vary, or exactness counts: its projections are the same for every text",
    training={  # section 5.1, and RoBERTa's settings, as the authors' code has them
        name: _ROBERTA_RATES | {"steps": 250_000, "length": 512} for name in ("paper", "paper-heads")
    },
    recipes={
        **sizes(tiny=_linformer(16, 128), small=_linformer(128, 512), benchmark=_linformer(256, 4096)),
        "paper": Recipe(768, 12, 12, _linformer(256, 512), vocab_size=50265),
        "paper-heads": Recipe(768, 12, 12, _linformer(128, 512, layerwise=False), vocab_size=50265),
    },
)


# Sparse Sinkhorn Transformer: a block sees itself and another block, which a learned sorting chooses.


def _sinkhorn(block: int, max_length: int, cut: int = 0) -> Settings:
    """Return the settings; ``cut``: sorted blocks that all tokens see; 0: a block sees its sorted block and itself."""
    mixer = part("sinkhorn", block=block, max_length=max_length, iterations=5, cut=cut)
    return ENCODER | {"mixer": mixer, "position": part("learned", max_length=max_length)}


def _causal(block: int, max_length: int) -> Settings:
    """Return the settings of a decoder whose blocks are sorted within the past."""
    mixer = part("causal_sinkhorn", block=block, max_length=max_length, iterations=5)
    return {"mixer": mixer, "position": part("learned", max_length=max_length)}


SINKHORN = Member(
    name="sinkhorn",
    title="Sparse Sinkhorn Transformer (sorted blocks)",
    paper="Tay et al. 2020, Sparse Sinkhorn Attention (arXiv 2002.11296)",
    axes=("pattern",),
    causal=False,
    cost="between",
    departures=(
        "decoders (recipes causal, mixer causal_sinkhorn): the ranking of the earlier blocks for a block does not use "
        "later blocks; the published form balances all blocks under a mask and divides by sums over later blocks, "
        "which leaks (tested)",
        "a causal block ranks by the sum of the tokens before it (the paper: and its first token)",
        "the own and the sorted block are in one softmax",
        "texts of any length up to max_length: the last block need not be full, and its missing tokens have weight 0",
        "Gumbel noise in training alone",
        "the mixture with plain attention is a list of layers (`set` layers.0.mixer=bidirectional)",
        "the recipes predict masked tokens; the paper's encoders classify",
        usual_training("paper"),
    ),
    exact_limit="one block (block >= length), or two that change places; causal: two blocks",
    parity=("another implementation: sorting, in float64 (tests/mixers/test_sinkhorn.py)",),
    use_when="a block should see a far block, and the choice is to be learnt",
    avoid_when="texts are short, or training is brief: sorting must be learnt first",
    recipes={
        "tiny": Recipe(32, 2, 2, _sinkhorn(16, 128)),
        "small": Recipe(256, 4, 4, _sinkhorn(64, 512), hidden_dim=896),
        "benchmark": Recipe(256, 4, 4, _sinkhorn(64, 4096)),
        "sortcut": Recipe(256, 4, 4, _sinkhorn(64, 512, cut=2), hidden_dim=896),
        "tiny-causal": Recipe(32, 2, 2, _causal(16, 128)),
        "causal": Recipe(256, 4, 4, _causal(64, 512), hidden_dim=896),
        "paper": Recipe(512, 6, 8, _sinkhorn(32, 2048), vocab_size=32000),
    },
)


# Star-Transformer: tokens in a ring, and a relay connected to all tokens.

_STAR: Settings = {
    **_BERT,
    "layer": "bare",
    "mixer": part("star", iterations=2),
    "embedding_norm": None,
    "initialisation": {"scheme": "xavier", "residual": "plain"},
}
"""One layer of several updates, without residual and feed-forward."""
_DEEP: Settings = _BERT | {"mixer": part("star", iterations=2, tied=True)}
"""Two updates with one set of weights take the place of every layer's attention."""

STAR = Member(
    name="star",
    title="Star-Transformer (ring and relay)",
    paper="Guo et al. 2019, Star-Transformer (arXiv 1902.09113)",
    axes=("pattern", "recurrence"),
    causal=False,
    cost="linear",
    departures=(
        "the relay begins as the mean of the real tokens, and the ring closes over them: in the authors' code both see "
        "padding in the first update, and both ends of a text look at zeros (`set` layers.*.mixer.ends=zeros)",
        "a token's output is its mean with the relay; the authors' classifier reads `set` head.pooling=max",
        "small and benchmark have the updates in place of attention, in layers with residuals and feed-forwards",
        "masked tokens are predicted, which the paper does not",
        "no dropout unless asked for",
        usual_training("paper"),
    ),
    exact_limit="3 tokens or fewer: each sees all tokens, beside its own input and the relay; the relay always does",
    parity=("the authors' code (tests/mixers/test_star.py)",),
    use_when="texts are short to medium, data is small and a light model is enough",
    avoid_when="any two tokens must meet directly",
    recipes={
        "tiny": Recipe(32, 1, 2, _STAR, {"position.max_length": 128}),
        "small": Recipe(256, 4, 4, _DEEP, hidden_dim=512),
        "benchmark": Recipe(256, 4, 4, _DEEP, {"position.max_length": 4096}),
        "paper": Recipe(300, 1, 6, _STAR, vocab_size=30000),
    },
)

MEMBERS = (BERT, BIG_BIRD, BLOCKBERT, ETC, LONGFORMER, LINFORMER, SINKHORN, STAR)
