"""Token ids: a table of vectors, and the ids that stand for a mask and for the ends of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kinformer.core.input import Input, InputConfig
from kinformer.core.model_config import EmbeddingConfig
from kinformer.inputs.lookup import Lookup
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import arguments_trusted


class Tokens(Input):
    """The input tokens [batch, time] int64 -> [batch, time, dim]: embedding (times sqrt(dim) with ``scale``) + type.

    ``scale``: as Vaswani et al. 2017, section 3.4. ``types``: how many token types (segments) there are, as BERT's;
    tokens are of type 0 where the caller gives none. ``mask_token``, ``bos_token`` ([CLS]) and ``eos_token`` ([SEP]):
    the ids of a mask and of a sequence's ends; data is prepared with them, the model treats them as any other. What a
    decoder continues ends with an ``eos_token``, of which it may have several.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(InputConfig):
        kind = "tokens"
        vocab_size: int
        embedding: EmbeddingConfig = Lookup.Config()
        scale: bool = False
        types: int = 0
        mask_token: int | None = None
        bos_token: int | None = None
        eos_token: int | tuple[int, ...] | None = None

        def __post_init__(self) -> None:
            if self.vocab_size < 1:
                raise KinformerError(f"vocab_size must be 1 or more, but is {self.vocab_size}.")
            if self.types < 0:
                raise KinformerError(f"types must be 0 or more, but is {self.types}.")
            if self.eos_token == ():
                raise KinformerError("eos_token is a list of no ids; give one id or more, or None.")
            named = [(name, getattr(self, name)) for name in ("mask_token", "bos_token")]
            for name, token in (*named, *(("eos_token", token) for token in self.eos_tokens)):
                if token is not None and not 0 <= token < self.vocab_size:
                    raise KinformerError(f"{name} must be an id below vocab_size = {self.vocab_size}, but is {token}.")

        @property
        def eos_tokens(self) -> tuple[int, ...]:
            """Return the ids that end a sequence; the first stands at the end of data."""
            if self.eos_token is None:
                return ()
            return self.eos_token if isinstance(self.eos_token, tuple) else (self.eos_token,)

        def build(self, dim: int) -> Tokens:
            return Tokens(self, dim)

    vocab_size: int

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.embedding = config.embedding.build(config.vocab_size, dim)
        self.types = nn.Embedding(config.types, dim) if config.types else None
        self.factor = dim**0.5 if config.scale else None

    @property
    def table(self) -> Any:
        return self.embedding.weight

    def check(self, values: Tensor) -> None:
        if values.dim() != 2 or values.shape[1] < 1:
            raise KinformerError(
                f"tokens must be [batch, time] with time >= 1, but have the shape {tuple(values.shape)}."
            )
        if values.dtype != torch.int64:
            raise KinformerError(f"tokens must be int64 ids, but are {values.dtype}; convert them by tokens.long().")

    def forward(self, values: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Encode tokens; ``types`` [batch, time] int64 or None (all of type 0)."""
        self._check_range(values)
        x = self.embedding(values, positions)
        x = x if self.factor is None else x * self.factor
        if self.types is None:
            return x
        return x + (self.types.weight[0] if types is None else self.types(types))

    def _check_range(self, tokens: Tensor) -> None:
        """Refuse ids that the table does not have; on a GPU looking at them would wait for the device."""
        if (
            arguments_trusted()
            or type(tokens) is not Tensor
            or tokens.device.type != "cpu"
            or torch.compiler.is_compiling()
        ):
            return
        low, high = tokens.aminmax()
        if low < 0 or high >= self.vocab_size:
            raise KinformerError(
                f"token {int(low) if low < 0 else int(high)} is no id of this model, whose ids are 0 to "
                f"{self.vocab_size - 1}; encode with the tokenizer that it was trained with."
            )

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        return torch.zeros(batch, time, dtype=torch.int64, device=device)
