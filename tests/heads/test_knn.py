"""kNN-LM's mixture: the official code's numbers, and the model alone in the limit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

from kinformer.core.parts import Neighbours
from kinformer.heads.language import ABSENT, KnnMixture, knn_log_probs, mix
from kinformer.lab.datastore.search import ExactSearch
from kinformer.lab.datastore.store import Datastore, KeySpace, Writer
from kinformer.runtime.errors import KinformerError

GOLDEN = Path(__file__).parents[1] / "golden" / "knn_lm.npz"
NEIGHBOURS, VOCAB, WEIGHT = 6, 9, 0.25


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files if file[name].ndim}


@pytest.fixture(scope="module")
def store(golden, tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    origin = KeySpace(weights="w", representation="r", dim=8, vocab_size=VOCAB, tokenizer="ids")
    with Writer(folder, origin, dtype="float32") as writer:
        writer.begin({}, 40)
        writer.append(golden["in.keys"], golden["in.vals"][:, 0].numpy())
        writer.flush()
    return Datastore(folder, origin)


def test_it_is_the_official_codes(golden, store):
    queries = golden["in.queries"].flatten(0, 1)
    found = ExactSearch(store).search(queries, NEIGHBOURS)
    assert torch.equal(found.entries, golden["out.l2.neighbour_ids"].flatten(0, 1))
    assert (found.distances - golden["out.l2.neighbour_distance"].flatten(0, 1)).abs().max() < 5e-6
    near = knn_log_probs(found, VOCAB)
    assert (near - golden["out.l2.knn_log_probs"].flatten(0, 1)).abs().max() < 5e-6
    assert (near == ABSENT).any()
    own, wanted = golden["in.lm_log_probs"].flatten(0, 1), golden["out.l2.mixed_log_probs"].flatten(0, 1)
    assert (mix(own, near, WEIGHT) - wanted).abs().max() < 5e-6
    head = KnnMixture(ExactSearch(store), weight=WEIGHT, neighbours=NEIGHBOURS)
    assert (head(own, queries) - wanted).abs().max() < 5e-6
    assert (head(own, queries).exp().sum(-1) - 1).abs().max() < 1e-5


def test_weight_zero_is_the_model_alone(golden, store):
    queries, logits = golden["in.queries"].flatten(0, 1), torch.randn(8, VOCAB)
    assert KnnMixture(ExactSearch(store), weight=0.0)(logits, queries) is logits
    assert KnnMixture(None)(logits, queries) is logits
    own = logits.log_softmax(-1)
    gaps = [
        (KnnMixture(ExactSearch(store), weight=weight)(logits, queries) - own).abs().max() for weight in (1e-6, 0.1)
    ]
    assert 0 < gaps[0] < 1e-3 < gaps[1]


def test_weight_one_is_the_store_alone(golden, store):
    queries = golden["in.queries"].flatten(0, 1)
    told = KnnMixture(ExactSearch(store), weight=1.0, neighbours=40, temperature=3.0)(torch.randn(8, VOCAB), queries)
    shares = log_softmax(-torch.cdist(queries.double(), golden["in.keys"].double()).square() / 3.0, dim=-1).exp()
    wanted = torch.zeros(8, VOCAB, dtype=torch.float64).index_add_(1, golden["in.vals"][:, 0], shares)
    assert (told.exp() - wanted).abs().max() < 1e-5


def test_queries_without_neighbours_keep_the_models_prediction():
    class Nothing:
        entries, bytes_read = 1, 0

        def search(self, queries, neighbours):
            distances = torch.tensor([[torch.inf, torch.inf], [1.0, torch.inf]])
            return Neighbours(distances, torch.tensor([[0, 0], [2, 0]]), torch.tensor([[-1, -1], [7, -1]]))

    logits = torch.randn(2, 4)
    told = KnnMixture(Nothing(), weight=0.5)(logits, torch.zeros(2, 3))
    assert torch.equal(told[0], logits[0])
    assert (told[1].exp() - (logits[1].softmax(-1) / 2 + torch.tensor([0, 0, 0.5, 0]))).abs().max() < 1e-6


@pytest.mark.parametrize(
    "options",
    [{"weight": -0.1}, {"weight": 1.1}, {"temperature": 0.0}, {"temperature": float("inf")}, {"neighbours": 0}],
)
def test_bad_values_are_told(options):
    with pytest.raises(KinformerError, match=str(next(iter(options.values())))):
        KnnMixture(None, **options)
