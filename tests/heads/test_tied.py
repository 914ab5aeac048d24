"""Heads and embeddings: every pair works, with a gradient for every weight, or is refused when the model is built."""

import pytest
import torch

from kinformer.blocks.layer import EncoderLayer
from kinformer.heads.classes import ClassificationHead, TokenClassificationHead
from kinformer.heads.language import AdaptiveSoftmax, LanguageModelHead, MaskedLanguageHead, ModulusHead, SpalmHead
from kinformer.inputs.tokens import AdaptiveEmbedding, Lookup, Tokens
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.models.encoder import Encoder
from kinformer.parts.positions import ComplexOrder, NoPosition
from kinformer.runtime.errors import KinformerError

VOCAB, DIM = 23, 8
EMBEDDINGS = {
    "lookup": Lookup.Config(),
    "complex order": ComplexOrder.Config(),
    "adaptive": AdaptiveEmbedding.Config(cutoffs=(5, 11), divisor=2),
    "adaptive, other cutoffs": AdaptiveEmbedding.Config(cutoffs=(5,), divisor=2),
    "adaptive, narrow": AdaptiveEmbedding.Config(cutoffs=(5, 11), divisor=1, width=6),
    "adaptive, plain": AdaptiveEmbedding.Config(cutoffs=(5, 11), divisor=1),
}
HEADS = {
    "language": LanguageModelHead.Config(),
    "language, own": LanguageModelHead.Config(tied=False),
    "masked language": MaskedLanguageHead.Config(),
    "masked language, own": MaskedLanguageHead.Config(tied=False),
    "spalm": SpalmHead.Config(),
    "modulus": ModulusHead.Config(),
    "modulus, masked": ModulusHead.Config(inner=MaskedLanguageHead.Config()),
    "modulus, own": ModulusHead.Config(inner=LanguageModelHead.Config(tied=False)),
    "adaptive": AdaptiveSoftmax.Config(cutoffs=(5, 11), divisor=2),
    "adaptive, own": AdaptiveSoftmax.Config(cutoffs=(5, 11), divisor=2, tied=False),
    "adaptive, plain": AdaptiveSoftmax.Config(cutoffs=(5, 11), divisor=1),
    "classes": ClassificationHead.Config(classes=3),
    "classes of tokens": TokenClassificationHead.Config(classes=3),
}
OWN = {name for name in HEADS if "own" in name or "classes" in name}
WORKS = {
    "lookup": OWN | {"language", "masked language", "spalm", "adaptive, plain"},
    "complex order": OWN | {"modulus", "modulus, masked"},
    "adaptive": OWN | {"adaptive"},
    "adaptive, other cutoffs": OWN,
    "adaptive, narrow": OWN,
    "adaptive, plain": OWN | {"adaptive, plain"},
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_works_or_is_refused(embedding, head):
    config = Encoder.Config(
        input=Tokens.Config(vocab_size=VOCAB, embedding=EMBEDDINGS[embedding]),
        dim=DIM,
        layers=(EncoderLayer.Config(mixer=BidirectionalAttention.Config(num_heads=2)),),
        position=NoPosition.Config(),
        head=HEADS[head],
    )
    if head not in WORKS[embedding]:
        with pytest.raises(KinformerError, match="is tied to") as refused:
            config.build()
        assert ("tied = false" in str(refused.value)) == (head != "spalm")  # which has no such field
        return
    model = config.build()
    logits = model(torch.arange(VOCAB).view(1, -1))
    assert logits.shape[-1] in (VOCAB, 3)
    logits.square().sum().backward()
    idle = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert not idle
