"""Speech by linear attention without a mask: all frames see all, at a cost that is linear in their number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, plateau_training, recogniser
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _recipe(shape: ModelShape, convolutions: int = 2, classes: int = 29) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.bidirectional_linear import BidirectionalLinear

        mixer = BidirectionalLinear.Config(num_heads=shape.num_heads)
        return recogniser(shape, classes, mixer, convolutions)

    return recipe


MEMBER = Member(
    name="speech-linear",
    task="speech",
    title="Speech recognition by linear attention",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236), section 4.3",
    year=2020,
    axes=("kernel", "domain"),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "two convolutions sub-sample frames by four, but in the recipe paper, which reads every frame",
        "pre-norm, sinusoidal positions and GELU (the authors' code for speech was never published)",
        "symbols are those of the transcripts (the paper: phonemes)",
        "paper: the learning rate is halved after two validations without a better one (the paper: when the error "
        "stops falling)",
    ),
    exact_limit="none finite (elu + 1 is not the exponential)",
    use_when="long recordings must be fast",
    avoid_when="errors count: it makes the most of the four",
    training={"paper": plateau_training()},
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(96, 3, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4), convolutions=0),
        "paper": _recipe(ModelShape(192, 9, 6), convolutions=0, classes=43),
    },
)
