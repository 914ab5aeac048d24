"""Cross-attention with positions, and over summaries of the source: contract, limits."""

import pytest
import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.core.state import form, repeat_rows
from kinformer.family.kinds import kinds
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.cross import CrossAttention, LinformerCrossAttention
from kinformer.runtime.errors import KinformerError
from kinformer.testing import MixerSubject, verify_config, verify_mixer

DIM, WIDTH, SOURCE = 16, 12, 7
SIZES = {"num_heads": 2, "source_dim": WIDTH}
T5 = {"kind": "t5", "bidirectional": True, "num_buckets": 8, "max_distance": 5}
SHAW = {"kind": "shaw", "max_distance": 2}
CONFIGS = {
    "rotary": CrossAttention.Config(position="rope", **SIZES),
    "distances": CrossAttention.Config(position=SHAW, **SIZES),
    "learned": LinformerCrossAttention.Config(rank=3, max_length=9, **SIZES),
    "mean": LinformerCrossAttention.Config(rank=3, max_length=9, method="mean", **SIZES),
    "a projection for each head": LinformerCrossAttention.Config(rank=3, max_length=9, sharing="none", **SIZES),
}
SKIP = {"structure": "its state begins with what it holds of the source, which is not zero"}


def bound(config):
    """The mixer whose rows all look at one source of seven tokens, the fifth of which is padding and holds NaN."""
    mixer = config.build(DIM)
    begin, size = mixer.initial_state, mixer.state_bytes

    @torch.no_grad()
    def initial_state(batch, *, device=None, dtype=None):
        source = torch.randn(1, SOURCE, WIDTH, generator=torch.Generator().manual_seed(9))
        source[:, 4] = torch.nan
        valid = (torch.arange(SOURCE) != 4).expand(batch, -1)
        source = source.to(mixer.query.weight.dtype).expand(batch, -1, -1)
        return begin(batch, device=device, dtype=dtype, source=source, source_valid=valid)

    mixer.initial_state = initial_state
    mixer.state_bytes = lambda length, *, dtype=torch.float32: size(length, dtype=dtype, source_length=SOURCE)
    return mixer


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", CONFIGS)
def test_contract(name):
    compiled = ("learned", "distances")
    skip = SKIP if name in compiled else SKIP | {"compile": "that of one method is enough"}
    report = verify_mixer(lambda: bound(CONFIGS[name]), dim=DIM, skip=skip)
    assert {"causality", "partition", "padding", "ragged_reset", "reserved", "gradcheck"} <= set(report.passed)


@pytest.mark.parametrize("name", ["distances", "learned"])
def test_it_survives_a_file(name):
    subject = lambda item: MixerSubject(lambda: bound(item), dim=DIM)  # noqa: E731
    verify_config(CONFIGS[name], kinds(), dim=DIM, subject=subject)


POSITIONS = {"rope": {"kind": "rope"}, "alibi": {"kind": "alibi"}, "t5": T5, "shaw": SHAW, "xl": {"kind": "xl"}}
POSITIONS["distance_aware"] = {"kind": "distance_aware", "spread": 0.7}


@pytest.mark.parametrize("name", POSITIONS)
def test_over_the_text_itself_it_is_attention_of_an_encoder(name):
    config = BidirectionalAttention.Config(num_heads=2, position=POSITIONS[name])
    encoder, x = config.build(DIM).double().eval(), random(2, 9, DIM)
    mixer = CrossAttention.Config(num_heads=2, position=POSITIONS[name]).build(DIM).double().eval()
    weights = encoder.state_dict()
    for part in ("weight", "bias"):
        query, *rest = weights[f"projection.qkv.{part}"].chunk(3)
        weights |= {f"query.{part}": query, f"key_value.{part}": torch.cat(rest)}
        del weights[f"projection.qkv.{part}"]
    mixer.load_state_dict(weights)
    y, after = mixer(Chunk(x), mixer.initial_state(2, source=x))
    assert (y - encoder(x)).abs().max() < 1e-12
    last, _ = mixer(Chunk(x[:, -1:]), after)  # behind the end of the source: aligned with its last token
    assert (last - y[:, -1:]).abs().max() < 1e-12
    moved, _ = mixer(Chunk(x[:, -1:]), mixer.initial_state(2, source=x))
    assert (moved - y[:, -1:]).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["distance_keys", "t5", "sinusoidal"])
def test_a_position_that_knows_one_side_is_one_sentence(position):
    match = "added to token embeddings" if position == "sinusoidal" else f"'{position}' tells only how far back"
    with pytest.raises(KinformerError, match=match):
        CrossAttention.Config(position=position).build(DIM)


def test_as_many_summaries_as_tokens_by_the_identity_are_plain():
    plain = CrossAttention.Config(**SIZES).build(DIM).double().eval()
    x, source = random(3, 5, DIM), random(3, SOURCE, WIDTH, seed=1)
    want, _ = plain(Chunk(x), plain.initial_state(3, source=source))
    weights = plain.state_dict()
    for method in ("learned", "mean", "max"):
        config = LinformerCrossAttention.Config(rank=SOURCE, max_length=SOURCE, method=method, **SIZES)
        mixer = config.build(DIM).double().eval()
        for name in ("weight", "bias"):
            key, value = weights[f"key_value.{name}"].chunk(2)
            getattr(mixer.key, name).data.copy_(key)
            getattr(mixer.value, name).data.copy_(value)
        for part in ("query", "out"):
            getattr(mixer, part).load_state_dict(getattr(plain, part).state_dict())
        if mixer.length is not None:
            mixer.length.weight.data.copy_(torch.eye(SOURCE))
        y, _ = mixer(Chunk(x), mixer.initial_state(3, source=source))
        assert (y - want).abs().max() < 1e-12
        if mixer.length is not None:
            mixer.length.weight.data[0, 0, 2, 3] = 0.5
            assert (mixer(Chunk(x), mixer.initial_state(3, source=source))[0] - want).abs().max() > 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_neighbouring_rows_share_a_source_and_padding_leaves_no_trace(name):
    mixer = CONFIGS[name].build(DIM).double().eval()
    x, source = random(6, 5, DIM), random(2, SOURCE, WIDTH, seed=1)
    valid = torch.arange(SOURCE) < torch.tensor([[SOURCE], [0]])
    spoilt = source.masked_fill(~valid[..., None], torch.nan).requires_grad_()
    state = mixer.initial_state(2, source=spoilt, source_valid=valid)
    y, _ = mixer(Chunk(x), repeat_rows(state, 3, sources=False))
    want, _ = mixer(Chunk(x), repeat_rows(state, 3))
    assert (y - want).abs().max() < 1e-13
    assert torch.equal(y[3:], mixer.out.bias.expand(3, 5, -1))
    y.sum().backward()
    assert spoilt.grad.isfinite().all() and (spoilt.grad[~valid] == 0).all()


def test_the_state_of_summaries_does_not_grow_with_the_source():
    mixer = CONFIGS["learned"].build(DIM)
    short, long = (mixer.initial_state(2, source=torch.randn(2, count, WIDTH)) for count in (2, 9))
    assert form(short) == form(long)
    assert mixer.state_bytes(5, source_length=2) == mixer.state_bytes(5, source_length=9) == 3 * (4 * 2 * 2 * 8 + 1)
    with pytest.raises(KinformerError, match="longer than max_length = 9 of the mixer cross_linformer"):
        mixer.initial_state(2, source=torch.randn(2, 10, WIDTH))


@pytest.mark.parametrize("cross", ["cross_linformer", {"position": "rope"}])
def test_a_translator_is_made_of_it(cross):
    cross = {"num_heads": 2} | ({"kind": cross} if isinstance(cross, str) else {"kind": "cross"} | cross)
    model = kinformer.build("vanilla", recipe="tiny", set={"layers.*.further_mixers": [cross]})
    logits, _ = model(torch.randint(256, (2, 5)), model.begin(torch.randint(256, (2, 6))))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.stack.parameters())
