"""Universal Transformer: one layer over depth, as often as each token asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kinformer.family.assemble import Shape, decoder, encoder_decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder_decoder import EncoderDecoder


def _recipe(
    shape: Shape, steps: int, *, halts: bool = True, bias: float = 1.0, dropout: float = 0.0, learned: bool = False
) -> Recipe:
    """``shape.depth`` layers, ``steps`` times."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.timing import Timing
        from kinformer.stacks.act import ACT
        from kinformer.stacks.universal import Universal

        config = decoder(
            shape,
            vocab or 256,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, dropout=dropout),
            position=Timing.Config(step="learned" if learned else "sinusoidal"),
            scale=True,
        )
        halting = ACT.Config(bias=bias) if halts else None
        layers = tuple(layer.replace(dropout=dropout) for layer in config.layers)
        return config.replace(layers=layers, stack=Universal.Config(steps=steps, halting=halting), dropout=dropout)

    return recipe


def _translating(shape: Shape, steps: int, *, halts: bool, dropout: float = 0.0) -> Recipe:
    """Tied layers on both sides; those of the encoder are applied ``steps`` times, those of the decoder until a token
    halts if it ``halts``."""

    def recipe(vocab: int | None) -> EncoderDecoder.Config:
        from kinformer.mixers.bidirectional import BidirectionalAttention
        from kinformer.stacks.universal import Universal

        base: Any = _recipe(shape, steps, halts=halts, bias=-0.5, learned=True)(vocab or 258)
        mixer = BidirectionalAttention.Config(num_heads=shape.num_heads)
        config = encoder_decoder(base, mixer, dropout=dropout)
        return config.replace(encoder=config.encoder.replace(stack=Universal.Config(steps=steps)))

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> Shape:
    return Shape(dim, depth, num_heads, activation="relu")


MEMBER = Member(
    name="universal",
    title="Universal Transformer (adaptive computation time)",
    paper="Dehghani et al. 2019, Universal Transformers (ICLR, arXiv 1807.03819)",
    year=2019,
    axes=("depth", "position"),
    causal=True,
    growth="linear",
    departures=(
        "the decoder alone, as a language model, but for the translating recipes, whose encoder takes all steps",
        "norms stand before sublayers and behind the last step, as in tensor2tensor; in the paper behind sublayers",
        "a halted token's vector is copied, as in the paper, so that its work is saved; in tensor2tensor it goes on "
        "changing where others see it (stack.halting.halted=evolving)",
        "halting weights begin at zero, so that at first all tokens take equally many steps",
        "recipe small has as many layers as other members of that budget, used twice",
    ),
    exact_limit="without halting (stack.halting=null) a stack of tied layers of exact attention",
    parity=("tensor2tensor: adaptive computation time (tests/stacks/test_universal.py)",),
    recipes={
        "tiny": _recipe(_shape(32, 1, 2), 3, bias=-0.5, learned=True),
        "small": _recipe(_shape(256, 4, 4), 2),
        "benchmark": _recipe(_shape(256, 1, 4), 4),
        "paper": _recipe(_shape(1024, 1, 16), 6, halts=False, dropout=0.3, learned=True),
        "tiny-translate": _translating(_shape(32, 1, 2), 3, halts=True),
        "translate": _translating(_shape(1024, 1, 16), 6, halts=False, dropout=0.3),
        "paper-act": _recipe(_shape(1024, 1, 16), 12, dropout=0.3, learned=True),
    },
)
