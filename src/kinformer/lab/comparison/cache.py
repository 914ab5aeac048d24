"""A cache of results under keys of their inputs, so that no result is computed twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kinformer.runtime.files import json_digest, read_json, require_signature, signed, write_json

T = TypeVar("T")


def key_of(content: object) -> str:
    """Return a digest of JSON-ready ``content``."""
    return json_digest(content)[:16]


def file_name(text: str) -> str:
    """Return ``text`` with only characters that a file name may hold."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.")


class Cache:
    """A folder of JSON values, each under its kind and key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, kind: str, key: str) -> Path:
        """Return the path of the file that holds a value."""
        return self.folder / f"{kind}-{key}.json"

    def get(self, kind: str, key: str) -> Any | None:
        """Return the stored value; None without a stored value.

        Errors: ``KinformerError`` for a damaged file.
        """
        path = self.path(kind, key)
        if not path.is_file():
            return None
        data = read_json(path)
        require_signature(data, path, required=True)
        return data["value"]

    def put(self, kind: str, key: str, value: object) -> None:
        """Store a value with a checksum under its kind and key."""
        write_json(self.path(kind, key), signed({"value": value}))

    def once(self, kind: str, key: str, make: Callable[[], T]) -> T:
        """Return the stored value; without a stored value call ``make``, and store and return its result."""
        value: T | None = self.get(kind, key)
        if value is None:
            value = make()
            self.put(kind, key, value)
        return value
