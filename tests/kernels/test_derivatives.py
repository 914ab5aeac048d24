"""Derivatives beyond the first, and forward mode, of every kernel: right, or an error in one sentence."""

import pytest
import torch

import kinformer
from kinformer.blocks.feed_forward import Values
from kinformer.core.parts import Relative
from kinformer.core.pattern import Band
from kinformer.kernels.attention import Gathered, Projected, Scoring, Visibility, attention
from kinformer.kernels.delta import delta_rule
from kinformer.kernels.linear import LinearState, linear_attention
from kinformer.kernels.lstm import Weights, lstm
from kinformer.parts.patterns.sequence import Strided
from kinformer.runtime.errors import KinformerError
from kinformer.testing.subject import agree_derivatives

TIME, WIDTH = 7, 4


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


QKV = [(2, 2, TIME, WIDTH)] * 3


def softmax(impl, pattern=None, **scoring):
    visibility = Visibility(pattern or Band())
    return lambda q, k, v, *rest: (attention(q, k, v, visibility, Scoring(0.5, **scoring), impl=impl).out,)


def with_tables(impl):
    def function(q, k, v, bias, keys, values, shift):
        relative = Relative(0, bias=bias, keys=keys, values=values, shift=shift)
        found = attention(q, k, v, Visibility(Band()), Scoring(0.5, relative=relative), impl=impl, lse=True)
        return found.out, found.lse

    return function


def one_query(q, k, v):
    return softmax("chunked", Strided(stride=2).build())(q[:, :, -1:], k, v)


def few(q, k, v):
    found = attention(q, k, v, Visibility(), Scoring(0.5), impl="chunked", lse=True)
    return found.out, found.lse


def projected(q, x, w):
    return (attention(q[:, :, :2], Projected(x, w), Projected(x, w), Visibility(), Scoring(0.5), impl="chunked").out,)


def gathered(q):
    k, v = (each.detach() for each in tensors(*QKV[:2], seed=3))
    found = torch.randint(-1, TIME, (2, 2, TIME, 3), generator=torch.Generator().manual_seed(4))
    given = (Gathered(found, (table,), ((0, TIME),)) for table in (k, v))
    found = attention(q, *given, Visibility(), Scoring(1.0), impl="chunked", lse=True)
    return found.out, found.lse


def linear(impl, eps):
    def function(q, k, v, s, z):
        out, state = linear_attention(q.exp(), k.exp(), v, LinearState(s, z.exp()), eps=eps, impl=impl)
        return out, *state

    return function


def delta(impl):
    def function(q, k, v, beta, w):
        return delta_rule(q.softmax(-1), k.softmax(-1), v, beta.sigmoid(), w, impl=impl)

    return function


def recurrent(impl):
    return lambda x, h, c, *weights: lstm(x, h, c, Weights(*weights), impl=impl)


def looked_up(sparse):
    values = Values(6, WIDTH, sparse).double()
    slots = torch.randint(6, (5, 3), generator=torch.Generator().manual_seed(0))
    return lambda weights, table: (torch.func.functional_call(values, {"weight": table}, (slots, weights)),)


TABLES = [(2, TIME), (2, TIME, WIDTH), (2, TIME, WIDTH), (2, 1, WIDTH)]
STATES = [(2, 2, WIDTH, WIDTH), (2, 2, WIDTH)]
CELLS = [(2, 3, WIDTH), (2, 5), (2, 5), (20, WIDTH), (20, 5), (20,), (20,)]
KERNELS = {
    **{f"band, {impl}": (softmax(impl), QKV) for impl in ("reference", "chunked", "sdpa")},
    "tiles": (softmax("chunked", Strided(stride=3).build()), QKV),
    **{f"tables, {impl}": (with_tables(impl), QKV + TABLES) for impl in ("reference", "chunked")},
    "one query": (one_query, QKV),
    "few": (few, QKV),
    "projected": (projected, [QKV[0], (2, 9, 5), (2 * WIDTH, 5)]),
    "gathered": (gathered, QKV[:1]),
    **{f"linear, {impl}": (linear(impl, 1e-3), QKV + STATES) for impl in ("reference", "chunked")},
    "linear, chunked, no normaliser": (linear("chunked", None), QKV + STATES),
    **{f"delta, {impl}": (delta(impl), [*QKV, (2, 2, TIME), STATES[0]]) for impl in ("reference", "chunked")},
    **{f"lstm, {impl}": (recurrent(impl), CELLS) for impl in ("reference", "native")},
    **{f"look-up, sparse = {sparse}": (looked_up(sparse), [(5, 3), (6, WIDTH)]) for sparse in (False, True)},
}


@pytest.mark.parametrize("name", KERNELS)
def test_right_or_an_error(name):
    function, shapes = KERNELS[name]
    agree_derivatives(name, function, tensors(*shapes))


RAISES = ("band, chunked", "tiles", "tables, chunked", "linear, chunked", "delta, chunked")


@pytest.mark.parametrize("name", RAISES)
def test_a_second_derivative_that_is_missing_is_named(name):
    """Also where another path leads to the inputs, by which PyTorch would pass the error by."""
    function, shapes = KERNELS[name]
    points = tensors(*shapes)
    loss = sum(y.sum() for y in function(*points)) + sum(point.square().sum() for point in points)
    slopes = torch.autograd.grad(loss, points, create_graph=True)
    with pytest.raises(KinformerError, match="does not have a second derivative.*impl='reference'"):
        torch.autograd.grad(sum(slope.square().sum() for slope in slopes), points)


@pytest.mark.parametrize("name", ["band, chunked", "tiles", "tables, chunked"])
def test_a_forward_mode_that_is_missing_is_named(name):
    function, shapes = KERNELS[name]
    points = tuple(point.detach() for point in tensors(*shapes))
    with pytest.raises(KinformerError, match="does not have a forward-mode derivative.*impl='reference'"):
        torch.func.jvp(function, points, points)


@pytest.mark.parametrize(
    "name", ["gathered", "one query", "few", "projected", "band, reference", "band, sdpa", "look-up, sparse = True"]
)
def test_kernels_of_differentiable_steps_have_second_derivatives(name):
    function, shapes = KERNELS[name]
    points = tensors(*shapes)
    loss = sum(y.square().sum() for y in function(*points))
    slopes = torch.autograd.grad(loss, points[0], create_graph=True)
    assert torch.autograd.grad(slopes[0].square().sum(), points[0])[0].abs().sum() > 0


@pytest.mark.parametrize("member", ["linear-transformer", "fast-weights", "t5"])
def test_a_hessian_vector_product_of_a_member_is_refused(member):
    model = kinformer.build(member, recipe="tiny", vocab_size=11)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    logits, _ = model(torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0)))
    slopes = torch.autograd.grad(logits.square().mean(), weights, create_graph=True, allow_unused=True)
    with pytest.raises(KinformerError, match="does not have a second derivative"):
        torch.autograd.grad(sum(s.sum() for s in slopes if s is not None), weights, allow_unused=True)


def test_second_derivatives_of_torchs_kernel_are_the_references():
    """Also where a query sees nothing, and the first derivative stays the kernel's own."""
    visibility = Visibility(None, key_padding_mask=torch.tensor([[False] * 4 + [True] * 3, [True] * 7]))

    def derivatives(impl, q, k, v, **options):
        out = attention(q, k, v, options.get("visibility", visibility), Scoring(0.5), impl=impl).out
        slopes = torch.autograd.grad(out.square().sum(), (q, v), create_graph=True)
        return *slopes, *torch.autograd.grad(sum(slope.square().sum() for slope in slopes), (q, k, v))

    q, k, v = tensors((2, 4, 5, WIDTH), *[(2, 2, TIME, WIDTH)] * 2)
    for got, want in zip(derivatives("sdpa", q, k, v), derivatives("reference", q, k, v), strict=True):
        assert torch.allclose(got, want, atol=1e-10)


AUTO = {
    "band": (softmax("auto"), QKV),
    "tiles": (softmax("auto", Strided(stride=3).build()), QKV),
    "tables": (with_tables("auto"), QKV + TABLES),
    "sink": (lambda q, k, v, z: softmax("auto", sink=z)(q, k, v), [*QKV, (2,)]),
    "projected": (
        lambda q, x, w: (attention(q[:, :, :2], Projected(x, w), Projected(x, w), Visibility(), Scoring(0.5)).out,),
        [QKV[0], (2, 9, 5), (2 * WIDTH, 5)],
    ),
    "linear": (linear("auto", 1e-3), QKV + STATES),
    "delta": (delta("auto"), [*QKV, (2, 2, TIME), STATES[0]]),
    "lstm": (recurrent("auto"), CELLS),
    **{f"look-up, sparse = {sparse}": (looked_up(sparse), [(5, 3), (6, WIDTH)]) for sparse in (False, True)},
}


@pytest.mark.filterwarnings("ignore:.*batching rule")  # the kernel of PyTorch takes one row at a time
@pytest.mark.parametrize("name", AUTO)
def test_transforms_of_torch_func_are_right(name):
    """A kernel with a custom backward cannot be transformed, so that the references compute."""
    function, shapes = AUTO[name]
    points = [point.detach() for point in tensors(*shapes)]

    def loss(first):
        return sum(y.square().sum() for y in function(first, *points[1:]))

    point = points[0]
    leaf = point.clone().requires_grad_()
    slope = torch.autograd.grad(loss(leaf), leaf)[0]
    assert torch.allclose(torch.func.grad(loss)(point), slope, atol=1e-10)
    assert torch.allclose(torch.func.jvp(loss, (point,), (slope,))[1], slope.square().sum(), rtol=1e-9)
    inputs = torch.stack([point, 2 * point])
    each = torch.func.vmap(torch.func.grad(loss))(inputs)
    assert torch.allclose(each[0], slope, atol=1e-10)
    step = 1e-6 * slope
    product = torch.func.jvp(torch.func.grad(loss), (point,), (slope,))[1]
    apart = (torch.func.grad(loss)(point + step) - torch.func.grad(loss)(point - step)) / 2e-6
    assert torch.allclose(product, apart, rtol=1e-4, atol=1e-5)
    curved = torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(point)
    leaf.grad = None
    torch.func.grad(loss)(leaf).square().sum().backward()
    assert torch.allclose(leaf.grad, curved, rtol=1e-6, atol=1e-8)


def test_experts_have_a_derivative_in_forward_mode():
    layer = kinformer.layer("mixtral", 16, whole=True, num_heads=2).eval()
    x, along = (torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    slope = torch.func.grad(lambda x: layer(x).square().sum())(x)
    assert torch.allclose(
        torch.func.jvp(lambda x: layer(x).square().sum(), (x,), (along,))[1], (slope * along).sum(), rtol=1e-3
    )
