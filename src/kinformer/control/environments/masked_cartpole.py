"""CartPole without velocities: a pole on a cart is to be kept upright (Barto et al. 1983) by one who sees where cart
and pole are, but not how they move (after Wierstra et al. 2007).

The equations, the bounds and the rewards are those of gymnasium's CartPole-v1: every step pays 1, and an episode ends
when the pole has fallen or the cart has left the track, or after 500 steps. Velocities follow only from earlier
observations.

Observation: the cart's place and the pole's angle, each as a share of its bound. Actions: push left, push right.
"""

from __future__ import annotations

from math import pi

import numpy as np

from kinformer.control.environments.drawing import AGENT, INK, KEY, PIXELS, grid, stroke
from kinformer.control.environments.environment import Discrete, Environment

GRAVITY, CART, POLE, HALF, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
"""Metres, kilograms and newtons; HALF is half of the pole's length, SECONDS the time of a step."""
LAST_PLACE, LAST_ANGLE, FIRST = 2.4, 12 * pi / 180, 0.05


def moved(states: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Return place, speed, angle and its speed [rows, 4] after a step of Euler's method."""
    place, speed, angle, turning = states.T
    force = np.where(actions == 1, FORCE, -FORCE)
    sine, cosine = np.sin(angle), np.cos(angle)
    pushed = (force + POLE * HALF * turning**2 * sine) / (CART + POLE)
    torque = (GRAVITY * sine - cosine * pushed) / (HALF * (4 / 3 - POLE * cosine**2 / (CART + POLE)))
    push = pushed - POLE * HALF * torque * cosine / (CART + POLE)
    changes = np.stack([speed, push, turning, torque], axis=1)
    return states + SECONDS * changes


class MaskedCartPole(Environment):
    """A pole on a cart, seen without velocities. The optimum is 500."""

    name = "masked-cartpole"
    observation_dim = 2
    actions = Discrete(2)
    most_steps = 500

    def __init__(self, count: int = 1) -> None:
        super().__init__(count)
        self.states = np.zeros((count, 4))

    @property
    def optimal(self) -> np.ndarray:
        return np.full(self.count, float(self.most_steps))

    def _begin(self, row: int, seed: int) -> None:
        self.states[row] = np.random.default_rng(seed).uniform(-FIRST, FIRST, 4)

    def _observe(self) -> np.ndarray:
        return (self.states[:, [0, 2]] / (LAST_PLACE, LAST_ANGLE)).astype(np.float32)

    def _act(self, actions: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.states = np.where(running[:, None], moved(self.states, actions), self.states)
        fallen = (np.abs(self.states[:, [0, 2]]) > (LAST_PLACE, LAST_ANGLE)).any(1)
        return np.ones(self.count), np.asarray(fallen)

    def render(self) -> np.ndarray:
        """Return a picture of the track, the cart and the pole."""
        picture = grid(6, 12)
        place, _, angle, _ = self.states[0]
        base = np.array([5.0, 6 + 5 * place / LAST_PLACE]) * PIXELS
        stroke(picture, np.array([base[0] + 8, 0.0]), np.array([base[0] + 8, picture.shape[1]]), INK, 2)
        stroke(picture, base - (0, 18), base + (0, 18), AGENT, 14)
        stroke(picture, base, base + 90 * np.array([-np.cos(angle), np.sin(angle)]), KEY, 6)
        return picture
