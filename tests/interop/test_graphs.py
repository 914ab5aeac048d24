"""Graphs without Python: an ONNX file computes the run's logits and state."""

import json

import numpy as np
import pytest
import torch

import kinformer
from kinformer.family.build import configure
from kinformer.generation.recording import Leaf, leaves_of
from kinformer.interop import graphs
from kinformer.interop.graphs import FlatStep, captured
from kinformer.lab.cli.main import main
from kinformer.runtime.compiling import substitute, substituting
from kinformer.runtime.errors import KinformerError
from tests.interop.test_export import saved_run

TORCH = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
HYBRID = {"layers.1": configure("gpt", "tiny", 256).layers[0], "layers.0.mixer.convolution_bias": True}
EXPERTS = {"kind": "experts", "num_experts": 4, "topk": 2}
MIXED = {"layers.0.feed_forward": EXPERTS, "layers.1.mixer": {"kind": "lstm"}}
OPERATORS = {
    "linear-transformer": {"LinearAttention", "LSTM"},
    "gated-deltanet": {"LinearAttention", "CausalConvWithState"},
}


@pytest.mark.skipif(TORCH < (2, 13), reason="an older torch.export sees a constraint of time in the model")
@pytest.mark.parametrize("member, changes", [("linear-transformer", MIXED), ("gated-deltanet", HYBRID)])
@torch.no_grad()
def test_onnxruntime_computes_logits_and_state_of_a_prompt_and_of_steps(tmp_path, member, changes):
    """Kernel attention and an LSTM by their operators, experts sorted by TopK; in the hybrid, softmax attention with a
    growing cache beside it."""
    import onnx as library

    run = saved_run(member, tmp_path / "run", **changes)
    done = kinformer.export(run, tmp_path / "out", format="onnx")
    assert done.difference < 1e-5 and done.format == "onnx"
    facts = json.loads((tmp_path / "out" / "graph.json").read_text())
    assert facts["tokenizer"] == "bytes" and facts["opset"] == 27 and facts["inputs"][0] == "tokens"
    file = library.load(tmp_path / "out" / facts["file"])
    library.checker.check_model(file)
    names = {"LinearAttention", "CausalConvWithState", "LSTM"}
    assert {node.op_type for node in file.graph.node} & names == OPERATORS[member]
    assert json.loads(file.metadata_props[0].value)["state"] == facts["state"]

    session = graphs.session_of(tmp_path / "out" / facts["file"], 1)
    held = [
        np.zeros([{"batch": 2, "past": 0}.get(size, size) for size in leaf["shape"]], leaf["dtype"])
        for leaf in facts["state"]
    ]
    model, state = kinformer.load(run), None
    tokens = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(1))
    for chunk in (tokens[:, :31], *tokens[:, 31:].split(1, dim=1)):
        want, state = model(chunk, state)
        logits, *held = session.run(None, dict(zip(facts["inputs"], (chunk.numpy(), *held), strict=True)))
        assert np.abs(logits - want.numpy()).max() < 1e-5
    other = configure(member, "tiny", 256, changes).build().eval()
    assert graphs.gap(other, tmp_path / "out" / facts["file"], leaves_of(model)) > 0.01


def test_what_stands_in_for_operators_computes_the_same():
    x, ends = torch.tensor([[3, 1, 3, 0, 1, 3]]), torch.tensor([0, 2, 2, 5])
    aten = torch.ops.aten
    for name, arguments, options in (
        (aten.sort.stable, (x,), {"stable": True}),
        (aten.argsort.default, (x[0].unique(),), {"descending": True}),
        (aten.searchsorted.Tensor, (ends, torch.arange(6)), {"right": True}),
        (aten.searchsorted.Tensor, (ends, torch.arange(6)), {"out_int32": True}),
    ):
        one, other = name(*arguments, **options), graphs.WRITTEN_OTHERWISE[name](*arguments, **options)
        if name is aten.sort.stable:  # ties are the runtime's to break
            one, other = one[0], other[0]
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_leaves_have_names_and_windows_are_full_from_the_start():
    growing = {leaf.name: leaf for leaf in leaves_of(configure("gpt", "tiny", 256).build().eval())}
    assert growing["layers.0.0.k"].shape == ("batch", 2, "past", 16) and growing["layers.0.0.k"].grows
    assert growing["seen"] == Leaf("seen", "int64", ("batch",))
    window = {leaf.name: leaf for leaf in leaves_of(configure("local", "tiny", 256).build().eval())}
    size = window["layers.0.0.k"].shape[2]
    assert isinstance(size, int) and window["layers.0.0.k"].zeros(3).shape[2] == size


@pytest.mark.parametrize("member", ["gpt", "local", "linear-transformer", "transformer-xl", "primer"])
@torch.no_grad()
def test_flat_steps_are_the_models(member):
    torch.manual_seed(0)
    model = configure(member, "tiny", 256).build().eval()
    step = FlatStep(model, {})
    leaves, state = [leaf.zeros(2) for leaf in step.leaves], None
    for chunk in torch.randint(256, (2, 40)).split([17, 1, 22], dim=1):
        want, state = model(chunk, state)
        logits, *leaves = step(chunk, *leaves)
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-4)


ADAPTIVE = {
    "calm": {"stack.rule.thresholds": [0.004, 0.004]},
    "depth-adaptive": {},
    "universal": {"stack.steps": 2},
}


@pytest.mark.parametrize("member", ADAPTIVE)
@torch.no_grad()
def test_graphs_of_early_exits_and_of_halting_are_the_models(member):
    """In a graph all tokens go through all layers, and those that have left or halted keep their vectors."""
    torch.manual_seed(0)
    model = configure(member, "tiny", 256, ADAPTIVE[member]).build().eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    tokens, taken = torch.randint(256, (2, 40)), []
    if member != "universal":
        model.stack.left.register_forward_pre_hook(lambda module, arguments: taken.append(arguments[0]))
        model(tokens)
        assert len(set(taken[0].flatten().tolist())) > 1, "some leave early, and some do not"
    step = FlatStep(model, {})
    graph, leaves, state = captured(step).module(), [leaf.zeros(2) for leaf in step.leaves], None
    for chunk in tokens.split([17, 1, 22], dim=1):
        want, state = model(chunk, state)
        logits, *leaves = graph(chunk, *leaves)
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "member, options, words",
    [
        ("gpt", {"format": "onxx"}, "did you mean"),
        ("gpt", {"format": "onnx", "dtype": "bfloat16"}, "is for format hf"),
        ("bert", {"format": "onnx"}, "continues sequences of tokens"),
        (
            "compressive",
            {"format": "onnx"},
            r"'compressive' cannot be in a graph.*\(it cuts segments where each sequence has",
        ),
        (
            "memorizing",
            {"format": "onnx"},
            r"'memorizing' cannot be in a graph.*\(it evicts and searches memories\); export",
        ),
        ("tensorized", {"format": "onnx"}, "depend on .* on the host, so that a graph"),
    ],
)
def test_what_is_no_graph_is_refused_in_a_sentence(tmp_path, member, options, words):
    run = saved_run(member, tmp_path / "run")
    with pytest.raises(KinformerError, match=words):
        kinformer.export(run, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_size_with_a_bound_is_named():
    text = (
        "Constraints violated (past)! For more.\n  - Not all values of past = L['x'].size()[2] in the specified range"
    )
    assert graphs._reason(ValueError(text)).startswith("its operators depend on past on the host")


def test_an_operator_that_the_converter_lacks_is_named():
    text = (
        "Error when translating node %sort : call_function[target=torch.ops.aten.sort.stable](args = (%cat,)).\nMore."
    )
    assert graphs.converter_reason(ValueError(text)) == "it does not have the operator aten.sort.stable"
    assert graphs.converter_reason(ValueError("Something else.\nMore.")) == "Something else"


def test_the_command_refuses_with_one_sentence(tmp_path, capsys):
    run = saved_run("compressive", tmp_path / "run")
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--format", "onnx", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(run) in error and "this one with --format hf" in error


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    run = saved_run("gpt", tmp_path / "run")
    monkeypatch.setattr(graphs, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(KinformerError, match=r"needs onnxscript; pip install 'kinformer\[onnx\]'"):
        kinformer.export(run, tmp_path / "out", format="onnx")


def test_a_substitute_stands_in_within_its_context_alone():
    with substituting({"linear_attention": min}):
        assert substitute("linear_attention") is min and substitute("delta_rule") is None
    assert substitute("linear_attention") is None
