"""Memorizing attention: its authors' numbers, its limits, its searches, and memory that grows without new weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import kinformer
from kinformer.core.config import from_dict, to_dict
from kinformer.core.contract import Chunk
from kinformer.core.parts import merge_heads
from kinformer.core.state import nbytes
from kinformer.family.kinds import kinds
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.lookup import MemorySlice, Search, gathered, look_up
from kinformer.lab.cli.main import main
from kinformer.mixers.memory import Memorizing, _last
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns.sequence import Local
from kinformer.parts.positions import Learned
from kinformer.parts.projections import MultiHead
from kinformer.parts.relative_positions import T5, Alibi, DistanceAware, Rope, Shaw, TransformerXL, buckets
from kinformer.runtime.errors import KinformerError

GOLDEN = Path(__file__).parents[1] / "golden" / "memorizing.npz"
TRAINING = "--recipe tiny --length 16 --batch-size 2 --steps 4 --segments --validation-tokens 256"
DIM = 16
CONFIG = Memorizing.Config(num_heads=2, window=5, segment=8, memory_size=16, topk=4)


def golden_mixer(golden):
    config = Memorizing.Config(num_heads=2, head_dim=4, window=6, segment=6, memory_size=12, topk=3, sees_itself=False)
    mixer = config.build(12).double()
    kernels = (golden[f"w.tbase/_kvq/{name}_layer/kernel"].T for name in ("queries", "keys", "values"))
    with torch.no_grad():
        mixer.qkv.weight.copy_(torch.cat(list(kernels)))
        mixer.out.weight.copy_(golden["w.tbase/post_attn_mlp/output_layer/kernel"].T)
        mixer.scale.copy_(golden["w.tbase/_kvq/attention_scale"])
        mixer.gate.copy_(golden["w.external_memory_bias"])
    return mixer


def rms(x, scale):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale


def begun(mixer, z):
    """A first segment as theirs: attention to a window of zeros too, and a share for memories that are not there."""
    q, k, v = mixer._project(z)
    zeros = torch.zeros(len(z), 2, 6, 4, dtype=torch.float64)
    k, v, positions = torch.cat([zeros, k], dim=2), torch.cat([zeros, v], dim=2), torch.arange(6).expand(len(z), -1)
    local = mixer._local(q, k, v, positions, whole=True)
    return mixer._mix(local, torch.zeros_like(local))


def test_is_that_of_its_authors():
    """Four segments of two rows; a document begins where they say so, in one row in the middle of the other's."""
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        golden = {key: torch.from_numpy(arrays[key]) for key in arrays if arrays[key].dtype.kind in "fib"}
    golden = {key: each.double() if each.is_floating_point() else each for key, each in golden.items()}
    mixer, begins = golden_mixer(golden), 0
    state = mixer.initial_state(2, dtype=torch.float64)
    for segment in range(4):
        theirs = {key.split(".", 2)[2]: each for key, each in golden.items() if f".seg{segment}." in key}
        x, start = theirs["x"], theirs["start_of_sequence"] | (segment == 0)
        z = rms(x, golden["w.tbase/_kvq/pre_attn_layernorm/scale"])
        with torch.no_grad():
            reset = torch.zeros(2, 6, dtype=torch.bool)
            reset[:, 0] = start
            y, state = mixer(Chunk(z, reset=reset), state)
            y = torch.where(start[:, None, None], begun(mixer, z), y)
            y = x + y
            hidden = rms(y, golden["w.tbase/pre_ffn_layernorm/scale"]) @ golden["w.tbase/ffn/hidden0/kernel"]
            y = y + hidden.relu() @ golden["w.tbase/ffn/output_layer/kernel"]
        assert (y - theirs["output"]).abs().max() < 5e-6, segment
        assert (state.recent.k[:, :, -6:].transpose(1, 2) - theirs["cache_keys"]).abs().max() < 5e-6
        begins += int(start.sum())
    assert 2 < begins < 8
    stored = golden["out.seg3.memory_value_db"].view(2, 2, 12, 4)
    index = golden["out.seg3.memory_database_index"].view(2, 2)[:, 0]
    for row in range(2):
        count = min(12, int(index[row]))
        ring = stored[row].roll(-int(index[row]) % 12, dims=1)[:, -count:]
        assert int(state.recent.seen[row]) == int(index[row])
        assert (state.v[row, :, -count:] - ring).abs().max() < 5e-6


def test_they_find_the_same():
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        golden = {key: torch.from_numpy(arrays[key]).double() for key in arrays if arrays[key].dtype.kind == "f"}
    for segment in (1, 2, 3):
        before, now = f"out.seg{segment - 1}.", f"out.seg{segment}."
        k, v = (golden[f"{before}memory_{name}_db"].view(2, 2, 12, 4) for name in ("key", "value"))
        row = 0  # whose document goes on
        filled = int((k[row, 0].abs().sum(-1) > 0).sum())
        piece = MemorySlice(k[row : row + 1], v[row : row + 1], 0, filled)
        q = golden[f"{now}queries"][row : row + 1].transpose(1, 2)
        scale = golden["w.tbase/_kvq/attention_scale"].abs()[:, None, None]
        for impl in ("reference", "chunked"):
            found = look_up(q, [piece], Search("bucketed", 3, impl=impl))
            heads = torch.arange(2)[:, None, None]
            want = golden[f"{now}retrieved_values"][row].transpose(0, 1)
            assert (v[row][heads, found[0]] - want).abs().max() < 1e-6, (segment, impl)
            keys, values = gathered(found, [piece])
            y = attention(q * scale, keys, values, Visibility(), Scoring(1.0), impl=impl).out.transpose(1, 2)
            assert (y - golden[f"{now}external_attention"][row]).abs().max() < 5e-6


def outputs(config, x, change=None):
    torch.manual_seed(0)
    mixer = config.build(DIM).double()
    if change is not None:
        change(mixer)
    with torch.no_grad():
        return mixer(Chunk(x), mixer.initial_state(len(x), dtype=torch.float64))[0]


def open_gate(mixer):
    mixer.gate.data.fill_(100.0)


def test_without_memory_or_behind_a_closed_gate_it_is_the_plain_layer():
    x = torch.randn(2, 40, DIM, dtype=torch.float64)
    plain = outputs(CONFIG.replace(memory_size=0), x)
    torch.manual_seed(0)
    mixer = CONFIG.build(DIM).double()
    window = SoftmaxAttention.Config(
        num_heads=2, projection=MultiHead.Config(bias=False), pattern=Local.Config(window=5), bias=False
    ).build(DIM)
    q, k, v = mixer._project(x)
    window.double()
    positions = torch.arange(40).expand(2, -1)
    with torch.no_grad():
        window.out.weight.copy_(mixer.out.weight)
        heads = attention(q, k, v, Visibility(window.pattern, positions, True), Scoring(1.0)).out
        y = window.out(merge_heads(heads))
        assert (y - plain).abs().max() < 1e-12
        closed = outputs(CONFIG, x, lambda mixer: mixer.gate.data.fill_(-100.0))
    assert (closed - plain).abs().max() < 1e-12
    with_memory = outputs(CONFIG, x)
    assert (with_memory - plain).abs().max() > 1e-3


@pytest.mark.parametrize("search", ["exact", "bucketed"])
def test_as_many_as_all_memories_is_attention_to_all_of_them(search):
    """Local attention aside, of which an open gate takes nothing."""
    x = torch.randn(2, 40, DIM, dtype=torch.float64)
    config = CONFIG.replace(search=search, segment=16, topk=16)
    got = outputs(config, x, open_gate)
    torch.manual_seed(0)
    mixer = config.build(DIM).double()
    q, k, v = mixer._project(x)
    place = torch.arange(40)
    last = place // 16 * 16
    seen = (place < last[:, None]) & (place >= last[:, None] - 16)
    scores = (q @ k.mT).masked_fill(~seen, -torch.inf)
    with torch.no_grad():
        want = mixer.out((scores[:, :, 16:].softmax(-1) @ v).transpose(1, 2).flatten(2))
    assert (got[:, 16:] - want).abs().max() < 1e-12
    assert got[:, :16].abs().max() < 1e-12
    less = outputs(config.replace(topk=8), x, open_gate)
    assert (less[:, 16:] - want).abs().max() > 1e-4


def test_more_places_than_memories_of_all_rows_and_heads():
    config = CONFIG.replace(search="exact", segment=2, memory_size=8, topk=8)
    x, found = torch.randn(1, 14, DIM, dtype=torch.float64), []
    for topk in (8, 40):
        torch.manual_seed(0)
        mixer = config.replace(topk=topk).build(DIM).double()
        found.append(mixer(Chunk(x), mixer.initial_state(1, dtype=torch.float64))[0])
    assert (found[0] - found[1]).abs().max() < 1e-12


@pytest.mark.parametrize("search", ["exact", "bucketed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("time", [3, 40])
def test_searches_find_what_all_scores_find(search, dtype, time):
    torch.manual_seed(1)
    k, q = (torch.nn.functional.normalize(torch.randn(2, 3, n, 8, dtype=dtype), dim=-1) for n in (5000, time))
    pieces = [MemorySlice(k[:, :, :3000], k[:, :, :3000], 1000, 1600), MemorySlice(k, k, 3000, 2000)]
    found, want = (look_up(q, pieces, Search(search, 16, impl=impl)) for impl in ("chunked", "reference"))
    assert found.shape == (2, 3, time, 16) and found.min() >= 0 and found.max() < 3600
    keys = torch.cat([piece.keys for piece in pieces], dim=2)
    scores = q @ keys.mT
    got, best = (scores.gather(-1, each) for each in (found, want))
    rounded = 0.01 if search == "bucketed" and dtype == torch.float32 else 1e-6 if dtype == torch.float32 else 1e-12
    assert (got - best).abs().max() < rounded
    if search == "bucketed":
        assert torch.equal(found % 16, torch.arange(16).expand_as(found))


@pytest.mark.parametrize("sees_itself", [True, False])
@pytest.mark.parametrize(("position", "window"), [(T5.Config(num_buckets=6, max_distance=7), 9), (Alibi.Config(), 4)])
def test_biases_by_distance_are_the_windows_alone(position, window, sees_itself):
    """Against dense scores: values, and gradients of the table, with all memories found and the gate half open."""
    config = Memorizing.Config(
        num_heads=2, window=window, segment=4, memory_size=28, topk=28, search="exact", sees_itself=sees_itself
    ).replace(position=position)
    mixer = config.build(DIM).double()
    x = torch.randn(2, 30, DIM, dtype=torch.float64)
    y, state = mixer(Chunk(x[:, :13]), mixer.initial_state(2, dtype=torch.float64))
    y = torch.cat([y, mixer(Chunk(x[:, 13:]), state)[0]], dim=1)
    q, k, v = mixer._project(x)
    index = torch.arange(30)
    distance, begun = index[:, None] - index, index // 4 * 4
    if isinstance(position, T5.Config):
        table = mixer.position.table[buckets(position, distance.clamp_min(0))].permute(2, 0, 1)
    else:
        table = -mixer.position.slopes()[:, None, None] * distance
    products = q @ k.mT * mixer.scale.abs()[:, None, None]
    seen = (distance < window + (not sees_itself)) & (distance >= (not sees_itself))
    local = (products + table).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    memories = (index < begun[:, None]) & (index >= begun[:, None] - 28)
    found = products.masked_fill(~memories, -torch.inf).softmax(-1).nan_to_num()
    want = mixer._mix(local @ v, found @ v)
    assert (y - want).abs().max() < 1e-12
    if isinstance(position, T5.Config):
        got, expected = (torch.autograd.grad(each.square().sum(), mixer.position.table)[0] for each in (y, want))
        assert got.abs().max() > 1e-6 and (got - expected).abs().max() < 1e-12


@pytest.mark.parametrize(
    "position", [Rope.Config(), Shaw.Config(), TransformerXL.Config(), DistanceAware.Config(), Learned.Config()]
)
def test_positions_that_change_keys_or_values_are_refused(position):
    with pytest.raises(KinformerError, match="the position"):
        CONFIG.replace(position=position).build(DIM)


def test_the_layer_with_memories_may_share_the_table_of_all():
    model = kinformer.build("memorizing", recipe="tiny", set={"layers.1.mixer.position": "t5"})
    tables = [name for name, _ in model.named_parameters() if name.endswith("table")]
    assert len(tables) == 1
    assert model.stack.layers[1].mixer.position is model.stack.layers[0].mixer.position


def test_memories_take_no_gradient_but_queries_do():
    torch.manual_seed(0)
    mixer = CONFIG.build(DIM).double()
    mixer.gate.data.fill_(100.0)
    x = torch.randn(1, 16, DIM, dtype=torch.float64, requires_grad=True)
    y, _ = mixer(Chunk(x), mixer.initial_state(1, dtype=torch.float64))
    y[:, 8:].square().sum().backward()
    assert x.grad[:, :8].abs().max() < 1e-12
    assert x.grad[:, 8:].abs().amax(-1).min() > 1e-6


def test_what_was_put_away_is_shared_by_states_until_more_is():
    """A memory of many tokens is copied a few times while it fills, not at every chunk."""
    mixer = Memorizing.Config(num_heads=2, window=5, segment=4, memory_size=128, topk=4).build(DIM)
    assert mixer.batch_of == 8
    state, copies, last = mixer.initial_state(1), 0, None
    for _ in range(40):
        _, state = mixer(Chunk(torch.randn(1, 4, DIM)), state)
        copies += state.k.data_ptr() != last
        last = state.k.data_ptr()
    assert state.k.shape[2] == 128 and 18 <= copies <= 21
    assert nbytes(state) == mixer.state_bytes(160)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_size": 20}, "memory_size = 20 is not a multiple of segment = 8"),
        ({"topk": 5}, "topk = 5 does not divide segment = 8"),
        ({"window": 0}, "window must be 1 or more"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(KinformerError, match=message):
        CONFIG.replace(**changes)


def test_a_trained_model_gets_a_larger_memory(tmp_path, capsys):
    """Trained with none, fine-tuned with some and then with more, and measured with the state carried."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles of beer on the wall. " for number in range(400)))
    options = [*TRAINING.split(), "--data", str(text), "--threads", "1", "--device", "cpu"]
    last = None
    for size in (0, 32, 512):
        out = str(tmp_path / str(size))
        init = [] if last is None else ["--init", last]
        settings = ["--set", f"layers.1.mixer.memory_size={size}"]
        assert main(["train", "memorizing", *options, *settings, *init, "--out", out]) == 0
        last = out
    capsys.readouterr()
    assert main(["evaluate", last, "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["carried"]
    model = kinformer.load(last).double()
    assert model.stack.layers[1].mixer.config.memory_size == 512
    more = kinformer.load(last, set={"layers.1.mixer.memory_size": 1024}).double()
    with torch.no_grad():
        tokens = torch.randint(128, (1, 900))
        differ = (model(tokens)[0] - more(tokens)[0]).abs().amax(dim=(0, 2))
    assert differ[:520].max() < 1e-9 < differ[520:].max()


def test_sizes_in_graphs_hold_no_maximum():
    """Inductor has no kernels for them: the second segment that a compiled model is given failed there."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(_last, dynamic=True, fullgraph=True, backend=backend)
    new = torch.randn(2, 1, 2, 16, 4)
    for past in (9, 4):
        old = torch.randn(2, 1, 2, past, 4)
        found = [compiled(torch.cat([earlier, later], 2), 16 + 7) for earlier, later in zip(old, new, strict=True)]
        assert torch.equal(torch.stack(found), torch.cat([old[..., -7:, :], new], 3))
    assert graphs and not any("max" in code for code in graphs)


def test_a_config_of_an_earlier_version_is_read():
    """It had the fields of a search by lists, which did nothing for the other searches."""
    data = to_dict(CONFIG) | {"lists": 64, "probes": 3}
    assert from_dict(Memorizing.Config, data, kinds()) == CONFIG
    with pytest.raises(KinformerError, match="'lists' is not a field of the mixer 'memorizing'"):
        from_dict(Memorizing.Config, data | {"lists": 8}, kinds())
