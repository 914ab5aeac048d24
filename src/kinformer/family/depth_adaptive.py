"""Depth-adaptive Transformer: exits at every layer of a decoder, which a token takes as it has learnt to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder, encoder_decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder_decoder import EncoderDecoder


def _recipe(
    shape: ModelShape, *, multinomial: bool = False, mixed: bool = False, tied: bool = False, dropout: float = 0.0
) -> DecoderRecipe:
    """Return the recipe; ``mixed``: with exits drawn in training, and confidence instead of a learnt rule."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.initialise import Initialisation
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.sinusoidal import Sinusoidal
        from kinformer.stacks.confidence import SoftmaxResponse
        from kinformer.stacks.exit_rules import ExitRuleConfig
        from kinformer.stacks.exits import Exits
        from kinformer.stacks.learned_exits import Geometric, Multinomial

        rule: ExitRuleConfig = Multinomial.Config() if multinomial else Geometric.Config()
        stack = Exits.Config(rule=rule, weights="uniform", classifiers="tied" if tied else "separate")
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


def _translating(shape: ModelShape, dropout: float = 0.0) -> Recipe:
    """Return the recipe of a decoder over a source, from which one exit for the whole translation is predicted
    (3.2.1)."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.heads.language import LanguageModelHead
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.stacks.learned_exits import SequenceMultinomial

        base = _recipe(shape)(vocab or 258)
        base = base.replace(stack=base.stack.replace(rule=SequenceMultinomial.Config(), classifiers="tied"))
        base = base.replace(head=LanguageModelHead.Config(tied=True))
        return encoder_decoder(base, BidirectionalAttention.Config(num_heads=shape.num_heads), dropout=dropout)

    return recipe


def _shape(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, residual="post", activation="relu")


MEMBER = Member(
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
        "tiny": _recipe(_shape(32, 3, 2)),
        "small": _recipe(_shape(256, 4, 4)),
        "tiny-translate": _translating(_shape(32, 3, 2)),
        "translate": _translating(_shape(256, 6, 4, 1024), dropout=0.3),
        "benchmark": _recipe(_shape(256, 4, 4)),
        "paper": _recipe(_shape(256, 6, 4, 1024), dropout=0.3),
        "paper-multinomial": _recipe(_shape(256, 6, 4, 1024), multinomial=True, dropout=0.3),
        "paper-tied": _recipe(_shape(256, 6, 4, 1024), tied=True, dropout=0.3),
        "paper-mixed": _recipe(_shape(256, 6, 4, 1024), mixed=True, dropout=0.3),
    },
    objective="exits",
)
