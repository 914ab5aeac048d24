"""Changes of configs by dotted paths, as in ``--set layers.*.mixer.num_heads=8``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kinformer.core.config import C, Config, Kinds, checked, describe, field_types, parse, parse_slot, plain
from kinformer.runtime.errors import KinformerError, nearest

LONGEST = 10_000
"""Items that a list may be repeated to; more layers than any model has."""


def override(config: C, changes: Mapping[str, object], kinds: Kinds) -> C:
    """Return a copy with dotted ``path -> value`` changes, as in ``{"layers.*.mixer.num_heads": 8}``.

    ``*`` means every item of a list. Values may be text (as typed on a command line) or Python values. A part is
    replaced by its kind (``"pattern": "local"``) or by an object (``{"kind": "local", "window": 64}``), and a list is
    repeated or cut to a length by an integer (``"layers": 6``). The path of a kind (``"layers.*.kind": "parallel"``)
    changes it and keeps the fields that both kinds have.
    """
    for path, value in changes.items():
        config = _replace(config, path.split("."), value, kinds, f"`set` {path}")
    return config


def _replace(node: object, keys: list[str], value: object, kinds: Kinds, path: str) -> Any:
    key, rest = keys[0], keys[1:]
    if isinstance(node, tuple):
        chosen = range(len(node)) if key == "*" else [_index(key, node, path)]
        return tuple(
            (_replace(item, rest, value, kinds, path) if rest else parse(type(item), value, kinds, path))
            if i in chosen
            else item
            for i, item in enumerate(node)
        )
    if not isinstance(node, Config):
        raise KinformerError(
            f"{path}: {key!r} is looked for inside {node!r}, which is a plain value; drop it from the path."
        )
    fields = field_types(type(node))
    if key == "kind" and not rest:
        return parse_slot(type(node).slot, _retyped(node, value, kinds), kinds, path)
    if key not in fields:
        raise KinformerError(f"{path}: {key!r} is not a field of {describe(node)}; {nearest(key, fields)}")
    current = getattr(node, key)
    if rest:
        new = _replace(current, rest, value, kinds, path)
    elif isinstance(current, tuple) and isinstance(count := plain(value), int) and not isinstance(count, bool):
        new = _cycle(current, count, path)
    else:
        new = parse(fields[key], value, kinds, path)
    return checked(lambda: node.replace(**{key: new}), path)


def _retyped(node: Config, kind: object, kinds: Kinds) -> dict[str, object]:
    """Return the data of a part of ``kind`` with the fields of ``node`` that it has too, of the same type."""
    new = kinds.get(type(node).slot, {}).get(str(kind))
    shared = field_types(type(node)).items() & (field_types(new).items() if new else ())
    return {"kind": kind} | {name: getattr(node, name) for name, _ in shared}


def _index(key: str, node: tuple[object, ...], path: str) -> int:
    if key.isdigit() and int(key) < len(node):
        return int(key)
    raise KinformerError(
        f"{path}: {key!r} is no item of a list of {len(node)}; use 0 to {len(node) - 1}, or * for all."
    )


def _cycle(items: tuple[object, ...], count: int, path: str) -> tuple[object, ...]:
    if not 1 <= count <= LONGEST or not items:
        raise KinformerError(f"{path}: {count} is no length for this list; give a whole number of 1 to {LONGEST:,}.")
    return tuple(items[i % len(items)] for i in range(count))
