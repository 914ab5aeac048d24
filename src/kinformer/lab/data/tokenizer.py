"""Text to token ids and back: bytes, or a tokenizer.json of the Hugging Face ``tokenizers`` library."""

from __future__ import annotations

import codecs
import json
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from kinformer.lab.data.files import atomic_write, reading_corpus
from kinformer.runtime import files
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import require_file
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.plugins import import_extra

if TYPE_CHECKING:
    import tokenizers

    from kinformer.lab.data.sampling import Split


# The growth of a text by a tokenizer.json, before it splits the text or after it has joined it again.
#
# Replacements that follow one another multiply: forty times ``a -> aa`` make a terabyte of a letter, and the library
# ends the process when its memory does. So the bound is computed from the replacements before any text is encoded.

MOST_GROWTH, MOST_STEPS = 64, 500
_COPIES = 8
"""How often the text of a replacement is repeated, so that later ones meet matches that span two copies."""


class _Replacement(NamedTuple):
    """A replacement: ``pattern`` (None: a regular expression, which may match anything) becomes ``content``."""

    pattern: str | None
    content: str


def require_bounded(path: Path | str, tokenizer: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer that may make a text more than ``MOST_GROWTH`` times as long."""
    for name, part in (("normalizer", tokenizer.normalizer), ("decoder", tokenizer.decoder)):
        steps = [] if part is None else list(_replacements(json.loads(part.__getstate__())))
        # Nothing that a replacement writes may grow long, by itself or by all later ones.
        bounded = len(steps) <= MOST_STEPS and all(
            len(step.content) <= MOST_GROWTH * len(step.pattern or ".") and _is_bounded(steps, first)
            for first, step in enumerate(steps)
        )
        if not bounded:
            raise KinformerError(
                f"{path}: its {name} may make a text more than "
                f"{MOST_GROWTH} times as long; give a tokenizer whose replacements are short."
            )


def _replacements(part: JsonObject) -> Iterator[_Replacement]:
    for inner in (*part.get("normalizers", ()), *part.get("decoders", ())):
        yield from _replacements(inner)
    if part["type"] == "Replace":
        yield _Replacement(part["pattern"].get("String"), part["content"])
    elif part["type"] == "Prepend":
        yield _Replacement(None, part["prepend"])
    elif part["type"] == "Precompiled":  # a table of replacements, its texts one after the other
        table = b64decode(part["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].decode("utf-8", "replace").split("\0")
        yield _Replacement(None, max(texts, key=len))


def _is_bounded(steps: list[_Replacement], first: int) -> bool:
    """Return whether the text that the replacement ``first`` writes stays short in all later ones."""
    text, factor = steps[first].content * _COPIES, 1
    limit = _COPIES * MOST_GROWTH * len(steps[first].pattern or ".")
    for pattern, content in steps[first + 1 :]:
        if len(text) * factor > limit:
            return False
        if pattern is None:
            factor *= 1 + len(content)
        else:
            text = text.replace(pattern, content)
    return len(text) * factor <= limit


PIECE, MOST_TOKENS = 1 << 16, 1 << 24
NEIGHBOURS = 8
"""How many ids before a token are decoded with the token."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
_BLANKS = str.maketrans("\u0120\u2581\u0109\u010a\u010d", "  \t\n\r")


class Tokenizer(Protocol):
    """The protocol from text to ids and back. Tokenizers differ in their ``fingerprint``; ids lie below ``vocab_size``;
    ``prefix`` holds the ids that begin every prompt, such as BOS."""

    vocab_size: int
    fingerprint: str
    prefix: tuple[int, ...]

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return ids int64 [length] of ``text``."""

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each of ``texts``."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens``, with U+FFFD in place of invalid text."""

    def spell(self, token: int) -> str:
        """Return the text of ``token`` inside of a text, where the blank that it begins with is kept."""

    def stream(self, before: Sequence[int] = ()) -> ByteStream:
        """Return a decoder for ids that come one by one behind the ids ``before``, whose text it leaves out."""


def prompt_ids(tokenizer: Tokenizer, text: str | bytes) -> np.ndarray:
    """Return the ids of ``text`` as a prompt, which begins with ``prefix`` once; an empty text stays empty."""
    ids, prefix = tokenizer.encode(text), np.array(tokenizer.prefix, np.int64)
    return ids if not len(ids) or np.array_equal(ids[: len(prefix)], prefix) else np.concatenate([prefix, ids])


class ByteTokenizer:
    """The default vocabulary: a token is a byte."""

    vocab_size = 256
    fingerprint = "bytes"
    prefix: tuple[int, ...] = ()

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return ids int64 [length]: the UTF-8 bytes of a string (bytes escaped by the system's decoding come back)."""
        return np.frombuffer(as_bytes(text), np.uint8).astype(np.int64)

    def places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of ``text`` and the number of the character in which each begins, both int64 [length]."""
        sizes = [len(character.encode("utf-8", "surrogateescape")) for character in text]
        return self.encode(text), np.repeat(np.arange(len(text)), sizes)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens``, with U+FFFD where they are not UTF-8."""
        return bytes(int(token) for token in tokens).decode("utf-8", "replace")

    def spell(self, token: int) -> str:
        """Return the character of an ASCII byte, else U+FFFD."""
        return self.decode([token])

    def stream(self, before: Sequence[int] = ()) -> ByteStream:
        """Return a decoder for bytes that come one by one; the bytes ``before`` do not affect it."""
        return ByteStream()


class ByteStream:
    """A decoder of ids that come one by one, here of UTF-8; incomplete characters wait for their rest."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the character that the byte completes, or nothing."""
        return self._decoder.decode(bytes([token]))

    def finish(self) -> str:
        """Return U+FFFD if a character was left incomplete."""
        return self._decoder.decode(b"", final=True)


class FileTokenizer:
    """A tokenizer.json. Texts get no special tokens, and prompts get ``prefix`` (:func:`prompt_ids`). Truncation and
    padding set in the file are ignored. A file whose fingerprint is not ``fingerprint`` is refused. Bits per byte are
    honest for a tokenizer that loses nothing (byte-level BPE); one that normalises text (lower case, unknown words)
    leaves some of the bytes unpredicted."""

    def __init__(self, path: str | Path, fingerprint: str | None = None, prefix: Sequence[int] = ()) -> None:
        with reading_corpus(path):
            Path(path).stat()
            require_file(Path(path))
            self.source = Path(path).read_bytes()
        self.fingerprint, self.prefix = file_fingerprint(self.source), tuple(prefix)
        if fingerprint not in (None, self.fingerprint):
            raise KinformerError(
                f"{path}: is not the tokenizer that the run was made with ({self.fingerprint[:19]} instead of "
                f"{str(fingerprint)[:19]}); restore that from a copy."
            )
        library = _library()
        with _library_errors(path, "is not a tokenizer.json", "give one made by tokenizers"):
            self._tokenizer = library.Tokenizer.from_buffer(self.source)
        require_bounded(path, self._tokenizer)
        decoder = b"" if self._tokenizer.decoder is None else self._tokenizer.decoder.__getstate__()
        self._byte_level, self._fallback = b'"ByteLevel"' in decoder, b'"ByteFallback"' in decoder
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if self.vocab_size > MOST_TOKENS:
            raise KinformerError(
                f"{path}: its highest token is {self.vocab_size - 1}, but must be below {MOST_TOKENS}; renumber them."
            )

    def save(self, path: str | Path) -> None:
        """Write the same tokenizer.json to ``path``, atomically."""
        with atomic_write(Path(path)) as file:
            file.write(self.source)

    def encode(self, text: str | bytes) -> np.ndarray:
        return self.encode_batch([as_bytes(text)])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return ids of each of ``texts``, UTF-8; anything else is a :class:`KinformerError`."""
        try:
            decoded = [text.decode("utf-8") for text in texts]
        except UnicodeDecodeError as error:
            raise KinformerError(
                f"a tokenizer needs UTF-8 text but byte {error.object[error.start]:#04x} is not ({error.reason}); "
                "convert the data to UTF-8 or leave the tokenizer out and train on bytes."
            ) from error
        with _library_errors("the tokenizer", "cannot encode this text", "give another one, or other data"):
            encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        with _library_errors("the tokenizer", "cannot encode this text", "give another one, or other data"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts = [begin for begin, _ in encoding.offsets]
        return np.array(encoding.ids, np.int64), np.array(starts, np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        ids = [int(token) for token in tokens]
        text = self.library_text(ids)
        if not (self._fallback and _REPLACEMENT in text):
            return text
        # The library replaces the valid bytes beside an invalid byte too, which a stream has already shown.
        stream = self.stream()
        return "".join([*map(stream.feed, ids), stream.finish()])

    def library_text(self, ids: list[int]) -> str:
        """Return the text of ``ids`` by the library ``tokenizers``."""
        with _library_errors("the tokenizer", "cannot decode these tokens", "give another one"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token that may hold a part of a character; None for a token of whole characters."""
        spelled = self._tokenizer.id_to_token(token) or ""
        if self._byte_level:
            values = [_byte_values().get(sign) for sign in spelled]
            return bytes(value for value in values if value is not None) if None not in values else spelled.encode()
        match = _FALLBACK.fullmatch(spelled) if self._fallback else None
        return None if match is None else bytes.fromhex(match[1])

    def spelled(self) -> tuple[list[str], bool]:
        """Return how each id is spelled, with blanks, and whether ``##`` continues a word, as in WordPiece."""
        pieces = [self._tokenizer.id_to_token(token) or "" for token in range(self.vocab_size)]
        marked = type(self._tokenizer.model).__name__ == "WordPiece"
        return [piece.translate(_BLANKS) for piece in pieces], marked

    def spell(self, token: int) -> str:
        # Decoders drop the first blank of a whole text, so the token stands behind itself.
        return self.decode([token, token])[len(self.decode([token])) :]

    def stream(self, before: Sequence[int] = ()) -> ByteStream:
        return FileStream(self, before)


@contextmanager
def _library_errors(place: str | Path, what: str, remedy: str) -> Iterator[None]:
    """Report errors in the library as one sentence, a panic of its Rust code too, which is not an ``Exception``."""
    with files.reading(place, what, remedy):
        try:
            yield
        except BaseException as error:
            if type(error).__module__ != "pyo3_runtime":
                raise
            raise ValueError(str(error)) from None


def file_fingerprint(source: bytes) -> str:
    """Return the fingerprint of a tokenizer.json that holds ``source``."""
    return "sha256:" + sha256(source).hexdigest()


@lru_cache(maxsize=1)
def _byte_values() -> dict[str, int]:
    """Return the byte of each sign of byte-level vocabularies: GPT-2 spells printable bytes as their Latin-1
    characters, and the other bytes, in order, as the characters from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class FileStream(ByteStream):
    """A decoder that passes the bytes of tokens to a decoder of UTF-8, which shows U+FFFD as soon as bytes cannot
    become a character. Tokens without bytes are decoded beside the ids before them, since their text depends on their
    neighbours: WordPiece joins words, and the decoders of LLaMA 2 and Mistral drop the blank at the beginning of a
    text.

    ``before``: ids that stand before the first one, such as the prompt's.
    """

    def __init__(self, tokenizer: FileTokenizer, before: Sequence[int] = ()) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._before = [int(token) for token in before[-NEIGHBOURS:]]

    def feed(self, token: int) -> str:
        """Return the text that ``token`` completes, or nothing while a character is incomplete."""
        data = self._tokenizer.bytes_of(token)
        if data is None or (not self._before and data.isascii()):  # the library may drop a blank at the beginning
            text = self.finish() + self._text(token)
        else:
            text = self._decoder.decode(data)
        self._before = [token] if text else [*self._before, token][-NEIGHBOURS:]
        return text

    def _text(self, token: int) -> str:
        """Return the text of ``token`` behind the ids before it."""
        before, text = (self._tokenizer.library_text(ids) for ids in (self._before, [*self._before, token]))
        return text[len(before) :] if text.startswith(before) else self._tokenizer.library_text([token])


def train_tokenizer(split: Split, vocab_size: int, path: str | Path, limit: int = 256 << 20) -> FileTokenizer:
    """Learn a byte-level BPE of at most ``vocab_size`` tokens from the first ``limit`` bytes of ``split``. Writes it to
    ``path`` (a tokenizer.json) and returns it. It encodes any text and loses nothing."""
    return train_tokenizer_on(texts_of(split, limit), vocab_size, path)


def texts_of(split: Split, limit: int = 256 << 20) -> Iterator[str]:
    """Yield the first ``limit`` bytes of ``split`` in pieces."""
    return (piece.decode("utf-8", "replace") for piece in text_pieces(split.text.take(limit)))


def train_tokenizer_on(texts: Iterable[str], vocab_size: int, path: str | Path) -> FileTokenizer:
    """Learn a byte-level BPE of at most ``vocab_size`` tokens from ``texts``, and write it to ``path``."""
    if vocab_size < 256:
        raise KinformerError(f"vocab_size is {vocab_size} but a byte-level tokenizer needs 256 or more.")
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    with atomic_write(Path(path)) as file:
        file.write(tokenizer.to_str().encode())
    return FileTokenizer(path)


def text_pieces(split: Split) -> Iterator[bytes]:
    """Yield the bytes of ``split``, at most 64 KiB at once, up to a line's or document's end or between characters."""
    for start, end in pairwise([*split.documents.tolist(), len(split)]):
        while start < end:
            piece = split.extents.read(start, min(start + PIECE, end))
            if start + len(piece) < end:
                piece = piece[: piece.rfind(b"\n") + 1 or _last_character_start(piece)]
            yield piece
            start += len(piece)


def _last_character_start(piece: bytes) -> int:
    backs = (back for back, byte in enumerate(reversed(piece[-4:]), start=1) if byte & 0xC0 != 0x80)
    return len(piece) - next(backs, 0)


def as_bytes(text: str | bytes) -> bytes:
    """Return ``text`` as UTF-8, with the bytes that the system's decoding escaped. Refuses half of a surrogate pair."""
    if not isinstance(text, str):
        return text
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise KinformerError(
            f"the text holds {ascii(text[error.start])}, half of a surrogate pair, at place {error.start}, and half a "
            "pair is not a character; leave it out."
        ) from None


def _library() -> Any:
    return import_extra("tokenizers", "a tokenizer.json", "the package 'tokenizers'", "'kinformer[text]'")
