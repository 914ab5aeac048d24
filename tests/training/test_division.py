"""Parts of mixers and feed-forwards, in one process: their outputs add up to those of the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kinformer.core.contract import CausalMixer, Chunk, ReadsSource
from kinformer.family.build import build
from kinformer.lab.training.layouts import Cut
from kinformer.lab.training.tensor_parallel import divide
from kinformer.runtime.errors import KinformerError
from tests.members import MEMBERS, TINY

PARTS = 2
WHY_NOT = {
    "differential": "takes differences over all heads",
    "reformer": "computes layers again",
    "routing": "centroids learn by sums over all processes",
    "adaptive-span": "has costs of all heads",
    "performer": "redrawn for all heads",
    "nsa": "num_kv_heads = 1 is not a multiple of 2",
    "mamba2": "key_heads = 1 is not a multiple of 2",
    "compressive": "costs of all heads",
    "dsa": "learns from the weights of all heads",
    "pkm": "sparse gradients",
    "sha-rnn": "every unit reads all units",
    "tensorized": "without heads",
    "ttt": "one norm is over all its heads",
    "longformer": "the projection of a part of its heads",
    "big-bird": "another one for every head",
    "blockbert": "another one for every head",
} | dict.fromkeys(
    ("etc", "linformer", "star", "sinkhorn", "swin", "convformer", "speech-linear", "speech-lsh", "speech-lstm"),
    "how one part computes its share",
)
"""The members that tensor parallelism refuses, and why; all others are divided."""


@pytest.mark.parametrize("name", TINY)
def test_parts_add_up_to_the_whole(name: str) -> None:
    torch.manual_seed(1)
    whole = TINY[name].build().double().eval()
    if name in WHY_NOT:
        with pytest.raises(KinformerError, match=f"cannot be divided among processes: .*{WHY_NOT[name]}.*leave"):
            divide(whole, 0, PARTS)
        return
    parts = [copy.deepcopy(whole) for _ in range(PARTS)]
    divisions = [divide(model, part, PARTS) for part, model in enumerate(parts)]
    first = divisions[0]
    for name_of_bias in first.added:
        for model in parts:
            model.get_parameter(name_of_bias).data /= PARTS
    x = torch.randn(2, 9, whole.config.dim, dtype=torch.float64)
    assert bool(first.mixers) == MEMBERS[name].causal
    assert first.feed_forwards or name == "rwkv7"  # whose feed-forwards look at the token before, as mixers do
    for path in (*first.mixers, *first.feed_forwards):
        summed = sum(_output(model.get_submodule(path), x) for model in parts)
        torch.testing.assert_close(summed, _output(whole.get_submodule(path), x), rtol=1e-12, atol=1e-13)
    for path, cut in first.cuts.items():
        tensors = [_tensor(model, path) for model in parts]
        joined = torch.cat(tensors, cut.dim)
        assert joined.equal(_tensor(whole, path).index_select(cut.dim, cut.order(PARTS))), path


def _output(module: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module, CausalMixer):
        source = {"source": x} if isinstance(module, ReadsSource) else {}
        return module(Chunk(x, None, None), module.initial_state(len(x), **source))[0]
    return module(x)


def _tensor(model: nn.Module, path: str) -> torch.Tensor:
    owner, _, key = path.rpartition(".")
    return getattr(model.get_submodule(owner), key)


def test_blocks_are_cut_each_for_itself() -> None:
    cut = Cut(0, (4, 2, 2))
    assert cut.rows(0, 2).tolist() == [0, 1, 4, 6] and cut.rows(1, 2).tolist() == [2, 3, 5, 7]
    assert cut.order(2).tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"layers.*.mixer.num_heads": 1}, "num_heads = 1 is not a multiple of 2"),
        ({"layers.*.mixer.projection": "grouped"}, "num_kv_heads = 1 is not a multiple of 2"),
        ({"layers.*.feed_forward.hidden_dim": 33}, "hidden_dim = 33 is not a multiple of 2"),
        ({"layers.*.mixer.projection": {"kind": "normalised", "over": "heads"}}, "one root mean square of all heads"),
    ],
)
def test_what_does_not_divide_is_one_sentence(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(KinformerError, match=f"^the .* cannot be divided among processes: .*{why}; leave `?parallel"):
        divide(build("rope", "tiny", 64, changes), 0, PARTS)
