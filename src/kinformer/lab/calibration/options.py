"""The options of calibrating early exits. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kinformer.lab.runs.options import Machine
from kinformer.runtime.errors import KinformerError, marked, require, require_above

MAX_THRESHOLDS, MAX_DRAWN = 10_000, 1_000_000


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(Machine):
    """Find the lowest threshold of early exits whose risk is bounded, and keep it in the run.

    A sample is a prompt from the text and its greedy continuation, or a source and its translation. Its loss is between
    0 and 1: the difference between the text with early exits and the text of all layers (textual), or how much worse
    the text with early exits is (risk).
    """

    risk: float = 0.05
    """The bound on the expected loss."""
    confidence: float = 0.95
    """The probability with which the bound holds."""
    consistency: Literal["textual", "risk"] = "textual"
    """textual: 1 - ROUGE-L of the continuations with and without early exits. risk: the increase by early exits of
    1 - ROUGE-L between the continuation and the text itself, or between the translation and its reference."""
    bound: Literal["bentkus", "hoeffding"] = "bentkus"
    """Which inequality bounds the risk by the samples: bentkus, as in Learn then Test, or hoeffding, as in CALM.
    Hoeffding's inequality needs more samples for the same bound."""
    data: str | None = None
    """The text: a path, - for standard input, or stdlib; the run's data if not given."""
    split: str = "validation"
    """Which part of the data: train, validation or test. Evaluate the result on another part."""
    prompts: int = 1000
    """How many samples, drawn evenly from the text or the pairs."""
    prompt_tokens: int | None = None
    """Tokens of a prompt of running text (64 if not given)."""
    new_tokens: int | None = None
    """Tokens of a continuation of running text (32 if not given)."""
    beam: int | None = None
    """How many translations of a source are followed (4 if not given, as in kinformer generate; 1 is greedy, as in
    CALM)."""
    thresholds: int = 24
    """How many thresholds may be tested, from 0.999 down to 0, closer to each other near 1."""
    decay_tokens: float | None = None
    """Thresholds fall to nine tenths by exp(-position / this many tokens), so they are stricter at the beginning (CALM,
    equation 5; a quarter of the longest text there). If not given, the run's setting, by default without a fall."""
    after: str | None = None
    """Layers behind which tokens may leave, from 1, as in 2,4: an exit pays where its prediction costs less than the
    layers behind it. The run's exits if not given."""
    batch_size: int = 64
    """How many continuations grow side by side."""
    search: int | None = None
    """Instead of a bound on a risk: draw N thresholds for every exit, and take the draw with the fewest layers per
    token whose bits per byte stay within `tolerance` of the bits per byte of all layers."""
    tolerance: float | None = None
    """With `search`: how many bits per byte early exits may cost (0.01 if not given)."""
    first: int | None = None
    """With `search`: measure on the first N bytes only (20,000 if not given)."""
    seed: int = 0
    """The seed by which samples are drawn."""

    LEAST = {"first": 2, "tolerance": 0, "seed": 0} | dict.fromkeys(
        ("prompts", "prompt_tokens", "new_tokens", "beam", "batch_size"), 1
    )
    SHARES = {"risk": "(0, 1)", "confidence": "(0, 1)"}

    def __post_init__(self) -> None:
        require("thresholds", self.thresholds, 2, MAX_THRESHOLDS)
        require("search", self.search, 1, MAX_DRAWN)
        require_above("decay_tokens", self.decay_tokens, 0)
        self.layers()
        super().__post_init__()
        shared = {"search", "after", "tolerance", "first", "split", "data", "seed"}
        shared |= {item.name for item in fields(Machine)}
        for field in fields(CalibrateOptions) if self.search is not None else ():
            if field.name not in shared and getattr(self, field.name) != field.default:
                raise KinformerError(
                    f"{marked(field.name)}: is of a calibration that bounds a risk; leave it or `search` out."
                )
        if self.search is not None:
            return
        for name in ("tolerance", "first"):
            if getattr(self, name) is not None:
                raise KinformerError(f"{marked(name)}: is for `search`; give `search` N too, or leave it out.")
        from kinformer.lab.calibration.risk import samples_needed

        needed = samples_needed(self.risk, 1 - self.confidence, self.bound)
        if self.prompts < needed:
            raise KinformerError(
                f"`prompts` {self.prompts}: are too few to tell a risk of at most {self.risk:g} with confidence "
                f"{self.confidence:g}, even without a single difference; give {needed} or more."
            )

    def layers(self) -> list[int] | None:
        """Return the layers that ``after`` names."""
        try:
            return None if self.after is None else [int(layer) for layer in self.after.split(",")]
        except ValueError:
            raise KinformerError(f"`after` {self.after}: is not a list of layers; write as in 2,4.") from None
