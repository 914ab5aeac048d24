"""The operators in C compute what PyTorch's do, alone and in recorded steps."""

import copy
import os

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.generation import native
from kinformer.generation.fusing import Fusion
from kinformer.generation.native import NONE, attend, is_native, pack, product, unpack
from kinformer.generation.recording import Call, Ref, Tape, compile_calls, simplify
from kinformer.generation.session import Session
from kinformer.generation.weights import as_weights
from kinformer.generation.weights import pack as packed
from kinformer.kernels import attention

pytestmark = pytest.mark.skipif(not is_native(), reason="no C compiler is installed")
EXACT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(("rows", "columns"), [(16, 2), (40, 7), (131, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_packed_weights_are_unpacked(rows, columns, dtype):
    matrix = torch.randn(rows, columns).mul(40).to(dtype)
    assert torch.equal(unpack(pack(matrix), rows, columns), matrix)


def recorded(step, *inputs):
    """Return the results of ``step`` of ``inputs``, recorded and run in C."""
    tape = Tape(inputs)
    with torch.inference_mode(), tape:
        outputs = step(*inputs)
    refs = list(map(tape.ref, outputs))
    calls, captured, refs = simplify(tape.calls, [tape], refs)
    assert {call.operator._schema.name for call in calls} <= {"kinformer_step::chain", "aten::as_strided"}
    return compile_calls(calls, len(inputs), len(captured), refs)(*inputs, *captured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    "joined", ["", "rms norm", "layer norm", "bare norm", "gelu", "gelu tanh", "silu", "gelu gated", "residual", "bias"]
)
@pytest.mark.parametrize("rows", [0, 1, 3, 9])
def test_a_product_with_what_stands_around_it(dtype, kind, joined, rows):
    out, columns = 71, 301
    matrix = torch.randn(out, columns).mul(40).to(kind)
    scales = torch.rand(out).bfloat16() if kind == torch.int8 else NONE
    x = torch.randn(rows, 1, columns * (2 if "gated" in joined else 1), dtype=dtype).mul(3).add(1)
    factor, shift, residual = torch.randn(columns), torch.randn(columns), torch.randn(rows, 1, out)
    bias = torch.randn(out) if joined == "bias" else NONE
    weight = matrix.double() * (scales.double()[:, None] if kind == torch.int8 else 1)
    packed_matrix = pack(matrix)

    def before(x):
        some = (factor.to(x.dtype), shift.to(x.dtype))
        if "gated" in joined:
            a, b = x.chunk(2, -1)
            return functional.gelu(a) * b
        if "norm" in joined:
            if joined == "rms norm":
                return functional.rms_norm(x, (columns,), some[0], 1e-5)
            return functional.layer_norm(x, (columns,), *((None, None) if joined == "bare norm" else some))
        if joined == "silu":
            return functional.silu(x)
        return functional.gelu(x, approximate="tanh" if "tanh" in joined else "none") if "gelu" in joined else x

    def step(x, residual):
        y = product(before(x), packed_matrix, out, scales, bias)
        return (y + residual if joined == "residual" else y,)

    expected = before(x.double()) @ weight.T + (bias if joined == "bias" else 0)
    expected = expected + (residual if joined == "residual" else 0)
    (y,) = recorded(step, x, residual.to(dtype))
    assert y.dtype == dtype and y.shape == (rows, 1, out)
    limit = max(EXACT[dtype], 2e-4 if kind == torch.int8 else 0) * (float(expected.abs().max()) if rows else 1)
    torch.testing.assert_close(y.double(), expected, atol=limit, rtol=0)


def attended(*arguments):
    """Return the attention of one query by the operator in C."""
    tensors = list(arguments[:7])
    q, v = tensors[0], tensors[2]
    results = [*tensors, q.new_empty(*q.shape[:3], v.shape[3])]
    call = Call(attend, (*map(Ref, range(7)), *arguments[7:]), (7,))
    calls = Fusion([call], [Ref(7)], results, captured := [], set()).calls()
    return compile_calls(calls, 7, len(captured), [Ref(7)])(*tensors, *captured)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [True, False, None])
@pytest.mark.parametrize(("heads", "groups", "width", "slots"), [(4, 4, 64, 200), (6, 2, 24, 3), (1, 1, 7, 1)])
def test_attention_of_one_query_fills_the_last_slot(dtype, pairs, heads, groups, width, slots):
    batch, turned = 3, width - width % 2 - 2 * (width > 8)
    q, k, v = (
        torch.randn(batch, 1, n, width + 5, dtype=dtype)[..., :width].transpose(1, 2) for n in (heads, groups, groups)
    )
    keys, values = (torch.randn(batch, groups, slots + 9, width, dtype=dtype)[:, :, 4 : 4 + slots] for _ in range(2))
    angles = torch.randn(batch, 1, 1, turned // 2)
    cos, sin = (NONE, NONE) if pairs is None else (angles.cos().to(dtype), angles.sin().to(dtype))

    def turn(x):
        if pairs is None:
            return x.double()
        first, c, s = x[..., :turned].double(), cos.double(), sin.double()
        a, b = (first[..., 0::2], first[..., 1::2]) if pairs else first.chunk(2, -1)
        both = [a * c - b * s, a * s + b * c]
        first = torch.stack(both, -1).flatten(-2) if pairs else torch.cat(both, -1)
        return torch.cat([first, x[..., turned:].double()], -1)

    all_keys, all_values = (
        torch.cat([past[:, :, :-1].double(), new], 2) for past, new in ((keys, turn(k)), (values, v))
    )
    scores = 0.3 * turn(q).unflatten(1, (groups, -1)).squeeze(3) @ all_keys.mT
    expected = (scores.softmax(-1) @ all_values.double()).flatten(1, 2)[:, :, None]
    y = attended(q, k, v, cos, sin, keys, values, 0.3, bool(pairs))
    torch.testing.assert_close(y.double(), expected, atol=3 * EXACT[dtype], rtol=0)
    torch.testing.assert_close(keys.double(), all_keys, atol=2 * EXACT[dtype], rtol=EXACT[dtype])
    assert torch.equal(values[:, :, -1:], v)


def operators(session):
    return [node.kind() for node in session._stepping.running.recording.function.graph.nodes()]


@pytest.mark.parametrize(("weights", "limit"), [("fp32", 1e-5), ("bf16", 0.03), ("int8", 0.03)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"layers.*.mixer.position.layout": "interleaved"},
        {"layers.*.mixer.position.layout": "half", "layers.*.mixer.position.fraction": 0.5},
        {"layers.*.mixer.projection.kind": "grouped", "layers.*.mixer.projection.num_kv_heads": 2},
    ],
)
def test_recorded_steps_run_in_c_and_are_near_float64(weights, limit, batch, changes):
    torch.manual_seed(0)
    changes = changes | {
        "head.tied": False,
        "norm.kind": "rms_norm",
        "layers.*.norm.kind": "rms_norm",
        "layers.*.feed_forward.kind": "swiglu",
    }
    model = kinformer.build("rope", recipe="tiny", set=changes).eval()
    exact, text = copy.deepcopy(model).double(), torch.randint(model.vocab_size, (batch, 9))
    session = Session(packed(as_weights(model, weights)), batch, temperature=0, room=64)
    session.feed(text)
    for _ in range(6):
        text = torch.cat([text, session.step()[:, None]], 1)
    with torch.no_grad():
        expected = exact(text[:, :-1])[0][:, -1]
    largest = float(expected.abs().max())
    torch.testing.assert_close(session._logits.double(), expected, atol=limit * largest, rtol=0)
    names = operators(session)
    assert names.count("kinformer_step::chain") == 1
    assert not {"aten::rms_norm", "aten::silu", "aten::scaled_dot_product_attention", "aten::cat"} & set(names)


@pytest.mark.parametrize("member", ["transformer-xl", "gtrxl", "shaw", "da-transformer"])
def test_products_over_past_slots_grow_with_them(member):
    """Transformer-XL projects the distance of every slot; a chain has fixed shapes, so this product stays outside."""
    model = packed(kinformer.build(member, recipe="tiny").eval())
    text, drawn = torch.randint(model.vocab_size, (1, 3)), []
    for recorded in (True, False):
        session = Session(model, 1, temperature=0, room=64, recorded=recorded)
        session.feed(text)
        drawn.append(torch.stack([session.step() for _ in range(40)]))
        assert (session._stepping.running is not None) == recorded
    assert torch.equal(*drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", ["slots", "rows"])
def test_steps_of_many_slots_and_rows_are_recorded(dtype, more):
    """PyTorch's kernel and ours take the same time at some size; a recorded step runs in C at every size."""
    model = packed(kinformer.build("rope", recipe="tiny").eval().to(dtype))
    table = attention.TABLE["other"]
    room, batch = (table.few_keys // model.config.dim + 64, 1) if more == "slots" else (64, table.few_heads)
    session = Session(model, batch, temperature=0, room=room)
    session.feed(torch.randint(model.vocab_size, (batch, 9)))
    for _ in range(4):
        session.step()
    names = operators(session)
    assert names.count("kinformer_step::chain") == 1
    assert not {"aten::gelu", "aten::scaled_dot_product_attention", "aten::matmul"} & set(names)


def test_a_compilation_that_fails_is_not_tried_again(monkeypatch, tmp_path):
    compiler, tries = tmp_path / "cc", tmp_path / "tries"
    compiler.write_text(f"#!/bin/sh\necho >> {tries}\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert not native._registered.__wrapped__()
    assert tries.read_text().count("\n") == 1
    os.utime(compiler, (0, 0))  # another compiler of the name
    assert not native._registered.__wrapped__()
    assert tries.read_text().count("\n") == 2
