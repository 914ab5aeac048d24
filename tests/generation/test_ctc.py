"""Decoding by CTC against all paths, one by one; and that PyTorch's loss means the same paths, lengths and blank."""

from collections import defaultdict
from itertools import groupby, product
from math import log

import pytest
import torch

from kinformer.family.build import build
from kinformer.generation.beam import BLANK, Fusion, Greedy, SymbolModel, Texts, greedy, prefix_beam
from kinformer.lab.tasks.speech import ctc_nats

CLASSES = 3


def labelling(path):
    return tuple(symbol for symbol, _ in groupby(path) if symbol != BLANK)


def by_paths(logits):
    """The probability of every labelling, as the sum over its paths."""
    found = defaultdict(float)
    probabilities = logits.softmax(-1)
    for path in product(range(logits.shape[1]), repeat=len(logits)):
        found[labelling(path)] += float(probabilities[range(len(path)), path].prod())
    return found


def random(time, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(time, CLASSES, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("time", [1, 2, 4, 6])
def test_the_loss_sums_all_paths(time):
    logits = random(time, time)
    found = by_paths(logits)
    assert abs(sum(found.values()) - 1) < 1e-9
    labellings = list(found)
    longest = max(map(len, labellings))
    targets = torch.zeros(len(found), max(1, longest), dtype=torch.int64)
    for row, each in zip(targets, labellings, strict=True):
        row[: len(each)] = torch.tensor(each, dtype=torch.int64)
    counts = torch.tensor([len(each) for each in labellings])
    padded = torch.cat([logits, torch.full((3, CLASSES), 50.0)]).expand(len(found), -1, -1)
    nats = ctc_nats(padded, torch.full_like(counts, time), targets, counts)
    assert torch.allclose(nats, -torch.tensor([found[each] for each in labellings]).log().double(), atol=1e-9)


def test_a_transcript_that_does_not_fit_costs_nothing_and_harms_nothing():
    logits = random(2, 0)[None].requires_grad_()
    nats = ctc_nats(logits, torch.tensor([2]), torch.tensor([[1, 1]]), torch.tensor([2]))
    nats.sum().backward()
    assert nats.item() == 0 and not logits.grad.any()


@pytest.mark.parametrize("seed", range(6))
def test_prefix_beam_finds_the_most_probable_labelling(seed):
    logits = random(5, seed, scale=1.5)
    found = by_paths(logits)
    assert tuple(prefix_beam(logits, 100)) == max(found, key=found.get)


def test_greedy_is_the_labelling_of_the_best_path():
    for seed in range(6):
        logits = random(6, seed)
        best = max(product(range(CLASSES), repeat=6), key=lambda path: float(logits.softmax(-1)[range(6), path].prod()))
        assert tuple(greedy(logits)) == labelling(best)


def test_the_best_path_may_not_be_the_most_probable_labelling():
    logits = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert greedy(logits) == [] and prefix_beam(logits, 10) == [1]


def test_greedy_piece_by_piece():
    logits = random(40, 9)
    stream = Greedy()
    pieces = [
        symbol for cut in (slice(0, 1), slice(1, 1), slice(1, 17), slice(17, 40)) for symbol in stream.feed(logits[cut])
    ]
    assert pieces == greedy(logits)


TEXTS = {
    "a token each": Texts([[1], [2]], [[3], [4]], [0], [0]),
    "some tokens each": Texts([[1, 5], [2]], [[6, 1, 5], [6, 2]], [0, 0], [7, 0]),
}


def enumerated(logits, model, texts, alpha, beta):
    """The labelling with the greatest sum, over all paths and with every text read anew."""

    def likely(labels):
        symbols = [(texts.later if place else texts.first)[label - 1] for place, label in enumerate(labels)]
        tokens = torch.tensor([[*texts.begin, *(token for item in symbols for token in item), *texts.end]])
        scores = model(tokens[:, :-1])[0].log_softmax(-1).gather(-1, tokens[:, 1:, None])
        return float(scores[0, len(texts.begin) - 1 :].sum())

    sums = {
        labels: log(probability) + alpha * likely(labels) + beta * len(labels)
        for labels, probability in by_paths(logits).items()
    }
    return max(sums, key=sums.get)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("member", ["gpt", "linear-transformer", "local"])
def test_a_language_model_guides_the_beam_to_the_best_sum(name, member):
    torch.manual_seed(1)
    model = build(member, "tiny", 8, {"dim": 8, "layers": 1}).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)  # so that it prefers something
    found, alone = [], []
    with torch.inference_mode():
        for seed in range(6):
            logits, texts = random(5, seed, scale=1.5), TEXTS[name]
            fusion = Fusion(SymbolModel(model, texts), alpha=0.8, beta=0.3)
            found.append(prefix_beam(logits, 100, fusion))
            alone.append(prefix_beam(logits, 100))
            assert tuple(found[-1]) == enumerated(logits, model, texts, 0.8, 0.3)
            assert prefix_beam(logits, 3, fusion._replace(alpha=0.0, beta=0.0)) == prefix_beam(logits, 3)
    assert found != alone
