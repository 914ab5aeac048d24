"""Learnt spans as a table of layers and heads."""

import pytest
import torch

from kinformer.core.learning import Regularized
from kinformer.core.model import modules_of
from kinformer.family.build import build
from kinformer.lab.drawing.runs import span_panel
from kinformer.runtime.errors import KinformerError


def test_rows_are_layers_and_columns_heads():
    model = build("adaptive-span", "tiny", 256)
    with torch.no_grad():
        for part, shares in zip(modules_of(model, Regularized), ([0.0, 0.25], [0.5, 1.0]), strict=True):
            part.span.copy_(torch.tensor(shares))
    panel = span_panel(model, "it")
    assert panel.values.tolist() == [[0.0, 4.0], [8.0, 16.0]] and not panel.signed


def test_a_model_without_spans_is_one_sentence():
    with pytest.raises(KinformerError, match="spans: it learns no spans; train one"):
        span_panel(build("gpt", "tiny", 256), "it")
