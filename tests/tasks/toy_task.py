"""A task of somebody else's: frames of a sine wave in, its frequency out. A page; its line is a test's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.blocks.layer import EncoderLayer
from kinformer.core.model import WholeModel, device_of
from kinformer.core.parts import Input, InputConfig
from kinformer.core.stack import HeadConfig
from kinformer.family.record import Member
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings, LoadedRun
from kinformer.lab.tasks.task import DataNeeds, EvaluationNeeds, Models, Source, Task, TrainingPlan
from kinformer.lab.training.data_module import DataModule, ObjectiveOutput, map_fields
from kinformer.lab.training.logging import Metric
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.models.encoder import Encoder
from kinformer.parts.positions import Learned
from kinformer.runtime.errors import KinformerError

ERROR = Metric("mean_squared_error", "squared hertz")
PERIOD = 4096


class Frames(Input):
    """values [batch, time] float -> [batch, time, dim]"""

    class Config(InputConfig):
        kind = "frames"

        def build(self, dim: int) -> Frames:
            return Frames(dim)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.projection = nn.Linear(1, dim)

    def check(self, values: Tensor) -> None:
        if values.dim() != 2 or not values.is_floating_point():
            raise KinformerError(f"frames must be floats [batch, time], but are {values.dtype} {list(values.shape)}.")

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return self.projection(values[..., None])

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        return torch.zeros(batch, time, device=device)


class Frequency(nn.Module):
    """hidden_states [batch, time, dim] -> [batch]"""

    class Config(HeadConfig):
        kind = "frequency"
        per_position = False

        def build(self, dim: int, input: Input) -> Frequency:
            return Frequency(dim)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.output = nn.Linear(dim, 1)

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        return self.output(hidden_states.mean(1))[..., 0]


def recipe(vocab_size: int | None) -> Encoder.Config:
    """Two layers of the library's own attention over frames."""
    layer = EncoderLayer.Config(mixer=BidirectionalAttention.Config(num_heads=1))
    return Encoder.Config(
        input=Frames.Config(),
        dim=8,
        layers=(layer,) * 2,
        position=Learned.Config(max_length=8),
        head=Frequency.Config(),
    )


MEMBER = Member(
    name="toy",
    title="Toy",
    paper="none",
    year=2026,
    axes=(),
    causal=False,
    growth="none",
    departures=(),
    exact_limit="none",
    recipes={"small": recipe},
)


class Waves(NamedTuple):
    """``frames`` [rows, time] and ``frequencies`` [rows], float32."""

    frames: Tensor
    frequencies: Tensor

    @property
    def size(self) -> int:
        return self.frames.numel()


@dataclass(frozen=True)
class Generator:
    """Waves by number, with noise."""

    noise: float
    name: str = "waves"
    version: str = "1"

    @property
    def fingerprint(self) -> str:
        return f"waves-{self.noise:g}"

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "fingerprint": self.fingerprint}

    def rows(self, first: int, count: int, time: int) -> Waves:
        draws = [torch.Generator().manual_seed(number) for number in range(first, first + count)]
        frequencies = torch.stack([torch.rand((), generator=draw) for draw in draws])
        noise = torch.stack([torch.randn(time, generator=draw) for draw in draws])
        return Waves((frequencies[:, None] * torch.arange(time)).sin() + self.noise * noise, frequencies)


class WaveRows(DataModule):
    sums = ("squares",)
    metrics = (ERROR,)
    validations = 2

    def __init__(self, plan: TrainingPlan) -> None:
        self.data, self.settings = plan.data, plan.settings

    def batch(self, step: int, rank: int, world: int) -> Waves:
        size = self.settings.batch_size // world
        first = PERIOD + step * self.settings.batch_size + rank * size
        return self.data.rows(first, size, self.settings.length)

    def validation(self, rank: int, world: int) -> Iterator[Waves]:
        for part in range(self.validations):
            yield self.data.rows((part * world + rank) * 8, 8, self.settings.length)

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {ERROR.name: means["squares"]}


def squared_error(model: Any, batch: Waves, state: Any, progress: float) -> ObjectiveOutput:
    loss = functional.mse_loss(model(batch.frames), batch.frequencies)
    predicted = torch.full((), len(batch.frequencies))
    return loss, {"squares": loss.detach() * predicted, "predicted": predicted}, None


@dataclass(frozen=True, kw_only=True)
class WaveOptions:
    """Of waves."""

    noise: float = 0.1
    """How much noise there is."""

    def __post_init__(self) -> None:
        if self.noise < 0:
            raise KinformerError(f"--noise is {self.noise:g} but must be 0 or more.")


@dataclass(frozen=True, kw_only=True)
class WaveMeasuring:
    """Of waves."""

    waves: int = 64
    """How many are measured."""


class Regression(Task):
    name = "regression"
    title = "regression"
    description = "Learns the frequency of a wave."
    models = Models(protocols=(WholeModel,))
    data = DataNeeds(
        default="waves",
        refused=dict.fromkeys(
            ("data", "holdout", "tokenizer", "train_tokenizer", "validation_tokens"), "waves are made up; leave it out."
        ),
    )
    evaluation = EvaluationNeeds(
        refused=dict.fromkeys(("data", "split", "first", "chunk", "seed"), "waves are made up; leave it out.")
    )
    metrics = (ERROR,)
    objectives = {"squared-error": lambda model: squared_error}
    Options = WaveOptions
    EvaluationOptions = WaveMeasuring

    def fits(self, config: Any) -> bool:
        return config.head.kind == "frequency"

    def open(self, source: Source, options: WaveOptions, cache: Any = None) -> Generator:
        return Generator(options.noise)

    def fit(self, config: Any, data: Generator | None) -> dict[str, Any]:
        return {"dim": 4}

    def data_module(self, plan: TrainingPlan) -> WaveRows:
        return WaveRows(plan)

    def measure(self, subject: LoadedRun, measuring: EvaluationSettings, own: WaveMeasuring, quiet: bool) -> Evaluation:
        run, model = subject.run, subject.model
        data = Generator(run.options.noise)
        waves = map_fields(data.rows(0, own.waves, run.training["length"]), lambda field: field.to(device_of(model)))
        with torch.inference_mode():
            metrics = {ERROR.name: float(functional.mse_loss(model(waves.frames), waves.frequencies))}
        mean = {"of_the_mean": float(waves.frequencies.var(correction=0))}
        return Evaluation(
            run=str(run.folder),
            member=run.member,
            metrics=metrics,
            units=(ERROR,),
            baselines=mean,
            data=data.identity,
            facts={"run": str(run.folder), "task": self.name, "data": data.identity} | metrics | mean,
            text=(f"{ERROR.text(metrics[ERROR.name])} of {own.waves} waves",),
        )


TASK = Regression()
