"""One layer of every member: the plain interface is the contract, and nothing else."""

import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kinformer
from kinformer.core.contract import AS_THEY_ARE, Chunk, RecomputesKV
from kinformer.core.encoder import SequenceContext
from kinformer.nn import CausalLayer, SoftmaxAttention, states
from kinformer.runtime.errors import KinformerError
from kinformer.testing import verify_layer
from tests.members import MEMBERS
from tests.nn.layers import BIDIRECTIONAL, CAUSAL, DIM, GRID, NAMES, extras, made, randn, unlike


@pytest.mark.parametrize(
    ("name", "whole"),
    [*((name, False) for name in unlike(NAMES, whole=False)), *((name, True) for name in unlike(NAMES))],
)
def test_a_layer_is_the_mixer_behind_a_plain_interface(name, whole):
    if whole and name not in MEMBERS:
        with pytest.raises(KinformerError, match="without a layer around it"):
            made(name, whole=True)
        return
    layer, x = made(name, whole), randn(2, 16, DIM)
    options = extras(name, layer, 2)
    y = layer(x, **options)
    if isinstance(layer, CausalLayer):
        source = {"source": options["context"]} if options else {}
        norm = (AS_THEY_ARE,) if isinstance(layer.inner, RecomputesKV) else ()
        want, end = layer.inner(Chunk(x), layer.inner.initial_state(2, dtype=torch.float64, **source), *norm)
        got, state = layer(x, return_state=True, **options)
        assert torch.equal(got, want)
        assert states.difference(state, end) == 0
    else:
        want = layer.inner(x, SequenceContext(grid=options.get("grid")))
    assert y.shape == (2, 16, DIM)
    assert torch.equal(y, want)


@pytest.mark.parametrize("name", unlike(CAUSAL, whole=False))
def test_cut_padded_reset_and_packed_agree_with_the_full_sequence(name):
    layer = made(name)
    lengths, total = (5, 9, 2), 16
    x = randn(1, total, DIM)
    alone = [layer(part, **extras(name, layer, 1)) for part in x.split(lengths, 1)]
    want = torch.cat(alone, 1)
    first, state = layer(x[:, :3], return_state=True, **extras(name, layer, 1))
    second = layer(x[:, 3:5], state)
    assert torch.allclose(torch.cat([first, second], 1), alone[0], atol=1e-9)
    padding = torch.tensor([[0, 1, 0, 0, 0, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    rows = torch.full((2, 10, DIM), torch.nan, dtype=torch.float64)
    rows[0, ~padding[0]] = torch.cat([x[0, :5], x[0, 5:7]])
    rows[1, ~padding[1]] = x[0, 5:13]
    padded = layer(rows, key_padding_mask=padding, **extras(name, layer, 2))
    assert torch.equal(padded[padding], torch.zeros(int(padding.sum()), DIM, dtype=torch.float64))
    assert torch.allclose(padded[0, ~padding[0]][:5], alone[0][0], atol=1e-9)
    assert torch.allclose(padded[1, ~padding[1]], alone[1][0, :8], atol=1e-9)
    if layer.reads_context:
        return  # every sequence has a context of its own
    reset = torch.zeros(1, total, dtype=torch.bool)
    reset[0, [0, 5, 14]] = True
    ends = torch.tensor([0, 5, 14, 16], dtype=torch.int32)
    assert torch.allclose(layer(x, reset=reset), want, atol=1e-9)
    assert torch.allclose(layer(x, cu_seqlens=ends), want, atol=1e-9)
    packed, after = layer(x, cu_seqlens=ends, return_state=True)
    assert torch.allclose(packed, want, atol=1e-9)
    more = randn(3, 1, DIM, seed=4)
    steps = [layer(torch.cat([part, more[i : i + 1]], 1))[:, -1:] for i, part in enumerate(x.split(lengths, 1))]
    assert torch.allclose(layer(more, after), torch.cat(steps), atol=1e-9)
    again = layer(more.transpose(0, 1), after, cu_seqlens=torch.arange(4))
    assert torch.allclose(again[0, :, None], torch.cat(steps), atol=1e-9)


@pytest.mark.parametrize("name", unlike(BIDIRECTIONAL, whole=False))
def test_bidirectional_layers_know_padding_and_packing(name):
    layer, x = made(name), randn(1, 16, DIM)
    alone = [layer(part) for part in x.split((5, 9, 2), 1)]
    packed = layer(x, cu_seqlens=torch.tensor([0, 5, 14, 16]))
    assert torch.allclose(packed, torch.cat(alone, 1), atol=1e-9)
    padding = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 1]], dtype=torch.bool)
    rows = torch.full((1, 8, DIM), torch.nan, dtype=torch.float64)
    rows[~padding] = x[0, :5]
    padded = layer(rows, key_padding_mask=padding)
    assert torch.allclose(padded[~padding], alone[0][0], atol=1e-9)
    assert not padded[padding].any()
    padding = torch.tensor([[True] * 16, [False] * 16])  # a row of padding alone
    padded = layer(x.expand(2, 16, DIM), key_padding_mask=padding)
    assert torch.allclose(padded[1:], layer(x), atol=1e-9)
    assert not padded[0].any()


def test_global_tokens_see_all_and_are_seen_by_all():
    layer = made("longformer", pattern={"kind": "window", "window": 2})
    x, mask = randn(1, 16, DIM), torch.zeros(1, 16, dtype=torch.bool)
    mask[0, 0] = True
    moved = x.clone()
    moved[0, 15] += 1
    with_global, without = (layer(moved, **o) - layer(x, **o) for o in ({"global_mask": mask}, {}))
    assert with_global[0, 0].abs().max() > 1e-6
    assert without[0, :8].abs().max() == 0


@pytest.mark.parametrize("name", ["gpt", "local", "gated-deltanet", "transformer-xl", "reformer", "compressive"])
def test_the_battery_takes_a_layer_as_it_is(name):
    report = verify_layer(lambda: kinformer.layer(name, 16, recipe="tiny", num_heads=2), dim=16)
    assert {"causality", "partition", "padding", "reset", "ragged_reset", "reserved"} <= set(report.passed)
    assert not report.failed


@pytest.mark.parametrize("name", unlike(NAMES))
def test_a_layer_is_an_ordinary_module(name):
    block = name in MEMBERS
    layer, x = made(name, block), randn(2, 16, DIM)
    options = extras(name, layer, 2)
    y = layer(x, **options)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x, **options), y)
    other = made(name, block, seed=5)
    assert not torch.equal(other(x, **options), y)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, **options), y)
    with torch.device("meta"):
        empty = made(name, block)
    assert {weight.device.type for weight in empty.parameters()} == {"meta"}
    empty.load_state_dict(layer.state_dict(), assign=True)
    layer.train()
    for parameter in layer.parameters():
        parameter.grad = None
    gradients = []
    for call in (layer, functools.partial(checkpoint, layer, use_reentrant=False)):
        torch.manual_seed(0)
        inputs = x.clone().requires_grad_()
        call(inputs, **options).square().sum().backward()
        gradients.append(inputs.grad)
    assert torch.allclose(*gradients)
    layer, options = (
        layer.eval().float(),
        {key: value.float() if torch.is_tensor(value) else value for key, value in options.items()},
    )
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x.float(), **options)
    if name != "moba":  # whose tokens choose other blocks where rounding moves products
        assert (half.double() - y).abs().max() < 0.05 * y.abs().max()


@pytest.mark.parametrize("name", unlike(NAMES))
def test_a_layer_computes_with_quantised_products(name):
    """PyTorch puts modules whose ``weight`` is a method in the place of products."""
    layer, x = made(name, name in MEMBERS).float(), randn(2, 16, DIM).float()
    options = {key: value.float() if torch.is_tensor(value) else value for key, value in extras(name, layer, 2).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch announces the end of this function
        small = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, torch.qint8)
    y = small(x, **options)
    assert y.shape == x.shape and y.isfinite().all()


HOST = {"compressive", "memorizing", "cross", "cross_linformer"}
"""What no graph of PyTorch's exporter holds: memories that the host moves, and names of tensors that begin alike (v and
valid), which it confuses."""


@pytest.mark.parametrize("name", [name for name in unlike(CAUSAL, whole=False) if name not in HOST])
def test_a_step_exports(name):
    layer, x = made(name).float(), randn(2, 8, DIM).float()
    with torch.no_grad():
        _, state = layer(x, return_state=True, **{key: value.float() for key, value in extras(name, layer, 2).items()})
    step = x[:, :1]
    want, after = layer(step, state, return_state=True)
    program = torch.export.export(layer, (step, state), {"return_state": True})
    got, end = program.module()(step, state, return_state=True)
    assert torch.allclose(got, want, atol=1e-6)
    assert states.difference(end, after) < 1e-6


@pytest.mark.parametrize("name", ["gpt", "linear-transformer", "gated-deltanet", "sparse-transformer"])
def test_a_step_compiles(name):
    torch.compiler.reset()
    layer, x = made(name).float(), randn(2, 8, DIM).float()
    with torch.no_grad():
        _, state = layer(x, return_state=True, **{key: value.float() for key, value in extras(name, layer, 2).items()})
    step = x[:, :1]
    want, after = layer(step, state, return_state=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, end = compiled(step, state, return_state=True)
    assert torch.allclose(got, want, atol=1e-6)
    assert states.difference(end, after) < 1e-6


def test_a_chunk_behind_a_state_compiles_with_any_length():
    """PyTorch's compiler cannot lower its attention over a slice whose bounds are the larger of two symbols."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    layer, x = made("gpt").float(), randn(2, 12, DIM).float()
    with torch.no_grad():
        _, state = layer(x[:, :5], return_state=True)
        want, after = layer(x[:, 5:], state, return_state=True)
        got, end = torch.compile(layer, backend=backend, dynamic=True)(x[:, 5:], state, return_state=True)
    assert torch.allclose(got, want, atol=1e-6)
    assert states.difference(end, after) < 1e-6
    assert "sym_max" not in "".join(graphs)


def test_a_state_moves_selects_repeats_and_saves(tmp_path):
    layer, x = made("gated-deltanet"), randn(3, 8, DIM)
    _, state = layer(x, return_state=True)
    step = randn(3, 1, DIM, seed=6)
    want = layer(step, state)
    rows = torch.tensor([2, 0])
    assert torch.allclose(layer(step[rows], states.select_rows(state, rows)), want[rows])
    repeated = states.repeat_rows(state, 2)
    assert torch.allclose(layer(step.repeat_interleave(2, 0), repeated)[::2], want)
    states.save(state, tmp_path / "state.safetensors")
    loaded = states.load(tmp_path / "state.safetensors", layer.initial_state(1))
    assert states.difference(loaded, state) == 0
    assert type(loaded) is type(state)
    assert {leaf.dtype for leaf in states.tensors(states.to(state, dtype=torch.float32))} <= {
        torch.float32,
        torch.int64,
    }
    with pytest.raises(KinformerError, match="holds the state of another layer"):
        states.load(tmp_path / "state.safetensors", made("gpt").initial_state(1))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    assert buffer.tell() > 0


@pytest.mark.parametrize(
    ("name", "full"),
    [
        *((name, False) for name in unlike(CAUSAL, whole=False)),
        *((name, True) for name in unlike(CAUSAL) if name in MEMBERS),
    ],
)
def test_a_state_has_the_rows_and_the_device_of_x(name, full):
    layer, x = made(name, full), randn(6, 9, DIM)
    options = extras(name, layer, 3)
    y, state = layer(x[:3], return_state=True, **options)
    for rows in (1, 2, 4):
        with pytest.raises(KinformerError, match=f"the state has 3 rows, but the input has {rows}; "):
            layer(x[:rows], state)
    with pytest.raises(KinformerError, match="the state is on meta, but the input is on cpu"):
        layer(x[:3], states.to(state, "meta"))
    with pytest.raises(KinformerError, match="x has the shape \\[0, 9, 32\\] but must be"):
        layer(x[:0], **{key: value[:0] for key, value in options.items()})
    whole = layer(torch.cat([x[:3], x[3:]], 1), **options)[:, 9:]
    rounded = layer(x[3:], states.to(state, dtype=torch.float32))
    if name not in ("moba", "nsa", "chosen_blocks", "routing", "reformer", "lsh"):  # they choose by rounded products
        assert torch.allclose(rounded, whole, atol=1e-4)
    if layer.reads_context:  # neighbours may share the context of a row
        shared = states.repeat_rows(state, 2, sources=False)
        apart = layer(x, states.repeat_rows(state, 2))
        assert torch.allclose(layer(x, shared), apart, atol=1e-12)


def test_settings_are_names_mappings_and_configs_alike():
    from kinformer.nn import LocalPattern, RotaryPositions, SoftmaxAttention

    config = SoftmaxAttention(num_heads=8, position=RotaryPositions(), pattern=LocalPattern(window=64))
    by_config = kinformer.layer(config, 64)
    by_name = kinformer.layer("local", 64, num_heads=8, pattern={"kind": "local", "window": 64}, position="rope")
    by_path = kinformer.layer("local", 64, num_heads=8, set={"pattern.window": 64})
    assert by_config.inner.pattern == by_name.inner.pattern == by_path.inner.pattern
    for layer in (by_name, by_path):
        layer.load_state_dict(by_config.state_dict())
        x = torch.randn(1, 100, 64, generator=torch.Generator().manual_seed(0))
        assert torch.equal(layer(x), by_config(x))
    block = kinformer.layer("gpt", 64, whole=True, feed_forward="swiglu", num_heads=8, dropout=0.5)
    assert type(block.inner.feed_forward).__name__ == "SwiGLU"


@pytest.mark.parametrize(
    ("name", "settings"),
    [("linformer", {"max_length": 64, "rank": 8}), ("rwkv7", {"value_rank": 32, "value_residual": False})],
)
def test_the_order_of_settings_does_not_matter(name, settings):
    backwards = dict(reversed(settings.items()))
    for given in (settings, backwards):
        assert getattr(kinformer.layer(name, 32, **given).inner.config, next(iter(settings))) == next(
            iter(settings.values())
        )


@pytest.mark.parametrize(
    ("name", "settings", "path", "value"),
    [
        ("local", {"window": 32}, "pattern.window", 32),
        ("gpt", {"window": 32}, "pattern.window", 32),
        ("bert", {"window": 32}, "pattern.ahead", 31),
        ("rope", {"num_kv_heads": 2}, "projection.num_kv_heads", 2),
        ("performer", {"features": 44}, "feature_map.features", 44),
        ("moba", {"block": 16}, "block", 16),
        ("moba", {"block_size": 16}, "block", 16),
        ("gpt", {"hidden_dim": 48, "whole": True}, "feed_forward.hidden_dim", 48),
    ],
)
def test_settings_of_inner_parts_are_given_by_name(name, settings, path, value):
    found = kinformer.layer(name, 64, **settings).config
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


BOTH = [record.name for record in kinformer.layers() if record.causal and record.bidirectional]


@pytest.mark.parametrize("name", BOTH)
def test_a_bidirectional_form_reads_whole_sequences(name):
    x = randn(2, 16, DIM)
    layer = kinformer.layer(name, DIM, causal=False, dtype=torch.float64).eval()
    later = x.clone()
    later[:, -1] += 1
    assert not isinstance(layer, CausalLayer)
    assert not torch.equal(layer(x)[:, :15], layer(later)[:, :15])


def test_the_plain_mechanisms_have_both_forms():
    assert {"gpt", "local", "linear-transformer", "performer", "alibi", "reformer"} <= set(BOTH)


def test_a_layer_shows_its_settings():
    assert "dim=64, causal, num_heads=4, position=rope(), pattern=local(window=32, ahead=0)" in repr(
        kinformer.layer("local", 64, window=32)
    )
    assert "bidirectional" in repr(kinformer.layer("performer", 64, causal=False))
    assert "causal, num_heads=4, feature_map=elu()" in repr(kinformer.layer("linear-transformer", 64))


def test_the_former_name_of_whole_warns():
    with pytest.warns(FutureWarning, match="is now `whole=True`"):
        assert kinformer.layer("gpt", 64, block=True).inner.feed_forward is not None


def test_the_name_of_a_member_may_be_in_capitals():
    assert kinformer.layer("GPT", 64).config == kinformer.layer("gpt", 64).config


def _padded_grid(name):
    padding = torch.zeros(2, 16, dtype=torch.bool)
    layer, x = made(name), randn(2, 16, DIM)
    assert torch.equal(layer(x, grid=(4, 4), key_padding_mask=padding), layer(x, grid=(4, 4)))
    padding[1, 6] = True
    layer(x, grid=(4, 4), key_padding_mask=padding)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kinformer.layer("gated-deltanets", 64), "did you mean 'gated-deltanet'"),
        (lambda: kinformer.layer("mamba", 64), "did you mean 'mamba2'"),
        (lambda: kinformer.layer("linea", 64), "'linear'"),
        (lambda: kinformer.layer("llama", 64), "is nearest here"),
        (lambda: kinformer.layer("bidirectionl", 64), "'bidirectional'"),
        (lambda: kinformer.layer("gpt", 64, heads=8), "'heads' is not a setting of the mixer 'softmax'"),
        (lambda: kinformer.layer("chosen_block", 64), "did you mean 'chosen_blocks'"),
        (lambda: kinformer.layer("gated-deltanet", 64, causal=False), "rule = 'delta' has no bidirectional form"),
        (
            lambda: kinformer.layer("transformer-xl", 64, causal=False),
            "the mixer 'segment_memory' has no bidirectional",
        ),
        (lambda: kinformer.layer("sparse-transformer", 64, causal=False), "the pattern 'fixed' hides later tokens"),
        (lambda: kinformer.layer("bert", 64, causal=True), "reads whole sequences"),
        (lambda: kinformer.layer("gpt", 64, causal=False, decay="sigmoid"), "has no bidirectional form"),
        (lambda: kinformer.layer("gpt", 64, num_heads=7), "num_heads = 7 does not divide dim = 64"),
        (lambda: kinformer.layer("gpt", 0), "dim is 0"),
        (lambda: kinformer.layer("moba", 64, whole=16), "whole is 16, but must be True"),
        (lambda: kinformer.layer(3, 64), "name is of the type int"),
        (lambda: made("gpt")(torch.zeros(2, 3, 5)), "x has the shape [2, 3, 5] but must be"),
        (lambda: made("gpt")(torch.zeros(0, 3, DIM)), "leave the call out where a batch is empty"),
        (lambda: made("bert")(torch.zeros(2, 0, DIM)), "leave the call out where a batch is empty"),
        (lambda: made("gpt")(torch.zeros(2, 3, DIM).long()), "x is torch.int64 but must be a floating-point tensor"),
        (lambda: made("gpt")(randn(2, 3, DIM), ()), "state: it is not one of this layer's"),
        (lambda: made("gpt")(randn(2, 3, DIM), made("rfa").initial_state(2)), "state: it is not one of this layer's"),
        (
            lambda: made("gpt")(randn(2, 3, DIM), states.map_tensors(Tensor.double, made("gpt").initial_state(2))),
            "state: it is not one of this layer's",
        ),
        (
            lambda: made("gpt")(randn(2, 3, DIM), key_padding_mask=torch.zeros(2, 3)),
            "key_padding_mask is torch.float32",
        ),
        (lambda: made("gpt")(randn(2, 3, DIM), cu_seqlens=torch.tensor([0, 3])), "packed sequences stand in one row"),
        (lambda: made("gpt")(randn(1, 3, DIM), cu_seqlens=torch.tensor([0, 2])), "cu_seqlens is [0, 2], but must be"),
        (lambda: made("gpt")(randn(1, 3, DIM), context=randn(1, 4, DIM)), "attends to x alone"),
        (lambda: made("cross")(randn(1, 3, DIM)), "has none; give context="),
        (lambda: made("bert")(randn(1, 3, DIM), num_global=3), "num_global is 3"),
        (lambda: made("swin")(randn(1, 15, DIM), grid=(4, 4)), "grid=(rows, columns), the grid of these 15 patches"),
        (lambda: made("swin")(randn(1, 16, DIM)), "the mixer windows is for the patches of images and nothing else"),
        *(
            (functools.partial(_padded_grid, name), "key_padding_mask: the patches of an image are all real")
            for name in sorted(GRID)
        ),
        (lambda: made("swin")(randn(1, 4, DIM), grid=(2, 2), cu_seqlens=torch.tensor([0, 4])), "or a grid"),
        (lambda: made("star")(randn(1, 3, DIM), global_mask=torch.ones(1, 3, dtype=torch.bool)), "leave global_tokens"),
    ],
)
def test_wrong_calls_are_one_sentence(call, message):
    with pytest.raises(KinformerError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize(
    "stack",
    ["sequential", {"kind": "reversible"}, {"kind": "universal", "steps": 3, "halting": "act"}],
    ids=["sequential", "reversible", "universal"],
)
def test_a_stack_is_a_layer(stack):
    from kinformer.nn import stack as stacked

    kind = stack if isinstance(stack, str) else stack["kind"]

    def make():
        return stacked(["gpt"] if kind == "universal" else ["local", "gated-deltanet"], 16, stack=stack)

    report = verify_layer(make)
    assert not report.failed
    assert "partition" in report.passed
    model = make()
    y, state = model(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)), return_state=True)
    assert y.shape == (2, 5, 32 if kind == "reversible" else 16)  # of both streams
    assert len(state) == (3 if kind == "universal" else 2)


def test_the_number_of_heads_fits_the_width():
    assert kinformer.layer("swin", 64).inner.config.num_heads == 4  # the recipe has 5
    assert kinformer.layer("swin", 64, whole=True).inner.mixer.config.num_heads == 4
    with pytest.raises(KinformerError, match="num_heads = 5 does not divide dim = 64"):
        kinformer.layer("swin", 64, num_heads=5)
    with pytest.raises(KinformerError, match="num_heads = 3 does not divide dim = 64"):
        kinformer.layer(SoftmaxAttention(num_heads=3), 64)  # a config's number stays


def test_records_list_what_a_layer_takes():
    records = {record.name: record for record in kinformer.layers()}
    assert set(MEMBERS) <= set(records)
    assert records["local"].settings["num_heads"] == 4
    assert "pattern = 'local'" in str(records["local"])
    assert records["gated-deltanet"].growth == "constant"
    assert (records["cross"].causal, records["bidirectional"].causal) == (True, False)
    shown = [repr(records[name]) for name in ("performer", "transformer-xl", "bert")]
    assert shown == ["<performer: causal or bidirectional>", "<transformer-xl: causal>", "<bert: bidirectional>"]
    assert str(records["performer"]).startswith("performer: causal or bidirectional; ")
