"""The settings of training: the options except for model, data and machine. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kinformer.runtime.errors import (
    Checked,
    KinformerError,
    nearest,
    plural,
    require,
    require_above,
    require_kind,
    require_types,
)
from kinformer.runtime.parsing import JsonObject

# The option `stages`: a list of tables, checked before a run is planned.

_TYPES: Mapping[str, tuple[type, ...]] = {
    "steps": (int,), "length": (int,), "batch_size": (int,), "accumulate": (int,), "lr": (float,), "warmup": (float,),
    "set": (Mapping,),
}  # fmt: skip
_OF_THE_RUN = ("steps", "length", "batch_size", "accumulate", "set")
"""What the last stage has of the run."""
_EXAMPLE = '`set` training.stages=\'[{"steps": 900, "length": 128}, {}]\''


def checked_stages(stages: object) -> tuple[JsonObject, ...] | None:
    """Return ``stages`` as tables of known names and types; None for None."""
    if stages is None:
        return None
    if isinstance(stages, str | Mapping) or not isinstance(stages, Sequence):
        raise KinformerError(f"`stages` is {stages!r} but must be a list of tables, as in {_EXAMPLE}.")
    for number, stage in enumerate(stages, start=1):
        place = f"stage {number}"
        if not isinstance(stage, Mapping):
            raise KinformerError(f"`stages`: {place} is {stage!r} but must be a table, as in {_EXAMPLE}.")
        for name, value in stage.items():
            if name not in _TYPES:
                near = nearest(str(name), _TYPES)
                raise KinformerError(f"`stages`: {place} does not have the setting {name!r}; {near}")
            require_kind(f"{name} of {place}", value, *_TYPES[name])
            if name == "lr":
                require_above(f"lr of {place}", value, 0)
            elif name != "set":
                require(f"{name} of {place}", value, 0 if name == "warmup" else 1)
        if "warmup" in stage and "lr" not in stage:
            raise KinformerError(f"`stages`: {place} has a warmup but no lr, with which a new rise begins; add it.")
        last = number == len(stages)
        if not last and "steps" not in stage:
            raise KinformerError(f"`stages`: {place} does not say its steps; add them, as in {_EXAMPLE}.")
        if taken := [name for name in _OF_THE_RUN if last and name in stage]:
            raise KinformerError(f"`stages`: {place} is the last: it has the run's own {taken[0]}; leave it out.")
    return tuple(dict(stage) for stage in stages)


DEFAULT_STEPS = 1000
PARTS_OF_A_RUN = 10
VALIDATED_SHARE = 0.1
LEAST_VALIDATED, MOST_VALIDATED, TRAINED_PER_VALIDATED = 16384, 65536, 16
"""Bounds of the tokens of a validation, and how many tokens a run of known steps trains on for each between them."""
WARM_UP_STEPS = 20
"""A run has at least this many steps: at the usual share, the learning rate then rises for one step."""

_COUNTS = ("steps", "length", "batch_size", "accumulate", "keep", "log_every", "validation_tokens", "sample_every")
_FROM_ZERO = (
    "plateau_patience", "validate_every", "patience", "checkpoint_every", "checkpoint_minutes", "average", "warmup",
    "table_lr", "weight_decay", "clip",
)  # fmt: skip

OptimizerName: TypeAlias = Literal["adamw", "radam", "muon", "lamb", "adafactor", "adagrad", "sgd"]
Precision: TypeAlias = Literal["fp32", "bf16-mixed"]


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """The settings that decide the final weights, and when they are validated and saved."""

    steps: int | None = None
    """Optimiser steps in all (1000 if `minutes` is not given either)."""
    minutes: float | None = None
    """Minutes that the whole command may take, instead of `steps`; with `resume`, the total of all its commands. The
    number of steps follows the measured speed. Missing sizes and a missing recipe are chosen to suit the time."""
    length: int = 512
    """Tokens that each row of a batch predicts (512, fewer where its positions end, or what suits `minutes`)."""
    batch_size: int = 8
    """Rows per step, over all processes and all accumulated parts (8, or what suits `minutes`)."""
    accumulate: int = 1
    """Parts into which each process splits its batch, to save memory. They are computed one after the other."""
    optimizer: OptimizerName = "adamw"
    """Muon takes the layers' matrices and AdamW the rest; lamb moves each tensor by a share of its length;
    adagrad clips each parameter; sgd has `momentum` (adamw, or what suits `minutes`)."""
    lr: float = 1e-3
    """Highest learning rate (0.001, or what suits `minutes`). With `resume`, a new one holds from there on."""
    schedule: Literal["cosine", "linear", "inverse-sqrt", "constant", "plateau"] = "cosine"
    """How the learning rate falls after the warm-up: to the end as a cosine or a line, with the root of the step, not
    at all, or at a plateau of the validations, by `plateau_factor` (cosine; for translation inverse-sqrt)."""
    plateau_factor: float = 0.5
    """With `schedule` plateau: the factor of the learning rate when validations stop to improve."""
    plateau_patience: int = 1
    """With `schedule` plateau: validations in a row that may be no better before the learning rate falls."""
    min_lr_ratio: float = 0.1
    """Least learning rate after the warm-up, as a share of the highest; with cosine and linear it is the
    rate of the end (0.1)."""
    warmup: float = 0.05
    """How long the learning rate rises: a share of all steps if below 1, else a number of steps (0.05)."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms, biases and other vectors have none (0.1, or what suits `minutes`)."""
    lora: int | None = None
    """Train low-rank updates of the layers' weights, of this rank, and not the weights themselves (LoRA)."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each layer to the one below it, for fine-tuning. The head moves at the full
    rate, the last layer at this share of it, the input least (1: all alike)."""
    momentum: float = 0.9
    """Decay of the mean of gradients: AdamW's and LAMB's first moment, and sgd's momentum (0.9)."""
    beta2: float = 0.95
    """Decay of AdamW's and LAMB's second moment (0.95)."""
    clip: float = 1.0
    """Largest norm of the gradient, or with adagrad of each parameter's gradient. 0 means no limit (1)."""
    table_lr: float = 1e-3
    """Constant learning rate of tables with sparse gradients (product-key memories), which are not clipped."""
    precision: Precision = "fp32"
    """bf16-mixed computes in bfloat16 where bfloat16 is safe; weights, loss and optimiser stay in float32 (fp32, or
    with `minutes` the faster one)."""
    compile: bool = False
    """Compile the model with torch.compile (needs a C++ compiler)."""
    stages: tuple[JsonObject, ...] | None = None
    """Stages of a run, each with its `steps` and what differs from the run in it: `length`, `batch_size`, `accumulate`,
    `lr` (which begins a new schedule, and its `warmup`), and `set`, changes of the model that no weight
    depends on, such as windows. The last one has the rest of the steps and trains as the run itself says."""
    objective: str | None = None
    """What is minimised: one of the task's objectives. The default is the member's, or the task's usual one."""
    seed: int = 0
    """The seed of the first weights, the order of the data and every random mask."""
    validate_every: int | None = None
    """Steps between validations. The default is a tenth of the run, or more where validations would take over a
    tenth of the training's time; 0 means never."""
    patience: int = 0
    """End the run after N validations in a row without a new best (0: never). The
    best weights are kept either way."""
    validation_tokens: int = MOST_VALIDATED
    """Tokens of the validation split for a validation. The default is a sixteenth of the run's training tokens, from
    16,384 to 65,536."""
    checkpoint_every: int | None = None
    """Steps between checkpoints. The default is a tenth of the run; 0 means only the last."""
    checkpoint_minutes: float = 10.0
    """Also write a checkpoint every this many minutes; 0 turns it off."""
    sample_every: int | None = None
    """Steps between samples, texts or images by the model, in the log and in the run's report.html. The default is
    none. Samples need a training in one process."""
    average: int = 0
    """Checkpoints whose weights are averaged at the end: the last one, and earlier ones due by
    `checkpoint_every`. The average is kept if it is better (0, none; for translation 5)."""
    ema: float = 0.0
    """Keep a moving average of the weights instead of the weights themselves. It looks back over about this share of
    the steps so far; 0 turns it off (0, or what suits `minutes`)."""
    keep: int = 2
    """Number of checkpoints to keep; older ones are removed."""
    async_saves: bool = False
    """Write checkpoints and the best weights beside training, which stands still only while they are copied."""
    log_every: int = 10
    """Steps between two looks at the loss (each waits for the device)."""

    LEAST = dict.fromkeys((*_COUNTS, "lora"), 1) | dict.fromkeys((*_FROM_ZERO, "seed"), 0)
    SHARES = {
        "momentum": "[0, 1)", "beta2": "[0, 1)", "plateau_factor": "(0, 1)", "min_lr_ratio": "[0, 1]", "ema": "[0, 1]",
        "layer_decay": "[0, 1]",
    }  # fmt: skip

    def __post_init__(self) -> None:
        require_types(self, Settings)
        if self.steps is not None and self.minutes is not None:
            raise KinformerError(f"`steps` {self.steps} and `minutes` {self.minutes:g} contradict; give one.")
        object.__setattr__(self, "stages", checked_stages(self.stages))
        if self.stages and self.minutes is not None:
            raise KinformerError(f"`minutes` {self.minutes:g}: `stages` count steps; give `steps`, or `stages` [].")
        if self.patience and self.validate_every == 0:
            what = "counts validations, but `validate_every` is 0"
            raise KinformerError(f"`patience` {self.patience}: {what}; change either.")
        if self.schedule == "plateau" and self.validate_every == 0:
            raise KinformerError("`schedule` plateau: `validate_every` 0 makes no validations; change either.")
        if self.average > 1 and self.checkpoint_every == 0:
            raise KinformerError(f"`average` {self.average}: `checkpoint_every` 0 makes only the last; change either.")
        for name in ("lr", "minutes", "layer_decay"):
            require_above(name, getattr(self, name), 0)
        super().__post_init__()

    def rows(self, world: int) -> int:
        """Return the rows of each accumulated part of each of ``world`` processes."""
        if self.batch_size % (world * self.accumulate):
            raise KinformerError(
                f"`batch_size` {self.batch_size} cannot be shared by {plural(world, 'process')} x "
                f"{plural(self.accumulate, 'accumulated part')}; give a multiple of {world * self.accumulate}."
            )
        return self.batch_size // (world * self.accumulate)

    def validated(self) -> int:
        """Return the tokens of a validation that suit the run: few for a short one."""
        if self.steps is None:
            return MOST_VALIDATED
        trained = self.steps * self.batch_size * self.length
        return min(MOST_VALIDATED, max(LEAST_VALIDATED, trained // TRAINED_PER_VALIDATED))

    def cadences(self, total: int, validation: float = 0.0) -> tuple[int, int]:
        """Return the steps from one validation to the next and from one checkpoint to the next, in a run of ``total``:
        the numbers of the options, or a tenth of the run. A ``validation`` takes the time of this many steps; together
        validations take at most ``VALIDATED_SHARE`` of the training's time, unless one alone takes more."""
        number = PARTS_OF_A_RUN
        if validation > 0:
            number = min(number, max(1, int(VALIDATED_SHARE * total / validation)))
        usual = (max(1, -(-total // number)), max(1, -(-total // PARTS_OF_A_RUN)))
        every = (self.validate_every, self.checkpoint_every)
        return tuple(item if flag is None else flag for flag, item in zip(every, usual, strict=True))  # type: ignore[return-value]
