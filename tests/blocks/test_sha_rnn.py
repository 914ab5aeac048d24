"""SHA-RNN: its author's numbers, its published size, its limits, and what its recurrence costs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import kinformer
from kinformer.blocks.feed_forward import Boom
from kinformer.core.attention_state import TokenMemoryState
from kinformer.core.contract import Chunk
from kinformer.family.build import configure
from kinformer.kernels.lstm import Weights, lstm
from kinformer.lab.estimation.estimate import estimate
from kinformer.mixers.memory import SingleHead
from kinformer.mixers.recurrent import LSTM
from kinformer.runtime.errors import KinformerError

GOLDEN = Path(__file__).parents[1] / "golden" / "sha_rnn.npz"
NAMES = {
    "lnstart": "mixer_norm",
    "lnff": "stream_norm",
    "lnxff": "feed_forward_norm",
    "lnmid": "attention.input_norm",
    "lnmem": "attention.memory_norm",
    "attn.qln": "attention.query_norm",
    "attn.q": "attention.query",
    "attn.vq.l1": "attention.value",
    "ff.linear1": "feed_forward.up",
    "rnn": "mixer.rnn",
}
GATES = {"qs": "q_gate", "ks": "k_gate", "vs": "v_gate"}


def official():
    """The golden arrays, and the model that they describe with their weights."""
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        golden = {key: torch.from_numpy(arrays[key]) for key in arrays}
    set = {"dim": 12, "layers.*.feed_forward.hidden_dim": 48, "layers.0.attention.memory": 12}
    model = kinformer.build("sha-rnn", recipe="tiny", vocab_size=15, set=set).double().eval()
    weights = {"input.embedding.weight": golden["w.encoder.weight"], "head.bias": golden["w.decoder.bias"]}
    for key in model.state_dict():
        if not key.startswith("stack.layers."):
            continue
        _, _, block, rest = key.split(".", 3)
        for theirs, ours in NAMES.items():
            if rest.startswith(f"{ours}."):
                weights[key] = golden[f"w.blocks.{block}.{theirs}.{rest.removeprefix(f'{ours}.')}"]
        for theirs, ours in GATES.items():
            if rest == f"attention.{ours}":
                weights[key] = golden[f"w.blocks.{block}.attn.{theirs}"].flatten()
    model.load_state_dict(weights)
    return golden, model


def close(got, want):
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-12


def cut_as_theirs(state, keep):
    """The state with a memory of ``keep`` slots, as the author cuts it when a segment begins."""
    recurrent, remembered = state.layers[0]
    slots = remembered.memory[:, :, -keep:]
    cut = TokenMemoryState(slots, remembered.seen.clamp_max(keep))
    return state._replace(layers=((recurrent, cut), *state.layers[1:]))


def test_is_that_of_its_author():
    """Three segments; in the third the memory is full, and theirs is cut before it."""
    golden, model = official()
    state = None
    with torch.no_grad():
        for segment in range(3):
            tokens = golden[f"in.seg{segment}.x"].T
            state = cut_as_theirs(state, 7) if segment == 2 else state
            hidden, state, tapped = model.hidden(tokens, state, taps=(0, 1))
            close(model.logits(hidden).transpose(0, 1), golden[f"out.seg{segment}.logits"])
            for block in (0, 1):
                close(tapped[block].transpose(0, 1), golden[f"out.seg{segment}.block{block}.output"])
                close(state.layers[block][0].h[None], golden[f"out.seg{segment}.lstm_h{block}"])
                close(state.layers[block][0].c[None], golden[f"out.seg{segment}.lstm_c{block}"])
            kept = golden[f"out.seg{segment}.new_mem"].transpose(0, 1)[:, -11:]
            close(state.layers[0][1].memory[:, 0], kept)


def test_departs_from_its_author_where_its_record_says_so():
    """Windows are counted by positions: without the cut only the last token of the third segment sees the same."""
    golden, model = official()
    with torch.no_grad():
        tokens = torch.cat([golden[f"in.seg{segment}.x"] for segment in range(3)]).T
        _, _, (whole,) = model.hidden(tokens, taps=(0,))
    theirs = torch.cat([golden[f"out.seg{segment}.block0.output"] for segment in range(3)]).transpose(0, 1)
    close(whole[:, :10], theirs[:, :10])
    close(whole[:, -1], theirs[:, -1])
    assert (whole[:, 10] - theirs[:, 10]).abs().max() > 1e-4


def test_published_size():
    with torch.device("meta"):
        model = configure("sha-rnn", "paper").build()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == 53.8


def attended(memory, x):
    torch.manual_seed(0)
    mixer = SingleHead.Config(memory=memory).build(16).double()
    with torch.no_grad():
        return mixer(Chunk(x), mixer.initial_state(2, dtype=torch.float64))[0], mixer


def test_a_memory_of_the_whole_length_is_attention_to_everything():
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    whole, mixer = attended(12, x)
    with torch.no_grad():
        h, m = mixer.input_norm(x), mixer.memory_norm(x)
        q = mixer.query_norm(mixer.query(h)) * mixer.q_gate.sigmoid()
        content, strength = mixer.value(mixer.v_gate.sigmoid()).chunk(2)
        scores = (q @ (m * mixer.k_gate.sigmoid()).mT / 4).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
        close(whole, h + scores.softmax(-1) @ (m * strength.sigmoid() * content.tanh()))
    less = attended(11, x)[0]
    assert torch.equal(less[:, :11], whole[:, :11])
    assert (less[:, 11] - whole[:, 11]).abs().max() > 1e-5


def test_boom_is_an_mlp_whose_second_product_sums():
    boom = Boom.Config(hidden_dim=48).build(16)
    x = torch.randn(3, 16)
    y = boom.up(x)
    y = (y * (1.702 * y).sigmoid()) @ torch.eye(16).repeat(3, 1)
    assert (boom(x) - y).abs().max() < 1e-6
    with pytest.raises(KinformerError, match="must be a multiple of dim = 16"):
        Boom.Config(hidden_dim=40).build(16)


def test_flops_of_the_recurrence_are_those_of_its_formula():
    batch, length, dim = 3, 100, 32
    products = 2 * batch * length * 4 * dim * (dim + dim)
    config = configure("sha-rnn", "tiny")
    rows = {part.part: part for part in estimate(config, length=length, batch=batch).parts}
    assert (rows["layers.0.mixer"].flops_forward, rows["layers.1.mixer"].flops_forward) == (products, products)
    assert rows["layers.1.mixer"].flops_backward == pytest.approx(2 * products, rel=0.05)
    mixer, reference = (LSTM.Config(impl=impl).build(dim) for impl in ("auto", "reference"))
    x = torch.zeros(batch, length, dim)
    with FlopCounterMode(display=False) as counter:
        reference(Chunk(x), reference.initial_state(batch))
    assert counter.get_total_flops() == products
    with FlopCounterMode(display=False) as counter:
        mixer(Chunk(x), mixer.initial_state(batch))
    assert counter.get_total_flops() < products  # what the estimate has a formula for


def test_unlike_sequences_run_side_by_side():
    """Every token begins a sequence: one step over all of them; and an unknown implementation is an error."""
    weights = Weights(*(torch.randn(shape, dtype=torch.float64) for shape in ((12, 3), (12, 3), 12, 12)))
    x, h, c = torch.randn(2, 5, 3).double(), torch.randn(2, 3).double(), torch.randn(2, 3).double()
    everywhere = torch.ones(2, 5, dtype=torch.bool)
    y, *_ = lstm(x, h, c, weights, reset=everywhere)
    nothing = torch.zeros(10, 3, dtype=torch.float64)
    alone, *_ = lstm(x.reshape(10, 1, 3), nothing, nothing, weights)
    close(y.view(10, 1, 3), alone)
    with pytest.raises(KinformerError, match="impl='cudnn' is unknown"):
        lstm(x, h, c, weights, impl="cudnn")
