"""Encoders of speech: four mixers under connectionist temporal classification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, plateau_training, recogniser
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.encoder import Encoder


# Speech by softmax attention: the Transformer that the Linear Transformer's speech recogniser is compared with.


def _recipe(shape: ModelShape, convolutions: int = 2, classes: int = 29) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.bidirectional import BidirectionalAttention

        mixer = BidirectionalAttention.Config(num_heads=shape.num_heads)
        return recogniser(shape, classes, mixer, convolutions)

    return recipe


SPEECH_SOFTMAX = Member(
    name="speech-softmax",
    task="speech",
    title="Speech recognition by softmax attention",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236), section 4.3",
    year=2020,
    axes=("domain",),
    causal=False,
    growth="none",
    departures=(
        "two convolutions sub-sample frames by four, but in the recipe paper, which reads every frame",
        "pre-norm, sinusoidal positions and GELU (the authors' code for speech was never published)",
        "symbols are those of the transcripts (the paper: phonemes)",
        "paper: the learning rate is halved after two validations without a better one (the paper: when the error "
        "stops falling)",
    ),
    exact_limit="is exact attention",
    use_when="recordings are short and errors count",
    avoid_when="recordings are long: its cost grows with the square",
    training={"paper": plateau_training()},
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2)),
        "small": _recipe(ModelShape(96, 3, 4)),
        "benchmark": _recipe(ModelShape(256, 4, 4), convolutions=0),
        "paper": _recipe(ModelShape(192, 9, 6), convolutions=0, classes=43),
    },
)


# Speech by linear attention without a mask: all frames see all, at a cost that is linear in their number.


def _recipe_of_speech_linear(shape: ModelShape, convolutions: int = 2, classes: int = 29) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.encoders import BidirectionalLinear

        mixer = BidirectionalLinear.Config(num_heads=shape.num_heads)
        return recogniser(shape, classes, mixer, convolutions)

    return recipe


SPEECH_LINEAR = Member(
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
        "tiny": _recipe_of_speech_linear(ModelShape(32, 2, 2)),
        "small": _recipe_of_speech_linear(ModelShape(96, 3, 4)),
        "benchmark": _recipe_of_speech_linear(ModelShape(256, 4, 4), convolutions=0),
        "paper": _recipe_of_speech_linear(ModelShape(192, 9, 6), convolutions=0, classes=43),
    },
)


# Speech by attention within sorted buckets of hashes, as Reformer's, over all frames.


def _recipe_of_speech_lsh(
    shape: ModelShape, num_buckets: int, chunk_size: int, rounds: int = 4, convolutions: int = 2, classes: int = 29
) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.buckets import BidirectionalLSH

        mixer = BidirectionalLSH.Config(
            num_heads=shape.num_heads, num_buckets=num_buckets, chunk_size=chunk_size, rounds=rounds
        )
        return recogniser(shape, classes, mixer, convolutions)

    return recipe


SPEECH_LSH = Member(
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
        "tiny": _recipe_of_speech_lsh(ModelShape(32, 2, 2), num_buckets=4, chunk_size=4, rounds=2),
        "small": _recipe_of_speech_lsh(ModelShape(96, 3, 4), num_buckets=8, chunk_size=16),
        "benchmark": _recipe_of_speech_lsh(ModelShape(256, 4, 4), num_buckets=64, chunk_size=32, convolutions=0),
        "paper": _recipe_of_speech_lsh(
            ModelShape(192, 9, 6), num_buckets=64, chunk_size=32, convolutions=0, classes=43
        ),
    },
)


# Speech by an LSTM in both directions: the baseline that has no attention.


def _recipe_of_speech_lstm(shape: ModelShape, convolutions: int = 2, classes: int = 29) -> Recipe:
    def recipe(vocab: int | None) -> Encoder.Config:
        from kinformer.mixers.recurrent import BidirectionalLSTM

        return recogniser(shape, classes, BidirectionalLSTM.Config(), convolutions, bare=True)

    return recipe


SPEECH_LSTM = Member(
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
        "tiny": _recipe_of_speech_lstm(ModelShape(32, 2, 1)),
        "small": _recipe_of_speech_lstm(ModelShape(128, 3, 1)),
        "benchmark": _recipe_of_speech_lstm(ModelShape(256, 4, 1), convolutions=0),
        "paper": _recipe_of_speech_lstm(ModelShape(640, 3, 1), convolutions=0, classes=43),
    },
)
