"""Numbers in words, English and German: pairs of lines for translation that every machine can make.

    two hundred one, twelve thousand seventy-three      zweihunderteins, zwölftausenddreiundsiebzig

A line has ``FEWEST`` to ``MOST`` numbers below a million, of one to six digits, all alike often. German writes a number
as one word and its units before its tens, so that words are put together and change places.
"""

from __future__ import annotations

from functools import cache

import numpy as np

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
    thousands, rest = divmod(number, 1000)
    words = [f"{_english_below_thousand(thousands)} thousand"] if thousands else []
    if rest or not thousands:
        words.append(_english_below_thousand(rest))
    return " ".join(words)


def _english_below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    words = [f"{_ENGLISH[hundreds]} hundred"] if hundreds else []
    if rest >= 20:
        tens, units = divmod(rest, 10)
        words.append(_ENGLISH_TENS[tens] + (f"-{_ENGLISH[units]}" if units else ""))
    elif rest or not hundreds:
        words.append(_ENGLISH[rest])
    return " ".join(words)


def german(number: int) -> str:
    """Return a number below a million as one German word."""
    thousands, rest = divmod(number, 1000)
    word = (_german_below_thousand(thousands, "ein") + "tausend") if thousands else ""
    return word + (_german_below_thousand(rest, "eins") if rest or not thousands else "")


def _german_below_thousand(number: int, one: str) -> str:
    """Return a number below a thousand in German; ``one`` is the word for a last 1: ``eins``, but ``eintausend``."""
    hundreds, rest = divmod(number, 100)
    word = (("ein" if hundreds == 1 else _GERMAN[hundreds]) + "hundert") if hundreds else ""
    if rest >= 20:
        tens, units = divmod(rest, 10)
        return word + ("" if not units else ("ein" if units == 1 else _GERMAN[units]) + "und") + _GERMAN_TENS[tens]
    if rest == 1:
        return word + one
    return word + (_GERMAN[rest] if rest or not hundreds else "")


@cache
def pairs(split: str) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of a split in both languages, always the same."""
    draw = np.random.default_rng([int(VERSION), list(SIZES).index(split)])
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for count in draw.integers(FEWEST, MOST + 1, SIZES[split]).tolist():
        numbers = [int(draw.integers(10**digits)) for digits in draw.integers(1, DIGITS + 1, count).tolist()]
        for side, words in zip(sides, (english, german), strict=True):
            side.append(", ".join(map(words, numbers)).encode())
    return sides
