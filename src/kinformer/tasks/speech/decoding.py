"""From logits to transcripts: by the most probable path, by a beam, or by a beam with a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kinformer.data.sound import CHARACTERS
from kinformer.generation.ctc import Fusion, greedy, prefix_beam
from kinformer.generation.symbols import SymbolModel, Texts
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.text import tokenizer_of
from kinformer.tasks.speech.options import DecodingOptions


def decoder_of(
    subject: LoadedRun, symbols: Sequence[str], unit: str, prefixes: int, options: DecodingOptions
) -> Callable[[Tensor], list[int]]:
    """Return a function from logits [time, classes] to symbols, by number from 1; ``symbols`` are texts of ``unit``.

    Errors: ``KinformerError`` for a language model whose tokens are not those of single symbols.
    """
    if prefixes == 1:
        return greedy
    beside = subject.language_model
    if beside is None:
        return lambda logits: prefix_beam(logits, prefixes)
    texts = _texts(beside, symbols, "" if unit == CHARACTERS else " ")
    fusion = Fusion(SymbolModel(beside.model, texts), options.alpha, options.beta)
    return lambda logits: prefix_beam(logits, prefixes, fusion)


def _texts(beside: LoadedRun, symbols: Sequence[str], between: str) -> Texts:
    """Return the tokens of the language model for symbols: a transcript is a line."""
    tokenizer = tokenizer_of(beside.run)

    def tokens(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text)]

    later = [tokens(between + symbol) for symbol in symbols]
    texts = Texts([tokens(symbol) for symbol in symbols], later, tokens("\n"), tokens("\n"))
    joined = tokens("\n" + "".join(between + symbol for symbol in symbols) + "\n")
    if joined != [*texts.begin, *(token for item in later for token in item), *texts.end]:
        raise KinformerError(
            f"`language_model` {beside.run.folder}: its tokenizer joins neighbouring symbols into one token; "
            "give a run that was trained on bytes."
        )
    return texts
