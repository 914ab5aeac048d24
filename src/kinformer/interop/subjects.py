"""Causal models as the laws of ``interop.proof`` call them: ``logits, cache = model(tokens, cache, valid)``."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError


class NotJudgedError(KinformerError):
    """The reason why a law cannot be checked on a model."""


class Uncached:
    """The cache of a model that returns none; no chunk can follow it."""


class Cached(NamedTuple):
    """The cache of a model of transformers, by the ``name`` of the argument that takes it, and the ``mask`` [batch,
    tokens so far]."""

    name: str
    past: object
    mask: Tensor


class Plain:
    """A model with the call of this library: ``logits, state = model(tokens, state, valid=valid)``."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval() if isinstance(model, nn.Module) else model
        self.vocab_size: int = getattr(model, "vocab_size", 0)
        self.max_length = getattr(model, "max_length", None)
        call = model.forward if isinstance(model, nn.Module) else model
        parameters = inspect.signature(call).parameters
        self.takes_padding = "valid" in parameters
        self.takes_packing = self.promises_packing = "reset" in parameters
        if self.vocab_size < 2:
            raise KinformerError("the object has no vocab_size; give it one, the number of ids that it takes.")

    def __call__(self, tokens: Tensor, cache: State = None, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Return logits [batch, time, vocab] and what the next chunk needs."""
        logits, cache = self.model(tokens, cache, **({} if valid is None else {"valid": valid}))
        return logits, cache

    def packed(self, tokens: Tensor, start: int) -> Tensor:
        """Return logits of rows in which another text begins at ``start``."""
        reset = torch.zeros_like(tokens, dtype=torch.bool)
        reset[:, start] = True
        return self.model(tokens, None, reset=reset)[0]  # type: ignore[no-any-return]


class Theirs:
    """A causal model of transformers, whose cache is its own and whose masks cover all tokens so far.

    What pads is the model's padding token. Positions are named only where they count from 0 (RoBERTa's do not); the
    mask of a recurrent model covers a chunk alone, as its own ``generate`` has it.
    """

    takes_padding = True

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        self.pad_token = getattr(config, "pad_token_id", None)
        self.vocab_size = int(config.vocab_size)
        self.max_length = getattr(config, "max_position_embeddings", None)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters and self._counts_from_0()
        self.takes_packing = self.takes_positions
        self.promises_packing = False

    def __call__(
        self, tokens: Tensor, cache: Cached | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, Cached]:
        """Return logits [batch, time, vocab] and their cache with the mask so far."""
        name, past, before = cache or ("", None, tokens.new_ones(len(tokens), 0))
        if isinstance(past, Uncached):
            raise NotJudgedError("the model returns no cache")
        mask = torch.cat([before, torch.ones_like(tokens) if valid is None else valid.to(tokens)], dim=1)
        if valid is not None and self.pad_token is not None:
            tokens = tokens.masked_fill(~valid, self.pad_token)
        options: dict[str, object] = {"use_cache": True}
        if not mask.all():
            options["attention_mask"] = mask[:, -tokens.shape[1] :] if name == "cache_params" else mask
            if self.takes_positions:
                options["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        if name:
            options[name] = past
        output = self.model(tokens, **options)
        names = ("cache", "past_key_values", "cache_params")
        name = next((one for one in names if output.get(one) is not None), "")
        return output.logits, Cached(name, output[name] if name else Uncached(), mask)

    def packed(self, tokens: Tensor, start: int) -> Tensor:
        """Return logits of rows in which another text begins at ``start``, where positions restart."""
        positions = torch.cat([torch.arange(start), torch.arange(tokens.shape[1] - start)])
        output = self.model(tokens, position_ids=positions.expand_as(tokens), use_cache=False)
        return output.logits  # type: ignore[no-any-return]

    @torch.no_grad()
    def _counts_from_0(self) -> bool:
        """Return whether positions that are named from 0 on are those of a text by itself."""
        tokens = torch.arange(1, 4)[None] % self.vocab_size
        try:
            named = self.model(tokens, position_ids=torch.arange(3)[None]).logits
            return torch.allclose(named, self.model(tokens).logits, atol=1e-4)
        except Exception:
            return False


Subject: TypeAlias = Plain | Theirs
