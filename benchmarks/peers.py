"""The peers as models tokens [batch, time] int64 -> logits [batch, time, vocab], each built the way its authors show.

All have learned positions, no dropout and the sizes of a :class:`PeerShape`. A builder returns None, after one
sentence, where the peer is not installed.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from common import peer
from kinformer.lab.comparison import works
from kinformer.lab.comparison.works import PeerShape


class Idiap(nn.Module):
    """Embeddings and a head around the transformer of pytorch-fast-transformers, which has neither."""

    def __init__(self, shape: PeerShape, encoder: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.positions = nn.Embedding(shape.length, shape.dim)
        self.encoder = encoder
        self.head = nn.Linear(shape.dim, shape.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        return self.head(self.encoder(self.embedding(tokens) + self.positions.weight[:time], _triangle(time)))

    def one(self, token: Tensor, position: int, state: list | None) -> tuple[Tensor, list]:
        """The logits [batch, vocab] after ``token`` [batch] (with the recurrent encoder), and the new state."""
        x, state = self.encoder(self.embedding(token) + self.positions.weight[position], state)
        return self.head(x), state


@cache
def _triangle(time: int):
    from fast_transformers.masking import TriangularCausalMask

    return TriangularCausalMask(time)


def idiap(shape: PeerShape, recurrent: bool = False) -> Idiap | None:
    """Causal linear attention with its C++ kernel, or its recurrent form for generation."""
    builders = peer("fast_transformers.builders")
    if builders is None:
        return None
    builder = builders.RecurrentEncoderBuilder if recurrent else builders.TransformerEncoderBuilder
    options = {
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "query_dimensions": shape.head_dim,
        "value_dimensions": shape.head_dim,
        "feed_forward_dimensions": shape.hidden,
        "attention_type": "linear" if recurrent else "causal-linear",
        "activation": "gelu",
        "dropout": 0.0,
    }
    return Idiap(shape, builder.from_kwargs(**options).get())


def x_transformers(shape: PeerShape, flash: bool = False) -> nn.Module | None:
    """Its decoder; ``flash`` is its option to use PyTorch's fused attention, off by default."""
    return None if peer("x_transformers") is None else works.x_transformers(shape, flash)


class HuggingFace(nn.Module):
    """GPT2LMHeadModel, which uses PyTorch's fused attention by itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def hugging_face(shape: PeerShape) -> HuggingFace | None:
    if peer("transformers") is None:
        return None
    if shape.heads * shape.head_dim != shape.dim:
        raise SystemExit("GPT-2 has heads x head_dim = dim; give such a shape.")
    return HuggingFace(works.gpt2(shape))


def copy_gpt2(source: HuggingFace, target: nn.Module) -> None:
    """Give Kinformer's gpt the weights of a GPT-2: same maths, so both must then give the same logits."""
    weights = source.model.transformer.state_dict()
    names = {
        "ln_1": "mixer_residual.norm",
        "ln_2": "feed_forward_residual.norm",
        "attn.c_attn": "mixer.projection.qkv",
        "attn.c_proj": "mixer.out",
        "mlp.c_fc": "feed_forward.up",
        "mlp.c_proj": "feed_forward.down",
    }
    own = {"input.embedding.weight": weights["wte.weight"], "position.table": weights["wpe.weight"]}
    own |= {f"norm.{kind}": weights[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    for layer in range(len(target.stack.layers)):
        for theirs, ours in names.items():
            for kind in ("weight", "bias"):
                value = weights[f"h.{layer}.{theirs}.{kind}"]
                transposed = kind == "weight" and value.dim() == 2
                own[f"stack.layers.{layer}.{ours}.{kind}"] = value.T if transposed else value
    with torch.no_grad():
        target.load_state_dict(own)
