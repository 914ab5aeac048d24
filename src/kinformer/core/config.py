"""Configs: frozen, keyword-only dataclasses that build one thing each, to and from plain dicts, with overrides.

A config class belongs to a *slot* (what kind of part it is) and has a *kind* (its name within the slot). Which kinds
a slot has is one explicit table that the caller passes (``Kinds``); nothing registers itself on import. Unknown keys
and wrong types are errors that name the place and the nearest valid names.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

from kinformer.core.errors import KinformerError, nearest

Kinds = Mapping[str, Mapping[str, type["Config"]]]


class Config:
    """Base of all configs, which are ``@dataclass(frozen=True, kw_only=True)``; ``kind`` and ``slot`` are no fields."""

    kind: ClassVar[str] = ""
    slot: ClassVar[str] = ""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed (validated again)."""
        return dataclasses.replace(typing.cast(Any, self), **changes)


C = TypeVar("C", bound=Config)


def field_types(config: type[Config]) -> dict[str, Any]:
    """Name to resolved type of every field of a config class."""
    hints = typing.get_type_hints(config)
    return {field.name: hints[field.name] for field in dataclasses.fields(typing.cast(Any, config))}


def to_dict(value: Any) -> Any:
    """A config (or a tuple or plain value inside one) as JSON-ready data; a config of a slot carries its ``kind``."""
    if isinstance(value, Config):
        data = {"kind": value.kind} if value.kind else {}
        return data | {name: to_dict(getattr(value, name)) for name in field_types(type(value))}
    if isinstance(value, tuple):
        return [to_dict(item) for item in value]
    return value


def from_dict(config: type[C], data: Any, kinds: Kinds, place: str = "config") -> C:
    """Build ``config`` from :func:`to_dict`'s form; the inverse of it, strict about names and types."""
    return typing.cast(C, _parse(config, data, kinds, place))


def override(config: C, changes: Mapping[str, Any], kinds: Kinds) -> C:
    """A copy with dotted ``path -> value`` changes, as in ``{"layers.*.mixer.num_heads": 8}``.

    ``*`` means every item of a list. Values may be text (as typed on a command line) or Python values. A part is
    replaced by its kind (``"pattern": "local"``) or by an object (``{"kind": "local", "window": 64}``), and a list is
    repeated or cut to a length by an integer (``"layers": 6``).
    """
    for path, value in changes.items():
        config = _replace(config, path.split("."), value, kinds, f"--set {path}")
    return config


def _replace(node: Any, keys: list[str], value: Any, kinds: Kinds, path: str) -> Any:
    key, rest = keys[0], keys[1:]
    if isinstance(node, tuple):
        chosen = range(len(node)) if key == "*" else [_index(key, node, path)]
        return tuple(
            (_replace(item, rest, value, kinds, path) if rest else _parse(type(item), value, kinds, path))
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
        return _parse_slot(type(node).slot, value, kinds, path)
    if key not in fields:
        raise KinformerError(f"{path}: {key!r} is not a field of {describe(node)}; {nearest(key, fields)}")
    current = getattr(node, key)
    if rest:
        new = _replace(current, rest, value, kinds, path)
    elif isinstance(current, tuple) and isinstance(count := _plain(value), int) and not isinstance(count, bool):
        new = _cycle(current, count, path)
    else:
        new = _parse(fields[key], value, kinds, path)
    return _checked(lambda: node.replace(**{key: new}), path)


def describe(config: Config | type[Config]) -> str:
    """How a config is called in messages."""
    cls = config if isinstance(config, type) else type(config)
    return f"the {cls.slot} {cls.kind!r}" if cls.kind else cls.__qualname__


def _index(key: str, node: tuple[Any, ...], path: str) -> int:
    if key.isdigit() and int(key) < len(node):
        return int(key)
    raise KinformerError(
        f"{path}: {key!r} is no item of a list of {len(node)}; use 0 to {len(node) - 1}, or * for all."
    )


def _cycle(items: tuple[Any, ...], count: int, path: str) -> tuple[Any, ...]:
    if count < 1 or not items:
        raise KinformerError(f"{path}: {count} is no length for this list; give a whole number of 1 or more.")
    return tuple(items[i % len(items)] for i in range(count))


def _plain(value: Any) -> Any:
    """Text as the JSON value it spells, if it spells one."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _parse(kind: Any, value: Any, kinds: Kinds, place: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _parse_optional(args, value, kinds, place)
    if origin is Literal:
        if value in args:
            return value
        raise KinformerError(f"{place}: {value!r} is not one of {', '.join(map(repr, args))}.")
    if origin is tuple:
        items = _plain(value)
        if not isinstance(items, (list, tuple)):
            raise KinformerError(f"{place}: {value!r} is not a list.")
        return tuple(_parse(args[0], item, kinds, f"{place}.{i}") for i, item in enumerate(items))
    if isinstance(kind, type) and issubclass(kind, Config):
        if isinstance(value, Config):
            return _parse(kind, to_dict(value), kinds, place)
        return _parse_slot(kind.slot, value, kinds, place) if kind.slot else _parse_fields(kind, value, kinds, place)
    return _parse_plain(kind, value, place)


def _parse_optional(args: tuple[Any, ...], value: Any, kinds: Kinds, place: str) -> Any:
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
        return None
    (inner,) = [arg for arg in args if arg is not type(None)]
    return _parse(inner, value, kinds, place)


def _parse_plain(kind: type, value: Any, place: str) -> Any:
    if kind is str and isinstance(value, str):
        return value
    plain = _plain(value)
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    if isinstance(plain, kind) and isinstance(plain, bool) == (kind is bool):
        return plain
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise KinformerError(f"{place}: {value!r} is not {names.get(kind, kind)}.")


def _parse_slot(slot: str, value: Any, kinds: Kinds, place: str) -> Config:
    table = kinds[slot]
    data = _plain(value)
    if isinstance(data, str):
        data = {"kind": data}
    if not isinstance(data, dict) or "kind" not in data:
        raise KinformerError(f"{place}: {value!r} does not say which {slot} it is; {nearest('', table)}")
    if data["kind"] not in table:
        raise KinformerError(f"{place}: {data['kind']!r} is not a known {slot}; {nearest(str(data['kind']), table)}")
    return _parse_fields(table[data["kind"]], {k: v for k, v in data.items() if k != "kind"}, kinds, place)


def _parse_fields(config: type[Config], data: Any, kinds: Kinds, place: str) -> Config:
    data = _plain(data)
    if not isinstance(data, dict):
        raise KinformerError(f"{place}: {data!r} is not a table of settings.")
    fields = field_types(config)
    for key in data:
        if key not in fields:
            raise KinformerError(f"{place}: {key!r} is not a field of {describe(config)}; {nearest(key, fields)}")
    values = {key: _parse(fields[key], value, kinds, f"{place}.{key}") for key, value in data.items()}
    required = [
        f.name
        for f in dataclasses.fields(typing.cast(Any, config))
        if f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in required if name not in values]:
        raise KinformerError(f"{place}: {describe(config)} needs {', '.join(missing)}, which is missing.")
    return _checked(lambda: config(**values), place)


def _checked(make: typing.Callable[[], Any], place: str) -> Any:
    try:
        return make()
    except KinformerError as error:
        text = str(error)
        raise KinformerError(text if text.startswith(place) else f"{place}: {text}") from None
