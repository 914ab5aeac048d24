"""One pass over many settings gives what measuring each of them gives."""

import pytest
import torch

from kinformer.core.parts import Neighbours
from kinformer.heads.language import KnnMixture
from kinformer.lab.data import open_corpus
from kinformer.lab.datastore.attach import AttachedDecoder
from kinformer.lab.evaluation.bits import Windows, measure
from kinformer.lab.evaluation.mixing import Grid, Setting, Watched, sweep
from tests.evaluation.conftest import tiny


class Table:
    def __init__(self, missing=False):
        generator = torch.Generator().manual_seed(1)
        self.keys = torch.randn(200, 32, generator=generator, dtype=torch.float64)
        self.tokens = torch.randint(97, 123, (200,), generator=generator)
        self.entries, self.bytes_read, self.missing = 200, 0, missing

    def search(self, queries, neighbours):
        distances = torch.cdist(queries.double(), self.keys).square().float()
        best = distances.topk(min(neighbours, 200), largest=False)
        lost = (best.indices + torch.arange(best.indices.shape[1])) % 7 == 0 if self.missing else best.indices < 0
        lost = lost.cummax(dim=1).values
        values = best.values.masked_fill(lost, torch.inf)
        return Neighbours(values, self.tokens[best.indices].masked_fill(lost, 0), best.indices.masked_fill(lost, -1))


@pytest.fixture(scope="module")
def split(text_file):
    return open_corpus(str(text_file)).splits["test"].take(300)


@pytest.mark.parametrize("windows", [None, Windows(context=32), Windows(context=32, overlap=0.5)])
@pytest.mark.parametrize("missing", [False, True])
def test_a_sweep_is_many_measurements(split, windows, missing):
    decoder = tiny("linear-transformer")
    grid = Grid((0.0, 0.3, 0.9), (1.0, 20.0), (1, 3, 8))
    searcher = Table(missing)
    swept = sweep(AttachedDecoder(decoder, KnnMixture(None)), searcher, split, windows, grid, chunk=64)
    assert swept.tokens == len(split) - 1
    for weight in grid.weights:
        for temperature in grid.temperatures:
            for neighbours in grid.neighbours:
                options = {"weight": weight, "temperature": temperature, "neighbours": neighbours}
                wanted = measure(AttachedDecoder(decoder, KnnMixture(searcher, **options)), split, windows, chunk=64)
                assert swept.bits_per_byte(Setting(**options)) == pytest.approx(wanted.bits_per_byte, rel=1e-6)
    best = swept.best
    assert swept.bits_per_byte(best) == pytest.approx(swept.stream.bits_per_byte(swept.nats.min()))
    alone = measure(decoder, split, windows, chunk=64)
    assert swept.bits_per_byte(Setting(weight=0.0, temperature=1.0, neighbours=1)) == pytest.approx(
        alone.bits_per_byte, rel=1e-9
    )


def test_more_neighbours_than_entries_are_all(split):
    model = AttachedDecoder(tiny("gpt"), KnnMixture(None))
    swept = sweep(model, Table(), split, Windows(context=32), Grid((0.5,), (1.0,), (200, 512)), chunk=64)
    assert swept.nats[0, 0, 0] == swept.nats[0, 0, 1]


def test_the_grid_reaches_up_to_the_neighbours_asked_for():
    assert Grid.up_to(6).neighbours == (1, 2, 4, 6)
    assert Grid.up_to(8).neighbours == (1, 2, 4, 8)
    assert Grid.up_to(1).weights[0] == 0


def test_recall_is_counted_over_evenly_spread_queries():
    watched = Watched(Table(missing=True), stride=10)
    for size in (7, 25, 30, 38):
        watched.search(torch.randn(size, 32, dtype=torch.float64), 4)
    assert watched.queries == 10
    share = watched.recall(Table())
    assert 0 < share < 1
    assert Watched.recall(_asked(Watched(Table(), 3)), Table()) == 1.0


def _asked(watched):
    watched.search(torch.randn(20, 32, dtype=torch.float64), 4)
    return watched
