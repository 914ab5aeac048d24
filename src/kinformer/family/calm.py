"""CALM: a token leaves a decoder as soon as it is sure enough of the next one, by a calibrated threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder

Measure = Literal["softmax_response", "saturation", "classifier"]


def _recipe(
    shape: ModelShape,
    measure: Measure = "softmax_response",
    head_dim: int | None = None,
    vocab_size: int = 256,
    decay_tokens: float | None = None,
) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.t5 import T5
        from kinformer.stacks.confidence import ExitClassifier, Saturation, SoftmaxResponse
        from kinformer.stacks.exits import Exits

        rules = {item.kind: item for item in (SoftmaxResponse.Config, Saturation.Config, ExitClassifier.Config)}
        config = decoder(
            shape,
            vocab or vocab_size,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, head_dim=head_dim, position=T5.Config()),
        )
        return config.replace(stack=Exits.Config(rule=rules[measure](decay_tokens=decay_tokens)))

    return recipe


def _paper(measure: Measure = "softmax_response") -> Recipe:
    """Return the decoder of T5-small (1.1), whose thresholds decay with tau = 4 over texts of 512 tokens (section
    3.4)."""
    return _recipe(_shape(512, 8, 6, 1024), measure, head_dim=64, vocab_size=32128, decay_tokens=512 / 4)


def _shape(dim: int, depth: int, num_heads: int, hidden_dim: int | None = None) -> ModelShape:
    return ModelShape(dim, depth, num_heads, hidden_dim, activation="gelu")


MEMBER = Member(
    name="calm",
    title="CALM (confident early exits, calibrated)",
    paper="Schuster et al. 2022, Confident Adaptive Language Modeling (NeurIPS, arXiv 2207.07061)",
    year=2022,
    axes=("depth",),
    causal=True,
    growth="linear",
    departures=(
        "the decoder alone, as a language model, with T5's biases of distances; its feed-forward is not gated",
        "calibration tests by the tighter p-value of Learn then Test unless asked for Hoeffding's (`bound` hoeffding)",
        "rows of a batch leave on their own; in the authors' code all wait for the least sure",
        "a layer that is skipped absorbs the vector that the token left with; in the authors' code the first exit's",
        "a threshold decays with the position in the sequence, prompt included; in the authors' code it does not",
        "the classifier learns beside the model, which its loss does not move; in the paper in a stage of its own",
    ),
    exact_limit="without thresholds, or with thresholds above 1, it is exact attention of all layers",
    use_when="generation should be faster within a risk that you set",
    avoid_when="every bit of quality counts",
    recipes={
        "tiny": _recipe(_shape(32, 3, 2)),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4)),
        "paper": _paper(),
        "paper-saturation": _paper("saturation"),
        "paper-classifier": _paper("classifier"),
    },
    objective="exits",
)
