"""The environments that come with the library, by name; all others are gymnasium's."""

from __future__ import annotations

from kinformer.control.environments.environment import Environment
from kinformer.control.environments.gymnasium import Gymnasium
from kinformer.control.environments.key_to_door import KeyToDoor
from kinformer.control.environments.masked_cartpole import MaskedCartPole
from kinformer.control.environments.poc_memory import PocMemory
from kinformer.control.environments.shortest_path import ShortestPath
from kinformer.control.environments.t_maze import TMaze
from kinformer.runtime.errors import KinformerError

BUILTIN: dict[str, type[Environment]] = {
    item.name: item for item in (KeyToDoor, ShortestPath, TMaze, PocMemory, MaskedCartPole)
}


def make(name: str, count: int = 1, render: bool = False) -> Environment:
    """Return ``count`` rows of the environment ``name``; ``render``: whether pictures will be drawn.

    ``t-maze:30`` is a T-maze whose corridor is 30 steps long.
    """
    setting, colon, length = name.partition(":")
    if setting not in BUILTIN:
        return Gymnasium(name, count, render)
    if not colon:
        return BUILTIN[setting](count)
    if setting != TMaze.name or not length.isdecimal():
        raise KinformerError(f"`env` {name}: only the T-maze has a length; write as in {TMaze.name}:30.")
    environment = TMaze(count, int(length))
    environment.name = name
    return environment
