"""Decision Transformer (Chen et al. 2021) as the library transformers saves it: GPT-2 over returns, states, actions.

The library adds the first row of a table of positions to every position, which is a bias behind the norm of the input
here. Outputs of states and returns are left out, as nothing trains them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.architecture import Architecture, Settings, integer
from kinformer.interop.gpt2 import GPT2, KEYS, REQUIRED
from kinformer.interop.key_map import ConfigData, ConfigView, KeyMap, key
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULTS: Mapping[str, object] = {
    **GPT2.defaults,
    "state_dim": 17,
    "act_dim": 4,
    "hidden_size": 128,
    "max_ep_len": 4096,
    "vocab_size": 1,
    "n_layer": 3,
    "n_head": 1,
    "activation_function": "relu",
}
"""The defaults of transformers for what a config leaves out."""
POSITIONS = "encoder.wpe.weight"
UNTRAINED = re.compile(r"predict_(state|return)\.(weight|bias)")
NO_TOKENS = r"wte\.weight"
"""The table of ids, which a model of numbers does not read."""


def _model(full: Settings, place: Path) -> ConfigData:
    actions = integer(full, place, "act_dim")
    return GPT2.model({**full, "n_embd": full["hidden_size"]}, place) | {
        "input": {
            "kind": "steps",
            "state_dim": integer(full, place, "state_dim"),
            "action_dim": actions,
            "timesteps": integer(full, place, "max_ep_len"),
        },
        "position": "none",
        "head": {"kind": "continuous_actions", "action_dim": actions},
    }


DECISION = Architecture(
    title="Decision Transformer",
    member="decision",
    defaults=DEFAULTS,
    required={**REQUIRED, "action_tanh": True},
    names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    model=_model,
    keys=KeyMap(
        model=(
            key("input.returns", "embed_return"),
            key("input.states", "embed_state"),
            key("input.actions", "embed_action"),
            key("input.timesteps", "embed_timestep"),
            key("input.norm", "embed_ln"),
            key("norm", "ln_f"),
            key("head.output", "predict_action.0"),
        ),
        layer=KEYS.layer,
        layers="h",
        prefix="encoder.",
        beside=("embed_return", "embed_state", "embed_action", "embed_timestep", "embed_ln", "predict_action"),
        left_out=re.compile(f"{NO_TOKENS}|{UNTRAINED.pattern}"),
    ),
)


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, object], folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; a tensor that such a model does not have is an error."""
    others = {name: tensor for name, tensor in tensors.items() if name != POSITIONS}
    weights = DECISION.key_map(model).read(others, model, folder, DECISION.title)
    bias, table = weights.get("input.norm.bias"), tensors.get(POSITIONS)
    if bias is None or table is None or table.shape[1:] != bias.shape or not len(table):
        raise KinformerError(
            f"{folder}: lacks embed_ln.bias or {POSITIONS}, or they are not as wide as config.json says; restore both "
            "from a copy."
        )
    weights["input.norm.bias"] = bias + table[0]
    return weights


def write(weights: Mapping[str, Tensor], model: ConfigView, positions: int) -> dict[str, Tensor]:
    """Return our ``weights`` under their names: the inverse of :func:`convert`; what ours does not have is zero."""
    tensors = DECISION.write(weights, model)
    steps, dim, zeros = model["input"], model["dim"], weights["norm.weight"].new_zeros
    tensors |= {POSITIONS: zeros(positions, dim), "encoder.wte.weight": zeros(1, dim)}
    for name, size in {"state": steps["state_dim"], "return": 1}.items():
        tensors |= {f"predict_{name}.weight": zeros(size, dim), f"predict_{name}.bias": zeros(size)}
    return tensors


def notes(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return notes for the user on a folder with ``tensors``."""
    out = sorted(name for name in tensors if UNTRAINED.fullmatch(name))
    scale = (
        "it does not say how returns and states are normalised: give `set` input.return_scale, input.state_mean and "
    )
    scale += "input.state_std, or values that are"
    return (f"{', '.join(out)} left out: nothing trains them", scale) if out else (scale,)
