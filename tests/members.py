"""The members of the family by what can be done with their models."""

from kinformer.core.model import CausalModel, SourceModel, WholeModel
from kinformer.family.build import configure
from kinformer.family.table import MEMBERS


def _of(protocol: type) -> list[str]:
    return [name for name in MEMBERS if configure(name, "tiny").protocol is protocol]


CAUSAL, ENCODERS, SOURCE = _of(CausalModel), _of(WholeModel), _of(SourceModel)
