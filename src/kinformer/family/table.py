"""The one list of the family. The documentation, the command line and the tests are generated from it.

Members of other packages are found by their entry points (see ``runtime.plugins``).
"""

from __future__ import annotations

from collections.abc import Callable

from kinformer.family import (
    adaptive_span,
    alibi,
    bert,
    big_bird,
    blockbert,
    calm,
    complex_order,
    compressive,
    convformer,
    da_transformer,
    decision,
    deep_char,
    deit,
    depth_adaptive,
    differential,
    etc,
    fast_weights,
    forgetting,
    gated_deltanet,
    gla,
    gpt,
    gtrxl,
    hipt,
    image_transformer,
    kda,
    knn_lm,
    linear_transformer,
    linformer,
    local,
    longformer,
    macaron,
    mamba2,
    memorizing,
    mixtral,
    mla,
    moba,
    nsa,
    performer,
    pkm,
    post_ln,
    primer,
    reformer,
    retnet,
    rfa,
    rope,
    routing,
    rwkv7,
    sha_rnn,
    shaw,
    sinkhorn,
    spalm,
    sparse_transformer,
    speech_linear,
    speech_lsh,
    speech_lstm,
    speech_softmax,
    star,
    swin,
    t5,
    tensorized,
    transformer_xl,
    universal,
    vanilla,
    vit,
)
from kinformer.family.elsewhere import nearest_member
from kinformer.family.record import Member
from kinformer.runtime import plugins
from kinformer.runtime.errors import KinformerError, choose

MEMBERS: dict[str, Member] = {
    module.MEMBER.name: module.MEMBER
    for module in (
        gpt,
        vanilla,
        post_ln,
        macaron,
        rope,
        local,
        differential,
        forgetting,
        mla,
        moba,
        nsa,
        mixtral,
        sparse_transformer,
        image_transformer,
        reformer,
        routing,
        adaptive_span,
        linear_transformer,
        fast_weights,
        performer,
        retnet,
        gated_deltanet,
        kda,
        gla,
        mamba2,
        rwkv7,
        rfa,
        shaw,
        t5,
        alibi,
        da_transformer,
        primer,
        deep_char,
        universal,
        depth_adaptive,
        calm,
        complex_order,
        transformer_xl,
        gtrxl,
        compressive,
        pkm,
        sha_rnn,
        memorizing,
        knn_lm,
        spalm,
        tensorized,
        decision,
        bert,
        longformer,
        etc,
        big_bird,
        blockbert,
        linformer,
        star,
        sinkhorn,
        vit,
        deit,
        swin,
        hipt,
        convformer,
        speech_softmax,
        speech_linear,
        speech_lsh,
        speech_lstm,
    )
}


FAMILY = plugins.Registry.of_records(Member, MEMBERS, plugins.MEMBERS)
"""Kinformer's own members, and those of other packages, which are imported when they are looked up."""


def member(name: str, package: str | None = None) -> Member:
    """Return the record called ``name``, in capitals or not; an unknown name is an error that lists the nearest.

    ``package`` ("name version", the result of ``FAMILY.package(name)``) is where the member came from when that was
    recorded; if it is no longer there, the error says so.
    """
    FAMILY.check_package(name, package)
    key = name if name in FAMILY else next((item for item in FAMILY if item.lower() == name.lower()), name)
    if key not in FAMILY and (other := nearest_member(name)) is not None:
        raise KinformerError(f"member: {name!r} is none of the family; {other.sentence}")
    if key not in FAMILY and "/" in name:
        raise KinformerError(f"member: {name!r} is a path, where the name of a member belongs; see: kinformer list.")
    return FAMILY[choose(key, FAMILY, "member")]


def members(complain: Callable[[str], object] = plugins.warn_once) -> list[Member]:
    """Return the records of the family, Kinformer's own first, in the order of the table.

    ``complain`` gets a sentence for every member of another package that cannot be loaded, which is left out.
    """
    return FAMILY.available(complain)
