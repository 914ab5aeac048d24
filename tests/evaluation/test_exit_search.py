"""Random search of exits' thresholds: by a loop over draws and tokens, and from what the model's rule really says."""

import numpy as np
import pytest
import torch

import kinformer
from kinformer.lab.calibration.search import Outlook, outlook
from kinformer.lab.data import open_corpus
from kinformer.lab.evaluation.bits import Windows


def test_what_is_kept_is_what_no_other_draw_beats():
    draw = np.random.default_rng(0)
    known = Outlook(draw.random((2, 50)), draw.random((3, 50)), (1, 2, 4))
    found = known.search(300, 1)
    thresholds = np.random.default_rng(1).uniform(known.confidence.min(1), known.confidence.max(1), (300, 2))
    every = []
    for some in thresholds:
        exits = [next((n for n in range(2) if known.confidence[n, t] >= some[n]), 2) for t in range(50)]
        nats = np.mean([known.nats[exit, t] for t, exit in enumerate(exits)])
        every.append((tuple(some), nats, np.mean([known.layers[exit] for exit in exits])))
    for one in found:
        assert any(one.thresholds == each[0] and np.allclose(one[1:], each[1:]) for each in every)
        assert not any(nats < one.nats - 1e-12 and layers <= one.layers for _, nats, layers in every)
    assert [one.layers for one in found] == sorted(one.layers for one in found) and len(found) > 3


@pytest.mark.parametrize("rule", ["saturation", "geometric", "softmax_response"])
def test_the_outlook_is_that_of_full_depth(rule, text_file):
    """Who leaves by the first exit leaves by it in the model too; with all layers its nats are the model's own."""
    torch.manual_seed(0)
    changes = {"stack.rule": {"kind": rule, "thresholds": [0.5]}, "stack.classifiers": "separate", "head.tied": False}
    model = kinformer.build("calm", recipe="tiny", set=changes).eval()
    split = open_corpus(str(text_file)).splits["test"].take(201)
    known = outlook(model, split, Windows(context=50))
    assert known.layers == (1, 2, 3) and known.confidence.shape == (2, 200) and known.nats.shape == (3, 200)
    middle = float(np.median(known.confidence[0]))
    model.stack.rule.thresholds = (middle, 2.0)
    tokens = torch.from_numpy(np.array(split.tokens(0, 201), np.int64))
    seen = []
    hook = model.stack.left.register_forward_hook(lambda _, given, __: seen.append(given[0].flatten()))
    with torch.no_grad():
        for start in range(0, 200, 50):
            model(tokens[None, start : start + 50])
        left = torch.cat(seen) == 0
        close = np.abs(known.confidence[0] - middle) < 1e-5
        assert (left.numpy() == (known.confidence[0] >= middle))[~close].all() and 50 < int(left.sum()) < 150
        model.stack.rule.thresholds = (2.0, 2.0)
        want = torch.nn.functional.cross_entropy(model(tokens[None, :50])[0][0], tokens[1:51], reduction="none")
    hook.remove()
    assert np.allclose(known.nats[-1, :50], want, atol=1e-5)
