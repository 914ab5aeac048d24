"""The interface by which runs use datastores, with a method for every stage of a run's life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinformer.core.model_config import ModelConfig
    from kinformer.datastore.attach import OpenRun, StoredRun
    from kinformer.datastore.options import StoreOptions, TrainingOptions
    from kinformer.models.decoder import Decoder
    from kinformer.tasks.evaluation import EvaluationReport
    from kinformer.tasks.task import TrainingPlan
    from kinformer.training.data_module import DataModule


class Stores:
    """The datastores of runs, which ``open_run`` opens by their folders. Nothing is imported before it is needed."""

    def __init__(self, open_run: OpenRun) -> None:
        self.open_run = open_run

    def choose(self, options: TrainingOptions, config: ModelConfig) -> dict[str, object]:
        """Return the datastore entry of a new run's ``data``; ``options`` are ``runs.options.TrainOptions``."""
        from kinformer.datastore.retrieval import choose_retrieval

        return choose_retrieval(options, config)

    def resume(self, run: StoredRun, options: TrainingOptions) -> dict[str, object]:
        """Return the datastore entry of a resumed run's ``data``; ``options`` as of :meth:`choose`."""
        from kinformer.datastore.retrieval import resume_retrieval

        return resume_retrieval(run, options)

    def rows(self, rows: DataModule, run: StoredRun, plan: TrainingPlan, device: str, quiet: bool) -> DataModule:
        """Return the run's rows, with the tokens of their neighbours where the model uses them on ``device``."""
        if not run.data.get("retrieval"):
            return rows
        from kinformer.datastore.retrieval import with_neighbours

        return with_neighbours(rows, run, self.open_run, plan, device, quiet)

    def attach(
        self, run: StoredRun, model: Decoder, options: StoreOptions | None = None, rows: int | None = None
    ) -> Any:
        """Return ``model`` with the datastore that the run or ``options`` name, or as it is where there is none.

        ``rows``: a retriever is made ready to read this many sequences token by token.
        """
        from kinformer.datastore.attach import attach_store

        return attach_store(run, model, self.open_run, options, rows)

    def facts(self, model: object) -> dict[str, object] | None:
        """Return the facts, for JSON, of the datastore of an attached ``model`` that was trained with one."""
        from kinformer.datastore.attach import lookup_facts

        return lookup_facts(model)

    def evaluate(
        self, runs: Sequence[StoredRun], options: Any, task_options: Any, quiet: bool
    ) -> EvaluationReport | None:
        """Evaluate a run with and without the datastore that ``options`` mix into its
        predictions; return None where there is none."""
        from kinformer.datastore.attach import looks_up

        if options.datastore is None or all(looks_up(run.config) for run in runs):
            return None
        from kinformer.datastore.evaluate import evaluate_datastore

        return evaluate_datastore(runs, options, task_options, quiet)

    def note_text(
        self, facts: Mapping[str, object] | None, run: StoredRun, options: Any, holdout: float | None
    ) -> None:
        """Note where the datastore of :meth:`facts` holds text that ``run`` was measured on; ``options`` as of
        :meth:`evaluate`."""
        if facts is None:
            return
        from kinformer.datastore.attach import note_stored
        from kinformer.datastore.store import read_record
        from kinformer.tasks.shared.text import measured_part

        corpus, part = measured_part(run, options, holdout)
        note_stored(read_record(Path(str(facts["datastore"]))), run, corpus, options.data, [part])
