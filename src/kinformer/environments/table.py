"""The environments that come with the library, by name; all others are gymnasium's."""

from __future__ import annotations

from kinformer.environments.environment import Environment
from kinformer.environments.gymnasium import Gymnasium
from kinformer.environments.key_to_door import KeyToDoor
from kinformer.environments.shortest_path import ShortestPath

OWN: dict[str, type[Environment]] = {each.name: each for each in (KeyToDoor, ShortestPath)}


def make(name: str, count: int = 1, render: bool = False) -> Environment:
    """``count`` rows of the environment ``name``; ``render``: pictures are going to be asked for."""
    return OWN[name](count) if name in OWN else Gymnasium(name, count, render)
