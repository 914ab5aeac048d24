"""SPALM: Transformer-XL with a gate at the output to what a frozen retriever finds in a datastore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family import transformer_xl
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.core.model_config import ModelConfig


def _recipe(name: str) -> Recipe:
    """Return the recipe of Transformer-XL with the same name, with the gate in its head."""
    base = transformer_xl.MEMBER.recipes[name]

    def recipe(vocab: int | None) -> ModelConfig:
        from kinformer.heads.spalm import SpalmHead

        return base(vocab).replace(head=SpalmHead.Config(bias=True))

    return recipe


MEMBER = Member(
    name="spalm",
    title="SPALM (gated long-term memory)",
    paper="Yogatama et al. 2021, Adaptive Semiparametric Language Models (arXiv 2102.02557)",
    year=2021,
    axes=("memory",),
    causal=True,
    growth="window",
    departures=(
        "the growth is that of the model itself: with a datastore, the retriever's state is carried beside it",
        "without `datastore` there is no gate and no long-term memory: what is trained is Transformer-XL",
        "keys are those that kinformer index makes of any causal run (the input of its last feed-forward), searched by "
        "squared distance, exactly or with `probes` in lists (the authors: quantised search)",
        "a text is looked up as a stream, as the datastore was made; a token's own entry is left out in training, and "
        "only there",
        "the gate is one number a token, as printed; elementwise=true gives each feature its own, as the blog's sign "
        "suggests",
        "the recipe paper is Transformer-XL's of characters; its clusters of words have no gate",
    ),
    exact_limit="a gate of 1, no neighbour, or no datastore: Transformer-XL",
    use_when="a datastore is at hand while you train, and a gate should decide when to use it",
    avoid_when="training is brief: mixing neighbours in, as `knn-lm` does, gained more",
    recipes={name: _recipe(name) for name in ("tiny", "small", "benchmark", "paper")},
)
