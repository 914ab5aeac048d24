"""JSON, TOML and single values from outside, as plain values; text in another format is a ``ValueError``.

The parsers of the standard library raise ``RecursionError`` for deeply nested text, and accept values that cannot be
written again: numbers of thousands of digits in TOML, and halves of surrogate pairs, which no encoding can store.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from kinformer.runtime.errors import LARGEST, KinformerError

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON or a table of TOML from outside, whose values its reader checks."""

MOST_DEPTH = 200
"""The largest depth of lists and tables inside one another; Kinformer's files nest less than a tenth as deep."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, errors: str = "surrogateescape") -> Any:
    """Return the value of the JSON ``text`` (bytes: in UTF-8).

    Halves of surrogate pairs that stand for bytes in a file name outside UTF-8 pass, unless ``errors`` is "strict".

    Errors: ``ValueError`` for text in another format, text that nests deeper than ``MOST_DEPTH``, a number of thousands
    of digits, and half of a surrogate pair.
    """
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise ValueError("it holds a whole number of thousands of digits") from None
    _check_depth(value, text.count("[") + text.count("{"))
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8", errors)
        except UnicodeEncodeError:
            raise ValueError("it holds half of a surrogate pair, which is not a character") from None
    return value


def parse_json_line(path: Path | str, number: int, line: str | bytes, remedy: str) -> Any:
    """Return the value of line ``number`` of a file of JSON lines; the error for other text ends in ``remedy``."""
    try:
        return parse_json(line, "strict")
    except ValueError as error:
        raise KinformerError(f"{path}, line {number}: is not JSON ({error}); {remedy}.") from None


def dump_json(data: object, indent: int | None = None, compact: bool = False) -> str:
    """Return ``data`` as JSON text, with null for NaN and infinity, which JSON lacks; ``compact``: without blanks."""
    separators = (",", ":") if compact else None
    try:
        return json.dumps(data, indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(with_finite_numbers(data), indent=indent, separators=separators, ensure_ascii=False)


def with_finite_numbers(data: Any) -> Any:
    """Return ``data``, of lists and dicts, with None in place of NaN and infinity."""
    if isinstance(data, Mapping):
        return {name: with_finite_numbers(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [with_finite_numbers(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def parse_toml(text: str) -> JsonObject:
    """Return the table of the TOML ``text``. Errors: ``ValueError`` as in :func:`parse_json`."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:
        digits = "digits" in str(error)  # Python's limit on the length of a number
        what = "a whole number of thousands of digits" if digits else f"a date that does not exist: {error}"
        raise ValueError(f"it holds {what}") from None
    _check_depth(table, len(text))
    return table


def _check_depth(value: object, bound: int) -> None:
    """Raise where ``value``, which has at most ``bound`` lists and tables, nests too deeply for recursive functions."""
    if bound <= MOST_DEPTH:
        return
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    if any(isinstance(item, dict | list) for item in level):
        raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"its lists and tables nest deeper than {MOST_DEPTH}")


def parse_count(text: str) -> int:
    """Return the whole number of ``text``: digits, with k or M for thousands or millions, or a form such as 1e9.

    Errors: ``ValueError`` for any other text.
    """
    if match := re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)(k|M|e\d{1,2})", text.strip(), re.ASCII):
        number = Decimal(match[1] + {"k": "e3", "M": "e6"}.get(match[2], match[2]))
        if number == number.to_integral_value():
            return int(number)
    if re.fullmatch(r"[+-]?\d{1,99}", text.strip(), re.ASCII):
        return int(text)
    raise ValueError(f"{text!r} is not a whole number, such as 16, 100k, 2M or 1e9")


def parse_counts(text: str) -> list[int]:
    """The distinct whole numbers above 0 and of 64 bits that ``text`` lists, as in 128,1k, in order.

    Errors: ``ValueError`` for any other text.
    """
    numbers = sorted({parse_count(part) for part in text.split(",")})
    if not 0 < numbers[0] <= numbers[-1] < LARGEST:
        raise ValueError(f"{text!r} must list numbers above 0 and below 2^63")
    return numbers
