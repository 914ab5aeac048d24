"""Speech by attention within sorted buckets of hashes, as Reformer's, over all frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, plateau_training, recogniser
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


def _recipe(
    shape: ModelShape, num_buckets: int, chunk_size: int, rounds: int = 4, convolutions: int = 2, classes: int = 29
) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.bidirectional_lsh import BidirectionalLSH

        mixer = BidirectionalLSH.Config(
            num_heads=shape.num_heads, num_buckets=num_buckets, chunk_size=chunk_size, rounds=rounds
        )
        return recogniser(shape, classes, mixer, convolutions)

    return recipe


MEMBER = Member(
    name="speech-lsh",
    task="speech",
    title="Speech recognition by hashed attention",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236), section 4.3",
    year=2020,
    axes=("pattern", "projection", "domain"),
    causal=False,
    growth="none",
    cost="linear",
    departures=(
        "two convolutions sub-sample frames by four, but in the recipe paper, which reads every frame",
        "pre-norm, sinusoidal positions and GELU (the authors' code for speech was never published)",
        "the number of buckets is a setting, whatever the length (the authors': from the length)",
        "symbols are those of the transcripts (the paper: phonemes)",
        "paper: the learning rate is halved after two validations without a better one (the paper: when the error "
        "stops falling)",
    ),
    exact_limit="attention with shared queries and keys: one round, chunk_size >= length",
    use_when="recordings are long and errors count",
    avoid_when="recordings are short: `speech-softmax` is simpler",
    training={"paper": plateau_training()},
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), num_buckets=4, chunk_size=4, rounds=2),
        "small": _recipe(ModelShape(96, 3, 4), num_buckets=8, chunk_size=16),
        "benchmark": _recipe(ModelShape(256, 4, 4), num_buckets=64, chunk_size=32, convolutions=0),
        "paper": _recipe(ModelShape(192, 9, 6), num_buckets=64, chunk_size=32, convolutions=0, classes=43),
    },
)
