"""Adaptive embedding and softmax: Transformer-XL's code, tied weights, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import kinformer
from kinformer.generation.weights import pack
from kinformer.heads.language import AdaptiveSoftmax
from kinformer.inputs.tokens import AdaptiveEmbedding
from kinformer.runtime.errors import KinformerError
from tests.heads.table import Table

GOLDEN = Path(__file__).parents[1] / "golden" / "adaptive_softmax.npz"
CUTOFFS, VOCAB, DIM, WIDTH = (7, 12), 20, 12, 8


def golden():
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def published(arrays, divisor, part, name):
    """The authors' weights called ``name`` of all clusters, one table cut into its clusters."""
    found = []
    while (key := f"w.div{divisor}.{part}.{name.format(len(found))}") in arrays:
        found.append(arrays[key])
    if divisor == 1 and "layers" in name:
        return list(found[0].split([7, 5, 8]))
    return found


def load(parameters, weights):
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)


@pytest.mark.parametrize("divisor", [1, 2])
def test_embedding_is_that_of_its_authors(divisor):
    arrays = golden()
    config = AdaptiveEmbedding.Config(cutoffs=CUTOFFS, divisor=divisor, width=WIDTH)
    embedding = config.build(VOCAB, DIM).double()
    load([table.weight for table in embedding.tables], published(arrays, divisor, "embedding", "emb_layers.{}.weight"))
    load(embedding.projections, published(arrays, divisor, "embedding", "emb_projs.{}"))
    got = DIM**0.5 * embedding(arrays["in.tokens"], None)
    assert (got - arrays[f"out.div{divisor}.embedding"]).abs().max() < 1e-13


@pytest.mark.parametrize("divisor", [1, 2])
def test_softmax_is_that_of_its_authors(divisor):
    """All log-probabilities, and the losses of a cross-entropy that takes them for logits."""
    arrays = golden()
    config = AdaptiveSoftmax.Config(cutoffs=CUTOFFS, divisor=divisor, width=WIDTH, tied=False)
    head = config.build(DIM, Table(vocab_size=VOCAB)).double()
    load(head.tables, published(arrays, divisor, "softmax", "out_layers.{}.weight"))
    load(head.projections, published(arrays, divisor, "softmax", "out_projs.{}"))
    with torch.no_grad():
        head.bias.copy_(torch.cat(published(arrays, divisor, "softmax", "out_layers.{}.bias")))
        head.columns.copy_(arrays[f"w.div{divisor}.softmax.cluster_weight"])
        head.column_bias.copy_(arrays[f"w.div{divisor}.softmax.cluster_bias"])
    got = head(arrays["in.hidden"], Table())
    want = arrays[f"out.div{divisor}.log_probs"]
    assert (got - want).abs().max() < 1e-12
    nats = cross_entropy(got, arrays["in.target"], reduction="none")
    assert (nats - arrays[f"out.div{divisor}.nll_keep_order"]).abs().max() < 1e-12
    head.column_bias.data = head.column_bias.data.flip(0)  # the trap: columns in the other order
    assert (head(arrays["in.hidden"], Table()) - want).abs().max() > 1e-3


def model(vocab=VOCAB, **changes):
    sizes = {"cutoffs": CUTOFFS, "divisor": changes.pop("divisor", 2), "width": changes.pop("width", None)}
    parts = {"input.embedding": AdaptiveEmbedding.Config(**sizes), "head": AdaptiveSoftmax.Config(**sizes)}
    return kinformer.build("transformer-xl", recipe="tiny", vocab_size=vocab, set=parts | changes)


@pytest.mark.parametrize(("divisor", "width"), [(2, None), (2, 12), (1, None), (1, 12)])
def test_tied_model_trains_and_generates(divisor, width):
    torch.manual_seed(0)
    one = model(divisor=divisor, width=width)
    tokens = torch.randint(VOCAB, (2, 20))
    logits, _ = one(tokens)
    assert torch.allclose(logits.exp().sum(-1), torch.ones(2, 20), atol=1e-5)
    cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    for name, parameter in one.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    assert not any("head.tables" in name for name, _ in one.named_parameters())
    assert kinformer.generate(one, tokens, max_new_tokens=5, seed=0).shape == (2, 5)


def test_plain_table_is_read_by_a_tied_head():
    """One width for all: the usual embedding, with clusters in the softmax alone."""
    head = AdaptiveSoftmax.Config(cutoffs=CUTOFFS, divisor=1)
    plain = kinformer.build("transformer-xl", recipe="tiny", vocab_size=VOCAB, set={"head": head})
    parts = {"input.embedding": AdaptiveEmbedding.Config(cutoffs=CUTOFFS, divisor=1), "head": head}
    clusters = kinformer.build("transformer-xl", recipe="tiny", vocab_size=VOCAB, set=parts)
    weights = plain.state_dict()
    table = weights.pop("input.embedding.weight")
    for index, part in enumerate(table.split([7, 5, 8])):
        weights[f"input.embedding.tables.{index}.weight"] = part
    clusters.load_state_dict(weights)
    tokens = torch.randint(VOCAB, (2, 20))
    assert torch.allclose(plain(tokens)[0], clusters(tokens)[0], atol=1e-6)


def test_one_cluster_is_the_softmax():
    head = AdaptiveSoftmax.Config(cutoffs=(), divisor=1).build(DIM, Table(vocab_size=VOCAB))
    hidden, table = torch.randn(3, DIM), torch.randn(VOCAB, DIM)
    assert torch.allclose(head(hidden, Table(table)), (hidden @ table.T).log_softmax(-1), atol=1e-5)


def test_recipe_of_words_has_its_published_size():
    with torch.device("meta"):
        one = kinformer.build("transformer-xl", recipe="paper-words")
    assert sum(parameter.numel() for parameter in one.parameters()) == pytest.approx(151e6, rel=0.01)
    few = kinformer.build("transformer-xl", recipe="paper-words-large", vocab_size=30, set={"dim": 16, "layers": "1"})
    assert few(torch.zeros(1, 2, dtype=torch.int64))[0].shape == (1, 2, 30)


def test_packed_weights_give_the_same():
    one = model(divisor=2, width=12).eval()
    tokens = torch.randint(VOCAB, (1, 20))
    with torch.no_grad():
        assert torch.allclose(pack(one)(tokens)[0], one(tokens)[0], atol=1e-4)


@pytest.mark.parametrize("part", [AdaptiveEmbedding, AdaptiveSoftmax])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutoffs": (5, 5)}, "rising token ids"),
        ({"cutoffs": (0, 5)}, "rising token ids"),
        ({"divisor": 0}, "divisor must be 1"),
        ({"width": 0}, "width must be 1"),
    ],
)
def test_refuses_clusters_that_mean_nothing(part, options, message):
    with pytest.raises(KinformerError, match=message):
        part.Config(**options)


def test_refuses_clusters_that_do_not_fit():
    with pytest.raises(KinformerError, match="cutoffs end at 30, but there are 20 tokens"):
        AdaptiveEmbedding.Config(cutoffs=(30,)).build(20, DIM)
    with pytest.raises(KinformerError, match="leaves nothing"):
        AdaptiveSoftmax.Config(cutoffs=(5, 10), divisor=4).build(DIM, Table(vocab_size=20))
