"""The members of the family by what can be done with their models, and by what they read."""

from kinformer.core.model import CausalModel, SourceModel, WholeModel
from kinformer.family.build import configure
from kinformer.family.table import MEMBERS

TINY = {name: configure(name, "tiny") for name in MEMBERS}


def one_layer(config):
    """``config`` with one layer where all its layers are alike, since another one is called in the same way."""
    alike = config.stack.kind == "sequential" and len(set(config.layers)) == 1
    return config.replace(layers=config.layers[:1]) if alike else config


def _of(protocol: type, input: str) -> list[str]:
    return [name for name, config in TINY.items() if (config.protocol, config.input.kind) == (protocol, input)]


CAUSAL, ENCODERS, SOURCE = (_of(protocol, "tokens") for protocol in (CausalModel, WholeModel, SourceModel))
"""Those that read token ids."""
TRAJECTORIES = _of(CausalModel, "steps")
IMAGES = _of(WholeModel, "patches") + _of(WholeModel, "tiles")
SOUND = _of(WholeModel, "frames")
