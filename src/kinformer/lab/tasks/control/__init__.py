"""Control: a causal model acts in an environment and learns from its rewards, by proximal policy optimisation with its
state carried from step to step (Schulman et al. 2017; Parisotto et al. 2019 for models with memory)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kinformer.core.model import CausalModel
from kinformer.lab.control.options import ControlEvaluationOptions, ControlGenerationOptions, ControlOptions
from kinformer.lab.tasks.evaluation import Evaluation, EvaluationSettings, Predicted, PredictionSettings
from kinformer.lab.tasks.runs import LoadedRun
from kinformer.lab.tasks.task import (
    DataNeeds,
    EvaluationNeeds,
    Generation,
    GenerationSettings,
    Models,
    NoOptions,
    Prediction,
    Source,
    Task,
    TrainingPlan,
)
from kinformer.lab.training.logging import RETURN

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.control.options import ControlData
    from kinformer.lab.tasks.control.work import LineSource
    from kinformer.lab.tasks.shared.records import Made
    from kinformer.lab.training.data_module import DataModule, Objective

NAME, INPUT = "control", "observations"


def _policy(model: nn.Module) -> Objective:
    from kinformer.lab.control.online import PolicyLoss, PolicyShift

    return PolicyLoss(ControlOptions(), PolicyShift())


class Control(Task):
    """The mean return of episodes, beside that of random actions."""

    name = NAME
    title = "control"
    description = (
        "Acts in an environment (`env`: t-maze, poc-memory, masked-cartpole, or gymnasium's) and learns from its "
        "rewards by proximal policy optimisation, with the model's state carried from step to step. Measured by the "
        "mean return of new episodes, beside random actions."
    )
    models = Models(protocols=(CausalModel,))
    data = DataNeeds(
        default=NAME,
        refused=dict.fromkeys(
            ("data", "holdout", "tokenizer", "train_tokenizer"),
            "control learns from what it does in `env`; leave it out.",
        )
        | {
            "devices": "control acts in one process; leave it out.",
            "validation_tokens": "control is validated by acting; leave it out.",
        },
    )
    evaluation = EvaluationNeeds(
        refused=dict.fromkeys(
            ("data", "split", "max_bytes", "chunk"),
            "control acts in new episodes; leave it out, or give `env` and `episodes`.",
        )
    )
    generation = Generation(
        prompt=None, reads=(), unread="one episode is played, and `action_temperature` says how actions are drawn"
    )
    prediction = Prediction()
    metrics = (RETURN,)
    objectives = {"policy": _policy}
    Options = ControlOptions
    EvaluationOptions = ControlEvaluationOptions
    GenerationOptions = ControlGenerationOptions
    settings = {"length": 32, "batch_size": 32, "lr": 3e-4}

    def fits(self, config: ModelConfig) -> bool:
        return super().fits(config) and config.input.kind == INPUT

    def open(self, source: Source, options: ControlOptions, cache: Path | None = None) -> ControlData:
        from kinformer.lab.control.options import open_environment

        return open_environment(options, "env" in source.by_user)

    def fit(self, config: ModelConfig, data: ControlData | None) -> dict[str, object]:
        from kinformer.lab.tasks.control.work import fitted

        return fitted(config, data)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.control.work import check_plan
        from kinformer.lab.tasks.shared.text import check_sequence

        check_sequence(model)
        check_plan(plan, getattr(model, "max_length", None))

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.control.online import ControlRows

        return ControlRows(plan.data, plan.settings)

    def objective(self, name: str | None, model: nn.Module, data: DataModule | None = None) -> Objective:
        from kinformer.lab.control.online import ControlRows, PolicyLoss

        if isinstance(data, ControlRows):
            self.choose_objective(name)
            return PolicyLoss(data.options, data.shift)
        return super().objective(name, model)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: ControlEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.control.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Made:
        from kinformer.lab.tasks.control.work import play_episode

        return play_episode(subject, options, options.task_options, write)

    def predict(
        self, subject: LoadedRun, source: LineSource, settings: PredictionSettings, task_options: NoOptions
    ) -> Iterator[Predicted]:
        from kinformer.lab.tasks.control.work import predict

        return predict(subject, source, settings)


TASK = Control()
