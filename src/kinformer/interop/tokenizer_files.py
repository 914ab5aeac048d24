"""The files of a tokenizer in a folder of the library transformers: ``tokenizer.json``, ``tokenizer_config.json`` and
chat templates.

Models of ours have ids for the mask and for the ends of a text that a tokenizer need not know; they become tokens of
its file, and the ends are put around every text, as the run's task puts them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinformer.inputs.signals import CHARACTERS
from kinformer.interop.architecture import Padding
from kinformer.interop.key_map import ConfigView
from kinformer.interop.settings import PREPROCESSOR, TOKENIZER, labels_of, optional_table
from kinformer.runtime.files import read_json, reading, write_json
from kinformer.runtime.parsing import JsonObject

TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
CHAT_TEMPLATE, CHAT_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
"""The file of a chat template, and the folder of further ones."""
DEFAULT = "default"
"""The name of the usual chat template."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PADS = ("[PAD]", "<pad>")
NUL = "\N{LATIN CAPITAL LETTER A WITH MACRON}"
"""The sign of the byte 0, which stands in no text, in vocabularies of bytes."""


@dataclass(frozen=True)
class Special:
    """The special tokens of a model: ``roles`` of transformers to an id and to its text where the file has none.

    ``before`` and ``behind``: the roles put around a text. ``pad``: the text of the padding token, or the role that
    pads.
    """

    roles: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    before: str | None = None
    behind: str | None = None
    pad: str | None = None


@dataclass(frozen=True)
class Prompting:
    """How the tokenizer of a folder makes prompts.

    ``before`` and ``behind``: the ids that it puts around a text. ``special_tokens``: their texts by the names that
    transformers gives them. ``chat_templates``: by name; ``DEFAULT`` names the usual template.
    """

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def prompting_of(folder: Path) -> Prompting:
    """Return how the tokenizer in ``folder/tokenizer.json`` makes prompts, as transformers reads it."""
    data, settings = read_json(folder / TOKENIZER), optional_table(folder / TOKENIZER_CONFIG)
    named = optional_table(folder / SPECIAL_TOKENS_MAP) | settings
    texts = {role: value.get("content") if isinstance(value, dict) else value for role, value in named.items()}
    special_tokens = {role: text for role in SPECIAL_TOKENS if isinstance(text := texts.get(role), str)}
    with reading(folder / TOKENIZER):
        before, behind = _around(data.get("post_processor"))
        if not before and settings.get("add_bos_token") is True:
            first = ids_of(data).get(special_tokens.get("bos_token", ""))
            before = () if first is None else (first,)
    return Prompting(before, behind, special_tokens, chat_templates(folder, settings.get("chat_template")))


ROLES = {
    "mask_token": (("mask_token",), ("[MASK]", "<mask>")),
    "bos_token": (("cls_token", "bos_token"), ("[CLS]", "<s>")),
    "eos_token": (("sep_token", "eos_token"), ("[SEP]", "</s>")),
}
"""Our name of a role to the names it has in the files, and to the usual texts of such tokens."""


def special_tokens(folder: Path, config: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of a mask and of a sequence's two ends (ROLES) in ``tokenizer.json`` and its neighbours in
    ``folder``, else by ``settings`` of the config.

    ``settings``: role to the name of the setting of ``config.json`` that holds its id.
    """
    ids = ids_of(optional_table(folder / TOKENIZER))
    named = {**optional_table(folder / TOKENIZER_CONFIG), **optional_table(folder / SPECIAL_TOKENS_MAP)}
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


def ids_of(data: Mapping[str, object]) -> dict[str, int]:
    """Return every token of a ``tokenizer.json`` with its id; the vocabulary is a
    table, or a list of tokens and costs."""
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


def _text(token: object) -> str:
    """Return the text of a token as the files have it: its text, or a table that holds it."""
    return str(token.get("content") if isinstance(token, dict) else token)


def _around(processor: JsonObject | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor of a tokenizer.json puts before and behind a text."""
    kind = None if processor is None else processor["type"]
    if processor is None or kind not in ("Sequence", "TemplateProcessing", "BertProcessing", "RobertaProcessing"):
        return (), ()
    if kind == "Sequence":
        parts = [_around(part) for part in processor["processors"]]
        return sum((one for one, _ in reversed(parts)), ()), sum((one for _, one in parts), ())
    if kind != "TemplateProcessing":
        return (int(processor["cls"][1]),), (int(processor["sep"][1]),)
    sides: tuple[list[int], list[int]] = [], []
    side = 0
    for piece in processor["single"]:
        if "SpecialToken" in piece:
            sides[side].extend(map(int, processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]))
        else:
            side = 1
    return tuple(sides[0]), tuple(sides[1])


def chat_templates(folder: Path, named: object = None) -> dict[str, str]:
    """Return the chat templates of a folder by name: its files, else ``named``, the entry of its settings."""
    files = {DEFAULT: folder / CHAT_TEMPLATE} if (folder / CHAT_TEMPLATE).is_file() else {}
    files |= {path.stem: path for path in sorted((folder / CHAT_TEMPLATES).glob("*.jinja")) if path.is_file()}
    templates: dict[str, str] = {}
    for name, path in files.items():
        with reading(path):
            templates[name] = path.read_text(encoding="utf-8")
    if templates or named is None:
        return templates
    with reading(folder / TOKENIZER_CONFIG, "has a chat_template that must be a text or a list of named templates"):
        pairs = [(DEFAULT, named)] if isinstance(named, str) else [(one["name"], one["template"]) for one in named]  # type: ignore[attr-defined]
        if not all(re.fullmatch(r"[\w-]{1,100}", name) and isinstance(text, str) for name, text in pairs):
            raise ValueError("a name is not made of letters, digits, - and _")
    return dict(pairs)


def write_chat_templates(folder: Path, templates: Mapping[str, str]) -> None:
    """Write chat templates into ``folder``, as transformers reads them."""
    for name, text in templates.items():
        path = folder / (CHAT_TEMPLATE if name == DEFAULT else f"{CHAT_TEMPLATES}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def of_encoder(tokens: ConfigView, pad: str | None) -> Special:
    """Return the special tokens of an encoder with the input ``tokens``, as data."""
    names = {"mask_token": ("mask_token", "[MASK]"), "cls_token": ("bos_token", "[CLS]")}
    names |= {"sep_token": ("eos_token", "[SEP]")}
    roles = {role: (tokens[ours], text) for role, (ours, text) in names.items() if tokens.get(ours) is not None}
    before, behind = (role if role in roles else None for role in ("cls_token", "sep_token"))
    return Special(roles, before, behind, pad)


def padding_of(source: bytes | None) -> Padding | None:
    """Return the padding token of a tokenizer.json, or of bytes, else a token that occurs in no text; None if every
    token may occur."""
    if source is None:
        return Padding(0)
    ids = ids_of(json.loads(source))
    text = next((text for text in PADS if text in ids), None)
    if text is not None:
        return Padding(ids[text], text)
    return Padding(ids[NUL]) if NUL in ids and "ByteLevel" in source.decode("utf-8") else None


def write_tokenizer(
    folder: Path, source: bytes | None, length: int | None, special: Special, named: Mapping[str, str]
) -> None:
    """Write the tokenizer.json ``source``, or one of bytes; ``length``: the longest text of the model, ``named``: the
    texts of special tokens that an imported tokenizer names."""
    data: JsonObject = byte_tokenizer() if source is None else json.loads(source)
    changed = _with_special(data, special)
    text = source.decode("utf-8") if source is not None and changed == data else json.dumps(changed)
    (folder / TOKENIZER).write_text(text, encoding="utf-8")
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if length is not None:
        settings["model_max_length"] = length
    texts = {number: text for text, number in ids_of(changed).items()}
    spelled = {role: texts[number] for role, (number, _) in special.roles.items() if number in texts}
    pad = spelled.get(special.pad or "", special.pad if special.pad in texts.values() else None)
    write_json(
        folder / TOKENIZER_CONFIG, {**settings, **spelled, **({} if pad is None else {"pad_token": pad}), **named}
    )


def _with_special(data: JsonObject, special: Special) -> JsonObject:
    """Return a tokenizer.json with the ``special`` tokens that have a text and are new."""
    present = {number: text for text, number in ids_of(data).items()}
    new = sorted((number, text) for number, text in special.roles.values() if text and number not in present)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": text} | flags for number, text in new]
    changed = {**data, "added_tokens": [*(data.get("added_tokens") or ()), *added]} if added else data
    texts = present | dict(new)
    roles = [role for role in (special.before, special.behind) if role is not None]
    processor = data.get("post_processor")
    if not roles or (processor is not None and processor.get("type") != "ByteLevel"):
        return changed
    ends = [(role, special.roles[role][0], texts[special.roles[role][0]]) for role in roles]
    template = _template(ends, special)
    both = {"type": "Sequence", "processors": [processor, template]}
    return {**changed, "post_processor": template if processor is None else both}


def _template(ends: list[tuple[str, int, str]], special: Special) -> dict[str, object]:
    """Return what puts tokens around a text, as a tokenizer.json has it."""

    def around(number: int) -> list[dict[str, dict[str, object]]]:
        pieces: dict[str, dict[str, dict[str, object]]] = {
            role: {"SpecialToken": {"id": text, "type_id": number}} for role, _, text in ends
        }
        text: dict[str, dict[str, object]] = {"Sequence": {"id": "AB"[number], "type_id": number}}
        first = [] if number else [pieces[role] for role in (special.before,) if role in pieces]
        return [*first, text, *(pieces[role] for role in (special.behind,) if role in pieces)]

    tokens = {text: {"id": text, "ids": [number], "tokens": [text]} for _, number, text in ends}
    return {"type": "TemplateProcessing", "single": around(0), "pair": around(0) + around(1), "special_tokens": tokens}


def byte_tokenizer() -> dict[str, object]:
    """Return a tokenizer.json, as data, whose 256 ids are the bytes of UTF-8.

    The signs of bytes are GPT-2's: visible signs stand for themselves, the others are from U+0100 on.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    signs = [chr(byte if byte in visible else next(others)) for byte in range(256)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {sign: byte for byte, sign in enumerate(signs)}, "merges": []},
    }


# The files of a folder of speech recognition: how sound is prepared, and which symbols are written.

BLANK = "<pad>"
"""The name that transformers has for class 0, which is not a symbol."""
VOCABULARY = "vocab.json"


def write_speech(folder: Path, symbols: Sequence[str], unit: str, rate: int) -> dict[str, object]:
    """Write into ``folder`` how sound of ``rate`` samples a second is prepared, and of characters a tokenizer; return
    the settings of ``config.json``."""
    prepared: dict[str, object] = {"feature_size": 1, "sampling_rate": rate, "padding_value": 0.0}
    prepared |= {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": False}
    write_json(folder / PREPROCESSOR, prepared | {"return_attention_mask": True})
    names = [BLANK, *symbols]
    if unit == CHARACTERS:
        write_json(folder / VOCABULARY, {name: number for number, name in enumerate(names)})
        tokens = {"pad_token": BLANK, "unk_token": BLANK, "bos_token": None, "eos_token": None}
        settings = {"tokenizer_class": "Wav2Vec2CTCTokenizer", "word_delimiter_token": " "}
        write_json(folder / TOKENIZER_CONFIG, settings | tokens)
    return {"sampling_rate": rate, "pad_token_id": 0, **labels_of(names)}
