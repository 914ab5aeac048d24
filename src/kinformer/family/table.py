"""The one list of the family. README's table, the command line and the tests are generated from it."""

from __future__ import annotations

from kinformer.core.errors import choose
from kinformer.family import (
    alibi,
    complex_order,
    da_transformer,
    deep_char,
    fast_weights,
    gpt,
    image_transformer,
    linear_transformer,
    local,
    macaron,
    post_ln,
    primer,
    rope,
    shaw,
    sparse_transformer,
    t5,
)
from kinformer.family.record import Member

MEMBERS: dict[str, Member] = {
    module.MEMBER.name: module.MEMBER
    for module in (
        gpt,
        post_ln,
        macaron,
        rope,
        local,
        sparse_transformer,
        image_transformer,
        linear_transformer,
        fast_weights,
        shaw,
        t5,
        alibi,
        da_transformer,
        primer,
        deep_char,
        complex_order,
    )
}


def member(name: str) -> Member:
    """The record called ``name``; an unknown name is an error that lists the nearest."""
    return MEMBERS[choose(name, MEMBERS, "member")]


def markdown() -> str:
    """The family as the table that README shows; a test keeps the two equal."""
    rows = [
        f"| `{one.name}` | {one.title} | {one.paper} | {', '.join(one.axes) or 'none'} | {one.growth} |"
        for one in MEMBERS.values()
    ]
    return "\n".join(["| member | title | paper | changes | state growth |", "| --- | --- | --- | --- | --- |", *rows])
