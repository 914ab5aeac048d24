"""The ids of a mask and of a sequence's two ends, from the tokenizer's files in a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinformer.runtime.files import read_json

ROLES = {
    "mask_token": (("mask_token",), ("[MASK]", "<mask>")),
    "bos_token": (("cls_token", "bos_token"), ("[CLS]", "<s>")),
    "eos_token": (("sep_token", "eos_token"), ("[SEP]", "</s>")),
}
"""Our name of a role to the names it has in the files, and to the usual texts of such tokens."""


def special_tokens(folder: Path, config: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of the roles in ``tokenizer.json`` and its neighbours, else by ``settings`` of the config.

    ``settings``: role to the name of the setting of ``config.json`` that holds its id.
    """
    ids = _ids(folder / "tokenizer.json")
    named = {**_table(folder / "tokenizer_config.json"), **_table(folder / "special_tokens_map.json")}
    tokens = {}
    for role, (names, usual) in ROLES.items():
        texts = [_text(named[name]) for name in names if named.get(name) is not None] or list(usual)
        present = [ids[text] for text in texts if text in ids]
        setting = config.get(settings.get(role, ""))
        if present:
            tokens[role] = present[0]
        elif isinstance(setting, int) and 0 <= setting < config["vocab_size"]:
            tokens[role] = setting
    return tokens


def _ids(path: Path) -> dict[str, int]:
    """Return every token of a ``tokenizer.json`` with its id; the vocabulary is a
    table, or a list of tokens and costs."""
    data = _table(path)
    model = data.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids |= vocabulary
    elif isinstance(vocabulary, list):
        ids |= {str(entry[0]): number for number, entry in enumerate(vocabulary) if entry}
    added = data.get("added_tokens")
    if isinstance(added, list):
        ids |= {str(one.get("content")): one["id"] for one in added if isinstance(one, dict) and "id" in one}
    return {text: number for text, number in ids.items() if isinstance(number, int)}


def _table(path: Path) -> dict[str, Any]:
    data = read_json(path) if path.is_file() else {}
    return data if isinstance(data, dict) else {}


def _text(token: Any) -> str:
    """Return the text of a token as the files have it: its text, or a table that holds it."""
    return str(token.get("content") if isinstance(token, dict) else token)
