"""The data of control: the sizes of an environment."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from kinformer.control.environments.environment import Box, Discrete
from kinformer.control.environments.table import make, named
from kinformer.control.online.options import DEFAULT_ENV, ControlOptions


@dataclass(frozen=True, eq=False)
class ControlData:
    """The environment called ``env``: its observations, ``actions`` and the longest episode's steps."""

    env: str
    observation_dim: int
    actions: Discrete | Box
    most_steps: int
    options: ControlOptions

    @property
    def name(self) -> str:
        return self.env

    @property
    def version(self) -> str:
        return "1"

    @property
    def fingerprint(self) -> str:
        description = f"{self.env} {self.observation_dim} {self.actions} {self.most_steps}"
        return f"sha256:{sha256(description.encode()).hexdigest()}"

    @property
    def identity(self) -> dict[str, object]:
        return {"name": self.name, "version": self.version, "fingerprint": self.fingerprint}


def open_environment(options: ControlOptions, by_user: bool = False) -> ControlData:
    """Return the sizes of the environment that ``options`` name; ``by_user``: the user gives that name in this call."""
    name = (named(options.env) if by_user else options.env) or DEFAULT_ENV
    environment = make(name)
    environment.close()
    return ControlData(name, environment.observation_dim, environment.actions, environment.most_steps, options)
