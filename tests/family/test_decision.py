"""Decision Transformer against transformers 4.35.2 and the authors' code (golden arrays, float64), and against the
installed transformers with random weights: hidden states of all positions, and actions read at states."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kinformer
from kinformer.inputs.signals import pack

SIZES = {
    "input.state_dim": 5, "input.action_dim": 3, "input.timesteps": 30, "dim": 16, "layers.*.mixer.num_heads": 2,
    "layers.*.feed_forward.hidden_dim": 24, "head": {"kind": "continuous_actions", "action_dim": 3},
}  # fmt: skip


def ours(weights, **changes):
    """Our model with weights by the authors' names."""
    model = kinformer.build("decision", recipe="tiny", set=SIZES | changes).double().eval()
    given = {
        "input.returns": "embed_return", "input.states": "embed_state", "input.actions": "embed_action",
        "input.timesteps": "embed_timestep", "input.norm": "embed_ln", "norm": "encoder.ln_f",
        "head.output": "predict_action.0",
    }  # fmt: skip
    for layer in range(2):
        own, theirs = f"stack.layers.{layer}", f"encoder.h.{layer}"
        given |= {
            f"{own}.mixer_residual.norm": f"{theirs}.ln_1", f"{own}.feed_forward_residual.norm": f"{theirs}.ln_2",
            f"{own}.mixer.projection.qkv": f"{theirs}.attn.c_attn", f"{own}.mixer.out": f"{theirs}.attn.c_proj",
            f"{own}.feed_forward.up": f"{theirs}.mlp.c_fc", f"{own}.feed_forward.down": f"{theirs}.mlp.c_proj",
        }  # fmt: skip
    found = {}
    for name, theirs in given.items():
        for part in ("weight", "bias"):
            if f"{theirs}.{part}" in weights:
                weight = weights[f"{theirs}.{part}"]
                inward = "encoder.h" in theirs and weight.dim() == 2  # theirs are used as x @ W
                found[f"{name}.{part}"] = weight.T if inward else weight
    model.load_state_dict(found)
    return model


def packed(input, returns, states, actions, timesteps):
    """Positions [batch, 3 * time, width] of what stands in arrays of their own."""
    parts = [
        pack(torch.full_like(timesteps, kind), timesteps, values, input.width)
        for kind, values in enumerate((returns, states, actions))
    ]
    return torch.stack(parts, dim=2).flatten(1, 2)


@pytest.fixture(scope="module")
def golden():
    path = Path(__file__).parents[1] / "golden" / "decision_transformer.npz"
    with np.load(path, allow_pickle=False) as arrays:
        return {key: torch.as_tensor(arrays[key]) for key in arrays if arrays[key].dtype.kind in "fib"}


def test_golden(golden):
    weights = {name.removeprefix("w."): weight for name, weight in golden.items() if name.startswith("w.")}
    model = ours(weights)
    names = ("returns_to_go", "states", "actions", "timesteps")
    values = packed(model.input, *(golden[f"in.{name}"] for name in names))
    real = golden["in.attention_mask"].bool()
    valid = real.repeat_interleave(3, 1)
    with torch.no_grad():
        entered = model.input(values, torch.zeros_like(valid, dtype=torch.int64))
        hidden = model.hidden(values, valid=valid).hidden_states
        actions = model(values, valid=valid)[0][:, 1::3]
    assert (entered - golden["out.token_inputs"])[valid].abs().max() < 1e-12
    assert (hidden - golden["out.last_hidden_state"])[valid].abs().max() < 1e-12
    for theirs in ("out.action_preds", "out.official_action_preds"):
        assert (actions - golden[theirs])[real].abs().max() < 1e-12


def test_transformers():
    """Which adds the first row of a table of positions, whatever the position, unless it is zero."""
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    torch.manual_seed(1)
    theirs = DecisionTransformerModel(
        DecisionTransformerConfig(
            state_dim=5, act_dim=3, hidden_size=16, max_ep_len=30, n_layer=2, n_head=2, n_inner=24, n_positions=64
        )
    )
    theirs = theirs.double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.3)
        theirs.encoder.wpe.weight[0].zero_()
    model = ours(theirs.state_dict())
    timesteps = torch.arange(6).expand(2, -1) + 3
    states, actions, returns = (torch.randn(2, 6, size).double() for size in (5, 3, 1))
    with torch.no_grad():
        want = theirs(
            states=states, actions=actions, rewards=None, returns_to_go=returns, timesteps=timesteps,
            attention_mask=torch.ones(2, 6, dtype=torch.int64),
        )  # fmt: skip
        values = packed(model.input, returns, states, actions, timesteps)
        got, _ = model(values)
        hidden = model.hidden(values).hidden_states
    assert (hidden - want.last_hidden_state).abs().max() < 1e-10
    assert (got[:, 1::3] - want.action_preds).abs().max() < 1e-10
