"""Product-key memory: feed-forwards at chosen depths are replaced by a look-up among very many values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.blocks.product_keys import ProductKeys
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, depths: tuple[int, ...], num_keys: int, **sizes: int) -> Recipe:
    """Return the recipe with a memory of ``num_keys`` keys in each half at each of ``depths``."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.product_keys import ProductKeys

        return _with_memories(shape, vocab or 256, depths, ProductKeys.Config(num_keys=num_keys).replace(**sizes))

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.blocks.product_keys import ProductKeys

    memory = ProductKeys.Config(num_keys=512, num_heads=4, topk=32, key_dim=512, norm="batch")
    return _with_memories(ModelShape(1024, 12, 16, residual="post"), vocab or 60_000, (4,), memory, max_length=512)


def _with_memories(
    shape: ModelShape, vocab: int, depths: tuple[int, ...], memory: ProductKeys.Config, max_length: int = 2048
) -> Decoder.Config:
    from kinformer.heads.language import LanguageModelHead
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.positions.learned import Learned
    from kinformer.positions.none import NoPosition
    from kinformer.positions.rope import Rope

    published = shape.residual == "post"
    config = decoder(
        shape,
        vocab,
        mixer=SoftmaxAttention.Config(
            num_heads=shape.num_heads, position=NoPosition.Config() if published else Rope.Config()
        ),
        position=Learned.Config(max_length=max_length) if published else NoPosition.Config(),
        head=LanguageModelHead.Config(tied=True, bias=published),
    )
    layers = list(config.layers)
    for depth in depths:
        layers[depth] = layers[depth].replace(feed_forward=memory)
    return config.replace(layers=tuple(layers))


MEMBER = Member(
    name="pkm",
    title="Product-key memory",
    paper="Lample et al. 2019, Large Memory Layers with Product Keys (arXiv 1907.05242)",
    year=2019,
    axes=("memory",),
    causal=True,
    growth="linear",
    departures=(
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
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), (1,), num_keys=8, topk=4, key_dim=16, num_heads=2),
        "small": _recipe(ModelShape(256, 4, 4), (2,), num_keys=40),
        "benchmark": _recipe(ModelShape(256, 4, 4), (2,), num_keys=128),
        "paper": _paper,
    },
)
