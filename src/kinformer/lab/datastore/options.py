"""The options of a datastore: by keyword in Python, by flag on the command line. Free of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kinformer.runtime.errors import KinformerError, marked, require, require_above
from kinformer.runtime.fields import Checked

if TYPE_CHECKING:
    from kinformer.core.stack import ModelConfig
    from kinformer.lab.datastore.attach import OpenRun, StoredRun
    from kinformer.lab.runs.options import EvaluateOptions, TrainOptions
    from kinformer.lab.tasks.evaluation import EvaluationReport, EvaluationSettings
    from kinformer.lab.tasks.task import TrainingPlan
    from kinformer.lab.training.data_module import DataModule
    from kinformer.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class StoreOptions(Checked):
    """The options by which a datastore's next tokens are mixed into the model's prediction (kNN-LM), or of the
    datastore that the model's head searches (SPALM)."""

    datastore: str | None = None
    """A datastore of this run (see: kinformer index) whose next tokens are mixed into its predictions; for a run of
    spalm, another one than it was trained with."""
    retriever: str | None = None
    """With `datastore`, for a run of spalm: the run that made it (if not given, the retriever of training)."""
    weight: float | None = None
    """With `datastore`: the store's share of the prediction, 0 to 1 (0.25 if not given)."""
    neighbours: int | None = None
    """With `datastore`: entries looked up per token (32 if not given; for a run of spalm as many as in training)."""
    knn_temperature: float | None = None
    """With `datastore`: the divisor of squared distances, or products, before their softmax (1 if not given)."""
    probes: int | None = None
    """With `datastore`: search approximately, in N of its lists (see: kinformer index --approximate); 0 searches
    exactly. If not given, 8 where it has lists, else exactly."""

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 <= self.weight <= 1:
            raise KinformerError(f"`weight` is {self.weight:g} but must lie between 0 and 1.")
        require("neighbours", self.neighbours, 1)
        require("probes", self.probes, 0)
        require_above("knn_temperature", self.knn_temperature, 0)
        super().__post_init__()

    def check_store(self) -> None:
        """Refuse the options of a store where none is named."""
        named = [field.name for field in fields(type(self)) if self._is_set(field)]
        if named and self.datastore is None:
            raise KinformerError(f"{marked(named[0])}: says how a datastore is used; give `datastore` FOLDER too.")

    def _is_set(self, option: Field[object]) -> bool:
        """Whether an option of a store, other than the store itself, differs from its default."""
        store_names = {field.name for field in fields(StoreOptions)} | {"tune", "sizes"}
        return option.name in store_names - {"datastore"} and getattr(self, option.name) != option.default


@dataclass(frozen=True, kw_only=True)
class ListOptions(Checked):
    """The options of the lists of a datastore, for approximate search."""

    approximate: bool = False
    """Also sort the entries into lists, for approximate search (needs faiss)."""
    lists: int | None = None
    """With `approximate`: into how many lists (the root of the number of entries if not given)."""
    key_bytes: int | None = None
    """With `approximate`: bytes of a key in the lists, by product quantisation, a divisor of its width (a byte a number
    if not given). The keys themselves stay, to rank the entries that the lists find."""
    similarity: Literal["l2", "inner"] | None = None
    """With `approximate`: near means a small squared distance (l2, if not given) or a large inner product."""

    def __post_init__(self) -> None:
        require("lists", self.lists, 1)
        require("key_bytes", self.key_bytes, 1)
        super().__post_init__()
        for name in ("lists", "key_bytes", "similarity"):
            if (value := getattr(self, name)) is not None and not self.approximate:
                raise KinformerError(f"{marked(name)} {value}: is for approximate search; add `approximate`.")


class Stores:
    """The interface by which runs use datastores, with a method for every stage of a run's life.

    ``open_run`` opens a run by its folder. Modules are imported only when a method needs them.
    """

    def __init__(self, open_run: OpenRun) -> None:
        self.open_run = open_run

    def choose(self, options: TrainOptions, config: ModelConfig) -> dict[str, object]:
        """Return the datastore entry of a new run's ``data``."""
        from kinformer.lab.datastore.retrieval import choose_retrieval

        return choose_retrieval(options, config)

    def resume(self, run: StoredRun, options: TrainOptions) -> dict[str, object]:
        """Return the datastore entry of a resumed run's ``data``."""
        from kinformer.lab.datastore.retrieval import resume_retrieval

        return resume_retrieval(run, options)

    def rows(self, rows: DataModule, run: StoredRun, plan: TrainingPlan, device: str, quiet: bool) -> DataModule:
        """Return the run's rows, with the tokens of their neighbours where the model uses them on ``device``."""
        if not run.data.get("retrieval"):
            return rows
        from kinformer.lab.datastore.retrieval import with_neighbours

        return with_neighbours(rows, run, self.open_run, plan, device, quiet)

    def attach(
        self, run: StoredRun, model: Decoder, options: StoreOptions | None = None, rows: int | None = None
    ) -> Any:
        """Return ``model`` with the datastore that the run or ``options`` name, or ``model`` unchanged without a
        datastore. ``rows``: prepare the retriever to read this many sequences token by token.
        """
        from kinformer.lab.datastore.attach import attach_store

        return attach_store(run, model, self.open_run, options, rows)

    def facts(self, model: object) -> dict[str, object] | None:
        """Return the facts, for JSON, of the datastore of an attached ``model`` that was trained with one."""
        from kinformer.lab.datastore.attach import lookup_facts

        return lookup_facts(model)

    def evaluate(
        self, runs: Sequence[StoredRun], options: EvaluateOptions, task_options: Any, quiet: bool
    ) -> EvaluationReport | None:
        """Evaluate a run with and without the datastore that ``options`` mix into its predictions; return None without
        a datastore."""
        from kinformer.lab.datastore.attach import looks_up

        if options.datastore is None or all(looks_up(run.config) for run in runs):
            return None
        from kinformer.lab.datastore.evaluate import evaluate_datastore

        return evaluate_datastore(runs, options, task_options, quiet)

    def note_text(
        self, facts: Mapping[str, object] | None, run: StoredRun, options: EvaluationSettings, holdout: float | None
    ) -> None:
        """Print a note if the datastore of :meth:`facts` holds text on which ``run`` was measured. ``options``: the
        options of :meth:`evaluate`."""
        if facts is None:
            return
        from kinformer.lab.datastore.attach import note_stored
        from kinformer.lab.datastore.store import read_record
        from kinformer.lab.tasks.texts import measured_part

        corpus, part = measured_part(run, options, holdout)
        note_stored(read_record(Path(str(facts["datastore"]))), run, corpus, options.data, [part])
