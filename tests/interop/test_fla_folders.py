"""Import of flash-linear-attention's folders: what its own classes compute, and what is refused.

The golden numbers are those of its 0.6.0, whose kernels ran in Triton's interpreter (tests/golden/make_fla_folders.py).
"""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.state import detach
from kinformer.interop.recurrent import ARCHITECTURES
from kinformer.lab.runs.run import open_run
from kinformer.runtime.errors import KinformerError
from tests.interop.decoders import LENGTHS, assert_close
from tests.interop.fla_folders import FOLDERS, kind_of, token_ids, write

GOLDEN = Path(__file__).parents[1] / "golden" / "fla_folders.npz"


class Folder:
    """A folder of FOLDERS, the model imported from it, and what theirs computed."""

    def __init__(self, name, place):
        with np.load(GOLDEN, allow_pickle=False) as arrays:
            held = {key.removeprefix(f"{name}/"): arrays[key] for key in arrays if key.startswith(f"{name}/")}
        self.config, self.shapes = (json.loads(held.pop(one).tobytes()) for one in ("config", "shapes"))
        self.golden = {key: torch.from_numpy(array) for key, array in held.items()}
        self.folder, self.out = write(place / "peer", self.config, self.shapes), place / "run"
        kinformer.import_checkpoint(self.folder, self.out)
        self.ours = kinformer.load(self.out)
        self.double = deepcopy(self.ours).double()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders by their name in FOLDERS, each made once."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = Folder(name, tmp_path_factory.mktemp("folder"))
        return made[name]

    return folder


@torch.no_grad()
def check_logits(folder):
    assert_close(folder.ours(token_ids())[0], folder.golden["logits"])


def check_gradients(folder):
    ids = token_ids()
    folder.ours.zero_grad()
    logits = folder.ours(ids)[0]
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    kind, place = kind_of(folder.config["model_type"]), folder.folder / "config.json"
    model = ARCHITECTURES[kind].read_config(folder.config, place)
    theirs = {name.removeprefix("grad/"): grad for name, grad in folder.golden.items() if name.startswith("grad/")}
    wanted = ARCHITECTURES[kind].read_tensors(theirs, model, folder.folder)
    ours = {name: parameter.grad for name, parameter in folder.ours.named_parameters()}
    assert ours.keys() == wanted.keys()
    for name, gradient in ours.items():
        assert_close(gradient, wanted[name])


@torch.no_grad()
def check_streaming(folder):
    """Chunks of any length give the logits of the whole text. In double precision: a head's norm divides by outputs so
    small that float32, theirs too, is 3e-5 of the largest value from them."""
    state, parts = None, []
    for part in token_ids().split([1, 7, 2, 1, 9], dim=1):
        logits, state = folder.double(part, state)
        parts.append(logits)
        state = detach(state)
    assert_close(torch.cat(parts, dim=1), folder.double(token_ids())[0], 1e-10)


@torch.no_grad()
def check_padding(folder):
    """What stands on the left of a text changes nothing."""
    ids = token_ids()[:, : max(LENGTHS)]
    for row, want in zip(ids, folder.double(ids)[0], strict=True):
        for length in LENGTHS:
            padding = max(LENGTHS) - length
            padded = torch.nn.functional.pad(row[:length], (padding, 0))[None]
            valid = (torch.arange(max(LENGTHS)) >= padding)[None]
            assert_close(folder.double(padded, valid=valid)[0][0, padding:], want[:length], 1e-10)


def check_generation(folder):
    ours = kinformer.generate(folder.ours, token_ids()[:, :6], max_new_tokens=8, temperature=0, seed=0)
    assert torch.equal(ours, folder.golden["tokens"])


CHECKS = {
    "logits": check_logits,
    "gradients": check_gradients,
    "streaming": check_streaming,
    "padding": check_padding,
    "generation": check_generation,
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", FOLDERS)
def test_equal(name, check, folders):
    CHECKS[check](folders(name))


def test_the_state_does_not_grow_and_a_layer_with_a_window_is_bounded(folders):
    model = folders("gated_deltanet, with attention").ours
    sizes = [kinformer.core.state.nbytes(model(token_ids(time))[1]) for time in (6, 20)]
    assert sizes[0] == sizes[1]
    assert [layer.mixer.kind for layer in open_run(folders("gla").out).config.layers] == ["linear"] * 2


REFUSED = {
    "another activation": ("gla", {"hidden_act": "powlu"}, "hidden_act is 'powlu', but only swish"),
    "attention over depth": ("gated_deltanet", {"attnres_block_size": 2}, "attnres_block_size is 2, but only None"),
    "no convolution": ("delta_net", {"use_short_conv": False}, "use_short_conv is False, but only True"),
    "no strength": ("delta_net", {"use_beta": False}, "use_beta is False"),
    "another norm of keys": ("delta_net", {"qk_norm": "sum"}, "qk_norm is 'sum', but only 'l2'"),
    "clamped decays": ("gla", {"clamp_min": -1.0}, "clamp_min is -1.0"),
    "features": ("retnet", {"feature_map": "relu"}, "feature_map is 'relu'"),
    "shared keys of sums": ("gla", {"num_kv_heads": 1}, "num_kv_heads is 1, but only as many as num_heads, 2"),
    "heads of values": ("gated_deltanet", {"num_v_heads": 3}, "num_v_heads is 3, but must be a multiple of num_heads"),
    "parts of a number": ("gla", {"expand_k": 0.3}, "expand_k is 0.3, but 16 times it must be .* a multiple of 2"),
    "widths": ("gated_deltanet", {"expand_v": 2.0}, "is not what config.json says"),
    "another gate": ("gated_deltanet", {"output_gate_activation": "relu"}, "but only swish, silu, sigmoid"),
    "attention without layers": ("retnet", {"attn": {"num_heads": 2}}, "attn does not name a list of layers"),
    "attention beyond the layers": ("retnet", {"attn": {"layers": [2], "num_heads": 2}}, "layers of attn is 2"),
}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_lying_config_is_one_sentence(name, changes, message, folders, tmp_path):
    peer = folders(name)
    folder = write(tmp_path / "peer", peer.config | changes, peer.shapes)
    with pytest.raises(KinformerError, match=message) as refusal:
        kinformer.import_checkpoint(folder, tmp_path / "run")
    assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_tensors_that_are_missing_or_unknown_are_told(folders, tmp_path):
    peer = folders("gla")
    decay = "model.layers.0.attn.gk_proj.1.bias"
    less = {name: shape for name, shape in peer.shapes.items() if name != decay}
    with pytest.raises(KinformerError, match=r"lacks stack\.layers\.0\.mixer\.decay\.up\.bias"):
        kinformer.import_checkpoint(write(tmp_path / "less", peer.config, less), tmp_path / "run")
    more = peer.shapes | {"model.layers.0.attn.k_norm.weight": [4]}
    with pytest.raises(KinformerError, match="holds 'model.layers.0.attn.k_norm.weight', which a GLA language model"):
        kinformer.import_checkpoint(write(tmp_path / "more", peer.config, more), tmp_path / "run")
