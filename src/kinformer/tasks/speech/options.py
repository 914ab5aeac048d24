"""Options of decoding speech with a language model. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.runtime.errors import KinformerError, require


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Options of decoding, beside ``prefixes``, how many the beam follows."""

    language_model: str | None = None
    """With `prefixes`: a run of next-token, trained on transcripts, one a line, which guides the search."""
    alpha: float = 0.5
    """With `language_model`: weight of its log-probabilities beside those of the sound."""
    beta: float = 0.0
    """With `language_model`: what every symbol adds to a transcript's score, as the model prefers short ones."""

    def check(self, prefixes: int) -> None:
        """Refuse values that cannot be, and a language model without a beam."""
        require("prefixes", prefixes, 1)
        require("alpha", self.alpha, 0)
        require("beta", self.beta, 0)
        if self.language_model is not None and prefixes == 1:
            raise KinformerError(
                f"`language_model` {self.language_model}: guides a search, but `prefixes` 1 searches nothing; give "
                "`prefixes` 8, or more."
            )

    @property
    def name(self) -> str:
        """Return the language model and its weights in words; "" for none."""
        if self.language_model is None:
            return ""
        return f", language model {self.language_model} with alpha {self.alpha:g} and beta {self.beta:g}"
