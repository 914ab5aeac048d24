"""Pairs of lines, a source and its target: two aligned files, a table (TSV, CSV), JSON lines; plain or gzip.

    folder/train.en  train.de  val.en.gz  val.de.gz  ...     a folder: a pair of files for each part
    folder/train     (train.en, train.de)                   the common beginning of the names of two files
    pairs.tsv        source<TAB>target                      or with a first line that names the columns; or .csv
    pairs.jsonl      {"source": ..., "target": ...}         or by languages, or both in "translation"

A file's language is its ending. In a folder, files whose names begin with ``val``, ``dev`` or ``test`` are the held-out
parts, and all others are for training. A missing part is held out of the rest, 5 % each, by a hash of the source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kinformer.lab.data.files import Identified, SourceFile, fingerprint_of, folder_files, reading_corpus, single_file
from kinformer.lab.data.images import hold_out
from kinformer.lab.data.labelled import UTF16_MARKS, cells_of, quoted_rows
from kinformer.lab.data.tokenizer import ByteTokenizer, Tokenizer
from kinformer.lab.tables import read_unpacked
from kinformer.runtime.errors import KinformerError, plural, require_share
from kinformer.runtime.parsing import parse_json_line
from kinformer.runtime.progress import note_once

# Numbers in words, English and German: pairs of lines for translation that every machine can make.
#
#     two hundred one, twelve thousand seventy-three      zweihunderteins, zwölftausenddreiundsiebzig
#
# A line has ``FEWEST`` to ``MOST`` numbers below a million, of one to six digits with equal probability. German writes
# a number as one word and its units before its tens, so that words are put together and change places.

VERSION = "1"
FEWEST, MOST, DIGITS = 3, 6, 6
SIZES = {"train": 20_000, "validation": 500, "test": 500}

_ENGLISH = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_ENGLISH_TENS = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_GERMAN = (
    *("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"),
    *("dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn"),
)
_GERMAN_TENS = ["-", "-", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def english(number: int) -> str:
    """Return a number below a million in English words."""
    for size, name in ((1000, "thousand"), (100, "hundred")):
        count, rest = divmod(number, size)
        if count:
            return f"{english(count)} {name}" + (f" {english(rest)}" if rest else "")
    if number < 20:
        return _ENGLISH[number]
    tens, units = divmod(number, 10)
    return _ENGLISH_TENS[tens] + (f"-{_ENGLISH[units]}" if units else "")


def german(number: int, one: str = "eins") -> str:
    """Return a number below a million as one German word; ``one`` is the word for a last 1: ``eins``, but
    ``eintausend``."""
    for size, name in ((1000, "tausend"), (100, "hundert")):
        count, rest = divmod(number, size)
        if count:
            return german(count, "ein") + name + (german(rest, one) if rest else "")
    if number < 20:
        return one if number == 1 else _GERMAN[number]
    tens, units = divmod(number, 10)
    return (german(units, "ein") + "und" if units else "") + _GERMAN_TENS[tens]


@cache
def number_pairs(split: str) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of a split in both languages, always the same."""
    draw = np.random.default_rng([int(VERSION), list(SIZES).index(split)])
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for count in draw.integers(FEWEST, MOST + 1, SIZES[split]).tolist():
        numbers = [int(draw.integers(10**digits)) for digits in draw.integers(1, DIGITS + 1, count).tolist()]
        for side, words in zip(sides, (english, german), strict=True):
            side.append(", ".join(map(words, numbers)).encode())
    return sides


# Pairs of lines in one file: tables of two columns, and JSON lines.

TABLES = (".tsv", ".csv", ".jsonl")
Row = tuple[str, str]
Names = Sequence[str | None]
"""The names of the columns of the source and of the target."""
_USUAL = ("source", "target")
ENGLISH = "en"


def read_table(path: Path, text: str, names: Names) -> tuple[Names, list[Row]]:
    """Return the names of source and target in the ``text`` of a file (``names`` where they are set), and its rows."""
    lines = _lines(text)
    plain = path.name.removesuffix(".gz")
    if plain.endswith(".jsonl"):
        return _objects(path, lines, names)
    rows: Iterator[tuple[int, list[bytes]]]
    if plain.endswith(".csv"):
        rows = quoted_rows(text.encode().splitlines(keepends=True), str(path))
    else:
        rows = ((number, cells_of(line.encode())) for number, line in enumerate(lines, start=1) if line)
    # A quoted cell of CSV may hold ends of lines.
    return _columns(
        path, [(number, [cell.decode().replace("\n", " ") for cell in cells]) for number, cells in rows], names
    )


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _columns(path: Path, rows: Sequence[tuple[int, list[str]]], names: Names) -> tuple[Names, list[Row]]:
    first = [cell.strip().lower() for cell in rows[0][1]] if rows else []
    header = _header(first, names)
    if header is None and any(names):
        if missing := [name for name in names if name and name.lower() not in first]:
            raise KinformerError(
                f"{path}: its first line names no column {missing[0]!r}; leave `source` and `target` out, the columns "
                "are source and target then, or name them in the first line."
            )
        raise KinformerError(
            f"{path}: its first line names {plural(len(first), 'column')}; say by `source` and `target` which two "
            f"columns are a pair: {_listed(first)}."
        )
    width = 2 if header is None else len(first)
    for number, cells in rows:
        if len(cells) != width:
            meaning = ", a source and its target; mend it, or say by `source` and `target` which columns they are"
            raise KinformerError(
                f"{path}, line {number}: has {plural(len(cells), 'column')} where {width} are expected"
                f"{meaning if header is None else '; mend it'}."
            )
    if header is None:
        if first and all(map(_is_code, first)):
            note_once(
                f"note: {path}: its first line, {' and '.join(first)}, is taken for a pair of words; if these are "
                "languages, name them by `source` and `target`."
            )
        return names, [(cells[0], cells[1]) for _, cells in rows]
    return [first[side] for side in header], [(cells[header[0]], cells[header[1]]) for _, cells in rows[1:]]


def _header(cells: Sequence[str], names: Names) -> tuple[int, int] | None:
    """Return where source and target stand if ``cells`` are names of columns, else None. They are if the given
    ``names`` are among them, else the usual names, or the codes of English and another language (two other codes may be
    two words)."""
    named = [name.lower() for name in names if name]
    codes = [cell for cell in cells if _is_code(cell) and (cell != "id" or len(cells) == 2)]
    if not named and set(_USUAL) <= set(cells):
        names = _USUAL
    elif not named and len(set(codes)) == len(codes) == 2 and ENGLISH in codes:
        names = codes
    elif not named or not set(named) <= set(cells):
        return None
    places = [cells.index(name.lower()) if name else None for name in names]
    left = [place for place, _ in enumerate(cells) if place not in places]
    if None in places and len(left) != 1:  # which of the others is meant is not said
        return None
    source, target = (left[0] if place is None else place for place in places)
    return None if source == target else (source, target)


def _is_code(cell: str) -> bool:
    return len(cell) == 2 and cell.isascii() and cell.isalpha()


def _objects(path: Path, lines: Sequence[str], names: Names) -> tuple[Names, list[Row]]:
    rows, chosen = [], names
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = parse_json_line(path, number, line, "write one object per line")
        row = row.get("translation", row) if isinstance(row, dict) else row
        chosen = chosen if all(chosen) else _fields(row, chosen)
        pair = [row.get(name) if isinstance(row, dict) else None for name in chosen]
        if not all(isinstance(item, str) for item in pair):
            shown = " and ".join(str(name) for name in chosen if name) or "source and target"
            raise KinformerError(
                f'{path}, line {number}: lacks the text of {shown}; write {{"source": "...", "target": "..."}}, or '
                "name the fields with `source` and `target`."
            )
        source, target = (" ".join(str(item).splitlines()) for item in pair)
        rows.append((source, target))
    return chosen, rows


def _fields(row: object, names: Names) -> Names:
    """Return the fields of source and target: the usual fields, or the only two fields of text, English first."""
    texts = [name for name, value in row.items() if isinstance(value, str)] if isinstance(row, dict) else []
    if not any(names) and set(_USUAL) <= set(texts):
        return _USUAL
    left = [name for name in texts if name not in names]
    if len(left) != sum(name is None for name in names):
        return [name or usual for name, usual in zip(names, _USUAL, strict=True)]
    left.sort(key=lambda name: name != ENGLISH)
    return [name or left.pop(0) for name in names]


NUMBER_WORDS = "number-words"
_PARTS = {"val": "validation", "dev": "validation", "test": "test"}


class Pairs(NamedTuple):
    """Lines of UTF-8 text, none empty: ``source[i]`` and its translation ``target[i]``."""

    source: Sequence[bytes]
    target: Sequence[bytes]

    def taken(self, numbers: Sequence[int]) -> Pairs:
        """Return some of the pairs, in this order."""
        return Pairs([self.source[index] for index in numbers], [self.target[index] for index in numbers])


class Languages(NamedTuple):
    """The names of the two sides: endings of files, or names of columns; None where they are not set."""

    source: str | None = None
    target: str | None = None


@dataclass(frozen=True, eq=False)
class Parallel(Identified):
    """The pairs in the splits "train", "validation" and "test"; where several parts make up one of the last two, each
    part is also a split under its own name."""

    languages: Languages
    tokenizer: Tokenizer
    splits: Mapping[str, Pairs]

    @property
    def identity(self) -> dict[str, object]:
        return super().identity | {
            "name": f"{self.name} ({self.languages.source} to {self.languages.target})",
            "languages": list(self.languages),
            "examples": {name: len(pairs.source) for name, pairs in self.splits.items()},
        }


def open_pairs(
    spec: str,
    *,
    tokenizer: Tokenizer | None = None,
    holdout: float | None = None,
    languages: Languages = Languages(),  # noqa: B008 (an immutable value)
) -> Parallel:
    """Return the pairs that ``spec`` names: a path, or ``number-words``, numbers in English and German words.
    ``holdout=0.1`` holds out a tenth instead of a twentieth twice; it is then validation and test at once. Without
    ``languages``, the source is English where English is one side, else the alphabetically first language. Pairs with
    an empty side are left out, with a note."""
    require_share("holdout", holdout)
    tokenizer = tokenizer or ByteTokenizer()
    if spec == NUMBER_WORDS:
        if holdout is not None:
            raise KinformerError(f"`holdout` {holdout:g}: is for files, but number words are made; leave it out.")
        made = {name: Pairs(*number_pairs(name)) for name in SIZES}
        return Parallel(spec, VERSION, f"{spec}:{VERSION}", Languages("en", "de"), tokenizer, made)
    path = Path(spec).expanduser()
    files = _files(path)
    languages, parts = _parts(path, files, languages)
    fingerprint = f"{fingerprint_of(files)}:{languages.source}-{languages.target}"
    splits = _held_out(parts, holdout, path)
    return Parallel(path.name, fingerprint.split(":")[1][:12], fingerprint, languages, tokenizer, splits)


def _files(path: Path) -> list[SourceFile]:
    with reading_corpus(path):
        if path.is_dir():
            return folder_files(path)
        if path.is_file():
            return [single_file(path)._replace(name=path.name)]
        beside = sorted(path.parent.glob(f"{path.name}.*")) if path.parent.is_dir() else []
    if not beside:
        raise KinformerError(
            f"{path} does not exist, and no file's name begins with it; give a folder or the beginning of two aligned "
            "files (train for train.en and train.de), a .tsv, a .csv or a .jsonl."
        )
    return [single_file(item)._replace(name=item.name) for item in beside]


def _parts(path: Path, files: Sequence[SourceFile], requested: Languages) -> tuple[Languages, dict[str, Pairs]]:
    """Return the languages, and the pairs of every part by its name."""
    tables: dict[str, SourceFile] = {}
    sides: dict[str, dict[str, SourceFile]] = {}
    for file in files:
        name = file.name.removesuffix(".gz")
        stem, _, ending = name.rpartition(".")
        if f".{ending}" in TABLES:
            tables[stem] = file
        elif stem:
            sides.setdefault(stem, {})[ending] = file
    if tables:
        return _of_tables(tables, requested)
    languages = _languages(path, sides, requested)
    parts = {}
    for stem, side in sides.items():
        there = [language for language in languages if language in side]
        if len(there) == 2:
            files = [side[str(language)] for language in languages]
            source, target = ([line.encode() for line in _lines(_text(Path(file.path)))] for file in files)
            if len(source) != len(target):
                raise KinformerError(
                    f"{files[0].path} has {plural(len(source), 'line')} but {files[1].path} has {len(target):,}; line "
                    "by line they must be translations of each other."
                )
            parts[stem] = _without_empty(source, target, files[0].path)
        elif there:
            missing = next(language for language in languages if language not in side)
            raise KinformerError(f"{side[str(there[0])].path}: the other side {stem}.{missing} is missing; add it.")
    return languages, parts


def _languages(path: Path, sides: Mapping[str, Mapping[str, object]], requested: Languages) -> Languages:
    candidates = sorted({ending for side in sides.values() if len(side) > 1 for ending in side})
    candidates = candidates or sorted({ending for side in sides.values() for ending in side})
    for option, language in zip(("`source`", "`target`"), requested, strict=True):
        if language is not None and language not in candidates:
            raise KinformerError(
                f"{option} {language}: {path} does not have such files; their endings are {_listed(candidates)}."
            )
    if requested.source is not None and requested.source == requested.target:
        raise KinformerError(f"`source` and `target` are both {requested.source}; give two languages.")
    left = [item for item in candidates if item not in requested]
    if len(left) > 2 - sum(item is not None for item in requested):
        raise KinformerError(
            f"{path}: has files of more than two endings ({_listed(candidates)}); say which with `source` and `target`."
        )
    if len(candidates) < 2:
        raise KinformerError(
            f"{path}: has files of one language only ({_listed(candidates) or 'none'}); aligned files differ in their "
            "ending, as train.en and train.de."
        )
    left.sort(key=lambda language: language != ENGLISH)
    source = requested.source or left.pop(0)
    return Languages(source, requested.target or left.pop(0))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _of_tables(tables: Mapping[str, SourceFile], requested: Languages) -> tuple[Languages, dict[str, Pairs]]:
    languages, parts = requested, {}
    for stem, file in tables.items():
        pairs, rows = read_table(Path(file.path), _text(Path(file.path)), languages)
        languages = Languages(*pairs)
        source, target = ([row[side].encode() for row in rows] for side in (0, 1))
        parts[stem] = _without_empty(source, target, file.path)
    return Languages(languages.source or "source", languages.target or "target"), parts


def _text(path: Path) -> str:
    """Return the text of a file, unpacked and decoded."""
    data = read_unpacked(path)
    try:
        return data.decode("utf-16" if data.startswith(UTF16_MARKS) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise KinformerError(
            f"{path}, line {line}: is not UTF-8 (byte {data[error.start]:#04x}); convert it first, as with iconv."
        ) from None


def _without_empty(source: Sequence[bytes], target: Sequence[bytes], place: str) -> Pairs:
    full = [index for index, pair in enumerate(zip(source, target, strict=True)) if all(map(bytes.strip, pair))]
    if not full:
        raise KinformerError(f"{place}: does not hold a pair of lines; give data with text on both sides.")
    if left := len(source) - len(full):
        note_once(f"note: {place}: {left} of {plural(len(source), 'pair')} have an empty side and are left out.")
    return Pairs(source, target).taken(full)


def _held_out(parts: Mapping[str, Pairs], holdout: float | None, path: Path) -> dict[str, Pairs]:
    """Return the splits: parts by their names, and missing ones taken from the rest in the order of hashes."""
    held_out: dict[str, list[str]] = defaultdict(list)
    for stem in parts:
        first = stem.lower() if len(parts) > 1 else "train"
        held_out[next((split for begin, split in _PARTS.items() if first.startswith(begin)), "train")].append(stem)
    if "train" not in held_out:
        raise KinformerError(f"{path}: holds {', '.join(held_out)} but nothing to train on; add a part called train.")
    joined = {
        name: Pairs(*(list(chain.from_iterable(side)) for side in zip(*(parts[stem] for stem in stems), strict=True)))
        for name, stems in held_out.items()
    }
    train = joined.pop("train")
    rows = hold_out(joined, [sha256(line).digest() for line in train.source], holdout, path, "pairs")
    splits = {"train": train} | joined | {name: train.taken(numbers.tolist()) for name, numbers in rows.items()}
    named = [stem for name, stems in held_out.items() if name != "train" and len(stems) > 1 for stem in stems]
    return splits | {stem: parts[stem] for stem in named if stem not in splits}
