"""Trajectories: a causal model learns from episodes which action followed a return to go and a state, and then acts so
as to reach a target return (Chen et al. 2021, Decision Transformer)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kinformer.control.decision.options import (
    INPUT,
    TrajectoryEvaluationOptions,
    TrajectoryGenerationOptions,
    TrajectoryOptions,
)
from kinformer.core.model import CausalModel
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.record import DataNeeds, EvaluationNeeds, Generation, GenerationSettings, Models, Prediction
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.task import NoOptions, Source, Task, TrainingPlan
from kinformer.training.metric import ACCURACY, BITS_PER_ACTION

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kinformer.control.decision.data import TrajectoryData
    from kinformer.core.model_config import ModelConfig
    from kinformer.tasks.shared.made import Made
    from kinformer.training.data_module import DataModule
    from kinformer.training.objective import Objective

NAME, DEFAULT = "trajectories", "key-to-door"


def _actions(model: nn.Module) -> Objective:
    from kinformer.control.decision.rows import ActionLoss

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
        from kinformer.control.random_walks import MADE

        return spec in MADE or spec.startswith("minari:")

    def open(self, source: Source, options: TrajectoryOptions, cache: Path | None = None) -> TrajectoryData:
        from kinformer.control.decision.data import open_data

        return open_data(source.spec, source.holdout, options, "env" in source.by_user)

    def fit(self, config: ModelConfig, data: TrajectoryData | None) -> dict[str, object]:
        from kinformer.tasks.trajectories.fit import fitted

        return fitted(config, data)

    def check(self, plan: TrainingPlan, model: nn.Module) -> None:
        from kinformer.tasks.shared.text import check_sequence
        from kinformer.tasks.trajectories.fit import check_plan

        check_sequence(model)
        check_plan(plan)

    def data_module(self, plan: TrainingPlan) -> DataModule:
        from kinformer.control.decision.rows import TrajectoryRows

        return TrajectoryRows(plan.data, plan.settings, plan.config)

    def measure(
        self,
        subject: LoadedRun,
        evaluation_settings: EvaluationSettings,
        task_options: TrajectoryEvaluationOptions,
        quiet: bool,
    ) -> Evaluation:
        from kinformer.tasks.trajectories.evaluate import evaluate

        return evaluate(subject, evaluation_settings, task_options, quiet)

    def generate(
        self, subject: LoadedRun, prompt: None, options: GenerationSettings, write: Callable[[str], None] | None
    ) -> Made:
        from kinformer.tasks.trajectories.generate import play

        return play(subject, options, options.task_options, write)

    def predict(
        self, subject: LoadedRun, source: object, settings: PredictionSettings, task_options: NoOptions
    ) -> Iterator[Predicted]:
        from kinformer.tasks.trajectories.predict import predict

        return predict(subject, source, settings)


TASK = TrajectoryTask()
