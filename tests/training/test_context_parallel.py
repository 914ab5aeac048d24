"""Rows whose time several processes share: losses, states, gradients and weights are those of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kinformer.family.build import build
from kinformer.lab.data import Corpus
from kinformer.lab.estimation.cluster import Mesh, Part, Shared
from kinformer.lab.runs.options import parallel_of
from kinformer.lab.tasks.next_token import TokenBatch
from kinformer.lab.training.context_parallel import check_time
from kinformer.runtime.errors import KinformerError
from tests.members import CAUSAL, ENCODERS, SOURCE, TINY
from tests.training.context_parallel import LAWS, ROWS, RUNS, TIME, TWO_SIDED
from tests.training.tiny import curve, gap

SAME_AS = {
    f"{many} {name}": f"one {name}" for many in ("two", "four") for name in RUNS if f"{many} {name}" != "four classes"
} | {
    "one to two hybrid": "one hybrid",
    "four to one hybrid": "one hybrid",
    "four to one encoder": "one encoder",
    "two to one pairs": "one pairs",
}
WHY_NOT = {
    "mixtral": "costs beside the loss",
    "routing": "costs beside the loss",
    "compressive": "costs beside the loss",
    "dsa": "costs beside the loss",
    "reformer": "computes layers again",
    "universal": "depends on the tokens",
    "depth-adaptive": "depends on the tokens",
    "calm": "depends on the tokens",
}
"""The members that cannot share time, and why; all other causal ones can."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, text: Path) -> Path:
    place = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "tests.training.context_parallel", str(place), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[0], [0, 0], [0, 0, 0, 0], [0]], done.stderr[-4000:]
    return place


@pytest.mark.parametrize(
    "world, names", [(2, (*LAWS, "hybrid", "ring", *TWO_SIDED)), (4, ("hybrid", "ring", *TWO_SIDED))]
)
def test_stretches_are_the_row(runs: Path, world: int, names: tuple[str, ...]) -> None:
    """Losses, states after two segments with resets, gradients of weights and of the state before, relative."""
    gaps = json.loads((runs / f"laws {world}.json").read_text())
    assert sorted(gaps) == sorted(names)
    assert max(gaps.values()) < 1e-10, gaps


@pytest.mark.parametrize("name", SAME_AS)
def test_stretches_learn_what_one_process_does(runs: Path, name: str) -> None:
    assert gap(runs / name, runs / SAME_AS[name]) < 1e-10
    assert curve(runs / name) == pytest.approx(curve(runs / SAME_AS[name]), rel=1e-12)


def test_what_is_sent_is_what_the_formulas_say(runs: Path) -> None:
    """The formulas of docs/howto/several_processes.md, in bytes of both passes."""
    stretches, stretch, edge = 2, TIME // 2, 2 * ROWS * 8
    for rank, told in enumerate(json.loads((runs / "sent.json").read_text())):
        softmax = [(layer.mixer.num_heads, TINY["rope"].dim // layer.mixer.num_heads) for layer in TINY["rope"].layers]
        kv = sum(2 * ROWS * heads * width * 4 for heads, width in softmax)  # of a token
        gathered = {"all_gather": stretches * (stretch * kv + edge), "reduce_scatter": stretches * stretch * kv}
        assert _exchanged(told["rope"]) == gathered
        # Round the ring: forward, backward, and the gradients the other way.
        assert told["rope ring"]["sent"] == stretch * kv * (2 if rank == 0 else 1)
        window = TINY["local"].layers[0].mixer.pattern.build().horizon
        assert told["local"]["sent"] == min(window, stretch) * kv
        mixers = [(layer.mixer, TINY["gated-deltanet"].dim) for layer in TINY["gated-deltanet"].layers]
        affine = halo = 0
        for config, dim in mixers:
            built = config.build(dim)
            affine += ROWS * config.num_heads * built.features * (built.features + built.value_dim) * 4
            halo += ROWS * built.key_heads * built.convolution.context * sum(built.widths) * 4
        delta = {"all_gather": stretches * (affine + edge), "reduce_scatter": stretches * affine, "sent": halo}
        assert _exchanged(told["gated-deltanet"]) == delta
        sums = 0
        for layer in TINY["linear-transformer"].layers:
            built = layer.mixer.build(TINY["linear-transformer"].dim)
            sums += ROWS * layer.mixer.num_heads * (1 + built.features * (built.value_dim + 1)) * 4
        linear = {"all_gather": stretches * (sums + edge), "reduce_scatter": stretches * sums}
        assert _exchanged(told["linear-transformer"]) == linear


@pytest.mark.parametrize("name", ["bert", "vanilla"])
def test_what_encoders_send_is_what_the_formulas_say(name: str, runs: Path) -> None:
    told, estimated = json.loads((runs / "sent.json").read_text())[0][name], _estimated(name)
    tokens, dim = ROWS * TIME, TINY[name].dim
    layers = len(TINY[name].layers)
    numbers = 2 * tokens * dim * layers if name == "bert" else tokens * dim * (4 * layers + 1)  # and the source, once
    marks = tokens if name == "bert" else 2 * tokens + 2 * 2 * ROWS * 8  # which are valid, in bytes; counts of tokens
    assert _exchanged(told) == {"all_gather": 4 * numbers + marks, "reduce_scatter": 4 * numbers}
    assert estimated == 4 * numbers


@pytest.mark.parametrize("name", ["rope", "local", "gated-deltanet", "linear-transformer"])
def test_what_is_sent_is_what_the_estimate_says(name: str, runs: Path) -> None:
    told = json.loads((runs / "sent.json").read_text())[0]
    estimated = _estimated(name)
    edge = 2 * ROWS * 8  # the counts of tokens, by which the model knows where its stretch begins
    gathered = told[name].get("all_gather", 2 * edge) - 2 * edge + told[name].get("reduce_scatter", 0)
    assert estimated == gathered / 2 + 2 * told[name].get("sent", 0)


def _estimated(name: str) -> int:
    return Part(TINY[name], Shared(1, 2), TIME, "adamw", "fp32").payload(Mesh(1, 1, "ddp", 2), ROWS).context


def _exchanged(told: dict[str, int]) -> dict[str, int]:
    return {name: told[name] for name in ("all_gather", "reduce_scatter", "sent") if name in told}


@pytest.mark.parametrize("name", CAUSAL)
def test_every_member_shares_time_or_says_why_not(name: str) -> None:
    model = TINY[name].build()
    if name in WHY_NOT:
        with pytest.raises(KinformerError, match=f"cannot share the time of rows: .*{WHY_NOT[name]}.*leave"):
            check_time(model, ring=False)
        return
    check_time(model, ring=False)


@pytest.mark.parametrize("name", [*ENCODERS, *SOURCE])
def test_every_encoder_shares_time_or_says_why_not(name: str) -> None:
    model = TINY[name].build()
    why = {"bert": "", "vanilla": "", "longformer": "its global tokens see the whole row"}
    if not (reason := why.get(name, "needs a whole row at once|its global tokens see the whole row")):
        check_time(model, ring=False)
        with pytest.raises(KinformerError, match="an encoder sees both ways; give cp"):
            check_time(model, ring=True)
        return
    with pytest.raises(KinformerError, match=f"cannot share the time of rows: .*({reason}).*leave"):
        check_time(model, ring=False)


def test_layers_are_computed_again_where_no_mixer_waits_for_a_state() -> None:
    check_time(build("rope", "tiny", 64, {"stack.checkpoint": True}), ring=True)
    with pytest.raises(KinformerError, match="the mixer LSTM would receive states again in the backward pass"):
        check_time(build("sha-rnn", "tiny", 64, {"stack.checkpoint": True}), ring=False)


def test_scores_that_are_no_products_do_not_go_round() -> None:
    with pytest.raises(KinformerError, match="do not go round, .* give cp instead"):
        check_time(build("alibi", "tiny", 64), ring=True)


def test_a_row_is_cut_into_stretches_of_one_length() -> None:
    batch = TokenBatch(torch.arange(22).view(2, 11), torch.zeros(2, 10, dtype=torch.bool))
    whole = [batch.stretch(number, 2) for number in range(2)]
    assert [part.tokens[0].tolist() for part in whole] == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    padded = [batch.stretch(number, 4) for number in range(4)]
    assert [int(part.valid.sum()) for part in padded if part.valid is not None] == [6, 6, 6, 2]
    assert padded[3].tokens[0].tolist() == [9, 10, 0, 0]


def test_sizes_of_stretches_are_read() -> None:
    parallel = parallel_of("cp=2,tp=2,fsdp=3")
    assert (parallel.context, parallel.ring, parallel.devices) == (2, False, 12)
    assert parallel_of("ring=4").ring and parallel_of("ring=4").context == 4
    with pytest.raises(KinformerError, match="give one of the two"):
        parallel_of("cp=2,ring=2")
