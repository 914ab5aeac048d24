"""Head inputs before every prediction of a stream: with the state carried from end to end, or in windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State
from kinformer.data.evaluation import EvaluationStream
from kinformer.evaluation.windows import Windows, batches


class Contexts(NamedTuple):
    """The head inputs of some positions (``head_inputs``), leaves [rows, n, ...]; the ``targets`` [rows, n] that come
    next, and which are ``counted``, bool."""

    inputs: Any
    targets: Tensor
    counted: Tensor


def contexts(model: CausalModel, stream: EvaluationStream, windows: Windows | None) -> Iterator[Contexts]:
    """Yield the contexts of all predictions of ``stream``, each of them counted once, in order.

    ``windows`` None: the state is carried. Else windows are side by side, at most ``stream.length`` tokens of them but
    at least one window.
    """
    device = device_of(model)
    if windows is None:
        state: State = None
        for segment in stream:
            tokens, counted = (torch.from_numpy(field).to(device) for field in (segment.tokens, segment.valid))
            inputs, state = model.head_inputs(tokens[:, :-1], state)
            yield Contexts(inputs, tokens[:, 1:], counted)
        return
    for group in batches(stream.predictions, windows, max(1, stream.length // windows.context)):
        size = group[0].size
        tokens = torch.from_numpy(stream.split.rows(np.array([window.start for window in group]), size + 1)).to(device)
        unscored = torch.tensor([window.unscored for window in group], device=device)
        inputs, _ = model.head_inputs(tokens[:, :-1])
        yield Contexts(inputs, tokens[:, 1:], torch.arange(size, device=device) >= unscored[:, None])
