"""Results stored under a key of their inputs, so that nothing is computed twice."""

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
    """Return ``text`` as part of a file's name."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.")


class Cache:
    """JSON values in a folder, each by its kind and key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, kind: str, key: str) -> Path:
        """Return the file in which a value is stored."""
        return self.folder / f"{kind}-{key}.json"

    def get(self, kind: str, key: str) -> Any | None:
        """Return the stored value, None if there is none.

        Errors: ``KinformerError`` for a damaged file.
        """
        path = self.path(kind, key)
        if not path.is_file():
            return None
        data = read_json(path)
        require_signature(data, path, required=True)
        return data["value"]

    def put(self, kind: str, key: str, value: object) -> None:
        """Store a value, signed, under its kind and key."""
        write_json(self.path(kind, key), signed({"value": value}))

    def once(self, kind: str, key: str, make: Callable[[], T]) -> T:
        """Return the stored value, or what ``make`` returns, which is stored then."""
        value: T | None = self.get(kind, key)
        if value is None:
            value = make()
            self.put(kind, key, value)
        return value
