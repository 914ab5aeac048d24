"""Members whose tokens take different numbers of layers, or whose heads look differently far back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kinformer.family.assemble import ModelShape, decoder, encoder, encoder_decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder
    from kinformer.models.encoder_decoder import EncoderDecoder
    from kinformer.parts.scores import SoftSpan
    from kinformer.stacks.universal import Universal


# Universal Transformer: one layer over depth, as often as each token asks for.


def _stack(steps: int, halts: bool, bias: float) -> Universal.Config:
    from kinformer.stacks.universal import ACT, Universal

    return Universal.Config(steps=steps, halting=ACT.Config(bias=bias) if halts else None)


def _recipe(
    shape: ModelShape,
    steps: int,
    *,
    halts: bool = True,
    bias: float = 1.0,
    dropout: float = 0.0,
    learned: bool = False,
    convolution: bool = False,
    post: bool = False,
) -> DecoderRecipe:
    """Return the recipe of ``shape.depth`` layers, ``steps`` times; ``convolution``: their transition is a separable
    one; ``post``: norms stand behind sublayers."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.residual import PostNorm
        from kinformer.mixers.convolutions import SeparableTransition
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.positions import Timing

        config = decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, dropout=dropout),
            position=Timing.Config(step="learned" if learned else "sinusoidal"),
            scale=True,
        )
        layers = tuple(layer.replace(dropout=dropout) for layer in config.layers)
        if convolution:
            layers = tuple(layer.replace(feed_forward=SeparableTransition()) for layer in layers)
        if post:
            layers = tuple(layer.replace(residual=PostNorm.Config()) for layer in layers)
            config = config.replace(norm=None)
        return config.replace(layers=layers, stack=_stack(steps, halts, bias), dropout=dropout)

    return recipe


def _encoding(shape: ModelShape, steps: int, bias: float = 1.0) -> Recipe:
    """Return the recipe of an encoder of ``shape.depth`` layers, ``steps`` times or until a token halts, below a
    masked-language-model head."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.residual import LayerNorm
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.parts.positions import Timing

        mixer = BidirectionalAttention.Config(num_heads=shape.num_heads)
        stack = _stack(steps, True, bias)
        config = encoder(
            shape, vocab or 259, [mixer], Timing.Config(), norm=LayerNorm(), embedding_norm=None, stack=stack
        )
        return config.replace(input=config.input.replace(scale=True))

    return recipe


def _translating(shape: ModelShape, steps: int, *, halts: bool, dropout: float = 0.0) -> Recipe:
    """Return the recipe of tied layers on both sides, applied ``steps`` times or, with ``halts``, until a token
    halts."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.mixers.bidirectional import BidirectionalAttention

        base = _recipe(shape, steps, halts=halts, bias=-0.5, learned=True)(vocab or 258)
        mixer = BidirectionalAttention.Config(num_heads=shape.num_heads)
        config = encoder_decoder(base, mixer, dropout=dropout)
        return config.replace(encoder=config.encoder.replace(stack=base.stack))

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="relu")


UNIVERSAL = Member(
    name="universal",
    title="Universal Transformer (adaptive computation time)",
    paper="Dehghani et al. 2019, Universal Transformers (ICLR, arXiv 1807.03819)",
    year=2019,
    axes=("depth", "position"),
    causal=True,
    growth="linear",
    departures=(
        "the decoder alone, as a language model, except for the recipes encoder and translate",
        "norms stand before sublayers and behind the last step, as in tensor2tensor; in the paper behind "
        "sublayers, which are the recipes post-norm",
        "a halted token's vector is copied, as in the paper, so that its work is saved; in tensor2tensor it goes on "
        "changing where others see it (stack.halting.halted=evolving)",
        "halting weights begin at zero, so that at first all tokens take equally many steps",
        "recipe small has as many layers as other members of that budget, used twice",
    ),
    exact_limit="without halting (stack.halting=null) a stack of tied layers of exact attention",
    parity=("tensor2tensor: adaptive computation time (tests/stacks/test_universal.py)",),
    use_when="a problem wants the same step again and again, and tokens differ in how many",
    avoid_when="text is plain: untied layers learn more in the same time",
    recipes={
        "tiny": _recipe(_shape(32, 1, 2), 3, bias=-0.5, learned=True),
        "small": _recipe(_shape(256, 4, 4), 2),
        "benchmark": _recipe(_shape(256, 1, 4), 4),
        "tiny-post-norm": _recipe(_shape(32, 1, 2), 3, bias=-0.5, learned=True, post=True),
        "paper-post-norm": _recipe(_shape(1024, 1, 16), 6, halts=False, dropout=0.3, learned=True, post=True),
        "paper": _recipe(_shape(1024, 1, 16), 6, halts=False, dropout=0.3, learned=True),
        "tiny-convolution": _recipe(_shape(32, 1, 2), 3, bias=-0.5, learned=True, convolution=True),
        "convolution": _recipe(_shape(256, 4, 4), 2, convolution=True),
        "tiny-encoder": _encoding(_shape(32, 1, 2), 3, bias=-0.5),
        "encoder": _encoding(_shape(256, 4, 4), 2),
        "tiny-translate": _translating(_shape(32, 1, 2), 3, halts=True),
        "translate": _translating(_shape(1024, 1, 16), 6, halts=False, dropout=0.3),
        "paper-act": _recipe(_shape(1024, 1, 16), 12, dropout=0.3, learned=True),
    },
)


# Depth-adaptive Transformer: exits at every layer of a decoder, which a token takes as it has learnt to.


def _recipe_of_depth_adaptive(
    shape: ModelShape, *, multinomial: bool = False, mixed: bool = False, tied: bool = False, dropout: float = 0.0
) -> DecoderRecipe:
    """Return the recipe; ``mixed``: with exits drawn in training, and confidence instead of a learnt rule."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.adaptive.rules import ExitRuleConfig, Geometric, Multinomial, SoftmaxResponse
        from kinformer.adaptive.stack import ExitStack
        from kinformer.blocks.residual import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.positions import Sinusoidal

        rule: ExitRuleConfig = Multinomial.Config() if multinomial else Geometric.Config()
        stack = ExitStack.Config(rule=rule, weights="uniform", classifiers="tied" if tied else "separate")
        if mixed:
            rule = SoftmaxResponse.Config(measure="maximum")
            stack = stack.replace(rule=rule, training="mixed", samples=6)
        config = decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, dropout=dropout),
            position=Sinusoidal.Config(),
            head=LanguageModelHead.Config(tied=tied),
            initialisation=Initialisation(scheme="xavier"),
            scale=True,
        )
        layers = tuple(layer.replace(dropout=dropout) for layer in config.layers)
        return config.replace(layers=layers, stack=stack, norm=None, dropout=dropout)

    return recipe


def _translating_of_depth_adaptive(shape: ModelShape, dropout: float = 0.0) -> Recipe:
    """Return the recipe of a decoder over a source, from which one exit for the whole translation is predicted
    (3.2.1)."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.adaptive.rules import SequenceMultinomial
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.bidirectional import BidirectionalAttention

        base = _recipe_of_depth_adaptive(shape)(vocab or 258)
        base = base.replace(stack=base.stack.replace(rule=SequenceMultinomial.Config(), classifiers="tied"))
        base = base.replace(head=LanguageModelHead.Config(tied=True))
        return encoder_decoder(base, BidirectionalAttention.Config(num_heads=shape.num_heads), dropout=dropout)

    return recipe


def _shape_of_depth_adaptive(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual="post", activation="relu")


DEPTH_ADAPTIVE = Member(
    name="depth-adaptive",
    title="Depth-Adaptive Transformer (learnt exits)",
    paper="Elbayad et al. 2020, Depth-Adaptive Transformer (ICLR, arXiv 1910.10073)",
    year=2020,
    axes=("depth",),
    causal=True,
    growth="linear",
    departures=(
        "the decoder alone, as a language model, except for the recipes translate, whose encoder is as wide as the "
        "decoder (512 and 256 in the paper) and where one exit for the whole translation is predicted from its "
        "source; other rules fit there, too (stack.rule=geometric)",
        "one run of training, which the loss of the exit rule joins half-way (stack.rule.since); two in the paper",
        "no dropout outside of the recipes paper",
    ),
    exact_limit="without a rule (stack.rule=null) it is exact attention of all layers",
    use_when="easy tokens should leave early by a rule that is learnt",
    avoid_when="tokens use most layers anyway: one exit for all of them is as good",
    recipes={
        "tiny": _recipe_of_depth_adaptive(_shape_of_depth_adaptive(32, 3, 2)),
        "small": _recipe_of_depth_adaptive(_shape_of_depth_adaptive(256, 4, 4)),
        "tiny-translate": _translating_of_depth_adaptive(_shape_of_depth_adaptive(32, 3, 2)),
        "translate": _translating_of_depth_adaptive(_shape_of_depth_adaptive(256, 6, 4, 1024), dropout=0.3),
        "benchmark": _recipe_of_depth_adaptive(_shape_of_depth_adaptive(256, 4, 4)),
        "paper": _recipe_of_depth_adaptive(_shape_of_depth_adaptive(256, 6, 4, 1024), dropout=0.3),
        "paper-multinomial": _recipe_of_depth_adaptive(
            _shape_of_depth_adaptive(256, 6, 4, 1024), multinomial=True, dropout=0.3
        ),
        "paper-tied": _recipe_of_depth_adaptive(_shape_of_depth_adaptive(256, 6, 4, 1024), tied=True, dropout=0.3),
        "paper-mixed": _recipe_of_depth_adaptive(_shape_of_depth_adaptive(256, 6, 4, 1024), mixed=True, dropout=0.3),
    },
    objective="exits",
)


# CALM: a token leaves a decoder as soon as it is sure enough of the next one, by a calibrated threshold.

Measure = Literal["softmax_response", "saturation", "classifier"]


def _recipe_of_calm(
    shape: ModelShape,
    measure: Measure = "softmax_response",
    head_dim: int | None = None,
    vocab_size: int = 256,
    decay_tokens: float | None = None,
) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.adaptive.rules import ExitClassifier, Saturation, SoftmaxResponse
        from kinformer.adaptive.stack import ExitStack
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.relative_positions import T5

        rules = {item.kind: item for item in (SoftmaxResponse.Config, Saturation.Config, ExitClassifier.Config)}
        config = decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, head_dim=head_dim, position=T5.Config()),
        )
        return config.replace(stack=ExitStack.Config(rule=rules[measure](decay_tokens=decay_tokens)))

    return recipe


def _paper(measure: Measure = "softmax_response") -> Recipe:
    """Return the decoder of T5-small (1.1), whose thresholds decay with tau = 4 over texts of 512 tokens (section
    3.4)."""
    return _recipe_of_calm(
        _shape_of_calm(512, 8, 6, 1024), measure, head_dim=64, vocab_size=32128, decay_tokens=512 / 4
    )


def _shape_of_calm(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, activation="gelu")


CALM = Member(
    name="calm",
    title="CALM (confident early exits, calibrated)",
    paper="Schuster et al. 2022, Confident Adaptive Language Modeling (NeurIPS, arXiv 2207.07061)",
    year=2022,
    axes=("depth",),
    causal=True,
    growth="linear",
    departures=(
        "the decoder alone, as a language model, with T5's biases of distances; its feed-forward is not gated",
        "calibration tests by the tighter p-value of Learn then Test unless asked for Hoeffding's (`bound` hoeffding)",
        "rows of a batch leave on their own; in the authors' code all wait for the least sure",
        "a layer that is skipped absorbs the vector that the token left with; in the authors' code the first exit's",
        "a threshold decays with the position in the sequence, prompt included; in the authors' code it does not",
        "the classifier learns beside the model, which its loss does not move; in the paper in a stage of its own",
    ),
    exact_limit="without thresholds, or with thresholds above 1, it is exact attention of all layers",
    use_when="generation should be faster within a risk that you set",
    avoid_when="every bit of quality counts",
    recipes={
        "tiny": _recipe_of_calm(_shape_of_calm(32, 3, 2)),
        "small": _recipe_of_calm(_shape_of_calm(256, 4, 4)),
        "benchmark": _recipe_of_calm(_shape_of_calm(256, 4, 4)),
        "paper": _paper(),
        "paper-saturation": _paper("saturation"),
        "paper-classifier": _paper("classifier"),
    },
    objective="exits",
)


# Adaptive attention span: every head learns how far back it looks, and nothing beyond is computed or remembered.


def _mixer(num_heads: int, span: SoftSpan.Config) -> SoftmaxAttention.Config:
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.parts.projections import MultiHead
    from kinformer.parts.relative_positions import DistanceKeys

    return SoftmaxAttention.Config(
        num_heads=num_heads,
        projection=MultiHead.Config(bias=False),
        position=DistanceKeys.Config(max_distance=span.max_span),
        span=span,
        bias=False,
    )


def _tiny(vocab: int | None) -> Decoder.Config:
    from kinformer.parts.scores import SoftSpan

    span = SoftSpan.Config(max_span=16, ramp=4, initial=0.2, multiple=4)
    return decoder(ModelShape(32, 2, 2), vocab or 256, mixer=_mixer(2, span))


def _small(vocab: int | None) -> Decoder.Config:
    from kinformer.parts.scores import SoftSpan

    return decoder(ModelShape(256, 4, 4), vocab or 256, mixer=_mixer(4, SoftSpan.Config(max_span=1024)))


def _tiny_dynamic(vocab: int | None) -> Decoder.Config:
    from kinformer.parts.scores import DynamicSpan

    span = DynamicSpan.Config(max_span=16, ramp=4, initial=0.2, multiple=4, bounded=True, state_penalty=2e-6)
    return decoder(ModelShape(32, 2, 2), vocab or 256, mixer=_mixer(2, span))


def _dynamic(vocab: int | None) -> Decoder.Config:
    from kinformer.parts.scores import DynamicSpan

    span = DynamicSpan.Config(max_span=1024, bounded=True, state_penalty=2e-6)
    return decoder(ModelShape(256, 4, 4), vocab or 256, mixer=_mixer(4, span))


def _paper_of_adaptive_span(shape: ModelShape) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.residual import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.parts.scores import SoftSpan

        return decoder(
            shape,
            vocab or 205,
            mixer=_mixer(shape.num_heads, SoftSpan.Config(max_span=8192, penalty=5e-7)),
            head=LanguageModelHead.Config(tied=False, bias=True),
            initialisation=Initialisation(scheme="framework", residual="plain"),
        ).replace(norm=None)

    return recipe


ADAPTIVE_SPAN = Member(
    name="adaptive-span",
    title="Adaptive attention span",
    paper="Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers (arXiv 1905.07799)",
    year=2019,
    axes=("score", "pattern", "position"),
    causal=True,
    growth="window",
    departures=(
        "the cache begins empty (the authors': zeros, which are attended by their positions)",
        "the state holds keys and values, not hidden states, so that projections learn from their own segment only",
        "each head is cut off at its own span (the authors: at the largest of a layer), and nothing is added to the "
        "normaliser (the authors: 1e-8)",
        "pre-norm with GELU, but the recipes paper and paper-large, which are post-norm with ReLU as published",
        "the dynamic span, which depends on the token, is a recipe of its own (dynamic); it reads tokens divided "
        "by their root mean square, so that a bound of all spans follows from the weights and cuts the state, and the "
        "bound costs as much as the spans (state_penalty); as published: span.state_penalty=0 and span.bounded=false",
        "no dropout unless asked for",
    ),
    exact_limit="spans of max_span: exact attention to the last max_span tokens, with a vector for every distance",
    needs={"segments": True},
    parity=(
        "the authors' code: attention with spans (tests/scores/test_soft_span.py), their optimiser "
        "(tests/training/test_adagrad.py)",
    ),
    results=("dynamic_spans",),
    use_when="most heads need little context and you want to pay for just what they use",
    avoid_when="spans are known in advance: `local` is simpler and faster",
    training={  # section 3
        name: {
            "batch_size": 64,
            "length": 512,
            "optimizer": "adagrad",
            "lr": 0.07,
            "clip": 0.03,
            "schedule": "constant",
            "warmup": 32_000,
            "weight_decay": 0.0,
        }
        for name in ("paper", "paper-large")
    },
    recipes={
        "tiny": _tiny,
        "small": _small,
        "benchmark": _small,
        "tiny-dynamic": _tiny_dynamic,
        "dynamic": _dynamic,
        "paper": _paper_of_adaptive_span(ModelShape(512, 12, 8, hidden_dim=2048, residual="post", activation="relu")),
        "paper-large": _paper_of_adaptive_span(
            ModelShape(768, 24, 8, hidden_dim=4096, residual="post", activation="relu")
        ),
    },
)
