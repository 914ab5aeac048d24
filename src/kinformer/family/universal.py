"""Universal Transformer: one layer over depth, as often as each token asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder, encoder, encoder_decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder
    from kinformer.models.encoder_decoder import EncoderDecoder
    from kinformer.stacks.universal import Universal


def _stack(steps: int, halts: bool, bias: float) -> Universal.Config:
    from kinformer.stacks.act import ACT
    from kinformer.stacks.universal import Universal

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
        from kinformer.mixers.separable_transition import SeparableTransition
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.timing import Timing

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
        from kinformer.blocks.norms import LayerNorm
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.positions.timing import Timing

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


MEMBER = Member(
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
