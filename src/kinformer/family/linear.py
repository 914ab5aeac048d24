"""Kernel attention: linear attention, delta rules and decays, with a state of constant size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder, encoder_decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.mixers.latent import LatentAttention
    from kinformer.mixers.linear import LinearAttention
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder_decoder import EncoderDecoder


# Linear Transformer: "Transformers are RNNs", linear attention with the feature map elu + 1.


def _recipe(shape: ModelShape) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.residual import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.linear import LinearAttention
        from kinformer.parts.positions import Sinusoidal

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(num_heads=shape.num_heads),
            position=Sinusoidal.Config(),
            head=LanguageModelHead.Config(tied=False, bias=True),
            initialisation=Initialisation(scheme="framework"),
        )

    return recipe


def _images(depth: int, height: int, width: int, channels: int) -> Recipe:
    """Return the authors' model of images: half of the features say the value, half are sines of its place; a mixture
    of ten logistics."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.heads.images import LogisticMixture
        from kinformer.inputs.images import Pixels
        from kinformer.parts.positions import NoPosition

        config = _recipe(ModelShape(256, depth, 8, residual="post", activation="relu"))(vocab)
        return config.replace(
            input=Pixels.Config(height=height, width=width, channels=channels, places="sinusoid", concatenate=True),
            position=NoPosition.Config(),
            head=LogisticMixture.Config(),
        )

    return recipe


LINEAR_TRANSFORMER = Member(
    name="linear-transformer",
    title="Linear Transformer",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236)",
    year=2020,
    axes=("kernel", "recurrence"),
    causal=True,
    growth="constant",
    departures=(
        "pre-norm, and GELU in the recipes tiny and small; the recipe paper is post-norm with ReLU as published",
        "of text the sinusoid is added to the embedding, and the head is a softmax over the vocabulary; the authors' "
        "models of images (paper-mnist, paper-cifar) concatenate two halves and mix ten logistics",
        "the first value of an image is predicted too, from a learned vector (the authors' code: not at all); no "
        "dropout unless asked for (the authors: 0.1)",
    ),
    exact_limit="none finite (elu + 1 is not the exponential); quadratic features give the squared kernel exactly",
    parity=("pytorch-fast-transformers 0.4.0, the authors' code (tests/family/test_parity.py)",),
    results=("capacity",),
    use_when="speed and a constant state matter more than exact recall",
    avoid_when=(
        "many things must be recalled exactly, or texts go on far beyond the length of training: its sum never forgets"
    ),
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(256, 4, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu")),
        "paper": _recipe(ModelShape(256, 8, 8, residual="post", activation="relu")),
        "paper-mnist": _images(8, 28, 28, 1),
        "paper-cifar": _images(16, 32, 32, 3),
    },
)


# Fast Weight Transformer: DPFP features, the delta rule, sum normalisation.


def _recipe_of_fast_weights(shape: ModelShape) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.residual import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.linear import LinearAttention
        from kinformer.parts.feature_maps import SumNormalised

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads,
                feature_map=SumNormalised.Config(),
                rule="delta",
                normaliser="none",
                scale=True,
                bias=False,
            ),
            head=LanguageModelHead.Config(tied=True, bias=True),
            initialisation=Initialisation(residual="plain"),
        )

    return recipe


def _outer(shape: ModelShape) -> Recipe:
    """Return the recipe of fast weights behind an activation (the paper's equations 1 to 3)."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.recurrent import OuterProduct

        return decoder(shape, vocab or 256, mixer=OuterProduct.Config(num_heads=shape.num_heads))

    return recipe


FAST_WEIGHTS = Member(
    name="fast-weights",
    title="Fast Weight Transformer (delta rule)",
    paper="Schlag et al. 2021, Linear Transformers Are Secretly Fast Weight Programmers (arXiv 2102.11174)",
    year=2021,
    axes=("kernel", "recurrence"),
    causal=True,
    growth="constant",
    departures=(
        "pre-norm, and GELU in the recipes tiny and small; the recipe paper is post-norm with ReLU as published",
        "the sum normalisation adds 1e-5 to the sum (the authors' language models had none at first)",
        "the softmax over the vocabulary is not adaptive",
        "outer products through an activation (equations 1 to 3) are the recipes outer, whose tokens are computed one "
        "after the other",
    ),
    exact_limit="no finite limit; with the sum rule and the same features it is linear attention",
    parity=("lmtool-fwp, the authors' code, and labml-nn 0.5.1 (tests/family/test_parity.py)",),
    results=("capacity",),
    use_when="facts are overwritten, and the state must stay constant",
    avoid_when="training must be the fastest: a plain sum is faster, and `gated-deltanet` forgets as well",
    training={  # the authors' scripts of WikiText-103
        "paper": {
            "steps": 500_000,
            "length": 256,
            "lr": 2.5e-4,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.0,
            "clip": 0.25,
        },
    },
    recipes={
        "tiny": _recipe_of_fast_weights(ModelShape(32, 2, 2)),
        "small": _recipe_of_fast_weights(ModelShape(256, 4, 4)),
        "benchmark": _recipe_of_fast_weights(ModelShape(256, 4, 4, activation="relu")),
        "tiny-outer": _outer(ModelShape(32, 2, 2)),
        "outer": _outer(ModelShape(256, 4, 4)),
        "paper": _recipe_of_fast_weights(ModelShape(128, 16, 8, hidden_dim=2048, residual="post", activation="relu")),
    },
)


# Performer: linear attention over positive orthogonal random features of the softmax kernel (FAVOR+).


def _recipe_of_performer(shape: ModelShape, features: int | None = None) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.linear import LinearAttention
        from kinformer.parts.feature_maps import Favor
        from kinformer.parts.positions import Sinusoidal

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads, feature_map=Favor.Config(features=features), eps=1e-30
            ),
            position=Sinusoidal.Config(),
        )

    return recipe


PERFORMER = Member(
    name="performer",
    title="Performer (FAVOR+)",
    paper="Choromanski et al. 2021, Rethinking Attention with Performers (arXiv 2009.14794)",
    year=2021,
    axes=("kernel",),
    causal=True,
    growth="constant",
    departures=(
        "the authors' code subtracts from exponents a maximum over all keys, later ones included; here every key has "
        "its own, and the state carries a running one",
        "random features are redrawn every 1000 training steps from the run's seed (the authors' code: as often as "
        "its caller wants)",
        "pre-norm, and GELU in the recipes tiny and small",
    ),
    exact_limit="softmax attention as the number of random features grows; its error falls as one over their root",
    parity=("performer-pytorch 1.1.4: features, and attention over them, in float64 (tests/family/test_performer.py)",),
    results=("approximation",),
    use_when="a softmax model is to be approximated with a constant state, or you study random features",
    avoid_when="you train from scratch: a fixed feature map learns more in the same time",
    recipes={
        "tiny": _recipe_of_performer(ModelShape(32, 2, 2)),
        "small": _recipe_of_performer(ModelShape(256, 4, 4), features=128),
        "benchmark": _recipe_of_performer(ModelShape(256, 4, 4, activation="relu"), features=64),
        "paper": _recipe_of_performer(ModelShape(512, 6, 8, activation="relu"), features=256),
    },
)


# Random Feature Attention: gated linear attention over random Fourier features of normalised queries and keys.


def _recipe_of_rfa(shape: ModelShape) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.linear import LinearAttention
        from kinformer.parts.decays import Sigmoid
        from kinformer.parts.feature_maps import RandomFourier
        from kinformer.parts.positions import Sinusoidal

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads, feature_map=RandomFourier.Config(), decay=Sigmoid.Config(), floor=0.1
            ),
            position=Sinusoidal.Config(),
        )

    return recipe


def _translating(shape: ModelShape, dropout: float = 0.0) -> Recipe:
    """Return the recipe with an encoder of softmax attention before it and random features between both, as the authors
    translate (section 4.2)."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.mixers.cross import LinearCrossAttention
        from kinformer.parts.feature_maps import RandomFourier

        base = _recipe_of_rfa(shape)(vocab or 258)
        heads = shape.num_heads
        cross = LinearCrossAttention.Config(num_heads=heads, feature_map=RandomFourier.Config(), floor=0.1)
        return encoder_decoder(base, BidirectionalAttention.Config(num_heads=heads), dropout=dropout, cross=cross)

    return recipe


RFA = Member(
    name="rfa",
    title="Random Feature Attention (RFA-Gate)",
    paper="Peng et al. 2021, Random Feature Attention (arXiv 2103.02143)",
    year=2021,
    axes=("kernel", "recurrence"),
    causal=True,
    growth="constant",
    departures=(
        "random features are drawn once (the authors: in every training step, from a pool of 500)",
        "the normaliser is at least 0.1, as products of sines and cosines may be negative (the authors' code: 1, for "
        "features that are 0.1 [sin, cos] whatever their number)",
        "the softmax over the vocabulary is not adaptive, and the embedding is tied to it",
        "translating recipes have the gate",
    ),
    exact_limit="softmax attention of normalised queries and keys without the gate, as the number of features grows",
    parity=("the authors' code, without its gate (tests/family/test_kernel_members.py)",),
    results=("approximation",),
    use_when="you study random features of softmax attention with a gate",
    avoid_when="you need recall: its gate begins half open (decay.temperature = 16 mends that)",
    recipes={
        "tiny": _recipe_of_rfa(ModelShape(32, 2, 2)),
        "small": _recipe_of_rfa(ModelShape(256, 4, 4)),
        "benchmark": _recipe_of_rfa(ModelShape(256, 4, 4, activation="relu")),
        "paper": _recipe_of_rfa(ModelShape(512, 6, 8, activation="relu")),
        "tiny-translate": _translating(ModelShape(32, 2, 2)),
        "translate": _translating(ModelShape(512, 6, 8, activation="relu"), dropout=0.1),
    },
)


# RetNet: linear attention with a fixed decay per head, rotary positions, and gated norms of heads (retention).


def _recipe_of_retnet(shape: ModelShape, value_dim: int | None) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.linear import LinearAttention
        from kinformer.parts.decays import Fixed
        from kinformer.parts.feature_maps import Identity
        from kinformer.parts.relative_positions import Rope

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads,
                value_dim=value_dim,
                feature_map=Identity.Config(),
                decay=Fixed.Config(),
                normaliser="none",
                scale=True,
                position=Rope.Config(layout="interleaved"),
                head_norm="layer",
                gate=True,
                bias=False,
            ),
        )

    return recipe


RETNET = Member(
    name="retnet",
    title="RetNet (retention)",
    paper="Sun et al. 2023, Retentive Network: A Successor to Transformer for Large Language Models (arXiv 2307.08621)",
    year=2023,
    axes=("kernel", "position", "recurrence"),
    causal=True,
    growth="constant",
    departures=(
        "positions turn queries and keys by the paper's angles, 10000^(-2 i / head_dim) (the authors' code spaces them "
        "from 1 to 1 / 10000); neither has xPos's growing scale, as the decay takes its place",
        "retention scores are not normalised row by row: the norm of heads behind them undoes any factor",
        "a GELU feed-forward, and layer norms (the authors' later code has gated ones, and RMS norms)",
    ),
    exact_limit="no finite limit; without decay and rotation it is linear attention without a normaliser",
    parity=("flash-linear-attention's RetNet, whole (tests/interop/test_fla_folders.py)",),
    use_when="you want a constant state, stable over any length, with the simplest decay",
    avoid_when="how fast to forget depends on the text: `gla` and `gated-deltanet` learn that",
    recipes={
        "tiny": _recipe_of_retnet(ModelShape(32, 2, 2, hidden_dim=64), 32),
        "small": _recipe_of_retnet(ModelShape(256, 4, 4, hidden_dim=512), 128),
        "benchmark": _recipe_of_retnet(ModelShape(256, 4, 4, activation="relu"), None),
        "paper": _recipe_of_retnet(ModelShape(2048, 24, 8, hidden_dim=4096), 512),
    },
)


# Gated DeltaNet: the delta rule with a decay per token and head, short convolutions, and gated norms of heads.


def _recipe_of_gated_deltanet(
    shape: ModelShape, head_dim: int | None = None, value_dim: int | None = None
) -> Callable[[int | None], Decoder.Config]:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.linear import LinearAttention
        from kinformer.parts.decays import Softplus
        from kinformer.parts.feature_maps import Unit

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                feature_map=Unit.Config(),
                rule="delta",
                decay=Softplus.Config(),
                normaliser="none",
                scale=True,
                convolution=4,
                head_norm="rms",
                gate=True,
                bias=False,
            ),
        )

    return recipe


def _hybrid(shape: ModelShape) -> Recipe:
    """Return the recipe in which every fourth layer is softmax attention."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.relative_positions import Rope

        config = _recipe_of_gated_deltanet(shape)(vocab)
        softmax = SoftmaxAttention.Config(num_heads=shape.num_heads, position=Rope.Config())
        layers = (
            layer.replace(mixer=softmax) if number % 4 == 3 else layer for number, layer in enumerate(config.layers)
        )
        return config.replace(layers=tuple(layers))

    return recipe


GATED_DELTANET = Member(
    name="gated-deltanet",
    title="Gated DeltaNet",
    paper="Yang et al. 2025, Gated Delta Networks: Improving Mamba2 with Delta Rule (arXiv 2412.06464)",
    year=2025,
    axes=("kernel", "recurrence", "projection"),
    causal=True,
    growth="constant",
    departures=(
        "values are as wide as keys but in the recipe paper (the authors': twice as wide)",
        "a GELU feed-forward and layer norms around it (the authors': gated ones, and RMS norms)",
        "the recipe hybrid has one layer of softmax attention to three, as Qwen3-Next (the paper's have windows); the "
        "state of that layer grows with the text",
    ),
    exact_limit="no finite limit; without decay and convolutions it is the delta rule of fast weights",
    parity=(
        "Qwen3-Next's gated delta net of transformers (tests/family/test_kernel_members.py)",
        "Qwen3-Next, Qwen3.5 and OLMo Hybrid of transformers, whole (tests/interop/test_decoders.py)",
        "flash-linear-attention's Gated DeltaNet, whole (tests/interop/test_fla_folders.py)",
    ),
    results=("state_tracking",),
    use_when="you want endless text in constant memory: of members with a constant state it is the first to try",
    avoid_when="everything in a long context must be recalled exactly",
    recipes={
        "tiny": _recipe_of_gated_deltanet(ModelShape(32, 2, 2)),
        "small": _recipe_of_gated_deltanet(ModelShape(256, 4, 4)),
        "hybrid": _hybrid(ModelShape(256, 4, 4)),
        "benchmark": _recipe_of_gated_deltanet(ModelShape(256, 4, 4, activation="relu")),
        "paper": _recipe_of_gated_deltanet(ModelShape(2048, 24, 6), 256, 512),
    },
)


# Kimi Delta Attention: the gated delta rule with a decay for every channel, and gates of low rank.


def _delta(num_heads: int, head_dim: int | None, gate_rank: int) -> LinearAttention.Config:
    """Return the mixer of a KDA layer; ``head_dim`` None: dim / num_heads."""
    from kinformer.mixers.linear import LinearAttention
    from kinformer.parts.decays import SoftplusChannels
    from kinformer.parts.feature_maps import Unit

    return LinearAttention.Config(
        num_heads=num_heads,
        head_dim=head_dim,
        feature_map=Unit.Config(),
        rule="delta",
        decay=SoftplusChannels.Config(),
        normaliser="none",
        scale=True,
        convolution=4,
        head_norm="rms",
        gate=True,
        gate_rank=gate_rank,
        gate_activation="sigmoid",
        bias=False,
    )


def _recipe_of_kda(shape: ModelShape) -> Callable[[int | None], Decoder.Config]:
    def recipe(vocab: int | None) -> Decoder.Config:
        return decoder(shape, vocab or 256, mixer=_delta(shape.num_heads, None, shape.dim // shape.num_heads))

    return recipe


def _latent(num_heads: int, head_dim: int, rotary_dim: int, latent_dim: int) -> LatentAttention.Config:
    """Return the mixer of a full layer: latent attention without positions, whose heads still share some features of
    their keys."""
    from kinformer.mixers.latent import LatentAttention
    from kinformer.parts.positions import NoPosition

    return LatentAttention.Config(
        num_heads=num_heads, head_dim=head_dim, rotary_dim=rotary_dim, latent_dim=latent_dim,
        position=NoPosition.Config(),
    )  # fmt: skip


def _hybrid_of_kda(shape: ModelShape) -> Recipe:
    """Return the recipe in which every fourth layer is latent attention without positions."""

    def recipe(vocab: int | None) -> Decoder.Config:
        config, width = _recipe_of_kda(shape)(vocab), shape.dim // shape.num_heads
        full = _latent(shape.num_heads, width, width // 2, shape.dim // 2)
        layers = (layer.replace(mixer=full) if number % 4 == 3 else layer for number, layer in enumerate(config.layers))
        return config.replace(layers=tuple(layers))

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    """Kimi Linear: three KDA layers to one of latent attention, which the last is, too; experts behind all but one."""
    from kinformer.blocks.experts import Experts
    from kinformer.blocks.feed_forward import SwiGLU
    from kinformer.blocks.layer import DecoderLayer
    from kinformer.blocks.residual import Initialisation, RMSNorm
    from kinformer.heads.language import LanguageModelHead
    from kinformer.inputs.tokens import Tokens
    from kinformer.models.decoder import Decoder
    from kinformer.parts.positions import NoPosition

    depth, norm = 27, RMSNorm(eps=1e-5)
    full, delta = _latent(32, 128, 64, 512), _delta(32, 128, 128)
    experts = Experts.Config(
        num_experts=256, topk=8, hidden_dim=1024, shared_dim=1024, router="sigmoid", scale=2.446, balance=0.0,
        bias_rate=0.001,
    )  # fmt: skip
    layers = (
        DecoderLayer.Config(
            mixer=full if number % 4 == 3 or number == depth - 1 else delta,
            feed_forward=experts if number else SwiGLU.Config(hidden_dim=9216),
            norm=norm,
        )
        for number in range(depth)
    )
    return Decoder.Config(
        input=Tokens.Config(vocab_size=vocab or 163_840),
        dim=2304,
        layers=tuple(layers),
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=False),
        norm=norm,
        initialisation=Initialisation(residual="plain"),
    )


KDA = Member(
    name="kda",
    title="Kimi Delta Attention (KDA)",
    paper="Kimi Team 2025, Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv 2510.26692)",
    year=2025,
    axes=("kernel", "recurrence", "projection"),
    causal=True,
    growth="constant",
    departures=(
        "KDA in all layers, GELU feed-forwards and layer norms around them in all recipes but hybrid and paper (the "
        "authors': gated feed-forwards, mostly mixtures of experts, and RMS norms)",
        "the state of the latent attention in the recipes hybrid and paper grows with the text",
    ),
    exact_limit="no finite limit; with equal decays of a head's channels it is Gated DeltaNet, whose gate has low rank",
    parity=(
        "Kimi Linear's delta attention of transformers (tests/family/test_kernel_members.py)",
        "Kimi Linear's latent attention of transformers (tests/mixers/test_latent.py)",
        "the naive form of flash-linear-attention (tests/kernels/test_delta_steps.py)",
    ),
    use_when="`gated-deltanet` forgets too much at once: here every channel has its own decay",
    avoid_when="speed decides: decays by channel cost time, as measured",
    recipes={
        "tiny": _recipe_of_kda(ModelShape(32, 2, 2)),
        "small": _recipe_of_kda(ModelShape(256, 4, 4)),
        "hybrid": _hybrid_of_kda(ModelShape(256, 4, 4)),
        "benchmark": _recipe_of_kda(ModelShape(256, 4, 4, activation="relu")),
        "paper": _paper,
    },
)


# GLA: gated linear attention, whose state decays by token and channel.


def _recipe_of_gla(shape: ModelShape, head_dim: int | None, value_dim: int | None) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.linear import LinearAttention
        from kinformer.parts.decays import LowRank
        from kinformer.parts.feature_maps import Identity

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                feature_map=Identity.Config(),
                decay=LowRank.Config(),
                normaliser="none",
                scale=True,
                head_norm="layer",
                gate=True,
                bias=False,
            ),
        )

    return recipe


GLA = Member(
    name="gla",
    title="Gated linear attention (GLA)",
    paper="Yang et al. 2024, Gated Linear Attention Transformers with Hardware-Efficient Training (arXiv 2312.06635)",
    year=2024,
    axes=("kernel", "recurrence"),
    causal=True,
    growth="constant",
    departures=(
        "a GELU feed-forward and layer norms around it (the authors': gated ones, and RMS norms)",
        "the output gate has no bias, and the norm of heads no weights",
        "keys are as wide as values in the recipe benchmark (the paper's: half as wide)",
    ),
    exact_limit="no finite limit; without decay it is linear attention without a normaliser",
    parity=("flash-linear-attention's GLA, whole (tests/interop/test_fla_folders.py)",),
    use_when="a small constant state has to recall, with decays that the text decides",
    avoid_when="facts are overwritten: the delta rule replaces them, this sum does not",
    recipes={
        "tiny": _recipe_of_gla(ModelShape(32, 2, 2), 8, 16),
        "small": _recipe_of_gla(ModelShape(256, 4, 4), 32, 64),
        "benchmark": _recipe_of_gla(ModelShape(256, 4, 4, activation="relu"), None, None),
        "paper": _recipe_of_gla(ModelShape(1024, 24, 4), 128, 256),
    },
)


@dataclass(frozen=True)
class Space:
    """Mamba-2: a state space per head that all heads write to and read from by the same keys and queries.

    Sizes of the states: ``state`` (keys and queries) x ``head`` (values), in each of ``num_heads``.
    """

    num_heads: int
    state: int
    head: int


def _recipe_of_mamba2(shape: ModelShape, space: Space, levels: int = 0) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.linear import LinearAttention
        from kinformer.parts.decays import Softplus
        from kinformer.parts.feature_maps import Identity

        return decoder(
            shape,
            vocab or 256,
            mixer=LinearAttention.Config(
                num_heads=space.num_heads,
                head_dim=space.state,
                value_dim=space.head,
                key_heads=1,
                feature_map=Identity.Config(),
                levels=levels,
                decay=Softplus.Config(coupled=True),
                normaliser="none",
                convolution=4,
                skip=True,
                head_norm="rms_group",
                gate=True,
                gate_first=True,
                bias=False,
            ),
        )

    return recipe


MAMBA2 = Member(
    name="mamba2",
    title="Mamba-2",
    paper="Dao and Gu 2024, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured "
    "State Space Duality (arXiv 2405.21060)",
    year=2024,
    axes=("kernel", "recurrence", "projection"),
    causal=True,
    growth="constant",
    departures=(
        "a GELU feed-forward behind every mixer, and layer norms (the authors': mixers alone, twice as many, and RMS "
        "norms)",
        "convolutions have no bias",
        "the recipe benchmark is as wide inside as outside (the authors': twice as wide)",
        "the recipe log-linear (Guo et al. 2025, Log-Linear Attention, arXiv 2506.04761) has 15 levels, of which the "
        "last holds all that is older (the authors': as many as the text needs)",
    ),
    exact_limit="no finite limit; with rates A of 0 it is linear attention without a normaliser, of values times steps",
    parity=(
        "Mamba-2 of transformers (tests/family/test_kernel_members.py)",
        "log-linear attention of flash-linear-attention (tests/kernels/test_levels.py)",
    ),
    use_when="you want a constant state in the manner of state-space models, with few keys for many values",
    avoid_when="overwriting or exact recall counts",
    recipes={
        "tiny": _recipe_of_mamba2(ModelShape(32, 2, 4), Space(4, 8, 16)),
        "small": _recipe_of_mamba2(ModelShape(256, 4, 8, hidden_dim=704), Space(8, 64, 64)),
        "benchmark": _recipe_of_mamba2(ModelShape(256, 4, 4, activation="relu"), Space(4, 64, 64)),
        "log-linear": _recipe_of_mamba2(ModelShape(256, 4, 8, hidden_dim=704), Space(8, 64, 64), levels=15),
        "paper": _recipe_of_mamba2(ModelShape(2560, 32, 80), Space(80, 128, 64)),
    },
)


# RWKV-7: a state that forgets by channel, erases under one key and writes under another, behind token shifts.


def _recipe_of_rwkv7(shape: ModelShape, ranks: tuple[int, int, int, int] = (64, 64, 128, 32)) -> Recipe:
    """Return the recipe; ``ranks``: of the decay, the rate, the gate and the mixing of values."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.convolutions import ChannelMix
        from kinformer.mixers.recurrent import RWKV7

        decay, rate, gate, value = ranks
        mixer = RWKV7.Config(
            num_heads=shape.num_heads, decay_rank=decay, rate_rank=rate, gate_rank=gate, value_residual=True,
            value_rank=value,
        )  # fmt: skip
        config = decoder(shape, vocab or 256, mixer=mixer)
        layers = (
            layer.replace(feed_forward=ChannelMix(hidden_dim=shape.hidden_dim or 4 * shape.dim))
            for layer in config.layers
        )
        return config.replace(layers=tuple(layers))

    return recipe


RWKV7 = Member(
    name="rwkv7",
    title="RWKV-7",
    paper="Peng et al. 2025, RWKV-7 Goose with Expressive Dynamic State Evolution (arXiv 2503.14456)",
    year=2025,
    axes=("kernel", "recurrence", "projection"),
    causal=True,
    growth="constant",
    departures=(
        "the first layer has the weights of mixing values, too, which have no effect there (the authors' has none)",
        "shifts and biases begin as in a middle layer of the authors', weights as in all members",
    ),
    exact_limit="no finite limit; where nothing is erased, and without shifts, it is linear attention with a decay by "
    "channel",
    parity=(
        "the layer of flash-linear-attention with the naive form of its kernel; two layers, the second with the values "
        "of the first (tests/mixers/test_rwkv7.py), and the feed-forward (tests/mixers/test_channel_mix.py)",
    ),
    use_when="a constant state must follow what a text changes, with keys to erase apart from keys to write",
    avoid_when="training speed decides",
    recipes={
        "tiny": _recipe_of_rwkv7(ModelShape(32, 2, 2), (8, 8, 8, 8)),
        "small": _recipe_of_rwkv7(ModelShape(256, 4, 4), (32, 32, 64, 16)),
        "benchmark": _recipe_of_rwkv7(ModelShape(256, 4, 4), (32, 32, 64, 16)),
        "paper": _recipe_of_rwkv7(ModelShape(768, 12, 12)),
    },
)
