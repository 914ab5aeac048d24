"""Speech by an LSTM in both directions: the baseline that has no attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, plateau_training, recogniser
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _recipe(shape: ModelShape, convolutions: int = 2, classes: int = 29) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.bidirectional_lstm import BidirectionalLSTM

        return recogniser(shape, classes, BidirectionalLSTM.Config(), convolutions, bare=True)

    return recipe


MEMBER = Member(
    name="speech-lstm",
    task="speech",
    title="Speech recognition by a bidirectional LSTM",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236), section 4.3",
    year=2020,
    axes=("recurrence", "domain"),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "two convolutions sub-sample frames by four, but in the recipe paper, which reads every frame",
        "frames are projected to the width of the two directions before the first layer",
        "symbols are those of the transcripts (the paper: phonemes)",
        "paper: the learning rate is halved after two validations without a better one (the paper: when the error "
        "stops falling)",
    ),
    exact_limit="none: it has no attention",
    use_when="you need the baseline, or data is small: it makes the fewest errors on spoken digits",
    avoid_when="training must be parallel over time",
    training={"paper": plateau_training(optimizer="adamw", lr=1e-3)},
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 1)),
        "small": _recipe(ModelShape(128, 3, 1)),
        "benchmark": _recipe(ModelShape(256, 4, 1), convolutions=0),
        "paper": _recipe(ModelShape(640, 3, 1), convolutions=0, classes=43),
    },
)
