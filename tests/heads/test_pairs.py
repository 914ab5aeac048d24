"""Every embedding with every head, in a decoder and an encoder: it runs, or is refused when it is built."""

from dataclasses import fields

import pytest
import torch

from kinformer.family.build import build
from kinformer.family.kinds import kinds
from kinformer.runtime.errors import KinformerError

FURTHER = {"adaptive": {"cutoffs": [20, 40]}, "classification": {"classes": 3}, "token_classification": {"classes": 3}}
HEADS = [
    {"kind": kind, **FURTHER.get(kind, {}), **tied}
    for kind, head in kinds()["head"].items()
    for tied in ([{"tied": True}, {"tied": False}] if "tied" in {field.name for field in fields(head)} else [{}])
]


@pytest.mark.parametrize("member", ["gpt", "bert"])
def test_it_runs_or_is_refused_when_it_is_built(member):
    tokens, run, refused = torch.arange(14).view(2, 7), set(), set()
    for embedding in kinds()["embedding"]:
        table = {"kind": embedding, **FURTHER.get(embedding, {})}
        for head in HEADS:
            pair = embedding, head["kind"], head.get("tied")
            try:
                model = build(member, "tiny", 64, {"input.embedding": table, "head": head})
            except KinformerError:
                refused.add(pair)
                continue
            out = model(tokens)
            out = out if isinstance(out, torch.Tensor) else out[0]
            out.sum().backward()
            assert out.isfinite().all(), pair
            run.add(pair)
    assert {(embedding, head, False) for embedding, head, tied in refused | run if tied is not None} <= run
    assert ("lookup", "language", True) in run and ("adaptive", "adaptive", True) in run
    assert {("complex_order", "language", True), ("adaptive", "language", True), ("lookup", "modulus", None)} <= refused
