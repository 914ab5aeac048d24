"""Configs: frozen, keyword-only dataclasses that build one thing each, to and from plain dicts, with overrides.

A config class belongs to a *slot* (the place of the part in a model) and has a *kind* (its name within the slot). The
caller passes an explicit table of the kinds of every slot (``Kinds``); classes do not register themselves on import.
Unknown keys and wrong types are errors that name the place and the nearest valid names.

A config object is accepted in place of its data, even if its class is in no table. In data, a part of another package
has the name of its ``package`` beside its ``kind`` (see ``runtime.plugins``).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import groupby
from typing import Any, ClassVar, Literal, Self, TypeVar

from kinformer.runtime.errors import KinformerError, nearest, require_ranges
from kinformer.runtime.parsing import parse_count, parse_json
from kinformer.runtime.plugins import KINFORMER, PARTS, package_of, require_package

# The table of kinds of parts is outside of core. The package registers its function here, so that a config can find
# the class of a part by its name.

find: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
"""Return the table, slot -> kind -> config class; the package replaces this function."""

Kinds = Mapping[str, Mapping[str, type["Config"]]]
_hints: Callable[[type], dict[str, object]] = cache(typing.get_type_hints)  # Python evaluates every type at each call


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
class _Typed(type):
    """The metaclass of configs, which makes every class a dataclass. It checks the fields when a config is made, and
    accepts the forms of ``--set``: a part as its config, its kind or a mapping, and a number as text."""

    builds: Any

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        if "__dataclass_fields__" not in namespace:  # which the decorator's copy with slots has
            dataclasses.dataclass(frozen=True, kw_only=True)(typing.cast(type, cls))
            # A class may have the decorator as well, which adds these methods itself and raises if it finds them.
            del cls.__setattr__, cls.__delattr__

    def __setattr__(cls, name: str, value: object) -> None:
        # A second decorator does not see the calls of ``field`` in the class any more, so the first fields stay.
        if name != "__dataclass_fields__" or name not in vars(cls):
            super().__setattr__(name, value)

    def __set_name__(cls, owner: type, name: str) -> None:
        """Take note of the class ``owner`` in which the config class is written."""
        if cls.__qualname__ == f"{owner.__qualname__}.{name}":
            cls.builds = owner

    def __call__(cls, *arguments: object, **values: object) -> Any:
        kinds: Mapping[str, object] = {}
        with suppress(KinformerError):  # the type of a field cannot be found yet
            kinds = field_types(typing.cast("type[Config]", cls))
        for name, value in values.items():
            kind = kinds.get(name, Any)
            if (names_part := _names_part(value) and _takes_part(kind)) or not _fits(kind, value):
                place = f"{name} of {describe(typing.cast(type[Config], cls))}"
                values[name] = parse(kind, value, find() if names_part else {}, place)
        return super().__call__(*arguments, **values)


def _names_part(value: object) -> bool:
    return isinstance(value, str | Mapping) or (isinstance(value, list | tuple) and any(map(_names_part, value)))


def _takes_part(kind: object) -> bool:
    return issubclass(kind, Config) if isinstance(kind, type) else any(map(_takes_part, typing.get_args(kind)))


class _Frozen:
    def __setattr__(self, name: str, value: object) -> typing.NoReturn:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> typing.NoReturn:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


class Config(_Frozen, metaclass=_Typed):
    """The base of all configs: every subclass is a dataclass, frozen and of keywords only.

    A config is written in the class that it ``builds``. The ``build`` of its slot calls that class with the config and
    the sizes, such as ``dim``; a config overrides ``build`` where it builds something else.

    ``kind`` and ``slot`` belong to the class and are not fields. ``LEAST`` has the least values of numbers by name, and
    ``ABOVE`` the bounds that numbers must exceed; the bounds of base classes hold too. ``retired``: fields of earlier
    versions, name -> value; data may still contain such a field with this value.
    """

    kind: ClassVar[str] = ""
    slot: ClassVar[str] = ""
    LEAST: ClassVar[Mapping[str, float]] = {}
    ABOVE: ClassVar[Mapping[str, float]] = {}
    retired: ClassVar[Mapping[str, object]] = {}

    def __new__(cls, **values: object) -> Self:
        least, above = (
            {name: bound for base in reversed(cls.__mro__) for name, bound in vars(base).get(limit, {}).items()}
            for limit in ("LEAST", "ABOVE")
        )
        require_ranges(values, least, above)
        return super().__new__(cls)

    def builds(self, *sizes: object, **values: object) -> Any:
        """Raise for a config class that does not stand in a class."""
        raise NotImplementedError(
            f"{type(self).__qualname__} does not stand in the class that it builds; define build."
        )

    def replace(self, **changes: object) -> Self:
        """Return a copy with some fields changed (validated again)."""
        return dataclasses.replace(typing.cast(Any, self), **changes)


C = TypeVar("C", bound=Config)
T = TypeVar("T")


def field_types(config: type[Config]) -> dict[str, object]:
    """Return the resolved type of every field of a config class, by name."""
    try:
        hints = _hints(config)
    except NameError as error:
        raise KinformerError(
            f"{config.__qualname__}: the type of a field cannot be found ({error}); import it where the module is run."
        ) from None
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def to_dict(value: object) -> Any:
    """Return a config (or a value inside one) as data for JSON; the data of a config with a slot has its ``kind``."""
    if isinstance(value, Config):
        return tags(value) | {name: to_dict(getattr(value, name)) for name in field_types(type(value))}
    if isinstance(value, tuple):
        return [to_dict(item) for item in value]
    return value


def tags(config: Config) -> dict[str, str]:
    """Return the keys beside the fields in a config's dict form: its ``kind``, and ``package`` for another package."""
    tagged = {"kind": config.kind} if config.kind else {}
    package = package_of(type(config), PARTS, f"{config.slot}.{config.kind}")
    return tagged if package is None else tagged | {"package": package}


def from_dict(config: type[C], data: object, kinds: Kinds, place: str = "config") -> C:
    """Build ``config`` from the data of :func:`to_dict`; unknown names and wrong types are errors."""
    return typing.cast(C, parse(config, data, kinds, place))


def check_unused(config: Config, why: str, *names: str) -> None:
    """Raise for fields that differ from their default although they do not have an effect; ``why`` is the reason."""
    for field in dataclasses.fields(config):
        if field.name in names and (value := getattr(config, field.name)) != field.default:
            raise KinformerError(f"{field.name} = {value!r} does nothing {why}; leave it out, or change the latter.")


def parts_in(value: object) -> Iterator[Config]:
    """Yield a config and all configs inside it, in order."""
    if isinstance(value, Config):
        yield value
        value = tuple(getattr(value, name) for name in field_types(type(value)))
    if isinstance(value, tuple):
        for item in value:
            yield from parts_in(item)


def describe(config: Config | type[Config]) -> str:
    """Return the name of a config in messages."""
    cls = config if isinstance(config, type) else type(config)
    return f"the {cls.slot} {cls.kind!r}" if cls.kind else cls.__qualname__


def parse(kind: object, value: object, kinds: Kinds, place: str) -> object:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _parse_union(args, value, kinds, place)
    if origin is Literal:
        if value in args:
            return value
        raise KinformerError(f"{place}: {value!r} is not one of {', '.join(map(repr, args))}.")
    if origin is tuple:
        items = plain(value)
        if not isinstance(items, (list, tuple)):
            raise KinformerError(f"{place}: {value!r} is not a list.")
        return tuple(parse(args[0], item, kinds, f"{place}.{i}") for i, item in enumerate(items))
    if origin is dict:
        table = plain(value)
        if not isinstance(table, dict):
            raise KinformerError(f"{place}: {value!r} is not a table.")
        if args[1] not in (int, float):  # which only the config's owner checks
            return table
        return {key: parse(args[1], item, kinds, f"{place}.{key}") for key, item in table.items()}
    if isinstance(kind, type) and issubclass(kind, Config):
        if isinstance(value, Config):
            return _parse_object(kind, value, kinds, place)
        return parse_slot(kind.slot, value, kinds, place) if kind.slot else _parse_fields(kind, value, kinds, place)
    return _parse_plain(kind, value, place)


def _parse_union(args: tuple[object, ...], value: object, kinds: Kinds, place: str) -> object:
    """Return None, or ``value`` parsed as the first type that accepts it."""
    if type(None) in args and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    *others, last = [arg for arg in args if arg is not type(None)]
    for arg in others:
        try:
            return parse(arg, value, kinds, place)
        except KinformerError:
            continue
    return parse(last, value, kinds, place)


def _parse_object(expected: type[Config], config: Config, kinds: Kinds, place: str) -> Config:
    """Return ``config`` after the checks of :func:`from_dict`; its fields are parsed like data."""
    if expected.slot and config.slot != expected.slot:
        slot = f"the slot {config.slot!r}" if config.slot else "no slot"
        raise KinformerError(
            f"{place}: {describe(config)} has {slot}, but a config with the slot {expected.slot!r} belongs here; "
            "give a config with that slot."
        )
    if not expected.slot and not isinstance(config, expected):
        raise KinformerError(f"{place}: {describe(config)} is no {describe(expected)}, which belongs here; give one.")
    old = {name: getattr(config, name) for name in field_types(type(config))}
    new = {name: parse(field, old[name], kinds, f"{place}.{name}") for name, field in field_types(type(config)).items()}
    changes = {name: value for name, value in new.items() if value != old[name] or type(value) is not type(old[name])}
    return checked(lambda: config.replace(**changes), place) if changes else config


def parse_slot(slot: str, value: object, kinds: Kinds, place: str) -> Config:
    """Return the config of a part of ``slot``; ``value`` is its kind, or a mapping of its ``kind`` and its fields."""
    table = kinds.get(slot, {})
    data = plain(value)
    if isinstance(data, str):
        data = {"kind": data}
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise KinformerError(f"{place}: {value!r} does not say which {slot} it is; {nearest('', table)}")
    config = checked(lambda: _class_of(slot, data["kind"], data.get("package"), table), place)
    return _parse_fields(config, {k: v for k, v in data.items() if k not in ("kind", "package")}, kinds, place)


def _class_of(slot: str, kind: str, package: object, table: Mapping[str, type[Config]]) -> type[Config]:
    """Return the class of a kind; where ``package`` ("name version") is given, the class must come from it."""
    config = table.get(kind)
    if package is not None:
        result = None if config is None else package_of(config, PARTS, f"{slot}.{kind}") or KINFORMER
        require_package(str(package), f"the {slot} {kind!r}", result)
    if config is None:
        raise KinformerError(f"{kind!r} is not a known {slot}; {nearest(kind, table)}")
    return config


def _parse_fields(config: type[Config], data: object, kinds: Kinds, place: str) -> Config:
    data = plain(data)
    if not isinstance(data, dict):
        raise KinformerError(f"{place}: {data!r} is not a table of settings.")
    fields, retired = field_types(config), config.retired
    data = {key: value for key, value in data.items() if key not in retired or value != retired[key]}
    for key in data:
        if key not in fields:
            raise KinformerError(f"{place}: {key!r} is not a field of {describe(config)}; {nearest(key, fields)}")
    values = {key: parse(fields[key], value, kinds, f"{place}.{key}") for key, value in data.items()}
    entries = dataclasses.fields(typing.cast(Any, config))
    required = (item.name for item in entries if item.default is item.default_factory is dataclasses.MISSING)
    if missing := [name for name in required if name not in values]:
        raise KinformerError(f"{place}: {describe(config)} needs {', '.join(missing)}, which must be given.")
    return checked(lambda: config(**values), place)


def checked(make: Callable[[], T], place: str) -> T:
    """Return the result of ``make``; an error that it raises names the ``place``."""
    try:
        return make()
    except KinformerError as error:
        text = error.message
        raise KinformerError(text if text.startswith(place) else f"{place}: {text}") from None


def plain(value: object) -> Any:
    """Return the JSON value of a string, or the string itself if it is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def _fits(kind: object, value: object) -> bool:
    """Return whether ``value`` already has the type ``kind``: a number, text, a name of a ``Literal``, a tuple of
    numbers or texts, or a config of the same slot as ``kind``. For other types the result is True: only the class of
    the config can check such a value."""
    origin, items = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(item, value) for item in items)
    if origin is Literal:
        return value in items
    if origin is tuple:
        return not isinstance(value, tuple) or all(_fits(items[0], item) for item in value)
    if kind is Any or not isinstance(kind, type) or typing.is_typeddict(kind):
        return True
    if slot := getattr(kind, "slot", ""):
        return getattr(value, "slot", "") == slot
    numbers = (int, float) if kind is float else (kind,)
    return isinstance(value, numbers) and isinstance(value, bool) == (kind is bool)


def _parse_plain(kind: object, value: object, place: str) -> Any:
    """Return ``value`` as the plain type ``kind``; another is an error that names the ``place``."""
    if kind is str and isinstance(value, str):
        return value
    if kind is int and isinstance(value, str):
        with suppress(ValueError):
            return parse_count(value)
    read = plain(value)
    if kind is float and isinstance(read, int) and not isinstance(read, bool):
        return float(read)
    if kind is Any or not isinstance(kind, type) or typing.is_typeddict(kind):  # which only the config's owner checks
        return read
    if isinstance(read, kind) and isinstance(read, bool) == (kind is bool):
        return read
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise KinformerError(f"{place}: {value!r} is not {names.get(kind, kind)}.")


# Changes of configs by dotted paths, as in ``--set layers.*.mixer.num_heads=8``.

LONGEST = 10_000
"""Items that a list may be repeated to; more layers than any model has."""


def override(config: C, changes: Mapping[str, object], kinds: Kinds) -> C:
    """Return a copy with dotted ``path -> value`` changes, as in ``{"layers.*.mixer.num_heads": 8}``.

    ``*`` means every item of a list. Values may be text (as typed on a command line) or Python values. A part is
    replaced by its kind (``"pattern": "local"``) or by an object (``{"kind": "local", "window": 64}``), and a list is
    repeated or cut to a length by an integer (``"layers": 6``). The path of a kind (``"layers.*.kind": "parallel"``)
    changes it and keeps the fields that both kinds have.

    Settings given together are checked together, so that their order matters only where one is inside another.
    """
    wanted = [_Change(path.split("."), value, f"`set` {path}") for path, value in changes.items()]
    return _replace(config, wanted, kinds) if wanted else config


class _Change(typing.NamedTuple):
    keys: list[str]
    value: object
    path: str


def _replace(node: object, changes: list[_Change], kinds: Kinds) -> Any:
    """Return ``node``, a part or a list, after the changes inside it."""
    path = changes[0].path
    if isinstance(node, tuple):
        places = [(range(len(node)) if keys[0] == "*" else [_index(keys[0], node, path)]) for keys, _, path in changes]
        inner = [change._replace(keys=change.keys[1:]) for change in changes]
        return tuple(
            _value(item, type(item), [change for change, place in zip(inner, places, strict=True) if i in place], kinds)
            for i, item in enumerate(node)
        )
    if not isinstance(node, Config):
        raise KinformerError(
            f"{path}: {changes[0].keys[0]!r} is looked for inside {node!r}, which is a plain value; drop it from the "
            "path."
        )
    inside: dict[str, list[_Change]] = {}
    for change in changes:
        key, *rest = change.keys
        if key == "kind" and not rest:
            node = _filled(node, inside, kinds)
            new = kinds.get(type(node).slot, {}).get(str(change.value))
            shared = field_types(type(node)).items() & (field_types(new).items() if new else ())  # of the same type
            data = {"kind": change.value} | {name: getattr(node, name) for name, _ in shared}
            node, inside = parse_slot(type(node).slot, data, kinds, change.path), {}
        elif key not in (fields := field_types(type(node))):
            raise KinformerError(f"{change.path}: {key!r} is not a field of {describe(node)}; {nearest(key, fields)}")
        else:
            inside.setdefault(key, []).append(change._replace(keys=rest))
    return _filled(node, inside, kinds)


def _value(value: object, kind: object, changes: list[_Change], kinds: Kinds) -> object:
    """Return a field or an item, of the type ``kind``, after the changes of it and inside it."""
    for inside, some in groupby(changes, lambda change: bool(change.keys)):
        if inside:
            value = _replace(value, list(some), kinds)
            continue
        for _, new, path in some:
            if isinstance(value, tuple) and isinstance(count := plain(new), int) and not isinstance(count, bool):
                if not 1 <= count <= LONGEST or not value:
                    remedy = f"give a whole number of 1 to {LONGEST:,}"
                    raise KinformerError(f"{path}: {count} is not a length for this list; {remedy}.")
                value = tuple(value[i % len(value)] for i in range(count))
            else:
                value = parse(kind, new, kinds, path)
    return value


def _filled(node: Config, inside: Mapping[str, list[_Change]], kinds: Kinds) -> Config:
    """Return ``node`` with its fields changed and checked together. An error names the change that caused it."""
    fields = field_types(type(node))
    new = {key: _value(getattr(node, key), fields[key], changes, kinds) for key, changes in inside.items()}
    try:
        return node.replace(**new) if new else node
    except KinformerError as error:
        text = error.message
    place = ""
    for key, value in new.items():
        place = inside[key][-1].path
        try:
            node.replace(**{key: value})
        except KinformerError as error:
            if error.message == text:
                break
    raise KinformerError(text if text.startswith(place) else f"{place}: {text}")


def _index(key: str, node: tuple[object, ...], path: str) -> int:
    if key.isdigit() and int(key) < len(node):
        return int(key)
    raise KinformerError(
        f"{path}: {key!r} is not an item of a list of {len(node)}; use 0 to {len(node) - 1}, or * for all."
    )
