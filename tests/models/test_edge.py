"""The model's edge: what is no input of the model is one sentence, and padding counts for nothing."""

import pytest
import torch

import kinformer
from kinformer.core.state import join_rows, reserve, select_rows, value
from kinformer.runtime.errors import KinformerError
from tests.members import CAUSAL

TOKENS = torch.arange(12).view(2, 6)
ADAPTIVE = {"input.embedding": {"kind": "adaptive", "cutoffs": [10], "divisor": 2}, "head.tied": False}


def build(member="gpt", **changes):
    torch.manual_seed(0)
    return kinformer.build(member, recipe="tiny", vocab_size=23, set=changes).eval()


@pytest.mark.parametrize("member", ["gpt", "bert"])
@pytest.mark.parametrize(
    ("values", "beside", "message"),
    [
        (TOKENS.float(), {}, "int64 ids, but are torch.float32"),
        (TOKENS.bool(), {}, "int64 ids, but are torch.bool"),
        (TOKENS.tolist(), {}, "values must be a tensor, but is of the type list"),
        (None, {}, "values must be a tensor, but is of the type NoneType"),
        (TOKENS, {"valid": [[True] * 6] * 2}, "valid must be a tensor, but is of the type list"),
        (TOKENS[0], {}, r"tokens must be \[batch, time\]"),
        (TOKENS[:0], {}, "one row or more"),
        (TOKENS[:, :0], {}, "time >= 1"),
        (TOKENS + 12, {}, "token 23 is not an id of this model, whose ids are 0 to 22"),
        (TOKENS - 1, {}, "token -1 is not an id"),
        (
            TOKENS,
            {"valid": torch.ones(1, 6, dtype=torch.bool)},
            r"valid is torch.bool \[1, 6\], but must be .* \[2, 6\]",
        ),
        (
            TOKENS,
            {"valid": torch.ones(2, 6, dtype=torch.int64)},
            r"valid is torch.int64 \[2, 6\], but must be torch.bool",
        ),
    ],
)
def test_what_is_no_input_is_told(member, values, beside, message):
    with pytest.raises(KinformerError, match=message):
        build(member)(values, **beside)


@pytest.mark.parametrize("token", [-1, 23, 1000])
def test_adaptive_tables_have_no_vector_of_unknown_ids(token):
    with pytest.raises(KinformerError, match=f"token {token} is not an id"):
        build(**ADAPTIVE)(torch.tensor([[token, 1]]))


def test_a_state_of_other_rows_or_of_another_model_is_refused():
    model = build()
    _, state = model(TOKENS)
    with pytest.raises(KinformerError, match="the state has 2 rows, but the input has 1"):
        model(TOKENS[:1], state)
    assert model(TOKENS[:1], select_rows(state, torch.tensor([0])))[0].shape[0] == 1
    with pytest.raises(KinformerError, match="one of 2 layers, but this model's have 1"):
        build(layers=1)(TOKENS, state)
    with pytest.raises(KinformerError, match="one of the type tuple"):
        model(TOKENS, (1, 2))


@pytest.mark.parametrize("member", CAUSAL)
def test_a_state_of_another_model_is_refused_whatever_it_is(member):
    model, other = build(member), build("linear-transformer" if member != "linear-transformer" else "gpt")
    with torch.no_grad():
        for foreign in (other(TOKENS)[1], reserve(other(TOKENS)[1], 4)):
            with pytest.raises(KinformerError, match="the state is another model's|but this model's have"):
                model(TOKENS, foreign)
        for own in (model(TOKENS)[1], reserve(model(TOKENS)[1], 6)):
            assert model(TOKENS, own)[0].shape == (2, 6, 23)


def test_a_state_of_other_widths_is_refused():
    with pytest.raises(KinformerError, match="the state is another model's"):
        build()(TOKENS, build(**{"layers.*.mixer.num_heads": 4})(TOKENS)[1])


@pytest.mark.parametrize("member", CAUSAL)
def test_a_state_of_inference_mode_is_trained_on(member):
    model = build(member)
    with torch.inference_mode():
        state = model(TOKENS)[1]
        kept = reserve(state, 6)
    logits, _ = model(TOKENS, state)
    logits.sum().backward()
    with torch.no_grad():
        assert (model(TOKENS, kept)[0] - logits).abs().max() < 1e-5


def test_reserved_states_and_states_of_two_models_are_not_joined():
    with torch.no_grad():
        state, other = build()(TOKENS)[1], build("linear-transformer")(TOKENS)[1]
    with pytest.raises(KinformerError, match="a reserved state .* cannot be joined"):
        join_rows([state, state.reserve(3)])
    with pytest.raises(
        KinformerError, match="states of the types (KeysValues, KernelState|KernelState, KeysValues) cannot be joined"
    ):
        join_rows([state, other])
    assert join_rows([state, value(state.reserve(3))]).seen.shape == (4,)


@pytest.mark.parametrize("member", ["gpt", "bert", "deep-char"])
def test_padding_does_not_count_towards_the_last_position(member):
    model = build(member)
    length = model.max_length
    tokens = torch.randint(23, (2, length + 5))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[0, :5] = valid[1, length:] = False
    given = model(tokens, valid=valid)
    given = given if isinstance(given, torch.Tensor) else given[0]
    alone = model(tokens[:1, 5:])
    alone = alone if isinstance(alone, torch.Tensor) else alone[0]
    assert (given[:1, 5:] - alone).abs().max() < 1e-5
    valid[0, 4] = True
    with pytest.raises(KinformerError, match="end at max_length"):
        model(tokens, valid=valid)
