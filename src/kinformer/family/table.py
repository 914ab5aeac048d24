"""The one list of the family. The documentation, the command line and the tests are generated from it.

Members of other packages are found by their entry points (see ``runtime.plugins``).
"""

from __future__ import annotations

from collections.abc import Callable

from kinformer.family.adaptive import ADAPTIVE_SPAN, CALM, DEPTH_ADAPTIVE, UNIVERSAL
from kinformer.family.agents import DECISION, GTRXL
from kinformer.family.dense import DEEP_CHAR, GPT, MACARON, POST_LN, PRIMER, VANILLA
from kinformer.family.elsewhere import nearest_member
from kinformer.family.encoders import BERT, BIG_BIRD, BLOCKBERT, ETC, LINFORMER, LONGFORMER, SINKHORN, STAR
from kinformer.family.images import CONVFORMER, DEIT, HIPT, SWIN, VIT
from kinformer.family.linear import (
    FAST_WEIGHTS,
    GATED_DELTANET,
    GLA,
    KDA,
    LINEAR_TRANSFORMER,
    MAMBA2,
    PERFORMER,
    RETNET,
    RFA,
    RWKV7,
)
from kinformer.family.memory import COMPRESSIVE, KNN_LM, MEMORIZING, PKM, SHA_RNN, SPALM, TENSORIZED, TRANSFORMER_XL
from kinformer.family.modern import DIFFERENTIAL, FORGETTING, MIXTRAL, MLA
from kinformer.family.positions import ALIBI, COMPLEX_ORDER, DA_TRANSFORMER, ROPE, SHAW, T5
from kinformer.family.record import Member
from kinformer.family.sparse import IMAGE_TRANSFORMER, LOCAL, MOBA, NSA, REFORMER, ROUTING, SPARSE_TRANSFORMER
from kinformer.family.speech import SPEECH_LINEAR, SPEECH_LSH, SPEECH_LSTM, SPEECH_SOFTMAX
from kinformer.runtime import plugins
from kinformer.runtime.errors import KinformerError, choose

MEMBERS: dict[str, Member] = {
    member.name: member
    for member in (
        GPT,
        VANILLA,
        POST_LN,
        MACARON,
        ROPE,
        LOCAL,
        DIFFERENTIAL,
        FORGETTING,
        MLA,
        MOBA,
        NSA,
        MIXTRAL,
        SPARSE_TRANSFORMER,
        IMAGE_TRANSFORMER,
        REFORMER,
        ROUTING,
        ADAPTIVE_SPAN,
        LINEAR_TRANSFORMER,
        FAST_WEIGHTS,
        PERFORMER,
        RETNET,
        GATED_DELTANET,
        KDA,
        GLA,
        MAMBA2,
        RWKV7,
        RFA,
        SHAW,
        T5,
        ALIBI,
        DA_TRANSFORMER,
        PRIMER,
        DEEP_CHAR,
        UNIVERSAL,
        DEPTH_ADAPTIVE,
        CALM,
        COMPLEX_ORDER,
        TRANSFORMER_XL,
        GTRXL,
        COMPRESSIVE,
        PKM,
        SHA_RNN,
        MEMORIZING,
        KNN_LM,
        SPALM,
        TENSORIZED,
        DECISION,
        BERT,
        LONGFORMER,
        ETC,
        BIG_BIRD,
        BLOCKBERT,
        LINFORMER,
        STAR,
        SINKHORN,
        VIT,
        DEIT,
        SWIN,
        HIPT,
        CONVFORMER,
        SPEECH_SOFTMAX,
        SPEECH_LINEAR,
        SPEECH_LSH,
        SPEECH_LSTM,
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
