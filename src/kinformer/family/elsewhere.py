"""Well-known models and techniques that are no members: what is nearest to them here, for who names one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Nearest:
    """What is nearest to a name: ``what`` it stands for, in a few words, and the ``member`` with ``changes`` of its
    config; ``exact`` where they are the same model."""

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
    "switch": Nearest("a mixture of experts of which a token chooses one", "mixtral", {_EXPERTS: "1"}),
    "deepseek": Nearest("multi-head latent attention and a mixture of experts", "mla"),
    "gemma": _LLAMA,
    "phi": _ROTARY,
    "falcon": Nearest("rotary positions and one head of keys", "rope", _GROUPED),
    "gptj": _ROTARY,
    "gptoss": Nearest("rotary positions, grouped queries and sink logits", "rope", _GROUPED | {_SCORE: "sink_logit"}),
    "attentionsink": Nearest("a key of value 0 that every query sees", "gpt", {_SCORE: "sink_logit"}, exact=True),
    "streamingllm": Nearest("a window and the first tokens", "rope", {f"{_MIXER}.pattern": "sinks"}, exact=True),
    "difftransformer": Nearest("the difference of two softmaxes", "differential", exact=True),
    "gatedattention": Nearest("a gate of what each head has read", "gpt", {f"{_MIXER}.gate": "element"}, exact=True),
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
"""By their names in small letters, without what separates words and numbers of versions."""


def nearest_member(name: str) -> Nearest | None:
    """Return what is nearest to the model or technique ``name``, which is no member; None for any other name."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    return ELSEWHERE.get(plain) or ELSEWHERE.get(plain.rstrip("0123456789b"))
