"""Which way products take in steps of generation, where a process has chosen oneDNN's for large ones."""

from __future__ import annotations

import pytest
import torch

import kinformer
from kinformer.core.state import reserve
from kinformer.generation import session as steps
from kinformer.generation.session import Steps
from kinformer.runtime import process


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch):
    monkeypatch.setattr(process, "_set_up", True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is, the setting is left to it")
@pytest.mark.parametrize(
    "member, rows, said",
    [("gpt", 2, "highest"), ("gpt", 40, "highest"), ("linear-transformer", 2, "highest")]
    + [("linear-transformer", 40, "medium")],
)
def test_only_many_rows_without_a_past_are_large_products(member, rows, said, monkeypatch) -> None:
    model = kinformer.build(member, recipe="tiny", vocab_size=7).eval()
    seen, inner = [], steps.logits_after

    def watched(*given):
        seen.append(torch.get_float32_matmul_precision())
        return inner(*given)

    monkeypatch.setattr(steps, "logits_after", watched)
    with torch.inference_mode():
        state = reserve(model.initial_state(rows), 8)
        Steps(model, 8, recorded=False).step(torch.zeros(rows, 1, dtype=torch.int64), state)
    assert seen == [said] and torch.get_float32_matmul_precision() == "medium"
