"""The export route of models of trajectories: Decision Transformer. See ``interop.routes``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.interop import decision
from kinformer.interop.architecture import Settings
from kinformer.interop.inverse import SETTINGS
from kinformer.interop.key_map import ConfigView
from kinformer.interop.routes import PLACE, Padding, Route, Weights

if TYPE_CHECKING:
    from torch import Tensor

NORMALISED = {"return_scale": 1.0, "state_mean": [], "state_std": []}
"""The settings of an input that takes values as they are."""


def _settings(model: ConfigView, length: int | None, padding: Padding | None) -> Settings:
    steps = model["input"]
    gpt2 = SETTINGS["gpt2"](
        {
            **model,
            "input": {"vocab_size": 1},
            "position": {"max_length": max(1024, length or 0)},
            "head": {"tied": True},
        }
    )
    others = {name: value for name, value in gpt2.items() if name not in ("n_embd", "tie_word_embeddings")}
    return others | {
        "hidden_size": model["dim"],
        "state_dim": steps["state_dim"],
        "act_dim": steps["action_dim"],
        "max_ep_len": steps["timesteps"],
        "action_tanh": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _plain(model: ConfigView) -> ConfigView:
    """Return ``model`` with values taken as they are and actions between -1 and 1; the same object where they are."""
    steps, head = dict(model["input"]) | NORMALISED, dict(model["head"])
    if all(abs(value) == 1 for value in (*head.get("low", ()), *head.get("high", ()))):
        head |= {name: [] for name in ("low", "high") if name in head}  # low lies below high
    plain = {**model, "input": steps, "head": head}
    return model if _normalisation(model) == _normalisation(plain) and head == model["head"] else plain


def _normalisation(model: ConfigView) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    steps = model["input"]
    return steps["return_scale"], tuple(steps["state_mean"]), tuple(steps["state_std"])


def _folded(weights: Weights, model: ConfigView) -> dict[str, Tensor]:
    """Return ``weights`` whose products take returns and states as they are; ``model`` normalises them."""
    import torch

    scale, mean, std = _normalisation(model)
    changed = dict(weights)
    returns, states = (weights[f"input.{name}.weight"].double() for name in ("returns", "states"))
    states = states / torch.tensor(std or 1.0, dtype=torch.float64)
    changed["input.returns.weight"] = (returns / scale).to(weights["input.returns.weight"])
    changed["input.states.weight"] = states.to(weights["input.states.weight"])
    if mean:
        bias = weights["input.states.bias"]
        changed["input.states.bias"] = (bias.double() - states @ torch.tensor(mean, dtype=torch.float64)).to(bias)
    return changed


ROUTES = {
    "decision_transformer": Route(
        title="Decision Transformer",
        kind="decoder",
        reads="steps",
        settings=_settings,
        read=lambda settings, model: decision.DECISION.model_config(settings, PLACE),
        write=lambda weights, model, settings: decision.write(weights, model, settings["n_positions"]),
        classes=lambda model: ("DecisionTransformerModel", "AutoModel"),
        order=_plain,
        reorder=_folded,
        reordered="the normalisation of returns and states is part of its products, so that it takes both as they are",
        notes=lambda model: ["its outputs of states and returns are zero, as nothing trained them"],
    )
}
"""The ``model_type`` to its export route."""
