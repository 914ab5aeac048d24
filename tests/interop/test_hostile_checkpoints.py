"""Whatever a checkpoint folder says of itself, who imports it is told one sentence that names the folder."""

import json

import pytest
import torch
from safetensors.torch import load, save_file

from kinformer.interop import read_checkpoint
from kinformer.interop.checkpoint import ARCHITECTURES
from kinformer.runtime.errors import KinformerError
from tests.interop.encoders import Peer

VALUES = (None, -1, 0, 2.5, 10**9, 10**400, 1e308, float("nan"), True, "x" * 50, [], [[]], [3], {}, {"0": 5})
SHARE = 5
"""Each setting of a kind takes one value in so many, another kind's setting the others."""
LONG = "1" * 5_000


def refusal(folder):
    """What reading it is answered with; None where it is read."""
    try:
        read_checkpoint(folder)
    except KinformerError as error:
        assert str(folder) in str(error) and "\n" not in str(error) and len(str(error)) < 900, error
        return str(error)
    return None


FLA = ("gated_deltanet", "comba", "delta_net", "mesa_net", "gla", "retnet", "path_attn", "ttt")
"""The architectures of flash-linear-attention and of TTT-Linear's authors, which transformers does not know."""


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return Peer(tmp_path_factory.mktemp("peer"), "bert").folder


@pytest.fixture
def folder(bert, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((bert / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_any_setting_may_hold_any_value(kind, folder):
    import transformers

    ours = ARCHITECTURES[kind] if kind in FLA else None
    config = ours.defaults.defaults() | ours.required if ours else transformers.AutoConfig.for_model(kind).to_dict()
    config |= {"architectures": ["X"], "model_type": kind}
    for number, name in enumerate(config, start=list(ARCHITECTURES).index(kind)):
        for value in VALUES[number % SHARE :: SHARE] if name != "model_type" else VALUES:
            (folder / "config.json").write_text(json.dumps(config | {name: value}))
            refused = refusal(folder)
            assert name != "model_type" or (refused and "cannot be imported" in refused)


@pytest.mark.parametrize("value", [["bert"], 5, None, {}])
def test_a_kind_of_model_is_a_word(folder, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": value}))
    assert "cannot be imported; what can" in refusal(folder)


def test_tensors_of_strange_names_and_shapes(folder):
    path = folder / "model.safetensors"
    tensors = load(path.read_bytes())
    query = next(name for name in tensors if name.endswith("layer.0.attention.self.query.weight"))
    for changes, message in (
        ({query: torch.zeros(16, 8)}, "not what config.json says"),
        ({query: torch.zeros(())}, "not what config.json says"),
        ({query.replace("layer.0", f"layer.{LONG}"): torch.zeros(1)}, "which a BERT with"),
        ({query.replace("layer.0", "layer.٣"): torch.zeros(1)}, "which a BERT with"),
    ):
        save_file(tensors | changes, path)
        assert message in refusal(folder)
    save_file(tensors, path)
    assert refusal(folder) is None


def test_an_index_of_strange_values(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    for weight_map in (
        [],
        {},
        5,
        {"a": None},
        {"a": ["a.safetensors"]},
        {"a": "b.safetensors"},
        {"a": "a.safetensors"},
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert refusal(folder) is not None
