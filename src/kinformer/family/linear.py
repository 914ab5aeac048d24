"""Kernel attention: linear attention, delta rules and decays, with a state of constant size."""

from __future__ import annotations

from kinformer.family.record import (
    POST_NORM,
    Member,
    Recipe,
    Settings,
    llama,
    part,
    sizes,
    translating,
    unconfirmed,
    usual_training,
    xl_training,
)

_RELU: Settings = {"activation": "relu"}


# Linear Transformer: "Transformers are RNNs", linear attention with the feature map elu + 1.

_LINEAR: Settings = {
    "mixer": "linear",
    "position": "sinusoidal",
    "head": part("language", tied=False, bias=True),
    "initialisation": {"scheme": "framework"},
}


def _images(depth: int, height: int, width: int, channels: int) -> Recipe:
    """Return the authors' model of images: half of the features are sines of the place; a mixture of ten logistics."""
    read = part("pixels", height=height, width=width, channels=channels, places="sinusoid", concatenate=True)
    return Recipe(256, depth, 8, _LINEAR, POST_NORM, input=read, position="none", head="logistics")


LINEAR_TRANSFORMER = Member(
    name="linear-transformer",
    title="Linear Transformer",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236)",
    axes=("kernel", "recurrence"),
    growth="constant",
    departures=(
        "pre-norm, and GELU in the recipes tiny and small; the recipe paper is post-norm with ReLU as published",
        "of text the sinusoid is added to the embedding, and the head is a softmax over the vocabulary; the authors' "
        "models of images (paper-mnist, paper-cifar) concatenate two halves and mix ten logistics",
        "the first value of an image is predicted too, from a learned vector (the authors' code: not at all); no "
        "dropout unless asked for (the authors: 0.1)",
        usual_training("paper", why="the authors trained models of these sizes on images alone"),
    ),
    exact_limit="none finite (elu + 1 is not the exponential); quadratic features give the squared kernel exactly",
    parity=("pytorch-fast-transformers 0.4.0, the authors' code (tests/family/test_parity.py)",),
    results=("capacity",),
    use_when="speed and a constant state matter more than exact recall",
    avoid_when=(
        "many things must be recalled exactly, or texts are far longer than in training: its sum never forgets"
    ),
    training={  # the authors' code
        name: {
            "steps": steps,
            "batch_size": rows,
            "optimizer": "radam",
            "lr": lr,
            "schedule": "constant",
            "warmup": 0,
            "beta2": 0.999,
            "weight_decay": 0.01,
            "clip": 0.0,
        }
        for name, steps, rows, lr in (("paper-mnist", 937_500, 16, 1e-4), ("paper-cifar", 500_000, 10, 2e-4))
    },
    recipes={
        **sizes(_LINEAR, benchmark=_RELU),
        "paper": Recipe(256, 8, 8, _LINEAR, POST_NORM),
        "paper-mnist": _images(8, 28, 28, 1),
        "paper-cifar": _images(16, 32, 32, 3),
    },
)


# Fast Weight Transformer: DPFP features, the delta rule, sum normalisation.

_FAST_WEIGHTS: Settings = {
    "mixer": part("linear", feature_map="sum_normalised", rule="delta", normaliser="none", scale=True, bias=False),
    "head": part("language", tied=True, bias=True),
    "initialisation": {"residual": "plain"},
}

FAST_WEIGHTS = Member(
    name="fast-weights",
    title="Fast Weight Transformer (delta rule)",
    paper="Schlag et al. 2021, Linear Transformers Are Secretly Fast Weight Programmers (arXiv 2102.11174)",
    axes=("kernel", "recurrence"),
    growth="constant",
    departures=(
        "pre-norm, and GELU in the recipes tiny and small; the recipe paper is post-norm with ReLU as published",
        "the sum normalisation adds 1e-5 to the sum (the authors' language models had none at first)",
        "the softmax over the vocabulary is not adaptive",
        "paper: 96 rows in a batch (the authors' script: 8 a device); no dropout (theirs: 0.1)",
        unconfirmed("paper", what="the number of rows"),
        "outer products through an activation (equations 1 to 3) are the recipes outer, whose tokens are computed one "
        "after the other",
    ),
    exact_limit="no finite limit; with the sum rule and the same features it is linear attention",
    parity=("lmtool-fwp, the authors' code, and labml-nn 0.5.1 (tests/family/test_parity.py)",),
    results=("capacity",),
    use_when="facts are overwritten, and the state must stay constant",
    avoid_when="training must be the fastest: a plain sum is faster, and `gated-deltanet` forgets as well",
    training={  # the authors' scripts of WikiText-103
        "paper": xl_training(500_000, 96, 256, warmup=2000)
    },
    recipes={
        **sizes(_FAST_WEIGHTS, benchmark=_RELU),
        # fast weights behind an activation (equations 1 to 3)
        "tiny-outer": Recipe(32, 2, 2, mixer="outer_product"),
        "outer": Recipe(256, 4, 4, mixer="outer_product"),
        "paper": Recipe(128, 16, 8, _FAST_WEIGHTS, POST_NORM, hidden_dim=2048),
    },
)


# Performer: linear attention over positive orthogonal random features of the softmax kernel (FAVOR+).


def _performer(features: int | None = None) -> Settings:
    return {"mixer": part("linear", feature_map=part("favor", features=features), eps=1e-30), "position": "sinusoidal"}


PERFORMER = Member(
    name="performer",
    title="Performer (FAVOR+)",
    paper="Choromanski et al. 2021, Rethinking Attention with Performers (arXiv 2009.14794)",
    axes=("kernel",),
    growth="constant",
    departures=(
        "the authors' code subtracts from exponents a maximum over all keys, later ones included; here every key has "
        "its own, and the state carries a running one",
        "random features are redrawn every 1000 training steps from the run's seed (the authors' code: as often as "
        "its caller wants)",
        "pre-norm, and GELU in the recipes tiny and small",
        usual_training("paper"),
    ),
    exact_limit="softmax attention as the number of random features grows; its error falls as one over their root",
    parity=("performer-pytorch 1.1.4: features, and attention over them, in float64 (tests/family/test_performer.py)",),
    results=("approximation",),
    use_when="a softmax model is to be approximated with a constant state, or you study random features",
    avoid_when="you train from scratch: a fixed feature map learns more in the same time",
    recipes={
        **sizes(tiny=_performer(), small=_performer(128), benchmark=_performer(64) | _RELU),
        "paper": Recipe(512, 6, 8, _performer(256), _RELU),
    },
)


# Random Feature Attention: gated linear attention over random Fourier features of normalised queries and keys.

_RFA: Settings = {
    "mixer": part("linear", feature_map="random_fourier", decay="sigmoid", floor=0.1),
    "position": "sinusoidal",
}
_CROSS = part("cross_linear", feature_map="random_fourier", floor=0.1)

RFA = Member(
    name="rfa",
    title="Random Feature Attention (RFA-Gate)",
    paper="Peng et al. 2021, Random Feature Attention (arXiv 2103.02143)",
    axes=("kernel", "recurrence"),
    growth="constant",
    departures=(
        "random features are drawn once (the authors: in every training step, from a pool of 500)",
        "the normaliser is at least 0.1, as products of sines and cosines may be negative (the authors' code: 1, for "
        "features 0.1 [sin, cos] of any number)",
        "the softmax over the vocabulary is not adaptive, and the embedding is tied to it",
        "translating recipes have the gate",
        usual_training("paper"),
    ),
    exact_limit="softmax attention of normalised queries and keys without the gate, as the number of features grows",
    parity=("the authors' code, without its gate (tests/family/test_kernel_members.py)",),
    results=("approximation",),
    use_when="you study random features of softmax attention with a gate",
    avoid_when="you need recall: its gate begins half open (decay.temperature = 16 mends that)",
    recipes={
        **sizes(_RFA, benchmark=_RELU),
        "paper": Recipe(512, 6, 8, _RFA, _RELU),
        # section 4.2: an encoder of softmax attention, and random features between both
        "tiny-translate": Recipe(32, 2, 2, _RFA, translating(cross=_CROSS)),
        "translate": Recipe(512, 6, 8, _RFA, _RELU, translating(0.1, cross=_CROSS)),
    },
)


# RetNet: linear attention with a fixed decay per head, rotary positions, and gated norms of heads (retention).


def _retnet(value_dim: int | None) -> Settings:
    return {
        "mixer": part(
            "linear",
            value_dim=value_dim,
            feature_map="identity",
            decay="fixed",
            normaliser="none",
            scale=True,
            position=part("rope", layout="interleaved"),
            head_norm="layer",
            gate=True,
            bias=False,
        )
    }


RETNET = Member(
    name="retnet",
    title="RetNet (retention)",
    paper="Sun et al. 2023, Retentive Network: A Successor to Transformer for Large Language Models (arXiv 2307.08621)",
    axes=("kernel", "position", "recurrence"),
    growth="constant",
    departures=(
        "positions turn queries and keys by the paper's angles, 10000^(-2 i / head_dim) (the authors' code spaces them "
        "from 1 to 1 / 10000); neither has xPos's growing scale, as the decay takes its place",
        "the recipe paper is without dropout (the authors': 0.1)",
        "retention scores are not normalised row by row: the norm of heads behind them undoes any factor",
        "a GELU feed-forward, and layer norms (the authors' later code has gated ones, and RMS norms)",
    ),
    exact_limit="no finite limit; without decay and rotation it is linear attention without a normaliser",
    parity=("flash-linear-attention's RetNet, whole (tests/interop/test_fla_folders.py)",),
    use_when="you want a constant state, stable over any length, with the simplest decay",
    avoid_when="how fast to forget depends on the text: `gla` and `gated-deltanet` learn that",
    training={  # section 3.1: batches of 4 million tokens
        "paper": {
            "steps": 25_000,
            "batch_size": 2048,
            "length": 2048,
            "lr": 6e-4,
            "schedule": "linear",
            "warmup": 375,
            "beta2": 0.98,
            "weight_decay": 0.05,
            "clip": 2.0,
        }
    },
    recipes={
        "tiny": Recipe(32, 2, 2, _retnet(32), hidden_dim=64),
        "small": Recipe(256, 4, 4, _retnet(128), hidden_dim=512),
        "benchmark": Recipe(256, 4, 4, _retnet(None), _RELU),
        "paper": Recipe(2048, 24, 8, _retnet(512), hidden_dim=4096),
    },
)


# Gated DeltaNet: the delta rule with a decay per token and head, short convolutions, and gated norms of heads.

_DELTANET: Settings = {
    "mixer": part(
        "linear",
        feature_map="unit",
        rule="delta",
        decay="softplus",
        normaliser="none",
        scale=True,
        convolution=4,
        head_norm="rms",
        gate=True,
        bias=False,
    )
}

GATED_DELTANET = Member(
    name="gated-deltanet",
    title="Gated DeltaNet",
    paper="Yang et al. 2025, Gated Delta Networks: Improving Mamba2 with Delta Rule (arXiv 2412.06464)",
    axes=("kernel", "recurrence", "projection"),
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
    training={  # section 4: 100 billion tokens, half a million in a batch
        "paper": {"steps": 190_735, "batch_size": 128, "length": 4096, "lr": 4e-4, "warmup": 1907, "weight_decay": 0.1}
    },
    recipes={
        **sizes(_DELTANET, benchmark=_RELU),
        "hybrid": Recipe(256, 4, 4, _DELTANET, {"layers.3::4.mixer": part("softmax", position="rope")}),
        "paper": Recipe(2048, 24, 6, _DELTANET, {"mixer.head_dim": 256, "mixer.value_dim": 512}),
    },
)


# Comba: Gated DeltaNet whose keys read the state before it decays, with feedback to queries.

_COMBA: Settings = {"mixer": _DELTANET["mixer"] | {"rule": "comba", "gate_activation": "sigmoid"}}

COMBA = Member(
    name="comba",
    title="Comba",
    paper="Hu et al. 2025, Improving Bilinear RNNs with Closed-loop Control (arXiv 2506.02475)",
    axes=("kernel", "recurrence"),
    growth="constant",
    departures=(
        "values are as wide as keys but in the recipe paper (the authors': twice as wide)",
        "a GELU feed-forward and layer norms around it (the authors': gated ones, and RMS norms)",
        "the share of the state that a key erases is below its beta (flash-linear-attention, which holds the authors' "
        "code, norms the erasing key again, so that the share is beta there; an import keeps that)",
        "the correction of queries begins at 0.02 in all recipes, as the authors advise for small models (theirs: 1)",
        "paper: 21 layers of 6 heads (the authors' configuration: 24 layers of 4 heads)",
    ),
    exact_limit="no finite limit; without decay, without a correction and with the whole feedback it is the delta rule",
    parity=(
        "the recurrence of flash-linear-attention's kernel (tests/mixers/test_rules.py)",
        "flash-linear-attention's Comba, whole, written down from its formulas (tests/interop/test_fla_formulas.py)",
    ),
    use_when="you compare rules with `gated-deltanet`: the decay and the correction of the state stand apart here",
    avoid_when="you train on a GPU: this rule has no Triton kernel",
    training={  # the authors' script: 100 billion tokens, a million in a batch
        "paper": {"steps": 102_400, "batch_size": 512, "length": 2048, "lr": 3e-4, "warmup": 1024, "weight_decay": 0.01}
    },
    recipes={
        **sizes(_COMBA, benchmark=_RELU),
        "paper": Recipe(2048, 21, 6, _COMBA, {"mixer.head_dim": 256, "mixer.value_dim": 512}),
    },
)


# Kimi Delta Attention: the gated delta rule with a decay for every channel, and gates of low rank.


def _kda(gate_rank: int) -> Settings:
    """Return the settings of KDA; ``gate_rank`` is the width of a head."""
    more = {"decay": "softplus_channels", "gate_rank": gate_rank, "gate_activation": "sigmoid"}
    return {"mixer": _DELTANET["mixer"] | more}


def _latent(head_dim: int, rotary_dim: int, latent_dim: int) -> Settings:
    """Return latent attention without positions, whose heads still share some features of their keys."""
    return part("latent", head_dim=head_dim, rotary_dim=rotary_dim, latent_dim=latent_dim, position="none")


KDA = Member(
    name="kda",
    title="Kimi Delta Attention (KDA)",
    paper="Kimi Team 2025, Kimi Linear: An Expressive, Efficient Attention Architecture (arXiv 2510.26692)",
    axes=("kernel", "recurrence", "projection"),
    growth="constant",
    departures=(
        "KDA in all layers, GELU feed-forwards and layer norms around them in all recipes but hybrid and paper (the "
        "authors': gated feed-forwards, mostly mixtures of experts, and RMS norms)",
        "the state of the latent attention in the recipes hybrid and paper grows with the text",
        "paper: Muon at a constant rate (the authors': MuonClip, whose rate falls at the end)",
    ),
    exact_limit="no finite limit; with equal decays of a head's channels it is Gated DeltaNet, whose gate has low rank",
    parity=(
        "Kimi Linear's delta attention of transformers (tests/family/test_kernel_members.py)",
        "Kimi Linear's latent attention of transformers (tests/mixers/test_latent.py)",
        "the naive form of flash-linear-attention (tests/kernels/test_delta_steps.py)",
    ),
    use_when="`gated-deltanet` forgets too much at once: here every channel has its own decay",
    avoid_when="speed decides: decays by channel cost time, as measured",
    training={  # section 5: batches of 32 million tokens
        "paper": {
            "batch_size": 8192,
            "length": 4096,
            "optimizer": "muon",
            "lr": 1.1e-3,
            "schedule": "constant",
            "weight_decay": 0.1,
        }
    },
    recipes={
        **sizes(_kda(64), tiny=_kda(16), benchmark=_RELU),
        "hybrid": Recipe(256, 4, 4, _kda(64), {"layers.3::4.mixer": _latent(64, 32, 128)}),
        # Kimi Linear: three KDA layers to one of latent attention, which the last is, too; experts behind all but one
        "paper": Recipe(2304, 27, 32).but(
            _kda(128),
            llama(1e-5, "swiglu", hidden_dim=9216),
            {
                "mixer.head_dim": 128,
                "layers.3::4.mixer": _latent(128, 64, 512),
                "layers.-1.mixer": _latent(128, 64, 512),
                "layers.1:.feed_forward": part(
                    "experts",
                    num_experts=256,
                    topk=8,
                    hidden_dim=1024,
                    shared_dim=1024,
                    router="sigmoid",
                    scale=2.446,
                    balance=0.0,
                    bias_rate=0.001,
                ),
            },
            initialisation={"residual": "plain"},
            vocab_size=163_840,
        ),
    },
)


# Gated DeltaNet-2: Kimi Delta Attention with an erasing gate and a writing gate for every channel.


def _gdn2(gate_rank: int) -> Settings:
    """Return the settings of Gated DeltaNet-2; ``gate_rank`` is the width of a head."""
    return {"mixer": _kda(gate_rank)["mixer"] | {"rule": "gdn2"}}


GDN2 = Member(
    name="gdn2",
    title="Gated DeltaNet-2",
    paper="Hatamizadeh et al. 2026, Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention "
    "(arXiv 2605.22791)",
    axes=("kernel", "recurrence", "projection"),
    growth="constant",
    departures=(
        "the low-rank gate of the outputs is without a bias",
        "a GELU feed-forward and layer norms around it (the authors': gated ones, and RMS norms)",
        "the recipe paper has the sizes of flash-linear-attention's layer, and as many layers as Gated DeltaNet's",
        usual_training("paper"),
    ),
    exact_limit="no finite limit; where both gates are one number for all channels it is Kimi Delta Attention",
    parity=(
        "the naive form of flash-linear-attention (tests/kernels/test_delta_steps.py, tests/mixers/test_rules.py)",
    ),
    results=("delta_rules",),
    use_when="`kda` erases too much where it writes: here each channel has a gate for erasing and one for writing",
    avoid_when="parameters are few: the two gates have as many weights as keys and values",
    recipes={
        "tiny": Recipe(32, 2, 2, _gdn2(16)),
        "small": Recipe(256, 4, 4, _gdn2(64), hidden_dim=704),
        "benchmark": Recipe(256, 4, 4, _gdn2(64), _RELU),
        "paper": Recipe(2048, 24, 16, _gdn2(128), {"mixer.head_dim": 128}),
    },
)


# MesaNet: gated linear attention read through the inverse of its keys' covariance.

_MESA: Settings = {
    "mixer": part(
        "linear",
        feature_map="unit",
        rule="mesa",
        decay=part("sigmoid", coupled=False),
        normaliser="none",
        convolution=4,
        head_norm="rms",
        bias=False,
    )
}

MESANET = Member(
    name="mesanet",
    title="MesaNet",
    paper="von Oswald et al. 2025, MesaNet: Sequence Modeling by Locally Optimal Test-Time Training (arXiv 2506.05233)",
    axes=("kernel", "recurrence"),
    growth="constant",
    departures=(
        "conjugate gradients divide by the numbers themselves (the authors' code: plus 1e-5), and begin at 0 while "
        "generating as in training",
        "a GELU feed-forward and layer norms around it (the authors': gated ones, and RMS norms)",
        usual_training("paper"),
    ),
    exact_limit="no finite limit; with as many iterations as a head has features it is one exact solve, and with a "
    "large penalty linear attention",
    parity=(
        "the exact naive form of flash-linear-attention (tests/mixers/test_rules.py)",
        "flash-linear-attention's MesaNet, whole, written from its formulas (tests/interop/test_fla_formulas.py)",
    ),
    use_when="a constant state has to give the best linear map of keys to values at every token",
    avoid_when="time decides: every iteration costs as much as linear attention",
    recipes={
        **sizes(_MESA, tiny={"mixer.iterations": 16}, benchmark=_RELU),
        "paper": Recipe(2048, 24, 16, _MESA, {"mixer.head_dim": 128}),
    },
)


# TTT-Linear: the state is a linear model, which takes a step of gradient descent for every mini-batch of tokens.

_TTT: Settings = {"mixer": "ttt"}
_TTT_LLAMA: Settings = llama(1e-6, "swiglu", hidden_dim=5504) | {"head": part("language", tied=True)}
_TTT_TRAINING: Settings = {  # appendix C: half a million tokens in a batch, a warm-up of a tenth of the steps
    "steps": 50_000, "batch_size": 256, "length": 2048, "lr": 1e-3, "warmup": 5000, "min_lr_ratio": 0.01,
    "weight_decay": 0.1,
}  # fmt: skip

TTT = Member(
    name="ttt",
    title="TTT-Linear",
    paper="Sun et al. 2024, Learning to (Learn at Test Time): RNNs with Expressive Hidden States (arXiv 2407.04620)",
    axes=("recurrence",),
    growth="constant",
    departures=(
        "a chunk may end anywhere in a mini-batch (the authors' code: only where it is followed by single tokens)",
        "a GELU feed-forward and layer norms around it in all recipes but paper and paper-mamba",
    ),
    exact_limit="no finite limit; without the inner norm it is the delta rule with mini-batches of one token, and "
    "linear attention with a single mini-batch",
    parity=(
        "the gradient of every token by autograd, in float64 (tests/mixers/test_ttt.py)",
        "the authors' TTT-Linear, whole, written from its formulas (tests/interop/test_ttt_folders.py)",
    ),
    use_when="you study states that learn: the model in the state, its loss and its learning rate are in sight",
    avoid_when="time decides: the mini-batches of a text are computed one after the other",
    training=dict.fromkeys(("paper", "paper-mamba"), _TTT_TRAINING),
    recipes={
        **sizes(_TTT),
        "paper": Recipe(2048, 24, 32, _TTT, _TTT_LLAMA, vocab_size=32_000),
        "paper-mamba": Recipe(
            2048, 24, 32, _TTT, _TTT_LLAMA, {"mixer.gate": True, "mixer.convolution": 4}, vocab_size=32_000
        ),
    },
)


# GLA: gated linear attention, whose state decays by token and channel.

_GLA: Settings = {
    "mixer": part(
        "linear",
        feature_map="identity",
        decay="low_rank",
        normaliser="none",
        scale=True,
        head_norm="layer",
        gate=True,
        bias=False,
    )
}

GLA = Member(
    name="gla",
    title="Gated linear attention (GLA)",
    paper="Yang et al. 2024, Gated Linear Attention Transformers with Hardware-Efficient Training (arXiv 2312.06635)",
    axes=("kernel", "recurrence"),
    growth="constant",
    departures=(
        "a GELU feed-forward and layer norms around it (the authors': gated ones, and RMS norms)",
        "the output gate is without a bias, and the norm of heads without weights",
        "keys are as wide as values in the recipe benchmark (the paper's: half as wide)",
    ),
    exact_limit="no finite limit; without decay it is linear attention without a normaliser",
    parity=("flash-linear-attention's GLA, whole (tests/interop/test_fla_folders.py)",),
    use_when="a small constant state has to recall, with decays that the text decides",
    avoid_when="facts are overwritten: the delta rule replaces them, this sum does not",
    training={  # section 5.1: 15 billion tokens, half a million in a batch
        "paper": {"steps": 28_610, "batch_size": 256, "length": 2048, "lr": 3e-4, "warmup": 954, "weight_decay": 0.01}
    },
    recipes={
        "tiny": Recipe(32, 2, 2, _GLA, {"mixer.head_dim": 8, "mixer.value_dim": 16}),
        "small": Recipe(256, 4, 4, _GLA, {"mixer.head_dim": 32, "mixer.value_dim": 64}),
        "benchmark": Recipe(256, 4, 4, _GLA, _RELU),
        "paper": Recipe(1024, 24, 4, _GLA, {"mixer.head_dim": 128, "mixer.value_dim": 256}),
    },
)


def _mamba2(state: int, head: int) -> Settings:
    """Return the settings of a state space per head that all heads write to and read from by the same keys and queries.
    States have the sizes ``state`` (keys and queries) x ``head`` (values)."""
    return {
        "mixer": part(
            "linear",
            head_dim=state,
            value_dim=head,
            key_heads=1,
            feature_map="identity",
            decay=part("softplus", coupled=True),
            normaliser="none",
            convolution=4,
            skip=True,
            head_norm="rms_group",
            gate=True,
            gate_first=True,
            bias=False,
        )
    }


MAMBA2 = Member(
    name="mamba2",
    title="Mamba-2",
    paper="Dao and Gu 2024, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured "
    "State Space Duality (arXiv 2405.21060)",
    axes=("kernel", "recurrence", "projection"),
    growth="constant",
    departures=(
        "a GELU feed-forward behind every mixer, and layer norms (the authors': mixers alone, twice as many, and RMS "
        "norms)",
        "convolutions have no bias",
        "the recipe benchmark is as wide inside as outside (the authors': twice as wide)",
        "the recipe log-linear (Guo et al. 2025, Log-Linear Attention, arXiv 2506.04761) has 15 levels, and the last "
        "level holds all older tokens (the authors': as many levels as the text needs)",
    ),
    exact_limit="no finite limit; with rates A of 0 it is linear attention without a normaliser, of values times steps",
    parity=(
        "Mamba-2 of transformers (tests/family/test_kernel_members.py)",
        "Granite 4 of transformers, whole (tests/interop/test_decoders.py)",
        "log-linear attention of flash-linear-attention (tests/kernels/test_levels.py)",
    ),
    use_when="you want a constant state in the manner of state-space models, with few keys for many values",
    avoid_when="overwriting or exact recall counts",
    training={"paper": {"length": 2048, "lr": 8e-4, "min_lr_ratio": 0.0125, "weight_decay": 0.1}},  # as Mamba's
    recipes={
        "tiny": Recipe(32, 2, 4, _mamba2(8, 16)),
        "small": Recipe(256, 4, 8, _mamba2(64, 64), hidden_dim=704),
        "benchmark": Recipe(256, 4, 4, _mamba2(64, 64), _RELU),
        "log-linear": Recipe(256, 4, 8, _mamba2(64, 64), {"mixer.levels": 15}, hidden_dim=704),
        "paper": Recipe(2560, 32, 80, _mamba2(128, 64)),
    },
)


# RWKV-7: a state that forgets by channel, erases under one key and writes under another, behind token shifts.


def _rwkv7(decay: int, rate: int, gate: int, value: int) -> Settings:
    """Return the settings; the arguments are the ranks of the decay, the rate, the gate and the mixing of values."""
    ranks = {"decay_rank": decay, "rate_rank": rate, "gate_rank": gate, "value_rank": value}
    return {"mixer": part("rwkv7", value_residual=True, **ranks), "feed_forward": "channel_mix"}


RWKV7 = Member(
    name="rwkv7",
    title="RWKV-7",
    paper="Peng et al. 2025, RWKV-7 Goose with Expressive Dynamic State Evolution (arXiv 2503.14456)",
    axes=("kernel", "recurrence", "projection"),
    growth="constant",
    departures=(
        "the first layer also has the weights of mixing values, without an effect there (the authors' is without them)",
        "shifts and biases begin as in a middle layer of the authors', weights as in all members",
    ),
    exact_limit="no finite limit; where nothing is erased, and without shifts, it is linear attention with a decay by "
    "channel",
    parity=(
        "the layer of flash-linear-attention with the naive form of its kernel; two layers, the second with the values "
        "of the first (tests/mixers/test_rwkv7.py), and the feed-forward (tests/mixers/test_channel_mix.py)",
    ),
    use_when="a constant state must follow the changes in a text, with keys to erase apart from keys to write",
    avoid_when="training speed decides",
    training={  # the authors' script for the Pile: 332 billion tokens
        "paper": {
            "steps": 337_845,
            "batch_size": 240,
            "length": 4096,
            "lr": 8e-4,
            "warmup": 10,
            "beta2": 0.99,
            "min_lr_ratio": 0.0375,
        }
    },
    recipes={
        **sizes(_rwkv7(32, 32, 64, 16), tiny=_rwkv7(8, 8, 8, 8)),
        "paper": Recipe(768, 12, 12, _rwkv7(64, 64, 128, 32)),
    },
)

MEMBERS = (
    LINEAR_TRANSFORMER, FAST_WEIGHTS, PERFORMER, RFA, RETNET, GATED_DELTANET, COMBA, KDA, GDN2, MESANET, TTT, GLA,
    MAMBA2, RWKV7,
)  # fmt: skip
