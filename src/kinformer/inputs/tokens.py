"""Token ids: a table of vectors, the ids that stand for a mask and for the ends of a sequence, and the global input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from kinformer.core.config import Config
from kinformer.core.parts import Input, InputConfig
from kinformer.core.stack import EmbeddingConfig
from kinformer.runtime.compiling import checks_values
from kinformer.runtime.errors import KinformerError, plural

# The plain token embedding: token ids to vectors.


class Lookup(nn.Embedding):
    """The table of one vector per token, wherever it stands."""

    class Config(EmbeddingConfig):
        kind = "lookup"
        by_vocabulary = True

        def build(self, vocab_size: int, dim: int) -> Lookup:
            return Lookup(vocab_size, dim)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(tokens)


class Tokens(Input):
    """The input tokens [batch, time] int64 -> [batch, time, dim]: embedding (times sqrt(dim) with ``scale``) + type.

    ``scale``: as Vaswani et al. 2017, section 3.4. ``types``: the number of token types (segments, as in BERT); tokens
    are of type 0 by default. ``mask_token``, ``bos_token`` ([CLS]) and ``eos_token`` ([SEP]): the ids of a mask and of
    a sequence's ends. Data is prepared with them; the model treats them like other ids. A decoder's continuation ends
    with an ``eos_token``; there may be several.
    """

    class Config(InputConfig):
        kind = "tokens"
        LEAST = {"vocab_size": 1, "types": 0}
        vocab_size: int
        embedding: EmbeddingConfig = Lookup.Config()
        scale: bool = False
        types: int = 0
        mask_token: int | None = None
        bos_token: int | None = None
        eos_token: int | tuple[int, ...] | None = None

        def __post_init__(self) -> None:
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
        """Refuse ids that the table does not have."""
        if not checks_values(tokens):
            return
        low, high = tokens.aminmax()
        if low < 0 or high >= self.vocab_size:
            raise KinformerError(
                f"token {int(low) if low < 0 else int(high)} is not an id of this model, whose ids are 0 to "
                f"{self.vocab_size - 1}; encode with the tokenizer that it was trained with."
            )

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        return torch.zeros(batch, time, dtype=torch.int64, device=device)


# A vocabulary in clusters of falling frequency, as adaptive embeddings and softmaxes have it (Grave et al. 2017).


class Tables(NamedTuple):
    """The tables of a tied adaptive head: of each cluster the table [size, width] and a projection [dim, width]."""

    tables: tuple[Tensor, ...]
    projections: tuple[Tensor | None, ...]

    @property
    def device(self) -> torch.device:
        return self.tables[0].device


@dataclass(frozen=True)
class Clusters:
    """The clusters of a vocabulary: token ids [0, cutoffs[0]), [cutoffs[0], cutoffs[1]), ..., the last up to
    ``vocab_size``; cluster i has vectors of ``width // divisor ** i``."""

    cutoffs: tuple[int, ...]
    vocab_size: int
    width: int
    divisor: int

    def __post_init__(self) -> None:
        if self.cutoffs and self.cutoffs[-1] >= self.vocab_size:
            raise KinformerError(
                f"cutoffs end at {self.cutoffs[-1]}, but there are {plural(self.vocab_size, 'token')}; give cutoffs "
                "below that."
            )
        if min(self.widths) < 1:
            raise KinformerError(
                f"a width of {self.width} divided by {self.divisor} for each of {len(self.cutoffs)} further clusters "
                "leaves nothing; give a smaller divisor or fewer cutoffs."
            )

    @property
    def limits(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the first tokens of all clusters, and the tokens after their last."""
        return (0, *self.cutoffs), (*self.cutoffs, self.vocab_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in zip(*self.limits, strict=True))

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.width // self.divisor**index for index in range(len(self.cutoffs) + 1))


def check_clusters(cutoffs: tuple[int, ...], divisor: int, width: int | None) -> None:
    """Refuse cutoffs, divisors and widths by which no vocabulary could be cut."""
    if list(cutoffs) != sorted(set(cutoffs)) or (cutoffs and cutoffs[0] < 1):
        raise KinformerError(f"cutoffs must be rising token ids from 1 on, but are {list(cutoffs)}.")
    if divisor < 1:
        raise KinformerError(f"divisor must be 1 (all clusters of one width) or more, but is {divisor}.")
    if width is not None and width < 1:
        raise KinformerError(f"width must be 1 or more, or none (the model's width), but is {width}.")


PROJECTION_STD = 0.01


class AdaptiveEmbedding(nn.Module):
    """Token ids to vectors whose width falls with the token's frequency (Baevski and Auli 2019; Dai et al. 2019):
    P_i E_i[token - start_i] for a token of cluster i.

    Tokens are numbered by falling frequency, cluster i ending before ``cutoffs[i]``; its vectors have ``width //
    divisor ** i`` features. With ``divisor = 1`` all clusters have one projection, none if ``width`` is dim. They
    begin at N(0, 0.01), as the authors'.
    """

    class Config(EmbeddingConfig):
        kind = "adaptive"
        cutoffs: tuple[int, ...] = (20000, 40000, 200000)
        divisor: int = 4
        width: int | None = None

        def __post_init__(self) -> None:
            check_clusters(self.cutoffs, self.divisor, self.width)

    def __init__(self, config: Config, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.clusters = Clusters(config.cutoffs, vocab_size, config.width or dim, config.divisor)
        shapes = zip(self.clusters.sizes, self.clusters.widths, strict=True)
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size, width in shapes)
        widths = self.clusters.widths[: 1 if config.divisor == 1 else None]
        self.projections = nn.ParameterList(
            torch.randn(dim, width) * PROJECTION_STD for width in widths if (width, config.divisor) != (dim, 1)
        )

    @property
    def weight(self) -> Tables:
        """Return the tables that a tied adaptive head shares."""
        projections = list(self.projections) or [None]
        last = len(projections) - 1
        tables = tuple(table.weight for table in self.tables)
        return Tables(tables, tuple(projections[min(index, last)] for index in range(len(tables))))  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        joined: Tensor | None = None
        for low, high, table, projection in zip(*self.clusters.limits, *self.weight, strict=True):
            inside = (tokens >= low) & (tokens < high)
            vectors = embedding((tokens - low).where(inside, 0), table)
            vectors = vectors if projection is None else linear(vectors, projection)
            joined = vectors if joined is None else torch.where(inside[..., None], vectors, joined)
        assert joined is not None
        return joined


# The global input of an encoder: tokens before the long input that all see and that see all (Ainslie et al. 2020, ETC;
# Zaheer et al. 2020, Big Bird).


class GlobalInput(nn.Module):
    """The tokens of a global input: their number, their vectors, and the sentences of the long input for them."""

    def sentences(self, batch: int, time: int, device: torch.device) -> Tensor | None:
        """Return the sentence of each token [batch, time] int64 where the caller names none; None if there are none."""
        return None

    def count(self, sentences: Tensor | None, time: int) -> int:
        """Return how many tokens go with a long input of ``time`` tokens; ``sentences`` are the caller's, or None."""
        raise NotImplementedError

    def embed(self, batch: int, count: int) -> Tensor:
        """Return the vectors of the tokens, [batch, count, dim]."""
        raise NotImplementedError


class GlobalInputConfig(Config):
    """The config of a global input: ``build(dim) -> GlobalInput``."""

    slot = "global_input"

    def build(self, dim: int) -> GlobalInput:
        return self.builds(self, dim)


class ExtraTokens(GlobalInput):
    """The global input of ``count`` tokens with one learnt vector each (Big Bird's extended construction)."""

    class Config(GlobalInputConfig):
        kind = "extra"
        LEAST = {"count": 1}
        count: int = 16

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(config.count, dim)

    def count(self, sentences: Tensor | None, time: int) -> int:
        return self.table.num_embeddings

    def embed(self, batch: int, count: int) -> Tensor:
        return self.table.weight[None].expand(batch, -1, -1)


class Sentences(GlobalInput):
    """A global token for every sentence of the long input, all with one vector: ETC's global input.

    Where the caller gives no sentences, every ``length`` tokens are one.
    """

    class Config(GlobalInputConfig):
        kind = "sentences"
        length: int = 64

        def __post_init__(self) -> None:
            if self.length < 1:
                raise KinformerError(f"length must be 1 token or more a sentence, but is {self.length}.")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.length = config.length
        self.table = nn.Embedding(1, dim)

    def sentences(self, batch: int, time: int, device: torch.device) -> Tensor:
        return (torch.arange(time, device=device) // self.length).expand(batch, -1)

    def count(self, sentences: Tensor | None, time: int) -> int:
        return -(-time // self.length) if sentences is None else int(sentences.max()) + 1

    def embed(self, batch: int, count: int) -> Tensor:
        return self.table.weight[None].expand(batch, count, -1)


PARTS = {
    "TokenInput": Tokens.Config,
    "LookupEmbedding": Lookup.Config,
    "AdaptiveEmbedding": AdaptiveEmbedding.Config,
    "ExtraTokens": ExtraTokens.Config,
    "Sentences": Sentences.Config,
}
