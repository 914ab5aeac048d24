"""What control is learnt in: an environment, looked at."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from kinformer.control.environments.environment import Box, Discrete
from kinformer.control.environments.table import make
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
        outputs = f"{self.env} {self.observation_dim} {self.actions} {self.most_steps}"
        return f"sha256:{sha256(outputs.encode()).hexdigest()}"

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "fingerprint": self.fingerprint}


def open_environment(options: ControlOptions) -> ControlData:
    """The environment that ``options`` name, looked at."""
    name = options.env or DEFAULT_ENV
    environment = make(name)
    environment.close()
    return ControlData(name, environment.observation_dim, environment.actions, environment.most_steps, options)
