"""Memorizing Transformer: one layer near the top looks up what the document said long ago."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.mixers.memorizing import Memorizing
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, layer: int, window: int, memory_size: int, topk: int = 32) -> Recipe:
    """Return the recipe with a window of ``window`` tokens in all layers, and memories in one of them."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.memorizing import Memorizing

        memory = Memorizing.Config(
            num_heads=shape.num_heads, window=window, segment=window, memory_size=memory_size, topk=topk
        )
        return _with_memory(shape, vocab or 256, layer, memory)

    return recipe


def _paper(vocab: int | None) -> Decoder.Config:
    from kinformer.mixers.memorizing import Memorizing
    from kinformer.positions.t5 import T5

    memory = Memorizing.Config(
        num_heads=8,
        head_dim=128,
        window=512,
        segment=512,
        memory_size=65536,
        sees_itself=False,
        position=T5.Config(),
    )
    return _with_memory(ModelShape(1024, 12, 8, activation="relu"), vocab or 32000, 8, memory)


def _with_memory(shape: ModelShape, vocab: int, layer: int, memory: Memorizing.Config) -> Decoder.Config:
    from kinformer.mixers.softmax import SoftmaxAttention
    from kinformer.patterns.local import Local
    from kinformer.positions.t5 import T5
    from kinformer.projections.multi_head import MultiHead

    config = decoder(
        shape,
        vocab,
        mixer=SoftmaxAttention.Config(
            num_heads=shape.num_heads,
            projection=MultiHead.Config(bias=False),
            position=T5.Config(),
            pattern=Local.Config(window=memory.window),
            bias=False,
        ),
    )
    layers = list(config.layers)
    layers[layer] = layers[layer].replace(mixer=memory)
    return config.replace(layers=tuple(layers))


MEMBER = Member(
    name="memorizing",
    title="Memorizing Transformer",
    paper="Wu et al. 2022, Memorizing Transformers (arXiv 2203.08913)",
    year=2022,
    axes=("memory", "pattern", "position"),
    causal=True,
    growth="window",
    departures=(
        "the window of every layer is counted back from each token; the authors see the segment and the one before it, "
        "and attend to zeros where a document begins",
        "a token sees itself in its window, but in the recipe paper, where the layer with memories leaves it out",
        "the layer with memories has T5's biases in its window in the recipe paper alone; elsewhere by "
        "layers.N.mixer.position=t5",
        "only the layer with memories norms its queries and keys (the authors: all)",
        "AdamW unless set otherwise (the authors train with Adafactor)",
    ),
    exact_limit="memory_size = 0 or a closed gate: windowed attention; topk >= memories: attention to all of them",
    needs={"segments": True},
    parity=("the authors' code (tests/mixers/test_memorizing.py)",),
    layer=2,
    use_when="exact look-ups in a long document are needed, by a small model",
    avoid_when="speed decides, or documents are shorter than the window",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), 1, window=8, memory_size=32, topk=4),
        "small": _recipe(ModelShape(256, 4, 4), 2, window=256, memory_size=8192),
        "benchmark": _recipe(ModelShape(256, 4, 4), 2, window=256, memory_size=8192),
        "paper": _paper,
    },
)
