"""How far the heads of a trained model look back, where that was learnt: span by layer and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kinformer.core.span import Span, TokenSpan
from kinformer.figures.panels import HeatPanel
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import nn


def span_panel(model: nn.Module, title: str) -> HeatPanel:
    """Return the spans in tokens, [layers, heads], of the layers of ``model`` that learn them, in order."""
    spans = [module.spans() for module in model.modules() if isinstance(module, Span)]
    if any(isinstance(module, TokenSpan) for module in model.modules()):
        raise KinformerError(
            f"`spans`: the spans of {title} follow from its tokens, so that no table says them; draw a run whose heads "
            "have spans of their own (span=soft_span)."
        )
    if not spans:
        raise KinformerError(
            f"`spans`: {title} learns no spans; train one that does, as adaptive-span or with "
            "`set` layers.*.mixer.span=soft_span."
        )
    if len({len(heads) for heads in spans}) > 1:
        raise KinformerError(f"`spans`: the layers of {title} differ in heads, which is no table; draw another model.")
    return HeatPanel(
        place="",
        name="learnt span in tokens",
        values=np.array(spans),
        rows="layer",
        columns="head",
        signed=False,
        first=1,
    )
