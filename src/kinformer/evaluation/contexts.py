"""Head inputs before every prediction of a stream: with the state carried from end to end, or in windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State, map_tensors
from kinformer.data.evaluation import EvaluationStream
from kinformer.evaluation.windows import Windows, batches


class Contexts(NamedTuple):
    """The head inputs of some positions (``head_inputs``), leaves [rows, n, ...]; the ``targets`` [rows, n] that come
    next, and which are ``counted``, bool."""

    inputs: Any
    targets: Tensor
    counted: Tensor


def contexts(
    model: CausalModel, stream: EvaluationStream, windows: Windows | None, prefix: Sequence[int] = ()
) -> Iterator[Contexts]:
    """Yield the contexts of all predictions of ``stream``, each of them counted once, in order.

    ``windows`` None: the state is carried. Else windows are side by side, at most ``stream.length`` tokens of them but
    at least one window. ``prefix``: ids such as BOS, in front of the stream or of every window. A window's context
    includes the prefix. Predictions by the prefix do not count.
    """
    device = device_of(model)
    first = torch.tensor([list(prefix)], device=device)
    if windows is None:
        state: State = model.head_inputs(first)[1] if prefix else None
        for segment in stream:
            tokens, counted = (torch.from_numpy(field).to(device) for field in (segment.tokens, segment.valid))
            inputs, state = model.head_inputs(tokens[:, :-1], state)
            yield Contexts(inputs, tokens[:, 1:], counted)
        return
    rows = max(1, stream.length // windows.context)
    for group in batches(stream.predictions, windows.behind(len(prefix)), rows):
        size = group[0].size
        tokens = torch.from_numpy(stream.split.rows(np.array([window.start for window in group]), size + 1)).to(device)
        unscored = torch.tensor([window.unscored for window in group], device=device)
        read = torch.cat([first.expand(len(tokens), -1), tokens[:, :-1]], 1) if prefix else tokens[:, :-1]
        inputs, _ = model.head_inputs(read)
        if prefix:
            inputs = map_tensors(lambda x: x[:, len(prefix) :], inputs)
        yield Contexts(inputs, tokens[:, 1:], torch.arange(size, device=device) >= unscored[:, None])
