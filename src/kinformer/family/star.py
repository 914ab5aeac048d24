"""Star-Transformer: tokens in a ring, and a relay between all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, encoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _published(dim: int, num_heads: int, max_length: int, iterations: int, vocab_size: int = 259) -> Recipe:
    """Return the recipe of one layer of ``iterations`` updates, without residual and feed-forward."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.blocks.bare import BareLayer
        from kinformer.blocks.initialise import Initialisation
        from kinformer.mixers.star import StarAttention
        from kinformer.positions.learned import Learned

        mixer = StarAttention.Config(num_heads=num_heads, iterations=iterations)
        config = encoder(
            ModelShape(dim, 1, num_heads),
            vocab or vocab_size,
            mixers=[mixer],
            position=Learned.Config(max_length=max_length),
            embedding_norm=None,
            initialisation=Initialisation(scheme="xavier", residual="plain"),
        )
        return config.replace(layers=(BareLayer.Config(mixer=mixer),))

    return recipe


def _deep(shape: ModelShape, max_length: int) -> Recipe:
    """Return the recipe with two updates with one set of weights in place of every layer's attention."""

    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.star import StarAttention
        from kinformer.positions.learned import Learned

        mixer = StarAttention.Config(num_heads=shape.num_heads, iterations=2, tied=True)
        return encoder(shape, vocab or 259, mixers=[mixer], position=Learned.Config(max_length=max_length))

    return recipe


MEMBER = Member(
    name="star",
    title="Star-Transformer (ring and relay)",
    paper="Guo et al. 2019, Star-Transformer (arXiv 1902.09113)",
    year=2019,
    axes=("pattern", "recurrence"),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "the relay begins as the mean of the real tokens, and the ring closes over them: in the authors' code both see "
        "padding in the first update, and both ends of a text look at zeros (`set` layers.*.mixer.ends=zeros)",
        "a token's output is its mean with the relay; `set` head.pooling=max is what the authors' classifier reads",
        "small and benchmark have the updates in place of attention, in layers with residuals and feed-forwards",
        "masked tokens are predicted, which the paper does not",
        "no dropout unless asked for",
    ),
    exact_limit="3 tokens or fewer: each sees all of them, beside its own input and the relay; the relay always does",
    parity=("the authors' code (tests/mixers/test_star.py)",),
    use_when="texts are short to medium, data is small and a light model is enough",
    avoid_when="any two tokens must meet directly",
    recipes={
        "tiny": _published(32, 2, 128, iterations=2),
        "small": _deep(ModelShape(256, 4, 4, hidden_dim=512, residual="post"), 512),
        "benchmark": _deep(ModelShape(256, 4, 4, residual="post"), 4096),
        "paper": _published(300, 6, 512, iterations=2, vocab_size=30000),
    },
)
