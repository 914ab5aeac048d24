"""Members whose tokens take different numbers of layers, or whose heads look differently far back."""

from __future__ import annotations

from kinformer.family.record import (
    ENCODER,
    POST_NORM,
    T5_TRAINING,
    Member,
    Recipe,
    Settings,
    drop,
    noam,
    part,
    sizes,
    translating,
    unconfirmed,
)

# Universal Transformer: one layer is applied several times, to each token as often as the token needs.


def _stack(steps: int, bias: float | None = 1.0) -> Settings:
    """Return the stack of at most ``steps`` steps, fewer for a token that halts; ``bias`` None: without halting."""
    return part("universal", steps=steps, halting=None if bias is None else part("act", bias=bias))


_UNIVERSAL: Settings = {"input": part("tokens", scale=True), "position": "timing", "activation": "relu"}
_LEARNED: Settings = _UNIVERSAL | {"position": part("timing", step="learned")}
_BEHIND: Settings = {"residual": "post", "norm": None}
_CONVOLVED: Settings = {"feed_forward": "separable_convolution"}
_ENCODER: Settings = {**ENCODER, **_UNIVERSAL, "residual": "pre", "norm": "layer_norm", "embedding_norm": None}


def _translating(stack: Settings, dropout: float = 0.0) -> Settings:
    """Return the settings of tied layers on both sides."""
    return {**_LEARNED, **translating(dropout), "stack": stack, "encoder.stack": stack}


UNIVERSAL = Member(
    name="universal",
    title="Universal Transformer (adaptive computation time)",
    paper="Dehghani et al. 2019, Universal Transformers (ICLR, arXiv 1807.03819)",
    axes=("depth", "position"),
    departures=(
        "the decoder alone, as a language model, except for the recipes encoder and translate",
        "norms stand before sublayers and after the last step, as in tensor2tensor; in the paper, and in the recipes "
        "post-norm, norms stand after sublayers",
        "the vector of a halted token is copied, as in the paper, so that its work is saved; in tensor2tensor the "
        "vector that other tokens see continues to change (stack.halting.halted=evolving)",
        "halting weights begin at zero, so that at first all tokens take equally many steps",
        "recipe small has as many layers as other members of that budget, used twice",
    ),
    exact_limit="without halting (stack.halting=null) a stack of tied layers of exact attention",
    parity=("tensor2tensor: adaptive computation time (tests/stacks/test_universal.py)",),
    use_when="a problem needs the same step again and again, and tokens need different numbers of steps",
    avoid_when="text is plain: untied layers learn more in the same time",
    training={  # tensor2tensor's universal_transformer_base
        name: noam(1024, 8000, lr=2 * 1024**-0.5 * 8000**-0.5, beta2=0.997)
        for name in ("paper", "paper-post-norm", "paper-act")
    },
    recipes={
        "tiny": Recipe(32, 1, 2, _LEARNED, stack=_stack(3, -0.5)),
        "small": Recipe(256, 4, 4, _UNIVERSAL, stack=_stack(2)),
        "benchmark": Recipe(256, 1, 4, _UNIVERSAL, stack=_stack(4)),
        "tiny-post-norm": Recipe(32, 1, 2, _LEARNED, _BEHIND, stack=_stack(3, -0.5)),
        "paper-post-norm": Recipe(1024, 1, 16, _LEARNED, _BEHIND, drop(0.3), stack=_stack(6, None)),
        "paper": Recipe(1024, 1, 16, _LEARNED, drop(0.3), stack=_stack(6, None)),
        "tiny-convolution": Recipe(32, 1, 2, _LEARNED, _CONVOLVED, stack=_stack(3, -0.5)),
        "convolution": Recipe(256, 4, 4, _UNIVERSAL, _CONVOLVED, stack=_stack(2)),
        "tiny-encoder": Recipe(32, 1, 2, _ENCODER, stack=_stack(3, -0.5)),
        "encoder": Recipe(256, 4, 4, _ENCODER, stack=_stack(2)),
        "tiny-translate": Recipe(32, 1, 2, _translating(_stack(3, -0.5))),
        "translate": Recipe(1024, 1, 16, _translating(_stack(6, None), dropout=0.3)),
        "paper-act": Recipe(1024, 1, 16, _LEARNED, drop(0.3), stack=_stack(12)),
    },
)


# Depth-adaptive Transformer: a decoder with an exit at every layer, and a learnt rule that chooses the exit of a token.


def _exits(rule: object, tied: bool = False, dropout: float = 0.0, **more: object) -> Settings:
    """Return the settings of a decoder with an exit at every layer; ``tied``: the exits share the head."""
    classifiers = "tied" if tied else "separate"
    return {
        **POST_NORM,
        "input": part("tokens", scale=True),
        "position": "sinusoidal",
        "head": part("language", tied=tied),
        "norm": None,
        "initialisation": {"scheme": "xavier"},
        "stack": part("exits", rule=rule, weights="uniform", classifiers=classifiers, **more),
        **drop(dropout),
    }


_SEQUENCE = _exits("sequence_multinomial", tied=True)
"""One exit for the whole translation is predicted from the source (3.2.1)."""

DEPTH_ADAPTIVE = Member(
    name="depth-adaptive",
    title="Depth-Adaptive Transformer (learnt exits)",
    paper="Elbayad et al. 2020, Depth-Adaptive Transformer (ICLR, arXiv 1910.10073)",
    axes=("depth",),
    departures=(
        "the decoder alone, as a language model, except for the recipes translate, whose encoder is as wide as the "
        "decoder (512 and 256 in the paper) and where one exit for the whole translation is predicted from its "
        "source; other rules can be used there, too (stack.rule=geometric)",
        "one run of training, which the loss of the exit rule joins half-way (stack.rule.since); two in the paper",
        "no dropout outside of the recipes paper",
        "the recipes paper have the usual learning rate: the paper does not state it",
    ),
    exact_limit="without a rule (stack.rule=null) it is exact attention of all layers",
    use_when="easy tokens should leave early, by a learnt rule",
    avoid_when="tokens use most layers anyway: one exit for all tokens is as good",
    training={  # section 4.1: 8,000 tokens in a batch
        name: {"steps": 50_000, "batch_size": 16, "length": 512, "weight_decay": 0.0, "clip": 3.0}
        for name in ("paper", "paper-multinomial", "paper-tied", "paper-mixed")
    },
    recipes={
        "tiny": Recipe(32, 3, 2, _exits("geometric")),
        "small": Recipe(256, 4, 4, _exits("geometric")),
        "tiny-translate": Recipe(32, 3, 2, _SEQUENCE, translating()),
        "translate": Recipe(256, 6, 4, _SEQUENCE, translating(0.3)),
        "benchmark": Recipe(256, 4, 4, _exits("geometric")),
        "paper": Recipe(256, 6, 4, _exits("geometric", dropout=0.3)),
        "paper-multinomial": Recipe(256, 6, 4, _exits("multinomial", dropout=0.3)),
        "paper-tied": Recipe(256, 6, 4, _exits("geometric", tied=True, dropout=0.3)),
        # exits are drawn in training, and confidence takes the place of a learnt rule
        "paper-mixed": Recipe(
            256, 6, 4, _exits(part("softmax_response", measure="maximum"), dropout=0.3, training="mixed", samples=6)
        ),
    },
    objective="exits",
)


# CALM: a token leaves a decoder as soon as its prediction is confident enough, by a calibrated threshold.


def _calm(rule: str = "softmax_response", decay_tokens: float | None = None) -> Settings:
    stack = part("exits", rule=part(rule, decay_tokens=decay_tokens))
    return {"mixer": part("softmax", position="t5"), "stack": stack}


def _paper(rule: str) -> Recipe:
    """Return T5-small's decoder (1.1), whose thresholds decay with tau = 4 over texts of 512 tokens (section 3.4)."""
    settings = _calm(rule, decay_tokens=512 / 4)
    return Recipe(512, 8, 6, settings, {"mixer.head_dim": 64}, hidden_dim=1024, vocab_size=32128)


_PAPERS = ("paper", "paper-saturation", "paper-classifier")

CALM = Member(
    name="calm",
    title="CALM (confident early exits, calibrated)",
    paper="Schuster et al. 2022, Confident Adaptive Language Modeling (NeurIPS, arXiv 2207.07061)",
    axes=("depth",),
    departures=(
        "the decoder alone, as a language model, with T5's biases of distances; its feed-forward is not gated",
        "calibration tests by the tighter p-value of Learn then Test unless asked for Hoeffding's (`bound` hoeffding)",
        "rows of a batch leave on their own; in the authors' code all wait for the least sure",
        "a skipped layer absorbs the vector at the token's exit; in the authors' code the vector at the first exit",
        "a threshold decays with the position in the sequence, prompt included; in the authors' code it does not",
        "the classifier is trained together with the model, without an effect on it; in the paper in a separate stage",
        unconfirmed(*_PAPERS),
    ),
    exact_limit="without thresholds, or with thresholds above 1, it is exact attention of all layers",
    use_when="generation should be faster within a risk that you set",
    avoid_when="every bit of quality counts",
    training={  # section 4: T5's optimiser
        name: {**T5_TRAINING, "steps": 500_000, "lr": 1e-3, "schedule": "constant", "warmup": 0} for name in _PAPERS
    },
    recipes={
        "tiny": Recipe(32, 3, 2, _calm()),
        "small": Recipe(256, 4, 4, _calm()),
        "benchmark": Recipe(256, 4, 4, _calm()),
        "paper": _paper("softmax_response"),
        "paper-saturation": _paper("saturation"),
        "paper-classifier": _paper("classifier"),
    },
    objective="exits",
)


# Adaptive attention span: every head learns how far back it looks, and nothing beyond is computed or remembered.


def _span(max_span: int, kind: str = "soft_span", **more: object) -> Settings:
    return {
        "mixer": part(
            "softmax",
            projection=part("multi_head", bias=False),
            position=part("distance_keys", max_distance=max_span),
            span=part(kind, max_span=max_span, **more),
            bias=False,
        )
    }


_TINY: Settings = {"ramp": 4, "initial": 0.2, "multiple": 4}
_DYNAMIC: Settings = {"kind": "dynamic_span", "bounded": True, "state_penalty": 2e-6}
_PAPER: Settings = {
    **_span(8192, penalty=5e-7),
    **POST_NORM,
    "head": part("language", tied=False, bias=True),
    "norm": None,
    "initialisation": {"scheme": "framework", "residual": "plain"},
    "vocab_size": 205,
}

ADAPTIVE_SPAN = Member(
    name="adaptive-span",
    title="Adaptive attention span",
    paper="Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers (arXiv 1905.07799)",
    axes=("score", "pattern", "position"),
    growth="window",
    departures=(
        "the cache begins empty (the authors': zeros, which are attended by their positions)",
        "the state holds keys and values, not hidden states, so that projections learn from their own segment only",
        "each head is cut off at its own span (the authors: at the largest of a layer), and nothing is added to the "
        "normaliser (the authors: 1e-8)",
        "pre-norm with GELU, but the recipes paper and paper-large, which are post-norm with ReLU as published",
        "the dynamic span, which depends on the token, is a separate recipe (dynamic); it reads tokens divided "
        "by their root mean square, so that a bound of all spans follows from the weights and cuts the state, and the "
        "bound costs as much as the spans (state_penalty); as published: span.state_penalty=0 and span.bounded=false",
        "no dropout unless asked for (the authors: 0.3, and 0.4 in the recipe paper-large)",
    ),
    exact_limit="spans of max_span: exact attention to the last max_span tokens, with a vector for every distance",
    needs={"segments": True},
    parity=(
        "the authors' code: attention with spans (tests/scores/test_soft_span.py), their optimiser "
        "(tests/training/test_adagrad.py)",
    ),
    results=("dynamic_spans",),
    use_when="most heads need little context, and each head should cost only its span",
    avoid_when="spans are known in advance: `local` is simpler and faster",
    training={  # the authors' scripts of enwik8; the large model learns at a tenth of the rate at the end
        name: {
            **ends,
            "batch_size": 64,
            "length": 512,
            "optimizer": "adagrad",
            "lr": 0.07,
            "clip": 0.03,
            "schedule": "constant",
            "warmup": 32_000,
            "weight_decay": 0.0,
        }
        for name, ends in (
            ("paper", {"steps": 600_000}),
            (
                "paper-large",
                {
                    "steps": 170_000,
                    "stages": ({"steps": 150_000, "lr": 0.07, "warmup": 32_000}, {"lr": 0.007, "warmup": 0}),
                },
            ),
        )
    },
    recipes={
        **sizes(_span(1024), tiny=_span(16, **_TINY)),
        "tiny-dynamic": Recipe(32, 2, 2, _span(16, **_TINY, **_DYNAMIC)),
        "dynamic": Recipe(256, 4, 4, _span(1024, **_DYNAMIC)),
        "paper": Recipe(512, 12, 8, _PAPER),
        "paper-large": Recipe(768, 24, 8, _PAPER, hidden_dim=4096),
    },
)

MEMBERS = (UNIVERSAL, DEPTH_ADAPTIVE, CALM, ADAPTIVE_SPAN)
