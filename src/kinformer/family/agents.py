"""Members that act: recurrent policies, and models of trajectories."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from kinformer.family.assemble import ModelShape, decoder
from kinformer.family.record import Member, Recipe

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder


# GTrXL: Transformer-XL whose residuals are gates that begin nearly closed.


def _recipe(shape: ModelShape, segment: int, memory: int, head_dim: int | None = None) -> Recipe:
    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.blocks.feed_forward import MLP
        from kinformer.blocks.residual import Gated, Initialisation
        from kinformer.mixers.segment_memory import SegmentMemory
        from kinformer.parts.relative_positions import TransformerXL

        config = decoder(
            shape,
            vocab or 256,
            mixer=SegmentMemory.Config(
                num_heads=shape.num_heads,
                head_dim=head_dim,
                segment=segment,
                memory=memory,
                position=TransformerXL.Config(share_biases=False),
            ),
            initialisation=Initialisation(residual="plain"),
        )
        feed_forward = MLP.Config(hidden_dim=shape.hidden_dim or 4 * shape.dim, activation="relu", bias=False)
        layers = tuple(layer.replace(feed_forward=feed_forward, residual=Gated.Config()) for layer in config.layers)
        return config.replace(layers=layers, norm=None)

    return recipe


GTRXL = Member(
    name="gtrxl",
    title="GTrXL (gated Transformer-XL)",
    paper="Parisotto et al. 2019, Stabilizing Transformers for Reinforcement Learning (arXiv 1910.06764)",
    year=2019,
    axes=("memory", "depth"),
    causal=True,
    growth="window",
    departures=(
        "recipes read tokens and predict the next one; agents learn by PPO (`task` control; the paper's by V-MPO), or "
        "from trajectories (`task` trajectories)",
        "memory begins empty, where other implementations let tokens attend zeros",
        "u and v are each layer's own, and feed-forwards have no biases, as in RLlib; there is no official code",
        "recipe small is narrower than that of other members, since gates double a layer's weights",
        "of the recipe paper the width (256), the depth, the heads and the memory are recalled from the paper, not "
        "held to it again; segments, and feed-forwards four times as wide, are ours",
    ),
    exact_limit="segment >= length: exact attention with relative positions, behind gates",
    needs={"segments": True},
    parity=("RLlib 2.9.3: the whole network, in float64 (tests/blocks/test_gated.py)",),
    use_when="an agent must remember, in many layers, and training must be reliable",
    avoid_when="the task is text: its gates cost time without gain there",
    recipes={
        "tiny": _recipe(ModelShape(32, 2, 2), segment=8, memory=12),
        "small": _recipe(ModelShape(192, 4, 4, hidden_dim=576), segment=256, memory=256),
        "benchmark": _recipe(ModelShape(256, 4, 4), segment=256, memory=256),
        "paper": _recipe(ModelShape(256, 12, 8), segment=128, memory=512, head_dim=64),
    },
)


# Decision Transformer: a decoder of trajectories, which acts so as to get the return that it is asked for.

IMAGE = (4, 84, 84)
"""Four frames of a game, as Mnih et al. 2015 prepare them."""


def _recipe_of_decision(
    shape: ModelShape, *, state_dim: int = 4, actions: int = 2, discrete: bool = True, timesteps: int = 1024,
    dropout: float = 0.0, atari: bool = False,
) -> Recipe:  # fmt: skip
    """Return the recipe; ``discrete``: ``actions`` to choose from, else that many numbers; ``atari``: the authors'
    model of such games."""

    def recipe(vocab: int | None) -> Decoder.Config:
        from kinformer.heads.classes import ContinuousActions, DiscreteActions
        from kinformer.inputs.signals import Steps
        from kinformer.mixers.softmax import SoftmaxAttention
        from kinformer.parts.positions import Learned

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


DECISION = Member(
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
        "tiny": _recipe_of_decision(_shape(32, 2, 2), timesteps=64),
        "small": _recipe_of_decision(_shape(256, 4, 4)),
        "benchmark": _recipe_of_decision(_shape(256, 4, 4)),
        "paper": _recipe_of_decision(
            _shape(128, 3, 1), state_dim=11, actions=3, discrete=False, timesteps=4096, dropout=0.1
        ),
        "paper-atari": _recipe_of_decision(ModelShape(128, 6, 8), actions=4, timesteps=10000, dropout=0.1, atari=True),
    },
)
