"""The members of the family by what can be done with their models, and by what they read."""

from kinformer.core.model import CausalModel, SourceModel, WholeModel
from kinformer.family.build import configure
from kinformer.family.table import MEMBERS

TINY = {name: configure(name, "tiny") for name in MEMBERS}


def _of(protocol: type, input: str) -> list[str]:
    return [name for name, config in TINY.items() if (config.protocol, config.input.kind) == (protocol, input)]


CAUSAL, ENCODERS, SOURCE = (_of(protocol, "tokens") for protocol in (CausalModel, WholeModel, SourceModel))
"""Those that read token ids."""
TRAJECTORIES = _of(CausalModel, "steps")
IMAGES = _of(WholeModel, "patches") + _of(WholeModel, "tiles")
SOUND = _of(WholeModel, "frames")
