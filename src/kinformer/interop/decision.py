"""Decision Transformer (Chen et al. 2021) as the library transformers saves it: GPT-2 over returns, states, actions.

The library adds the first row of a table of positions to every position, which is a bias behind the norm of the input
here. Outputs of states and returns are left out, as nothing trains them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.architecture import MASKS, Architecture, Padding, Tensors
from kinformer.interop.gpt2 import GPT2, GPT2_LAYER, REQUIRED, read_gpt2, write_gpt2
from kinformer.interop.key_map import ConfigData, ConfigView, KeyMap, key
from kinformer.interop.settings import Settings
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

DEFAULTS: Mapping[str, object] = {
    **GPT2,
    "state_dim": 17,
    "act_dim": 4,
    "hidden_size": 128,
    "max_ep_len": 4096,
    "vocab_size": 1,
    "n_layer": 3,
    "n_head": 1,
    "activation_function": "relu",
}
"""The values that transformers has for missing settings."""
POSITIONS = "encoder.wpe.weight"
UNTRAINED = re.compile(r"predict_(state|return)\.(weight|bias)")
NO_TOKENS = r"wte\.weight"
"""The table of ids, which a model of numbers does not read."""


def _read(full: Settings) -> ConfigData:
    actions = full.integer("act_dim")
    return read_gpt2(full.changed(n_embd=full["hidden_size"])) | {
        "input": {
            "kind": "steps",
            "state_dim": full.integer("state_dim"),
            "action_dim": actions,
            "timesteps": full.integer("max_ep_len"),
        },
        "position": "none",
        "head": {"kind": "continuous_actions", "action_dim": actions},
    }


KEYS = KeyMap(
    model=(
        key("input.returns", "embed_return"),
        key("input.states", "embed_state"),
        key("input.actions", "embed_action"),
        key("input.timesteps", "embed_timestep"),
        key("input.norm", "embed_ln"),
        key("norm", "ln_f"),
        key("head.output", "predict_action.0"),
    ),
    layer=GPT2_LAYER,
    layers="h",
    prefix="encoder.",
    beside=("embed_return", "embed_state", "embed_action", "embed_timestep", "embed_ln", "predict_action"),
    left_out=re.compile(f"{NO_TOKENS}|{UNTRAINED.pattern}"),
)


NORMALISED = {"return_scale": 1.0, "state_mean": [], "state_std": []}
"""The settings of an input that takes plain values."""


def _normalisation(model: ConfigView) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    steps = model["input"]
    return steps["return_scale"], tuple(steps["state_mean"]), tuple(steps["state_std"])


@dataclass(frozen=True, kw_only=True)
class DecisionTransformer(Architecture):
    """Decision Transformer, which takes plain returns and states and gives actions from -1 to 1."""

    reads: str = "steps"
    of = ""
    reordered = "the normalisation of returns and states is part of its products, so that it takes plain values"

    def read_tensors(
        self, tensors: Tensors, model: ConfigView, folder: Path, config: Mapping[str, object] | None = None
    ) -> dict[str, Tensor]:
        others = {name: tensor for name, tensor in tensors.items() if name != POSITIONS}
        weights = super().read_tensors(others, model, folder, config)
        bias, table = weights.get("input.norm.bias"), tensors.get(POSITIONS)
        if bias is None or table is None or table.shape[1:] != bias.shape or not len(table):
            raise KinformerError(
                f"{folder}: lacks embed_ln.bias or {POSITIONS}, or they are not as wide as config.json says; restore "
                "both from a copy."
            )
        weights["input.norm.bias"] = bias + table[0]
        return weights

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        out = sorted(name for name in tensors if UNTRAINED.fullmatch(name))
        scale = (
            "it does not say how returns and states are normalised: give `set` input.return_scale, input.state_mean "
            "and input.state_std, or normalised values"
        )
        return (f"{', '.join(out)} left out: nothing trains them", scale) if out else (scale,)

    def write_config(self, model: ConfigView, length: int | None, padding: Padding | None) -> JsonObject:
        steps, positions = model["input"], {"max_length": max(1024, length or 0)}
        gpt2 = write_gpt2({**model, "input": {"vocab_size": 1}, "position": positions, "head": {"tied": True}})
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

    def write_tensors(self, weights: Tensors, model: ConfigView, settings: JsonObject) -> dict[str, Tensor]:
        """Return the ``weights`` of our ``model`` under their names; what our model does not have is zero."""
        tensors = super().write_tensors(weights, model, settings)
        steps, dim, zeros = model["input"], model["dim"], weights["norm.weight"].new_zeros
        tensors |= {POSITIONS: zeros(settings["n_positions"], dim), "encoder.wte.weight": zeros(1, dim)}
        for name, size in {"state": steps["state_dim"], "return": 1}.items():
            tensors |= {f"predict_{name}.weight": zeros(size, dim), f"predict_{name}.bias": zeros(size)}
        return tensors

    def order(self, model: ConfigView) -> ConfigView:
        steps, head = dict(model["input"]) | NORMALISED, dict(model["head"])
        if all(abs(value) == 1 for value in (*head.get("low", ()), *head.get("high", ()))):
            head |= {name: [] for name in ("low", "high") if name in head}  # low lies below high
        plain = {**model, "input": steps, "head": head}
        return model if _normalisation(model) == _normalisation(plain) and head == model["head"] else plain

    def reorder(self, weights: Tensors, model: ConfigView) -> dict[str, Tensor]:
        """Return ``weights`` whose products take plain returns and states."""
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

    def differences(self, model: ConfigView) -> list[str]:
        return ["its outputs of states and returns are zero, as nothing trained them"]


ARCHITECTURES = {
    "decision_transformer": DecisionTransformer(
        title="Decision Transformer",
        member="decision",
        model_class="DecisionTransformerModel",
        auto_class="AutoModel",
        defaults=DEFAULTS,
        required={**REQUIRED, "action_tanh": True},
        names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        read=_read,
        keys=KEYS,
        buffers=MASKS,
    )
}
