"""What ``torch.compile`` is told of functions, and that nothing loads it that does not compile."""

import subprocess
import sys

import pytest
import torch

from kinformer.runtime.compiling import constant, uncompiled


@pytest.fixture(autouse=True)
def anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_neither_building_nor_running_loads_the_compiler():
    code = (
        "import sys, kinformer\n"
        "from kinformer.family.table import MEMBERS\n"
        "for name in MEMBERS:\n"
        "    kinformer.build(name, recipe='tiny')\n"
        "kinformer.generate(kinformer.build('gpt'), [[1, 2]], max_new_tokens=2)\n"
        "import kinformer.lab.runs.inference, kinformer.lab.runs.create, torch\n"
        "from kinformer.family.build import configure, weight_shapes\n"
        "for name in MEMBERS.keys() - {'rwkv7', 'da-transformer'}:  # which begin with numbers that are not drawn\n"
        "    weight_shapes(configure(name, 'tiny'))\n"
        "for name in ('rope', 'reformer', 'sparse-transformer'):  # an operator of each kernel\n"
        "    kinformer.build(name, recipe='tiny', vocab_size=256)(torch.zeros(1, 128, dtype=torch.int64))\n"
        "modules = 'torch._dynamo', 'sympy', 'torch.nn.attention.flex_attention', 'torch.distributed.tensor'\n"
        "print([name for name in modules if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("called_before", [False, True])
def test_what_is_uncompiled_runs_between_two_graphs(called_before):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @uncompiled("it reads the host")
    def doubled(x):
        assert not torch.compiler.is_compiling()
        return x + x

    if called_before:
        doubled(torch.ones(1))
    compiled = torch.compile(lambda x: doubled(x.sin()).cos(), backend=backend)
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x), (2 * x.sin()).cos())
    nodes = [[node.name for node in graph.graph.nodes] for graph in graphs]
    assert [any(name in each for each in nodes) for name in ("sin", "cos", "add")] == [True, True, False]


def test_what_is_uncompiled_tells_why_where_one_graph_is_asked_for():
    @uncompiled("it reads the host")
    def doubled(x):
        return x + x

    with pytest.raises(Exception, match="it reads the host"):
        torch.compile(lambda x: doubled(x) + 1, backend="eager", fullgraph=True)(torch.ones(2))


def test_a_constant_is_asked_while_a_graph_is_captured():
    settings = {"factor": 2}
    factor = constant(lambda: torch.tensor(settings["factor"]).item())
    compiled = torch.compile(lambda x: x * factor(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
    settings["factor"] = 3
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
