"""The files of a tokenizer in a folder of the library transformers: ``tokenizer.json`` and ``tokenizer_config.json``.

Models of ours have ids for the mask and for the ends of a text that a tokenizer need not know; they become tokens of
its file, and the ends are put around every text, as the run's task puts them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kinformer.interop.checkpoint import TOKENIZER
from kinformer.interop.encoder import ids_of
from kinformer.interop.layouts import ConfigView
from kinformer.interop.routes import Padding
from kinformer.runtime.files import write_json
from kinformer.runtime.parsing import JsonObject

TOKENIZER_CONFIG = "tokenizer_config.json"
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


def of_encoder(tokens: ConfigView, pad: str | None) -> Special:
    """Return the special tokens of an encoder with the input ``tokens``, as data."""
    names = {"mask_token": ("mask_token", "[MASK]"), "cls_token": ("bos_token", "[CLS]")}
    names |= {"sep_token": ("eos_token", "[SEP]")}
    roles = {role: (tokens[ours], text) for role, (ours, text) in names.items() if tokens.get(ours) is not None}
    before, behind = (role if role in roles else None for role in ("cls_token", "sep_token"))
    return Special(roles, before, behind, pad)


def padding_of(source: bytes | None) -> Padding | None:
    """Return the padding token of a tokenizer.json, or of bytes, else one that is in no text; None if all may be."""
    if source is None:
        return Padding(0)
    ids = ids_of(json.loads(source))
    text = next((text for text in PADS if text in ids), None)
    if text is not None:
        return Padding(ids[text], text)
    return Padding(ids[NUL]) if NUL in ids and "ByteLevel" in source.decode("utf-8") else None


def write_tokenizer(folder: Path, source: bytes | None, length: int | None, special: Special) -> None:
    """Write the tokenizer.json ``source``, or one of bytes; ``length``: the longest text of the model."""
    data: JsonObject = byte_tokenizer() if source is None else json.loads(source)
    changed = _with_special(data, special)
    text = source.decode("utf-8") if source is not None and changed == data else json.dumps(changed)
    (folder / TOKENIZER).write_text(text, encoding="utf-8")
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if length is not None:
        settings["model_max_length"] = length
    texts = {number: text for text, number in ids_of(changed).items()}
    spelled = {role: texts[number] for role, (number, _) in special.roles.items() if number in texts}
    pad = spelled.get(special.pad or "", special.pad if special.pad in texts.values() else None)
    write_json(folder / TOKENIZER_CONFIG, settings | spelled | ({} if pad is None else {"pad_token": pad}))


def _with_special(data: JsonObject, special: Special) -> JsonObject:
    """Return a tokenizer.json with the ``special`` tokens that have a text and are not among its own."""
    present = {number: text for text, number in ids_of(data).items()}
    new = sorted((number, text) for number, text in special.roles.values() if text and number not in present)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": text} | flags for number, text in new]
    changed = {**data, "added_tokens": [*(data.get("added_tokens") or ()), *added]} if added else data
    texts = present | dict(new)
    ends = [
        (role, special.roles[role][0], texts[special.roles[role][0]])
        for role in (special.before, special.behind)
        if role is not None
    ]
    processor = data.get("post_processor")
    if not ends or (processor is not None and processor.get("type") != "ByteLevel"):
        return changed
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
    return {
        "type": "TemplateProcessing",
        "single": around(0),
        "pair": around(0) + around(1),
        "special_tokens": tokens,
    }


def byte_tokenizer() -> dict[str, object]:
    """Return a tokenizer.json, as data, whose 256 ids are the bytes of UTF-8.

    Signs that stand for bytes are those of GPT-2: visible ones for themselves, the others from U+0100 on.
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
