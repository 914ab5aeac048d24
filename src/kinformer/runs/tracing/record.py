"""What tracing returns: plain tensors, their shapes and what they mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinformer.runs.tracing.sites import Keys


@dataclass(frozen=True, kw_only=True)
class AttentionTrace:
    """One mixer of one use of a layer on the text.

    place: where it stands, as in "layer 2", or "encoder, layer 1", "layer 2, step 3", "layer 2, source".
    layer, use: numbers from 1; a stack that applies its layers more than once has more uses than layers.
    mixer: its kind, such as "softmax" or "lsh".
    heads: which heads the tensors hold, numbers from 1.
    weights: [heads, queries, keys], or None where the mechanism has none. Rows of softmax attention sum to 1, or to 0
        where a query sees nothing; ``note`` says where something beside the text takes a share.
    values, outputs, constant: [heads, keys, width], [heads, queries, width] and [heads, queries, width], before the
        output projection: outputs = weights @ values + constant, which is 0 except for values by distance (Shaw) and
        for what is seen beside the text, such as compressed memories.
    implied: whether the weights are no probabilities but implied by another mechanism; ``note`` says so in words.
    buckets: int64 [heads, rounds, tokens] of attention within buckets or clusters, of the heads that have some, else
        None.
    spans: how far back heads look in tokens, [heads] where they learnt it, [heads, tokens] where each token has spans
        of its own, else None.
    keys: what the keys are: the tokens of the "text" itself, those of the "source", or Linformer's "summaries".
    """

    place: str
    layer: int
    use: int
    mixer: str
    heads: tuple[int, ...]
    weights: Tensor | None
    values: Tensor | None
    outputs: Tensor | None
    constant: Tensor | None
    implied: bool = False
    note: str = ""
    buckets: Tensor | None = None
    spans: Tensor | None = None
    keys: Keys = "text"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One model over one sequence: its ``ids`` int64 [tokens] and the ``tokens`` as text.

    hidden_states: one tensor [tokens, dim] after every use of a layer, the last before the model's last norm.
    attention: of the layers that were chosen, in order.
    exits: int64 [tokens], how many layers each token went through, where tokens may leave early, else None.
    steps: int64 [tokens], how many steps each token took, where tokens halt, else None.
    """

    ids: Tensor
    tokens: tuple[str, ...]
    hidden_states: tuple[Tensor, ...]
    attention: tuple[AttentionTrace, ...]
    exits: Tensor | None = None
    steps: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Trace(Reading):
    """What a run makes of a text. Of an encoder-decoder it is that of the target; ``source`` is the encoder's."""

    title: str
    source: Reading | None = None
