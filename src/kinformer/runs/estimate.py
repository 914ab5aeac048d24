"""What a member costs before anything is run: the model's costs, its objective's, and those of the process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kinformer.estimation.estimate import Estimate, estimate
from kinformer.estimation.options import EstimateOptions
from kinformer.estimation.peak import interpreter_bytes, peak
from kinformer.estimation.rules import RulesOfThumb, rules_of_thumb
from kinformer.family.table import FAMILY
from kinformer.runs.description import subject_of
from kinformer.runs.objective_cost import objective_cost
from kinformer.runs.run import open_run

LENGTH = 1024
RULE_BYTES = {"adamw": 8, "muon": 4, "adafactor": 0, "adagrad": 4, "sgd": 4}


@dataclass(frozen=True, kw_only=True)
class MemberEstimate(Estimate):
    """The costs of a member, in a recipe or as in a run, for ``batch_size`` sequences of ``length`` tokens.

    peak, peak_bytes: bytes of a process that trains it on a CPU, by part and in all.
    rules_of_thumb: what the field's rules say of a plain decoder of these sizes; None where they say nothing.
    """

    recipe: str
    length: int
    batch_size: int
    peak_bytes: int
    peak: dict[str, int]
    rules_of_thumb: RulesOfThumb | None


def estimate_member(options: EstimateOptions) -> MemberEstimate:
    """The costs of ``options.member`` in its recipe, or of a run's model, with its changes.

    Errors: ``KinformerError`` for unknown names, changes that do not fit, and lengths beyond the model's positions.
    """
    record, recipe, config = subject_of(options.member, options.recipe, options.vocab_size, options.set)
    sizes = {
        "length": options.length or _usual_length(options.member) or config.input.length or LENGTH,
        "batch": options.batch_size,
    }
    costs = estimate(config, **sizes, optimizer=options.optimizer, precision=options.precision)
    objective = objective_cost(config, record.objective, **sizes, optimizer=options.optimizer)
    process = peak(config, costs, **sizes, objective=objective, interpreter=interpreter_bytes())
    rules = rules_of_thumb(config, **sizes, optimizer_bytes=RULE_BYTES[options.optimizer], precision=options.precision)
    return MemberEstimate(
        **vars(costs),
        recipe=recipe,
        length=sizes["length"],
        batch_size=sizes["batch"],
        peak_bytes=sum(process.values()),
        peak=process,
        rules_of_thumb=rules,
    )


def _usual_length(name: str) -> int | None:
    """Return the length that a run was trained at; None of a member."""
    if name in FAMILY or not Path(name).is_dir():
        return None
    return open_run(name).training.get("length")
