"""Members that act: recurrent policies, and models of trajectories."""

from __future__ import annotations

from math import prod

from kinformer.family.record import Member, Recipe, Settings, drop, part, usual_training

# GTrXL: Transformer-XL whose residuals are gates that begin nearly closed.


def _gtrxl(segment: int, memory: int, head_dim: int | None = None) -> Settings:
    return {
        "mixer": part(
            "segment_memory", head_dim=head_dim, segment=segment, memory=memory, position=part("xl", share_biases=False)
        ),
        "feed_forward": part("mlp", bias=False),
        "activation": "relu",
        "residual": "gated",
        "norm": None,
        "initialisation": {"residual": "plain"},
    }


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
        "every layer has separate u and v, and feed-forwards without biases, as in RLlib; official code does not exist",
        "recipe small is narrower than in other members, since gates double a layer's weights",
        "of the recipe paper the width (256), the depth, the heads and the memory are recalled from the paper, not "
        "held to it again; segments, and feed-forwards four times as wide, are ours",
        usual_training("paper", why="the paper's are settings of V-MPO"),
    ),
    exact_limit="segment >= length: exact attention with relative positions, behind gates",
    needs={"segments": True},
    parity=("RLlib 2.9.3: the whole network, in float64 (tests/blocks/test_gated.py)",),
    use_when="an agent must remember, in many layers, and training must be reliable",
    avoid_when="the task is text: its gates cost time without gain there",
    recipes={
        "tiny": Recipe(32, 2, 2, _gtrxl(8, 12)),
        "small": Recipe(192, 4, 4, _gtrxl(256, 256), hidden_dim=576),
        "benchmark": Recipe(256, 4, 4, _gtrxl(256, 256)),
        "paper": Recipe(256, 12, 8, _gtrxl(128, 512, head_dim=64)),
    },
)


# Decision Transformer: a decoder of trajectories, which acts so as to get the return that it is asked for.

IMAGE = (4, 84, 84)
"""Four frames of a game, as Mnih et al. 2015 prepare them."""


def _steps(state_dim: int, actions: int, timesteps: int, **more: object) -> Settings:
    read = part("steps", state_dim=state_dim, action_dim=actions, timesteps=timesteps, **more)
    return {"input": read, "head": part("discrete_actions", actions=actions), "activation": "relu"}


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
        "tiny": Recipe(32, 2, 2, _steps(4, 2, timesteps=64)),
        "small": Recipe(256, 4, 4, _steps(4, 2, timesteps=1024)),
        "benchmark": Recipe(256, 4, 4, _steps(4, 2, timesteps=1024)),
        "paper": Recipe(
            128, 3, 1, _steps(11, 3, timesteps=4096), drop(0.1), head=part("continuous_actions", action_dim=3)
        ),
        "paper-atari": Recipe(
            128,
            6,
            8,
            _steps(prod(IMAGE), 4, timesteps=10000, entrance="tanh", timestep="first", image=IMAGE),
            drop(0.1),
            position=part("learned", max_length=90),
            head=part("discrete_actions", actions=4, bias=False),
            activation="gelu",
        ),
    },
)


MEMBERS = (GTRXL, DECISION)
