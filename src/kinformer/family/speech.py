"""Encoders of speech: four mixers under connectionist temporal classification."""

from __future__ import annotations

from kinformer.family.record import SPEECH, Member, Recipe, Settings, part, plateau_training

_EVERY_FRAME: Settings = {"input.convolutions": 0}
_PAPER: Settings = {"input.convolutions": 0, "head.classes": 43}
_SUB_SAMPLED = "two convolutions sub-sample frames by four, but in the recipe paper, which reads every frame"
_PRE_NORM = "pre-norm, sinusoidal positions and GELU (the authors' code for speech was never published)"
_SYMBOLS = "symbols come from the transcripts (the paper: phonemes)"
_HALVED = (
    "paper: the learning rate is halved after two validations without a better one (the paper: when the error stops "
    "falling)"
)


# Speech by softmax attention: the baseline of the Linear Transformer's speech recogniser.

SPEECH_SOFTMAX = Member(
    name="speech-softmax",
    task="speech",
    title="Speech recognition by softmax attention",
    paper="Katharopoulos et al. 2020, Transformers are RNNs (arXiv 2006.16236), section 4.3",
    year=2020,
    axes=("domain",),
    causal=False,
    growth="none",
    departures=(_SUB_SAMPLED, _PRE_NORM, _SYMBOLS, _HALVED),
    exact_limit="is exact attention",
    use_when="recordings are short and errors count",
    avoid_when="recordings are long: its cost grows with the square",
    training={"paper": plateau_training()},
    recipes={
        "tiny": Recipe(32, 2, 2, SPEECH),
        "small": Recipe(96, 3, 4, SPEECH),
        "benchmark": Recipe(256, 4, 4, SPEECH, _EVERY_FRAME),
        "paper": Recipe(192, 9, 6, SPEECH, _PAPER),
    },
)


# Speech by linear attention without a mask: every frame sees all frames, at a cost linear in the number of frames.

_LINEAR: Settings = SPEECH | {"mixer": "linear"}

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
    departures=(_SUB_SAMPLED, _PRE_NORM, _SYMBOLS, _HALVED),
    exact_limit="none finite (elu + 1 is not the exponential)",
    use_when="long recordings must be fast",
    avoid_when="errors count: of the four members of speech it makes the most errors",
    training={"paper": plateau_training()},
    recipes={
        "tiny": Recipe(32, 2, 2, _LINEAR),
        "small": Recipe(96, 3, 4, _LINEAR),
        "benchmark": Recipe(256, 4, 4, _LINEAR, _EVERY_FRAME),
        "paper": Recipe(192, 9, 6, _LINEAR, _PAPER),
    },
)


# Speech by attention within sorted buckets of hashes over all frames, as in Reformer.


def _lsh(num_buckets: int, chunk_size: int, rounds: int = 4) -> Settings:
    return SPEECH | {"mixer": part("lsh", num_buckets=num_buckets, chunk_size=chunk_size, rounds=rounds)}


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
        _SUB_SAMPLED,
        _PRE_NORM,
        "the number of buckets is a setting, whatever the length (the authors': from the length)",
        _SYMBOLS,
        _HALVED,
    ),
    exact_limit="attention with shared queries and keys: one round, chunk_size >= length",
    use_when="recordings are long and errors count",
    avoid_when="recordings are short: `speech-softmax` is simpler",
    training={"paper": plateau_training()},
    recipes={
        "tiny": Recipe(32, 2, 2, _lsh(4, 4, rounds=2)),
        "small": Recipe(96, 3, 4, _lsh(8, 16)),
        "benchmark": Recipe(256, 4, 4, _lsh(64, 32), _EVERY_FRAME),
        "paper": Recipe(192, 9, 6, _lsh(64, 32), _PAPER),
    },
)


# Speech by an LSTM in both directions: the baseline without attention.

_LSTM: Settings = SPEECH | {"layer": "bare", "mixer": "lstm", "position": "none", "norm": None}

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
        _SUB_SAMPLED,
        "frames are projected to the width of the two directions before the first layer",
        _SYMBOLS,
        _HALVED,
    ),
    exact_limit="none: it does not attend",
    use_when="you need the baseline, or data is small: it makes the fewest errors on spoken digits",
    avoid_when="training must be parallel over time",
    training={"paper": plateau_training(optimizer="adamw", lr=1e-3)},
    recipes={
        "tiny": Recipe(32, 2, 1, _LSTM),
        "small": Recipe(128, 3, 1, _LSTM),
        "benchmark": Recipe(256, 4, 1, _LSTM, _EVERY_FRAME),
        "paper": Recipe(640, 3, 1, _LSTM, _PAPER),
    },
)


MEMBERS = (SPEECH_SOFTMAX, SPEECH_LINEAR, SPEECH_LSH, SPEECH_LSTM)
