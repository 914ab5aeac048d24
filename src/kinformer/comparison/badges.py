"""The battery's laws, checked on every contestant: the badges of the report.

They are checked in float64 on the members' recipe tiny with the same changes, whose windows and segments are so small
that the battery crosses them; sizes that only fit a larger model are left out of the changes.
"""

from __future__ import annotations

from contextlib import suppress

from kinformer.comparison.entrants import Entrant
from kinformer.comparison.results import Badge
from kinformer.comparison.works import reads_tokens
from kinformer.core.model import CausalModel
from kinformer.core.model_config import ModelConfig
from kinformer.core.overrides import override
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_MODEL_CHECKS, MODEL_CHECKS, EncoderModelSubject, ModelSubject, examine

VOCAB = 23
LAWS = {
    "causality": "causal: later tokens change nothing before them",
    "partition": "any partition: however a text is cut, outputs, gradients and states are the same",
    "padding": "padding changes nothing",
    "reset": "a reset begins a new sequence, also in mid-chunk",
    "rows": "rows do not see each other",
    "both_ways": "every token is seen from both sides",
}


def badges(entrant: Entrant) -> list[Badge]:
    """Return a badge for each law; none for a model that the battery has no inputs for."""
    config, left_out = tiny(entrant)
    if not reads_tokens(config):
        return []
    subject: object
    if config.protocol is CausalModel:
        subject, every_check = ModelSubject(config.build, VOCAB), MODEL_CHECKS
    else:
        subject, every_check = EncoderModelSubject(config.build, VOCAB, global_tokens=False), ENCODER_MODEL_CHECKS
    checks = {name: check for name, check in every_check.items() if name in LAWS}
    report = examine(checks, subject)
    badges_: list[Badge] = []
    for name in checks:
        failed = report.failed.get(name)
        holds = True if name in report.passed else False if failed is not None else None
        why = str(failed) if failed is not None else ""
        badges_.append({"name": name, "law": LAWS[name], "holds": holds, "why": why, "left_out": left_out})
    return badges_


def tiny(entrant: Entrant) -> tuple[ModelConfig, list[str]]:
    """Return the entrant's config in the recipe tiny, and the changes that this recipe cannot have."""
    config = configure(entrant.member, "tiny")
    if reads_tokens(config):
        config = configure(entrant.member, "tiny", VOCAB)
    config = override(config, entrant.layers("tiny", config), kinds())
    left_out = []
    for path, value in entrant.changes.items():
        changed = None
        with suppress(KinformerError):
            changed = override(config, {path: value}, kinds())
        if changed is None or path == "layers" or path == "dim":
            left_out.append(path)
        else:
            config = changed
    return config, left_out
