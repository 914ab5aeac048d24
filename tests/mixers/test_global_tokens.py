"""Marking tokens global changes nothing where all see all: with every position, score and projection."""

import pytest
import torch

import kinformer
from kinformer.core.encoder import SequenceContext
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.parts.patterns.sequence import Window
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import MultiHead, MultiHeadGlobal
from kinformer.parts.relative_positions import T5, Alibi, DistanceAware, Rope, Shaw, TransformerXL
from kinformer.runtime.errors import KinformerError
from tests.mixers.made import SCORES, built, inputs

POSITIONS = {
    "none": NoPosition.Config(),
    "rope": Rope.Config(),
    "shaw": Shaw.Config(max_distance=3),
    "xl": TransformerXL.Config(),
    "xl, clamp": TransformerXL.Config(clamp=6),
    "t5": T5.Config(num_buckets=8, max_distance=9, bidirectional=True),
    "alibi": Alibi.Config(),
    "distance_aware": DistanceAware.Config(spread=0.4),
}
TIME = 13


def mixer_of(position, score, projection, impl="auto"):
    mixer = built(
        BidirectionalAttention.Config(
            num_heads=2, position=POSITIONS[position], score=SCORES[score], projection=projection, impl=impl
        )
    )
    own = mixer.projection.global_projection()
    if own is not None:  # the global tokens' own products are those of all
        with torch.no_grad():
            parts = (part for part in mixer.projection.qkv.parameters())
            for name, whole in zip(("weight", "bias"), parts, strict=True):
                for product, part in zip((own.query, own.key, own.value), whole.chunk(3), strict=True):
                    getattr(product, name).copy_(part)
    return mixer


def answered(mixer, x, text):
    """Outputs, and the gradients of the inputs and of all weights that are for tokens of either kind."""
    x = x.clone().requires_grad_()
    y = mixer(x, text)
    both = [weight for name, weight in mixer.named_parameters() if not name.startswith("projection")]
    loss = (y * inputs(y.shape[1], seed=4)).sum()
    return [y, *torch.autograd.grad(loss, [x, *both], materialize_grads=True, allow_unused=True)]


@pytest.mark.parametrize("projection", [MultiHead.Config(), MultiHeadGlobal.Config()], ids=["shared", "own"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("position", POSITIONS)
def test_in_a_full_pattern_global_tokens_are_as_all_others(position, score, projection):
    try:
        mixer = mixer_of(position, score, projection)
    except KinformerError as error:
        assert "is not a product" in str(error)
        return
    positions = torch.tensor([[0, 4, 12], [5, 9, -1]])
    for num_global in (0, 3):
        x = inputs(num_global + TIME)
        valid = torch.arange(num_global + TIME) < torch.tensor([[num_global + TIME], [num_global + TIME - 2]])
        for mask in (None, valid):
            plain, marked = (
                SequenceContext(mask, None, None, num_global),
                SequenceContext(mask, positions, None, num_global),
            )
            for got, want in zip(answered(mixer, x, marked), answered(mixer, x, plain), strict=True):
                assert (got - want).abs().max() < 1e-9


@pytest.mark.parametrize("position", [name for name in POSITIONS if name != "none"])
def test_the_reference_says_the_same_of_global_tokens(position):
    """In a pattern that hides pairs too: rows and columns of global tokens, and the global input."""
    config = BidirectionalAttention.Config(num_heads=2, position=POSITIONS[position], pattern=Window(window=2))
    chunked, reference = built(config), built(config.replace(impl="reference"))
    reference.load_state_dict(chunked.state_dict())
    text = SequenceContext(None, torch.tensor([[0, 4, 12], [5, 9, -1]]), None, 3)
    for got, want in zip(*(answered(each, inputs(3 + TIME), text) for each in (chunked, reference)), strict=True):
        assert (got - want).abs().max() < 1e-9


@pytest.mark.parametrize("position", ["alibi", "t5", "shaw", "xl", "distance_aware"])
def test_logits_of_a_model_stay_when_tokens_are_marked(position):
    model = kinformer.build("bert", recipe="tiny", vocab_size=19, set={"layers.*.mixer.position": POSITIONS[position]})
    tokens = torch.randint(19, (2, TIME), generator=torch.Generator().manual_seed(0))
    kinds = (torch.arange(TIME) % 5 == 0).long().expand(2, -1)
    with torch.no_grad():
        assert (model.eval()(tokens, kinds=kinds) - model(tokens)).abs().max() < 1e-5
