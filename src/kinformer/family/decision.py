"""Decision Transformer: a decoder of trajectories, which acts so as to get the return that it is asked for."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


IMAGE = (4, 84, 84)
"""Four frames of a game, as Mnih et al. 2015 prepare them."""


def _recipe(
    shape: ModelShape, *, state_dim: int = 4, actions: int = 2, discrete: bool = True, timesteps: int = 1024,
    dropout: float = 0.0, atari: bool = False,
) -> Recipe:  # fmt: skip
    """Return the recipe; ``discrete``: ``actions`` to choose from, else that many numbers; ``atari``: the authors'
    model of such games."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.heads.actions import ContinuousActions, DiscreteActions
        from kinformer.inputs.steps import Steps
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.positions.learned import Learned

        config = decoder(
            shape,
            2,
            mixer=SoftmaxAttention.Config(num_heads=shape.num_heads, dropout=dropout),
            position=Learned.Config(max_length=90) if atari else None,
            head=DiscreteActions.Config(actions=actions, bias=not atari)
            if discrete
            else ContinuousActions.Config(action_dim=actions),
        )
        return config.replace(
            input=Steps.Config(
                state_dim=prod(IMAGE) if atari else state_dim,
                action_dim=actions,
                timesteps=timesteps,
                entrance="tanh" if atari else "norm",
                timestep="first" if atari else "each",
                image=IMAGE if atari else (),
            ),
            layers=tuple(layer.replace(dropout=dropout) for layer in config.layers),
            dropout=dropout,
        )

    return recipe


def _shape(dim: int, depth: int, num_heads: int) -> ModelShape:
    return ModelShape(dim, depth, num_heads, activation="relu")


MEMBER = Member(
    name="decision",
    task="trajectories",
    title="Decision Transformer (acts for a return)",
    paper="Chen et al. 2021, Decision Transformer: Reinforcement Learning via Sequence Modeling (arXiv 2106.01345)",
    year=2021,
    axes=("domain",),
    causal=True,
    growth="linear",
    departures=(
        "predicts actions alone; the authors' code also has outputs of states and returns, which are not trained",
        "no padding: rows are as long as their trajectories",
        "paper-atari: tables of positions and timesteps begin as all tables do (the authors': at 0)",
        "an agent carries its state and absorbs one step at a time; the authors read the last K steps again at each "
        "(evaluate `context_steps` K)",
        "no dropout unless asked for, except for the recipes of the paper",
    ),
    exact_limit="is exact attention",
    parity=("transformers 4.35.2 and the authors' code, in float64 (tests/family/test_decision.py)",),
    results=("key_to_door",),
    use_when="an agent learns from recorded episodes, without an environment",
    avoid_when="you can act while learning: the task `control` does that",
    training={  # appendix A: the hyperparameters of OpenAI Gym and of Atari
        "paper": {
            "steps": 100_000,
            "batch_size": 64,
            "lr": 1e-4,
            "schedule": "constant",
            "warmup": 10_000,
            "beta2": 0.999,
            "weight_decay": 1e-4,
            "clip": 0.25,
        },
        "paper-atari": {  # five epochs over 500,000 steps of a game, in rows of 30 steps
            "steps": 19_531,
            "batch_size": 128,
            "length": 90,
            "lr": 6e-4,
            "warmup": 3,
        },
    },
    recipes={
        "tiny": _recipe(_shape(32, 2, 2), timesteps=64),
        "small": _recipe(_shape(256, 4, 4)),
        "benchmark": _recipe(_shape(256, 4, 4)),
        "paper": _recipe(_shape(128, 3, 1), state_dim=11, actions=3, discrete=False, timesteps=4096, dropout=0.1),
        "paper-atari": _recipe(ModelShape(128, 6, 8), actions=4, timesteps=10000, dropout=0.1, atari=True),
    },
)
