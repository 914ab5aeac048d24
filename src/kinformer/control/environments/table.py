"""The environments that come with the library, by name; all others are gymnasium's."""

from __future__ import annotations

from importlib import import_module

from kinformer.control.environments.environment import Environment
from kinformer.control.environments.gymnasium import Gymnasium
from kinformer.control.environments.key_to_door import KeyToDoor
from kinformer.control.environments.masked_cartpole import MaskedCartPole
from kinformer.control.environments.poc_memory import PocMemory
from kinformer.control.environments.shortest_path import ShortestPath
from kinformer.control.environments.t_maze import TMaze
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.plugins import current_folder

BUILTIN: dict[str, type[Environment]] = {
    item.name: item for item in (KeyToDoor, ShortestPath, TMaze, PocMemory, MaskedCartPole)
}


def named(env: str | None) -> str | None:
    """Return ``env``, which the user of this call names; the module of a name such as ``module:Env-v0`` is imported.

    Errors: ``KinformerError`` where that fails.
    """
    module, colon, _ = (env or "").rpartition(":")
    if colon and module not in BUILTIN:
        try:
            with current_folder():
                import_module(module)
        except Exception as error:  # whatever the user's module raises
            raise KinformerError(
                f"`env` {env}: the module {module} cannot be imported ({type(error).__name__}: {error}); mend it, or "
                "give the name of an environment alone."
            ) from error
    return env


def make(name: str, count: int = 1, render: bool = False) -> Environment:
    """Return ``count`` rows of the environment ``name``; ``render``: whether pictures will be drawn.

    ``t-maze:30`` is a T-maze whose corridor is 30 steps long. The module of ``module:Env-v0`` is not imported here,
    since a run folder can hold the name; see :func:`named`.
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
