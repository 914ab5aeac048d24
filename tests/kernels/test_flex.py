"""FlexAttention on a GPU: when "auto" takes it, and that it gives the values and gradients of our kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kinformer.core.parts import Relative
from kinformer.core.pattern import Band, Pattern
from kinformer.kernels import attention as route
from kinformer.kernels.attention import AttentionDropout, Scoring, Visibility, attention, choose_impl
from kinformer.parts.patterns.sequence import Blockwise, Fixed, Strided
from kinformer.runtime import compiling

PERMUTED = Blockwise(block=96, permutation=(1, 0))
WINDOW = Band(behind=255)
STRIDED = Strided(stride=64).build()

TAKEN = {
    "a window": (WINDOW, {}),
    "strides": (STRIDED, {}),
}
LEFT = {
    "all of the past": ("sdpa", Band(), {}),
    "a row of odd length": ("sdpa", WINDOW, {"time": 2049}),
    "a short row": ("sdpa", WINDOW, {"time": 1024}),
    "a past": ("sdpa", WINDOW, {"past": 128}),
    "rows that may be reset": ("sdpa", WINDOW, {"whole": False}),
    "dropout": ("chunked", WINDOW, {"dropout": AttentionDropout(0.1, 1)}),
    "float32": ("sdpa", WINDOW, {"dtype": torch.float32}),
    "strides in float32": ("chunked", STRIDED, {"dtype": torch.float32}),
    "wide heads": ("sdpa", WINDOW, {"width": 256}),
    "strides of a short row": ("chunked", STRIDED, {"time": 512}),
    "a bias by distance": ("chunked", Band(), {"bias": True}),
}


def choice(
    pattern: Pattern,
    time: int = 2048,
    past: int = 0,
    whole: bool = True,
    width: int = 64,
    bias: bool = False,
    dropout: AttentionDropout | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """The choice of "auto" for tensors that are said to be on a GPU."""
    with FakeTensorMode():
        q = torch.empty(1, 2, time, width, device="cuda", dtype=dtype)
        k = torch.empty(1, 2, past + time, width, device="cuda", dtype=dtype)
        positions = torch.empty(1, time, device="cuda", dtype=torch.int64)
        table = torch.empty(2, time, device="cuda")
        scoring = Scoring(0.1, relative=Relative(0, bias=table) if bias else None, dropout=dropout)
        return choose_impl(q, k, Visibility(pattern, positions, whole), scoring)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "has_triton", lambda: True)


@pytest.mark.parametrize("case", TAKEN)
def test_auto_takes_it_for_full_rows_of_a_pattern(case: str, triton: None) -> None:
    pattern, words = TAKEN[case]
    assert choice(pattern, **words) == "flex"  # type: ignore[arg-type]


@pytest.mark.parametrize("case", LEFT)
def test_auto_leaves_what_it_cannot_or_would_compile_anew(case: str, triton: None) -> None:
    expected, pattern, words = LEFT[case]
    assert choice(pattern, **words) == expected  # type: ignore[arg-type]


def test_auto_does_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "has_triton", lambda: False)
    assert choice(WINDOW) == "sdpa"
    assert choice(STRIDED) == "chunked"
    monkeypatch.setattr(compiling, "find_spec", lambda _: None)
    assert not compiling.has_triton()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [WINDOW, STRIDED, Fixed(segment=64, summary=8).build(), Band(behind=128, ahead=128), PERMUTED],
    ids=lambda pattern: type(pattern).__name__,
)
def test_values_and_gradients_are_those_of_the_reference(pattern: Pattern, padded: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    draw = {"device": "cuda", "generator": generator, "dtype": torch.bfloat16}
    inputs = [torch.randn(2, 4, 2048, 64, requires_grad=True, **draw) for _ in range(3)]  # type: ignore[call-overload]
    mask = torch.zeros(2, 2048, dtype=torch.bool, device="cuda")
    mask[1, 1500:] = padded
    visibility = Visibility(pattern, None, True, key_padding_mask=mask if padded else None)
    scoring = Scoring(0.125)
    assert choose_impl(inputs[0], inputs[1], visibility, scoring) == "flex"
    results: list[tuple[Tensor, ...]] = []
    for impl, given in (("auto", inputs), ("reference", [x.detach().float().requires_grad_() for x in inputs])):
        out = attention(*given, visibility, scoring, impl=impl).out  # type: ignore[arg-type]
        results.append((out, *torch.autograd.grad(out.float().square().sum(), given)))
    for ours, expected in zip(*results, strict=True):
        error = (ours.float() - expected).norm() / expected.norm()
        assert error < 0.02, f"{error:.4f} of the norm"
