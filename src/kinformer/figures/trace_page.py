"""Attention over a text as one interactive page that holds all that it needs (in the manner of BertViz, Vig 2019)."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from kinformer.runtime.errors import KinformerError

ASSETS = Path(__file__).parent / "assets"


def trace_page(title: str, data: dict[str, object]) -> str:
    """Return the page of ``data``: ``readings`` (name, tokens, exits, steps) and ``places`` (place, mixer, reading,
    heads, keys, queries, count, note, implied, buckets, spans and the weights, base64 of deflated int16 [heads,
    queries, count] times ``unit``). All text in it may be a stranger's and is escaped.

    Errors: ``KinformerError`` where jinja2 is missing.
    """
    if find_spec("jinja2") is None:
        raise KinformerError("pages need jinja2, which is not installed; pip install 'kinformer[plot]' gets it.")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    # "<" inside a script would let a token end it.
    embedded = Markup(json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c"))  # noqa: S704
    read = {name: Markup((ASSETS / f"trace.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}  # noqa: S704
    return environment.get_template("trace.html").render(
        title=title, style=read["css"], script=read["js"], data=embedded
    )
