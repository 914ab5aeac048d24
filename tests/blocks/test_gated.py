"""Gates of GTrXL: their formulas, the whole network of RLlib 2.9.3 (golden arrays, float64), and what they begin as."""

from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.blocks.residual import Gated, LayerNorm, Reordered
from kinformer.core.contract import Chunk
from kinformer.mixers.memory import SegmentState
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.runtime.errors import KinformerError

DIM = 12
GATES = ("gru", "input", "output", "highway", "sigtanh")


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "gtrxl.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays if arrays[key].ndim}


def published(arrays):
    """RLlib's weights under our names; those of gates are used as x @ W there."""
    found = {}
    for unit in range(2):
        attention, mlp = (f"w.attention_layers.{2 * unit + part}._layer" for part in range(2))
        ours = f"stack.layers.{unit}"
        found |= {
            f"{ours}.mixer.projection.qkv.weight": arrays[f"{attention}._qkv_layer._model.0.weight"],
            f"{ours}.mixer.out.weight": arrays[f"{attention}._linear_layer._model.0.weight"],
            f"{ours}.mixer.position.projection.weight": arrays[f"{attention}._pos_proj._model.0.weight"],
            f"{ours}.mixer.position.biases.content": arrays[f"{attention}._uvar"],
            f"{ours}.mixer.position.biases.position": arrays[f"{attention}._vvar"],
            f"{ours}.feed_forward.up.weight": arrays[f"{mlp}.1._model.0.weight"],
            f"{ours}.feed_forward.down.weight": arrays[f"{mlp}.2._model.0.weight"],
        }
        for part, (residual, norm) in enumerate(
            (("mixer_residual", f"{attention}._input_layernorm"), ("feed_forward_residual", f"{mlp}.0"))
        ):
            gate = {
                name: arrays[f"w.attention_layers.{2 * unit + part}._fan_in_layer._{name}"]
                for name in ("w_r", "w_z", "w_h", "u_r", "u_z", "u_h", "bias_z")
            }
            found |= {
                f"{ours}.{residual}.norm.weight": arrays[f"{norm}.weight"],
                f"{ours}.{residual}.norm.bias": arrays[f"{norm}.bias"],
                f"{ours}.{residual}.of_y.weight": torch.cat([gate[f"w_{name}"].T for name in "rzh"]),
                f"{ours}.{residual}.of_x.weight": torch.cat([gate[f"u_{name}"].T for name in "rz"]),
                f"{ours}.{residual}.of_reset.weight": gate["u_h"].T,
                f"{ours}.{residual}.bias": gate["bias_z"],
            }
    return found


def zeros_attended(layer, seen):
    """A memory of 6 zeros, which RLlib lets tokens attend, before the position ``seen``."""
    state = layer.initial_state(2, dtype=torch.float64)[0]
    memory = torch.zeros(2, 1, 6, DIM, dtype=torch.float64)
    return (SegmentState(memory, state.k, state.v, torch.full((2,), seen)),)


@pytest.mark.parametrize("cuts", [[4, 4], [1, 5, 2]])
def test_two_units_are_rllibs(golden, cuts):
    changes = {
        "dim": DIM, "layers.*.feed_forward.hidden_dim": 16, "layers.*.mixer.segment": 4, "layers.*.mixer.memory": 6,
    }  # fmt: skip
    model = kinformer.build("gtrxl", recipe="tiny", vocab_size=8, set=changes).double().eval()
    weights = published(golden)
    assert model.load_state_dict(weights, strict=False).missing_keys == ["input.embedding.weight"]
    observed = torch.cat([golden[f"in.seg{segment}.obs"] for segment in range(2)], dim=1)
    weight, bias = (golden[f"w.linear_layer._model.0.{name}"] for name in ("weight", "bias"))
    x = torch.nn.functional.linear(observed, weight, bias)
    with torch.no_grad():
        for unit, layer in enumerate(model.stack.layers):
            state, parts = zeros_attended(layer, 8), []
            for part in x.split(cuts, dim=1):
                y, state = layer(Chunk(part), state)
                parts.append(y)
            x = torch.cat(parts, dim=1)
            want = torch.cat([golden[f"out.seg{segment}.unit{unit}.after_gate2"] for segment in range(2)], dim=1)
            assert (x - want).abs().max() < 1e-12
    logits = torch.nn.functional.linear(x, golden["w.logits._model.0.weight"], golden["w.logits._model.0.bias"])
    assert (logits.relu() - torch.cat([golden[f"out.seg{i}.logits"] for i in range(2)], 1)).abs().max() < 1e-12


def built(config, dropout=0.0):
    torch.manual_seed(0)
    return config.build(DIM, LayerNorm(), dropout).double()


def formula(gate, part, x, y):
    """As the paper writes it."""
    s, b = torch.sigmoid, part.bias
    if gate == "gru":
        w_r, w_z, w_h = part.of_y.weight.chunk(3)
        u_r, u_z = part.of_x.weight.chunk(2)
        r, z = s(y @ w_r.T + x @ u_r.T), s(y @ w_z.T + x @ u_z.T - b)
        return (1 - z) * x + z * torch.tanh(y @ w_h.T + (r * x) @ part.of_reset.weight.T)
    if gate == "sigtanh":
        w, u = part.of_y.weight.chunk(2)
        return x + s(y @ w.T - b) * torch.tanh(y @ u.T)
    w = part.of_x.weight
    if gate == "input":
        return s(x @ w.T) * x + y
    if gate == "output":
        return x + s(x @ w.T - b) * y
    return s(x @ w.T + b) * x + (1 - s(x @ w.T + b)) * y


@pytest.mark.parametrize("gate", GATES)
def test_gates_are_their_formulas(gate):
    part = built(Gated.Config(gate=gate))
    x, y = torch.randn(2, 5, DIM).double(), torch.randn(2, 5, DIM).double()
    with torch.no_grad():
        for share in (1.0, 0.5):
            got, want = part.leave(x, y, share), formula(gate, part, x, share * y.relu())
            assert (got - want).abs().max() < 1e-12
        assert torch.equal(part(x), part.norm(x))


def test_reordering_adds_what_is_above_zero():
    part = built(Reordered.Config())
    x, y = torch.randn(2, 5, DIM).double(), torch.randn(2, 5, DIM).double()
    assert torch.equal(part.leave(x, y), x + y.relu())
    assert torch.equal(x + part.added(y, 0.5), part.leave(x, y, 0.5))


@pytest.mark.parametrize("gate", ["gru", "output", "highway", "sigtanh"])
def test_a_large_bias_is_the_identity_and_2_is_near_it(gate):
    x, y = torch.randn(9, DIM).double(), torch.randn(9, DIM).double()
    moved = []
    for bias in (0.0, 2.0, 60.0):
        part = built(Gated.Config(gate=gate, bias=bias))
        moved.append(float((part.leave(x, y) - x).detach().norm()))
    assert moved[0] > 2 * moved[1] > 1e-3 and moved[2] < 1e-9


def test_in_its_limit_it_is_exact_attention_and_one_step_off_it_is_not():
    def outputs(mixer):
        torch.manual_seed(0)
        config = kinformer.family.build.configure("gtrxl", "tiny", 23)
        layers = tuple(layer.replace(mixer=mixer) for layer in config.layers)
        model = config.replace(layers=layers).build().double().eval()
        with torch.no_grad():
            return model(torch.arange(14)[None] % 23)[0]

    segments = kinformer.family.build.configure("gtrxl", "tiny").layers[0].mixer
    exact = SoftmaxAttention.Config(num_heads=2, projection=segments.projection, position=segments.position, bias=False)
    want = outputs(exact)
    assert (outputs(segments.replace(segment=14)) - want).abs().max() < 1e-12
    off = outputs(segments.replace(segment=13, memory=12))
    assert torch.allclose(off[:, :13], want[:, :13]) and (off[:, 13] - want[:, 13]).abs().max() > 1e-6


def test_a_bias_that_a_gate_does_not_have():
    with pytest.raises(KinformerError, match="bias = 1.0 does nothing with the gate 'input'"):
        Gated.Config(gate="input", bias=1.0)
    with pytest.raises(KinformerError, match="by a norm or a gate behind it"):
        model = kinformer.build("gtrxl", recipe="tiny", set={"stack": "reversible", "head.tied": False})
        model(torch.zeros(1, 3, dtype=torch.int64))
