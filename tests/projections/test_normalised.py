"""QK-norm: the formula, grouped heads, and scores that do not grow with the stream."""

import pytest
import torch
from torch.nn.functional import rms_norm

from kinformer.parts.projections import Grouped, Normalised


def test_it_is_the_formula_and_keys_alone_are_the_same():
    projection = Normalised.Config(inner=Grouped.Config(num_kv_heads=2)).build(16, 4, 8).double()
    torch.nn.init.uniform_(projection.q_norm.weight, 0.5, 2)
    torch.nn.init.uniform_(projection.k_norm.weight, 0.5, 2)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    q, k, v = projection(x)
    plain_q, plain_k, plain_v = projection.inner(x)
    assert q.shape == (2, 4, 5, 8) and k.shape == v.shape == (2, 2, 5, 8)
    torch.testing.assert_close(q, rms_norm(plain_q, (8,), eps=1e-6) * projection.q_norm.weight)
    torch.testing.assert_close(k, rms_norm(plain_k, (8,), eps=1e-6) * projection.k_norm.weight)
    torch.testing.assert_close(v, plain_v)
    for found, expected in zip(projection.keys_values(x), (k, v), strict=True):
        torch.testing.assert_close(found, expected)


def test_queries_and_keys_do_not_grow_with_the_stream():
    projection = Normalised.Config(inner=Grouped.Config(bias=False)).build(16, 4, 8)
    x = torch.randn(2, 5, 16)
    for one, hundred in zip(projection(x)[:2], projection(100 * x)[:2], strict=True):
        torch.testing.assert_close(one, hundred, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("over", ["head", "heads"])
def test_without_weights_it_is_the_norm_before_its_weights_have_learnt(over):
    def built(weight):
        torch.manual_seed(0)
        return Normalised.Config(inner=Grouped.Config(), over=over, weight=weight).build(16, 4, 8).double()

    x = torch.randn(2, 5, 16, dtype=torch.float64)
    plain = built(False)
    torch.testing.assert_close(plain(x), built(True)(x))
    assert not any("norm" in name for name, _ in plain.named_parameters())


def test_over_heads_it_is_one_norm_and_with_one_head_that_of_a_head():
    def built(heads, over):
        torch.manual_seed(0)
        return Normalised.Config(inner=Grouped.Config(), over=over).build(16, heads, 8).double()

    x = torch.randn(2, 5, 16, dtype=torch.float64)
    whole = built(4, "heads")
    torch.nn.init.uniform_(whole.q_norm.weight, 0.5, 2)
    q, k, _ = whole(x)
    plain = whole.inner(x)[0].transpose(1, 2).flatten(2)
    want = rms_norm(plain, (32,), eps=1e-6) * whole.q_norm.weight
    torch.testing.assert_close(q.transpose(1, 2).flatten(2), want)
    torch.testing.assert_close(k, whole.keys_values(x)[0])
    assert whole.k_norm.weight.shape == (8,)
    torch.testing.assert_close(built(1, "heads")(x), built(1, "head")(x))
    torch.testing.assert_close(built(4, "by_head")(x), built(4, "head")(x))  # before the weights have learnt
    by_head = built(4, "by_head")
    torch.nn.init.uniform_(by_head.q_norm.weight, 0.5, 2)
    want = built(4, "head")(x)[0] * by_head.q_norm.weight.view(4, 1, 8)
    torch.testing.assert_close(by_head(x)[0], want)
    assert (built(4, "heads")(x)[0] - built(4, "head")(x)[0]).abs().max() > 1e-2
