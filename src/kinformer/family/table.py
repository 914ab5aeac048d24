"""The members of the family by name, and the nearest members to other well-known models and techniques.

A page of the family ends with ``MEMBERS``, the tuple of its records. The documentation, the command line and the tests
are generated from this table. Members of other packages are found by their entry points (see ``runtime.plugins``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module

from kinformer.family.record import Member
from kinformer.runtime import plugins
from kinformer.runtime.errors import KinformerError, nearest

PAGES = ("dense", "sparse", "modern", "linear", "memory", "adaptive", "encoders", "perception")
MEMBERS: plugins.Pages[Member] = plugins.Pages(
    PAGES, lambda page: {member.name: member for member in import_module(f"kinformer.family.{page}").MEMBERS}
)
"""Kinformer's own members. A page is imported when one of its members is looked up."""
FAMILY = plugins.Registry.of_records(Member, MEMBERS, plugins.MEMBERS)
"""Kinformer's own members, and members of other packages, which are imported when they are looked up."""


def member(name: str, package: str | None = None) -> Member:
    """Return the record called ``name``, in capitals or not; the error for an unknown name lists the nearest names.

    ``package`` ("name version", from ``FAMILY.package(name)``) is the package of the member when its name was recorded;
    it is an error if the name belongs to another package now, or to none.
    """
    FAMILY.check_package(name, package)
    key = name if name in FAMILY else next((item for item in FAMILY if item.lower() == name.lower()), None)
    if key is not None:
        return FAMILY[key]
    if (other := nearest_member(name)) is not None:
        raise KinformerError(f"member: {name!r} is none of the family; {other.sentence}")
    if "/" in name:
        raise KinformerError(f"member: {name!r} is a path, where the name of a member belongs; see: kinformer list.")
    raise KinformerError(f"member: {name!r} is unknown; {nearest(name, FAMILY)} See: kinformer list.")


def members(complain: Callable[[str], object] = plugins.warn_once) -> list[Member]:
    """Return the records of the family, Kinformer's own first, in the order of the table.

    ``complain`` gets a sentence for every member of another package that cannot be loaded, which is left out.
    """
    return FAMILY.available(complain)


# Well-known models and techniques outside the family, and the nearest member to each.


@dataclass(frozen=True)
class Nearest:
    """The nearest ``member`` to a well-known model, with ``changes`` of the member's config.

    ``what`` describes the well-known model in a few words. ``exact``: both are the same model.
    """

    what: str
    member: str
    changes: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False

    @property
    def sentence(self) -> str:
        """Return the remedy, for a message."""
        changes = " ".join(f"`set` {path}={value}" for path, value in self.changes.items())
        relation = "is the same" if self.exact else "is nearest"
        return f"{self.what}: {self.member}{f' with {changes}' if changes else ''} {relation} here."


_MIXER, _FEED_FORWARD = "layers.*.mixer", "layers.*.feed_forward"
_GROUPED = {f"{_MIXER}.projection": "grouped"}
_YARN = {
    f"{_MIXER}.position.scaling": "yarn",
    f"{_MIXER}.position.factor": "4",
    f"{_MIXER}.position.original_length": "512",
}
_SCORE = f"{_MIXER}.score"
_WINDOW = {f"{_MIXER}.pattern": "local"}
_LLAMA = Nearest("rotary positions, grouped queries and SwiGLU", "rope", _GROUPED | {_FEED_FORWARD: "swiglu"})
_HYBRID = Nearest("layers of the gated delta rule and of softmax attention, as in the recipe hybrid", "gated-deltanet")
_GPT = Nearest("a decoder with learned positions", "gpt", exact=True)
_ROTARY = Nearest("a decoder with rotary positions", "rope")
_SPACE = Nearest("a state-space model, whose decay depends on the token", "mamba2")
_EXPERTS = f"{_FEED_FORWARD}.topk"
_LATENT = Nearest("multi-head latent attention", "mla", exact=True)
_IMAGE = Nearest("an encoder of patches of an image", "vit")
_KERNEL = Nearest("an implementation of exact attention", "gpt", {f"{_MIXER}.impl": "sdpa"}, exact=True)

ELSEWHERE: dict[str, Nearest] = {
    "llama": _LLAMA,
    "qwen": _LLAMA,
    "qwen35": _HYBRID,
    "qwen3next": _HYBRID,
    "olmohybrid": _HYBRID,
    "mistral": Nearest(
        "rotary positions, grouped queries and a window", "rope", _GROUPED | _WINDOW | {_FEED_FORWARD: "swiglu"}
    ),
    "moe": Nearest("a mixture of experts", "mixtral"),
    "switch": Nearest("a mixture of experts, where a token chooses one expert", "mixtral", {_EXPERTS: "1"}),
    "deepseek": Nearest("multi-head latent attention and a mixture of experts", "mla"),
    "gemma": _LLAMA,
    "phi": _ROTARY,
    "falcon": Nearest("rotary positions and one head of keys", "rope", _GROUPED),
    "gptj": _ROTARY,
    "gptoss": Nearest("rotary positions, grouped queries and sink logits", "rope", _GROUPED | {_SCORE: "sink_logit"}),
    "attentionsink": Nearest("a key of value 0 that every query sees", "gpt", {_SCORE: "sink_logit"}, exact=True),
    "streamingllm": Nearest("a window and the first tokens", "rope", {f"{_MIXER}.pattern": "sinks"}, exact=True),
    "difftransformer": Nearest("the difference of two softmaxes", "differential", exact=True),
    "gatedattention": Nearest("a gate on the output of each head", "gpt", {f"{_MIXER}.gate": "element"}, exact=True),
    "gptneox": _ROTARY,
    "pythia": _ROTARY,
    "bloom": Nearest("a decoder with ALiBi", "alibi", exact=True),
    "mpt": Nearest("a decoder with ALiBi", "alibi", exact=True),
    "gpt1": Nearest("a decoder with the norm after each sum", "post-ln"),
    "gpt2": _GPT,
    "gpt3": _GPT,
    "nanogpt": _GPT,
    "opt": _GPT,
    "roberta": Nearest("BERT, trained longer", "bert", exact=True),
    "distilbert": Nearest("BERT with fewer layers", "bert"),
    "albert": Nearest("BERT whose layers share their weights", "universal", {"stack.halting": "null"}),
    "electra": Nearest("BERT, trained to tell replaced tokens", "bert"),
    "transformer": Nearest("the encoder-decoder of Vaswani et al. 2017", "vanilla", exact=True),
    "seq2seq": Nearest("an encoder-decoder", "vanilla"),
    "bart": Nearest("an encoder-decoder", "vanilla"),
    "marian": Nearest("an encoder-decoder", "vanilla"),
    "whisper": Nearest("speech recognition", "speech-softmax"),
    "wav2vec": Nearest("speech recognition", "speech-softmax"),
    "clip": _IMAGE,
    "beit": _IMAGE,
    "mamba": _SPACE,
    "ssd": Nearest("Mamba-2", "mamba2", exact=True),
    "kimilinear": Nearest("Kimi Delta Attention", "kda"),
    "s4": Nearest("a state-space model, whose decay is fixed", "retnet"),
    "rwkv": Nearest("a state that forgets by channel, behind token shifts", "rwkv7"),
    "hyena": Nearest("long convolutions instead of attention", "retnet"),
    "deltanet": Nearest("linear attention with the delta rule", "fast-weights"),
    "deltaproduct": Nearest("several steps of the delta rule a token", "gated-deltanet", {f"{_MIXER}.steps": "2"}),
    "lstm": Nearest("a recurrent model with little attention", "sha-rnn"),
    "rnn": Nearest("a recurrent model with little attention", "sha-rnn"),
    "gqa": Nearest("queries share the heads of keys and values", "gpt", _GROUPED, exact=True),
    "mqa": Nearest("queries share one head of keys and values", "gpt", _GROUPED, exact=True),
    "latentattention": _LATENT,
    "flash": _KERNEL,
    "flashattention": _KERNEL,
    "sdpa": _KERNEL,
    "swiglu": Nearest("a gated feed-forward", "gpt", {_FEED_FORWARD: "swiglu"}, exact=True),
    "swa": Nearest("attention within a window", "local", exact=True),
    "slidingwindow": Nearest("attention within a window", "local", exact=True),
    "rotary": Nearest("rotary positions", "rope", exact=True),
    "yarn": Nearest("rotary positions, stretched", "rope", _YARN, exact=True),
    "nystromformer": Nearest("attention to a few summaries of all keys", "linformer"),
    "perceiver": Nearest("attention to a few summaries of all keys", "linformer"),
    "knn": Nearest("a language model with a datastore", "knn-lm", exact=True),
}
"""Names in small letters, without separators and numbers of versions, to the nearest member."""


def nearest_member(name: str) -> Nearest | None:
    """Return the member nearest to the model or technique ``name``, or None for an unknown name."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    return ELSEWHERE.get(plain) or ELSEWHERE.get(plain.rstrip("0123456789b"))
