"""Reading of ``config.json``: its schema, keys and types are checked before anything uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import read_json
from kinformer.runtime.parsing import JsonObject
from kinformer.training.settings import Settings

SCHEMA = 2
CONFIG = "config.json"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "member": (str,),
    "recipe": (str,),
    "model": (dict,),
    "tokenizer": (str, NoneType),
    "task": (dict,),
    "data": (dict,),
    "training": (dict,),
}
_FURTHER: Mapping[str, tuple[type, ...]] = {
    "tokenizer_fingerprint": (str,),
    "packages": (dict,),
    "prompts": (dict,),
    "checksum": (str,),
}
_PROMPTS: Mapping[str, tuple[type, ...]] = {"prefix": (list,), "special_tokens": (dict,)}
_DATA: Mapping[str, tuple[type, ...]] = {
    "spec": (str, NoneType),
    "holdout": (float, int, NoneType),
    "identity": (dict, NoneType),
    "init": (str,),
    "inherited": (dict,),
    "retrieval": (dict,),
}
_RETRIEVAL: Mapping[str, tuple[type, ...]] = {
    "datastore": (str,),
    "retriever": (str,),
    "neighbours": (int,),
    "probes": (int, NoneType),
}
_TYPE_NAMES = {str: "text", dict: "a table", list: "a list", NoneType: "null", int: "a whole number", float: "a number"}


def read_config(place: Path) -> JsonObject:
    """Return the table in the file ``place``.

    Errors: ``KinformerError`` for a file that is no config of a run, or lacks a key or has one of another type.
    """
    folder = place.parent
    if not place.exists():
        raise KinformerError(
            f"{folder}: is no run folder (it has no {CONFIG}); train one with: kinformer train MEMBER --out DIR."
        )
    data = read_json(place)
    if isinstance(data, dict) and "model_type" in data and "schema" not in data:
        raise KinformerError(
            f"{folder}: is a checkpoint of another library; make it a run first: kinformer import {folder} --out DIR."
        )
    if not isinstance(data, dict) or "schema" not in data:
        raise KinformerError(f"{place}: is not the config of a run; restore it from a copy, or give another folder.")
    schema = data["schema"]
    if schema == 1:
        raise KinformerError(
            f"{place}: has schema 1, as kinformer 0.1 wrote it, but this version reads schema {SCHEMA}; train it "
            "again, or read it with kinformer 0.1."
        )
    if schema != SCHEMA:
        raise KinformerError(
            f"{place}: has schema {schema!r}, but this version reads schema {SCHEMA}; use a matching version."
        )
    if missing := [name for name in _TYPES if name not in data]:
        raise KinformerError(f"{place}: lacks {', '.join(missing)}; restore it from a copy.")
    _check(data, {**_TYPES, **_FURTHER}, place, "")
    _check(data["data"], _DATA, place, "data.")
    _check(data.get("prompts", {}), _PROMPTS, place, "prompts.")
    _check(data["data"].get("retrieval", {}), _RETRIEVAL, place, "data.retrieval.")
    name = data["tokenizer"]
    if name is not None and (Path(name).name != name or name == ".."):
        raise KinformerError(f"{place}: tokenizer is {name!r}, not a file of this folder; restore it from a copy.")
    if not isinstance(data["task"].get("name"), str) or not isinstance(data["task"].get("options"), dict):
        raise KinformerError(f"{place}: task is {data['task']!r}, without a name or options; restore it from a copy.")
    return data


def settings_in(training: JsonObject) -> Settings:
    """Return the settings in a config, checked like those of the command line."""
    if unknown := sorted(map(str, training.keys() - {field.name for field in fields(Settings)})):
        raise KinformerError(f"training has the unknown setting {unknown[0]!r}; use a matching version.")
    return Settings(**training)


def _check(data: Mapping[str, object], types: Mapping[str, tuple[type, ...]], place: Path, prefix: str) -> None:
    for name, expected in types.items():
        if name in data and (not isinstance(data[name], expected) or isinstance(data[name], bool)):
            kind = " or ".join(_TYPE_NAMES[item] for item in expected)
            raise KinformerError(f"{place}: {prefix}{name} is {data[name]!r}, not {kind}; restore it from a copy.")
