"""The one list of the family. The documentation, the command line and the tests are generated from it.

Members of other packages are found by their entry points (see ``runtime.plugins``).
"""

from __future__ import annotations

from collections.abc import Callable

from kinformer.family.adaptive_span import MEMBER as ADAPTIVE_SPAN
from kinformer.family.alibi import MEMBER as ALIBI
from kinformer.family.bert import MEMBER as BERT
from kinformer.family.big_bird import MEMBER as BIG_BIRD
from kinformer.family.blockbert import MEMBER as BLOCKBERT
from kinformer.family.calm import MEMBER as CALM
from kinformer.family.complex_order import MEMBER as COMPLEX_ORDER
from kinformer.family.compressive import MEMBER as COMPRESSIVE
from kinformer.family.convformer import MEMBER as CONVFORMER
from kinformer.family.da_transformer import MEMBER as DA_TRANSFORMER
from kinformer.family.decision import MEMBER as DECISION
from kinformer.family.deep_char import MEMBER as DEEP_CHAR
from kinformer.family.deit import MEMBER as DEIT
from kinformer.family.depth_adaptive import MEMBER as DEPTH_ADAPTIVE
from kinformer.family.differential import MEMBER as DIFFERENTIAL
from kinformer.family.etc import MEMBER as ETC
from kinformer.family.fast_weights import MEMBER as FAST_WEIGHTS
from kinformer.family.forgetting import MEMBER as FORGETTING
from kinformer.family.gated_deltanet import MEMBER as GATED_DELTANET
from kinformer.family.gla import MEMBER as GLA
from kinformer.family.gpt import MEMBER as GPT
from kinformer.family.gtrxl import MEMBER as GTRXL
from kinformer.family.hipt import MEMBER as HIPT
from kinformer.family.image_transformer import MEMBER as IMAGE_TRANSFORMER
from kinformer.family.kda import MEMBER as KDA
from kinformer.family.knn_lm import MEMBER as KNN_LM
from kinformer.family.linear_transformer import MEMBER as LINEAR_TRANSFORMER
from kinformer.family.linformer import MEMBER as LINFORMER
from kinformer.family.local import MEMBER as LOCAL
from kinformer.family.longformer import MEMBER as LONGFORMER
from kinformer.family.macaron import MEMBER as MACARON
from kinformer.family.mamba2 import MEMBER as MAMBA2
from kinformer.family.memorizing import MEMBER as MEMORIZING
from kinformer.family.mixtral import MEMBER as MIXTRAL
from kinformer.family.mla import MEMBER as MLA
from kinformer.family.moba import MEMBER as MOBA
from kinformer.family.nsa import MEMBER as NSA
from kinformer.family.performer import MEMBER as PERFORMER
from kinformer.family.pkm import MEMBER as PKM
from kinformer.family.post_ln import MEMBER as POST_LN
from kinformer.family.primer import MEMBER as PRIMER
from kinformer.family.reformer import MEMBER as REFORMER
from kinformer.family.retnet import MEMBER as RETNET
from kinformer.family.rfa import MEMBER as RFA
from kinformer.family.rope import MEMBER as ROPE
from kinformer.family.routing import MEMBER as ROUTING
from kinformer.family.rwkv7 import MEMBER as RWKV7
from kinformer.family.sha_rnn import MEMBER as SHA_RNN
from kinformer.family.shaw import MEMBER as SHAW
from kinformer.family.sinkhorn import MEMBER as SINKHORN
from kinformer.family.spalm import MEMBER as SPALM
from kinformer.family.sparse_transformer import MEMBER as SPARSE_TRANSFORMER
from kinformer.family.speech_linear import MEMBER as SPEECH_LINEAR
from kinformer.family.speech_lsh import MEMBER as SPEECH_LSH
from kinformer.family.speech_lstm import MEMBER as SPEECH_LSTM
from kinformer.family.speech_softmax import MEMBER as SPEECH_SOFTMAX
from kinformer.family.star import MEMBER as STAR
from kinformer.family.swin import MEMBER as SWIN
from kinformer.family.t5 import MEMBER as T5
from kinformer.family.tensorized import MEMBER as TENSORIZED
from kinformer.family.transformer_xl import MEMBER as TRANSFORMER_XL
from kinformer.family.universal import MEMBER as UNIVERSAL
from kinformer.family.vanilla import MEMBER as VANILLA
from kinformer.family.vit import MEMBER as VIT
from kinformer.family.elsewhere import nearest_member
from kinformer.family.record import Member
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
