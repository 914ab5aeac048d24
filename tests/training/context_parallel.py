"""Models that read stretches of rows in two and four processes. Prints what became of them.

    python -m tests.training.context_parallel FOLDER DATA

Processes are forks of this one, which has computed nothing before and loaded all that they need.
"""

from __future__ import annotations

import copy
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from kinformer.core.crossing import Crosses
from kinformer.core.state import map_tensors, tensors
from kinformer.family.build import build
from kinformer.family.kinds import kinds
from kinformer.heads.classes import ClassificationHead
from kinformer.lab.data import IGNORED, open_corpus
from kinformer.lab.tasks.classify import Classification, LabelledBatch
from kinformer.lab.tasks.mlm import MaskedBatch, MaskedLanguage
from kinformer.lab.tasks.next_token import NextTokenLoss, TokenBatch
from kinformer.lab.tasks.translate import PairBatch, TranslationLoss
from kinformer.lab.training.context_parallel import groups_of, mixers_of, share_time
from kinformer.lab.training.data_module import ObjectiveModule
from kinformer.lab.training.distributed import Group
from tests.members import TINY
from tests.training.measured import Collectives
from tests.training.sharded import together
from tests.training.tiny import rewound, train

ROWS, TIME = 2, 16
HYBRID: dict[str, Any] = {
    "member": "gated-deltanet",
    "layers": 3,
    "layers.1.mixer": {"kind": "softmax", "position": "rope", "pattern": {"kind": "local", "window": 5}},
    "layers.2.mixer": {"kind": "segment_memory", "segment": 4, "memory": 8},
}
"""Summaries, a halo of a convolution and one of a window, and a state that is handed on."""
TWO_SIDED: dict[str, dict[str, Any]] = {
    "bert": {},
    "window": {"layers.*.mixer.pattern": {"kind": "window", "window": 5}, "layers.*.mixer.position": "rope"},
    "biased": {"layers.*.mixer.position": {"kind": "t5", "bidirectional": True}, "stack.checkpoint": True},
    "classes": {"head": ClassificationHead.Config(classes=3, pooling="gated")},
    "vanilla": {"layers.0.further_mixers": [{"kind": "cross", "position": "rope"}]},
}
"""Encoders of all pairs, of a window, and of biases by distance; a head over whole rows; and cross-attention."""
LAWS = (
    "gpt",
    "gated-deltanet",
    "transformer-xl",
    "rope",
    "local",
    "mla",
    "fast-weights",
    "mamba2",
    "rwkv7",
    "comba",
    "gdn2",
    "performer",
    "sha-rnn",
)
WIDE = {"batch_size": 8}
UNBROKEN = {"checkpoint_every": 3}
"""For runs that are not continued from their middle: they save at their end."""
RUNS: dict[str, dict[str, Any]] = {
    "hybrid": {"model": HYBRID, "segments": True},
    "rope": {"model": {"member": "rope", "layers": 1, "stack.checkpoint": True}, "accumulate": 2, **UNBROKEN},
    "encoder": {"model": {"member": "bert", "layers": 1}, "objective": "masked-language", **WIDE},
    "classes": {"model": {"member": "bert", "layers": 1}, "objective": "classification", **WIDE, **UNBROKEN},
    "pairs": {"model": {"member": "vanilla", "layers": 1, "encoder.layers": 1}, "objective": "translation", **WIDE},
}
OPTIONS: dict[str, Any] = {"steps": 3, "checkpoint_every": 2, "validate_every": 3, "length": TIME}


def laws(place: Path, text: str) -> Callable[[Group], object]:
    """The law, for members with every way to cross."""

    def work(group: Group) -> None:
        processes = groups_of(1, group.world, 1)
        results = {name: outcome(tiny(name), processes) for name in (LAWS if group.world == 2 else ())}
        results["hybrid"] = outcome(tiny("hybrid"), processes)
        results["ring"] = outcome(tiny("rope"), processes, ring=True)
        results |= {name: encoded(name, processes) for name in TWO_SIDED}
        gaps = group.largest(*results.values())
        group.on_first(
            lambda: (place / f"laws {group.world}.json").write_text(json.dumps(dict(zip(results, gaps, strict=True))))
        )

    return work


def tiny(name: str) -> Any:
    torch.manual_seed(1)
    if name == "hybrid":
        model = dict(HYBRID)
        return build(model.pop("member"), "tiny", 64, model).double()
    return TINY[name].build().double()


def run(corpus: Any, folder: Path, group: Group, name: str, **changes: Any) -> None:
    """Train in float64, in which order of summation does not show."""
    torch.set_default_dtype(torch.float64)
    train(corpus, folder, group, **OPTIONS | RUNS[name] | changes)
    torch.set_default_dtype(torch.float32)


def alone(place: Path, text: str) -> Callable[[Group], object]:
    """The runs in one process."""

    def work(group: Group) -> None:
        for name in RUNS:
            run(open_corpus(text), place / f"one {name}", group, name)
        rewound(place / "one hybrid", place / "one to two hybrid")

    return work


def two(place: Path, text: str) -> Callable[[Group], object]:
    """The law; every run by two stretches of time; one of one process continued by two; and what is sent."""

    def work(group: Group) -> None:
        laws(place, text)(group)
        corpus, halves = open_corpus(text), replace(group, strategy="ddp", context=2)
        for name in RUNS:
            run(corpus, place / f"two {name}", halves, name)
        run(corpus, place / "one to two hybrid", halves, "hybrid")
        sent(place, text, group)

    return work


def four(place: Path, text: str) -> Callable[[Group], object]:
    """The law; meshes of two stretches of time and two shards of weights, or two parts of the heads."""

    def work(group: Group) -> None:
        laws(place, text)(group)
        corpus, meshed = open_corpus(text), replace(group, context=2)
        run(corpus, place / "four hybrid", meshed, "hybrid")
        run(corpus, place / "four encoder", meshed, "encoder")
        heads = replace(meshed, strategy="ddp", tensor=2)
        run(corpus, place / "four rope", heads, "rope")
        run(corpus, place / "four pairs", heads, "pairs")

    return work


def continued(place: Path, text: str) -> Callable[[Group], object]:
    """Runs of two and of four processes, from their middle, in one."""

    def work(group: Group) -> None:
        for many, name in (("four", "hybrid"), ("four", "encoder"), ("two", "pairs")):
            run(open_corpus(text), rewound(place / f"{many} {name}", place / f"{many} to one {name}"), group, name)

    return work


SENT = {"rope": False, "rope ring": True, "local": False, "gated-deltanet": False, "linear-transformer": False}
SENT |= {"bert": False, "vanilla": False}


def sent(place: Path, text: str, group: Group) -> None:
    """What each process exchanges in the forward and backward pass of one step, except for the gradients of weights."""
    processes, told = groups_of(1, group.world, 1), {}
    for name, ring in SENT.items():
        model = tiny(name.split()[0]).float()
        encodes = name in ("bert", "vanilla")
        step = ObjectiveModule(model, loss_of(name) if encodes else NextTokenLoss(), "fp32")
        share_time(step, processes, keeps=False, ring=ring)
        batch = (padded_rows(name, TIME, TIME) if encodes else rows(model, 1)).stretch(group.rank, group.world)
        with Collectives() as counted:
            step(batch, None, 0.0)[0].backward()
        told[name] = dict(counted.bytes)
    everyone = group.on_all(lambda: told)
    group.on_first(lambda: (place / "sent.json").write_text(json.dumps(everyone)))


def outcome(whole: Any, processes: Any, ring: bool = False) -> float:
    """How much two segments of rows, of which the second has the state of the first, differ from those of one process:
    losses, states after the rows, gradients of weights and of the state before."""
    shared = copy.deepcopy(whole)
    one, many = (ObjectiveModule(model, NextTokenLoss(), "fp32").eval() for model in (whole, shared))
    endless = whole.max_length is None and not ring and all(m.growth != "linear" for m in mixers_of(whole.stack))
    share_time(many, processes, keeps=endless, ring=ring)
    number, count = distributed.get_rank(processes), distributed.get_world_size(processes)
    learns = [isinstance(mixer, Crosses) and mixer.crosses for mixer in mixers_of(whole.stack)]
    segments = [rows(whole, seed) for seed in (1, 2)][: 2 if endless else 1]
    expected = absorbed(one, segments, learns if endless else [], 1)
    found = absorbed(many, [batch.stretch(number, count) for batch in segments], learns if endless else [], count)
    gap = 0.0
    for name, a in expected.items():
        b = found[name].clone()
        if not name.startswith("state"):
            distributed.all_reduce(b, group=processes)
        gap = max(gap, float((a - b).abs().max() / a.abs().max().clamp_min(1e-3)) if a.numel() else 0.0)
    return gap


def encoded(name: str, processes: Any) -> float:
    """How much the loss and the gradients of rows that an encoder reads differ from those of one process."""
    torch.manual_seed(1)
    whole = build("vanilla" if name == "vanilla" else "bert", "tiny", 64, TWO_SIDED[name]).double()
    number, count = distributed.get_rank(processes), distributed.get_world_size(processes)
    one, many = (ObjectiveModule(model, loss_of(name), "fp32").eval() for model in (whole, copy.deepcopy(whole)))
    share_time(many, processes, keeps=False, ring=False)
    batch = padded_rows(name)
    loss, metrics, _ = one(batch, None, 0.0)
    loss.backward()
    part, found, _ = many(batch.stretch(number, count), None, 0.0)
    (part / count).backward()
    gap = max(abs(float(found[name] - total)) / max(1.0, float(total)) for name, total in metrics.items())
    pairs = [(loss.detach(), part.detach() / count), *zip(gradients(one), gradients(many), strict=True)]
    for a, b in pairs:
        distributed.all_reduce(b, group=processes)
        gap = max(gap, float((a - b).abs().max() / a.abs().max().clamp_min(1e-3)))
    return gap


def gradients(step: ObjectiveModule) -> list[Tensor]:
    return [torch.zeros_like(item) if item.grad is None else item.grad for item in step.model.parameters()]


def loss_of(name: str) -> Any:
    if name == "vanilla":
        return TranslationLoss(0.1)
    return Classification() if name == "classes" else MaskedLanguage()


def padded_rows(name: str, most: int = 13, target: int = 9) -> Any:
    """A row of ``most`` tokens, or of ``target`` in a translation, and one of 4: stretches are padded, and some have
    nothing of a row."""
    draw = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(5, 64, (2, ROWS, most), generator=draw)
    valid = torch.arange(most) < torch.tensor([[most], [4]])
    if name == "vanilla":
        tokens, read = labels, tokens[:, :target]
        counted = valid[:, :target]
        return PairBatch(tokens, valid, read, counted, tokens[:, :target].masked_fill(~counted, IGNORED), valid.sum(1))
    if name == "classes":
        return LabelledBatch(tokens, valid, labels[:, 0] % 3)
    positions = torch.tensor([[2, 7, 12], [3, 0, 0]])
    labels = labels[:, :3].masked_fill(torch.tensor([[False] * 3, [False, True, True]]), IGNORED)
    return MaskedBatch(tokens, valid, labels, positions)


def rows(model: Any, seed: int) -> TokenBatch:
    """Rows in which documents begin: within a stretch, at its first token, and in neither of some."""
    draw = torch.Generator().manual_seed(seed)
    reset = torch.zeros(ROWS, TIME, dtype=torch.bool)
    reset[0, 3] = reset[1, TIME // 2] = seed == 2
    tokens = torch.randint(0, model.vocab_size, (ROWS, TIME + 1), generator=draw)
    return TokenBatch(tokens, reset if seed == 2 else None)


def absorbed(step: ObjectiveModule, segments: list[TokenBatch], learns: list[bool], count: int) -> dict[str, Tensor]:
    """What comes of the segments: losses, states, and gradients, of which some are those of the last states."""
    state, results = None, {}
    for index, batch in enumerate(segments):
        if state is not None:
            state = map_tensors(_leaf, state)
        before = state
        loss, _, state = step(batch, state, 0.0)
        results[f"loss {index}"] = loss.detach() / count
        of_mixers = [mixer_state for layer in state.layers for mixer_state in layer]
        for mixer_state, learnt in zip(of_mixers, learns, strict=bool(learns)):
            floats = [leaf for leaf in tensors(mixer_state) if leaf.is_floating_point()]
            loss = loss + (0.01 * sum(leaf.square().sum() for leaf in floats) if learnt else 0)
        (loss / count).backward()
        if learns:
            results |= {f"state {index} {n}": leaf.detach() for n, leaf in enumerate(tensors(state))}
        for number, leaf in enumerate(tensors(before) if before is not None else ()):
            if leaf.requires_grad:
                results[f"before {number}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return results | {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.to_dense()
        for name, weight in step.model.named_parameters()
    }


def _leaf(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


if __name__ == "__main__":
    signal.alarm(300)
    kinds()
    folder, data = Path(sys.argv[1]), sys.argv[2]
    jobs = [(1, alone), (2, two), (4, four), (1, continued)]
    print(json.dumps([together(world, folder, job(folder, data)) for world, job in jobs]))
