"""Trajectories: a causal model learns from episodes which action followed a return to go and a state, and then acts so
as to reach a target return (Chen et al. 2021, Decision Transformer)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kinformer.core.model import CausalModel
from kinformer.lab.control.options import (
    INPUT,
    TrajectoryEvaluationOptions,
    TrajectoryGenerationOptions,
    TrajectoryOptions,
)
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
from kinformer.lab.training.logging import ACCURACY, BITS_PER_ACTION

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.control.trajectories import TrajectoryData
    from kinformer.lab.tasks.shared.records import Made
    from kinformer.lab.training.data_module import DataModule, Objective

NAME, DEFAULT = "trajectories", "key-to-door"


def _actions(model: nn.Module) -> Objective:
    from kinformer.lab.control.decision import ActionLoss

    return ActionLoss()


class TrajectoryTask(Task):
    """Held-out actions, and where there is an environment the returns that the agent gets, beside cloned behaviour."""

    name = NAME
    title = "trajectories"
    description = (
        "Learns from episodes (an .npz of observations, actions, rewards and episode_ends, a folder of such, "
        "minari:NAME, or random walks in key-to-door or shortest-path) which action followed a return to go and a "
        "state. Measured by held-out actions, and in an environment (`env`) by the returns for those that are asked "
        "for, beside cloned behaviour and the best of the data."
    )
    models = Models(protocols=(CausalModel,))
    data = DataNeeds(
        default=DEFAULT,
        refused=dict.fromkeys(
            ("tokenizer", "train_tokenizer", "text_field"), "is for text, not for trajectories; leave it out."
        ),
    )
    evaluation = EvaluationNeeds(refused={"max_bytes": "is for text, not for trajectories; leave it out."})
    generation = Generation(
        prompt=None, reads=(), unread="one episode is played, and `action_temperature` says how actions are drawn"
    )
    prediction = Prediction(reads=("top_k", "batch_size"))
    metrics = (BITS_PER_ACTION, ACCURACY)
    objectives = {"actions": _actions}
    Options = TrajectoryOptions
    EvaluationOptions = TrajectoryEvaluationOptions
    GenerationOptions = TrajectoryGenerationOptions

    def fits(self, config: ModelConfig) -> bool:
        return super().fits(config) and config.input.kind == INPUT

    def names(self, spec: str) -> bool:
        from kinformer.lab.control.trajectories import MADE

        return spec in MADE or spec.startswith("minari:")

    def open(self, source: Source, options: TrajectoryOptions, cache: Path | None = None) -> TrajectoryData:
        from kinformer.lab.control.trajectories import open_data

        return open_data(source.spec, source.holdout, options, "env" in source.by_user)

    def fit(self, config: ModelConfig, data: TrajectoryData | None) -> dict[str, object]:
        from kinformer.lab.tasks.trajectories.work import fitted

        return fitted(config, data)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.lab.tasks.shared.text import check_sequence
        from kinformer.lab.tasks.trajectories.work import check_plan

        check_sequence(model)
        check_plan(plan)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.lab.control.decision import TrajectoryRows

        return TrajectoryRows(plan.data, plan.settings, plan.config)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: TrajectoryEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.lab.tasks.trajectories.work import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Made:
        from kinformer.lab.tasks.trajectories.work import play

        return play(subject, options, options.task_options, write)

    def predict(
        self, subject: LoadedRun, source: object, settings: PredictionSettings, task_options: NoOptions
    ) -> Iterator[Predicted]:
        from kinformer.lab.tasks.trajectories.work import predict

        return predict(subject, source, settings)


TASK = TrajectoryTask()
