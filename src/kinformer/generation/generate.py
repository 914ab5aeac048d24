"""Generation from prompts of ids: one call that begins a session, steps it and returns the tokens drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, Unpack, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.model import CausalModel
from kinformer.generation.drafts import DraftedSession, draft_of
from kinformer.generation.sampling import SamplingOptions
from kinformer.generation.session import Session
from kinformer.generation.weights import inference_copy
from kinformer.runtime.errors import KinformerError, require, require_kind

if TYPE_CHECKING:
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder

MOST_NEW = 256
"""How many tokens are drawn where no number is given."""

_EVALUATING: WeakKeyDictionary[nn.Module, tuple[list[int], list[nn.Module]]] = WeakKeyDictionary()
"""The threads that evaluate a model, and the modules that return to training mode after the last of these threads."""
_CHANGING = Lock()


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Put the model in eval mode, and the modules that were in training mode back in it when no thread evaluates."""
    if not isinstance(model, nn.Module):
        yield
        return
    with _CHANGING:
        threads, training = _EVALUATING.setdefault(model, ([], []))
        threads.append(get_ident())
        training += [part for part in model.modules() if part.training]
        for part in training:
            part.training = False
    try:
        yield
    finally:
        with _CHANGING:
            threads.remove(get_ident())
            while training and not threads:
                training.pop().training = True


def generate(
    model: CausalModel | Decoder | Encoder,
    prompt_tokens: Tensor | np.ndarray | Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    stop: Sequence[Sequence[int]] | None = None,
    valid: Tensor | None = None,
    draft: object = None,
    draft_length: int = 4,
    weights: str | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Tensor:
    """Continue prompts and return the new tokens [batch, new] int64.

    model: a causal model, which is in eval mode meanwhile.
    prompt_tokens: ids [batch, time]: an int64 tensor, a NumPy array, or lists of one length.
    max_new_tokens: the most tokens to draw for each row; if not given, 256, or fewer where the model's positions end.
    stop: sequences of ids; each ends a row as soon as the row has produced it. The row is filled up with its last
        token; when every row has ended, ``new`` is smaller.
    valid: [batch, time] bool, the real tokens of prompts of different lengths.
    draft: "ngram", "mtp" or a smaller model, which guesses ``draft_length`` tokens at most. The drawn tokens are the
        same, faster where the guesses are often right (``generation.drafts``).
    weights: "fp32", "bf16" or "int8", the type of the weights in memory; if not given, the model's. On a CPU, the model
        stores the copy that draws the tokens, so its weights are in memory twice until the model is freed or changed.
    sampling: ``temperature`` (1.0; 0 takes the most probable), ``top_k``, ``top_p``, ``min_p``,
        ``repetition_penalty`` (1.0), ``seed``; row r draws from stream r of the seed.

    Errors: ``KinformerError`` where the tokens would go beyond the model's positions, before anything is computed.
    """
    tokens = _tokens(prompt_tokens)
    if max_new_tokens is None:
        room = MOST_NEW if model.max_length is None else model.max_length - tokens.shape[1] + 1
        max_new_tokens = max(1, min(MOST_NEW, room))
    require_kind("max_new_tokens", max_new_tokens, int)
    require("max_new_tokens", max_new_tokens, 1)
    if valid is not None and not (isinstance(valid, Tensor) and valid.dtype == torch.bool):
        has = valid.dtype if isinstance(valid, Tensor) else type(valid).__name__
        raise KinformerError(f"valid is of the type {has} but must be a tensor [batch, time] of torch.bool.")
    with evaluating(model):
        batch, options = tokens.shape[0], {"stop": stop or (), "room": max_new_tokens, **sampling}
        ready: Any = inference_copy(cast(nn.Module, model), max_new_tokens, weights)
        session = session_of(ready, batch, draft, draft_length, options)
        longest = tokens.shape[1] if valid is None else int(valid.sum(dim=1).max())
        session.require(max_new_tokens, [longest] * session.batch)
        session.feed(tokens, valid)
        new: list[Tensor] = []
        while len(new) < max_new_tokens and not session.finished:
            new.append(session.step())
    return torch.stack(new, dim=1)


def session_of(model: CausalModel, batch: int, draft: object, length: int, options: Mapping[str, Any]) -> Session:
    """Return a session of ``batch`` rows; with a ``draft`` (see :func:`generate`) one that checks its guesses."""
    if draft is None:
        return Session(model, batch, **options)
    return DraftedSession(model, draft_of(draft, model, batch, length), batch, length=length, **options)


def _tokens(prompt: Tensor | np.ndarray | Sequence[Sequence[int]]) -> Tensor:
    """Return the prompt as a tensor [batch, time]; of an array or lists int64."""
    if not isinstance(prompt, Tensor):
        try:
            ids = np.asarray(prompt)
        except ValueError:
            raise KinformerError(
                "prompt_tokens has rows of unlike length; pad them to one length and say by valid which are real."
            ) from None
        if ids.dtype.kind not in "iu":
            texts = "; encode texts by the run's tokenizer first" if ids.dtype.kind in "US" else ""
            raise KinformerError(f"prompt_tokens holds {ids.dtype}, but must hold ids, which are whole numbers{texts}.")
        prompt = torch.from_numpy(ids.astype(np.int64))
    if prompt.dim() != 2:
        raise KinformerError(f"prompt_tokens must be [batch, time], but have the shape {tuple(prompt.shape)}.")
    return prompt
