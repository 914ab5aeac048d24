"""Routing Transformer: half of the heads see their cluster of content, half a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import DecoderRecipe, Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


def _recipe(shape: ModelShape, num_clusters: int, window: int) -> DecoderRecipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.routing import RoutingAttention
        from kinformer.positions.sinusoidal import Sinusoidal

        mixer = RoutingAttention.Config(
            num_heads=shape.num_heads, local_heads=shape.num_heads // 2, num_clusters=num_clusters, window=window
        )
        return decoder(shape, vocab or 256, mixer=mixer, position=Sinusoidal.Config())

    return recipe


def _upper(shape: ModelShape, num_clusters: int, window: int) -> Recipe:
    """Return the recipe of routing in the last two layers above windows, as in the authors' model of PG-19."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.patterns.local import Local

        config = _recipe(shape, num_clusters, window)(vocab)
        local = SoftmaxAttention.Config(num_heads=shape.num_heads, pattern=Local.Config(window=window))
        below = tuple(layer.replace(mixer=local) for layer in config.layers[:-2])
        return config.replace(layers=below + config.layers[-2:])

    return recipe


MEMBER = Member(
    name="routing",
    title="Routing Transformer (online k-means)",
    paper="Roy et al. 2021, Efficient Content-Based Sparse Attention with Routing Transformers (arXiv 2003.05997)",
    year=2021,
    axes=("pattern", "projection"),
    causal=True,
    growth="window",
    departures=(
        "a token is in the cluster of its nearest centroid and sees the cluster's last window, cut by rank, so that "
        "what it sees depends on the past alone; the authors' clusters take the most similar tokens of the whole "
        "text, later ones included, which is the encoder mixer routing; masked for a decoder it leaks: with other "
        "later tokens 43 % of the outputs before them change, by 66 % of their norm "
        "(tests/mixers/test_bidirectional_routing.py)",
        "keys are queries of length 1, scores are divided by sqrt(head_dim), and a token sees itself only where it "
        "sees nothing else, as in routing-transformer (the authors: layer norms of q and k, and no such rule)",
        "centroids begin as random directions and move once after each training step, by the tokens of all processes",
        "sinusoidal positions (the authors': relative ones in the local heads), pre-norm, GELU in all recipes but "
        "benchmark and paper",
    ),
    exact_limit="attention over the past with shared queries and keys: no local heads, one cluster, window >= length",
    parity=(
        "routing-transformer 1.6.1: clusters over whole texts, in float64 (tests/mixers/test_bidirectional_routing.py)",
    ),
    use_when="long texts fall into topics, and a token should see the last tokens of its own",
    avoid_when="exact recall counts, or training is brief: its clusters must form first",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), num_clusters=3, window=8),
        "small": _recipe(ModelShape(256, 4, 4), num_clusters=16, window=128),
        "tiny-upper": _upper(ModelShape(32, 3, 2), num_clusters=3, window=8),
        "upper": _upper(ModelShape(256, 6, 4), num_clusters=16, window=128),
        "benchmark": _recipe(ModelShape(256, 4, 4, activation="relu"), num_clusters=32, window=128),
        "paper": _recipe(ModelShape(1024, 10, 16, activation="relu"), num_clusters=16, window=256),
    },
)
