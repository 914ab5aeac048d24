"""Losses at all layers, two tokens ahead: by closed form, through a run's life, and as the deep-char member's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kinformer
from kinformer.family.build import build, configure
from kinformer.family.table import MEMBERS
from kinformer.lab.cli.main import main
from kinformer.lab.data import Corpus
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.next_token import DeepSupervision, NextTokenLoss, TokenBatch
from kinformer.lab.tasks.table import TASKS
from kinformer.runtime.errors import KinformerError
from tests.training.tiny import curve, gap, rewound, train, trainer, weights

DEEP: dict[str, Any] = {"member": "deep-char", "layers": 4}
RUN: dict[str, Any] = {"model": DEEP, "objective": "deep-supervision"}


@pytest.mark.parametrize("depth", [1, 2, 4, 12])
def test_layer_l_of_n_stops_at_l_of_2n(depth: int) -> None:
    objective = DeepSupervision(8, 5, depth)
    for step in range(1000):
        progress = step / 1000
        want = [layer - 1 for layer in range(1, depth) if progress < layer / (2 * depth)]
        assert objective.active(progress) == want
    assert objective.active(0.0) == list(range(depth - 1)) and objective.active(0.5) == []


def pieces(model: Any, objective: DeepSupervision, tokens: Tensor) -> list[tuple[float, float]]:
    """For every layer, the mean cross-entropy of the next token and of the one after it."""
    depth = len(model.stack.layers)
    hidden, _, tapped = model.hidden(tokens[:, :-1], taps=tuple(range(depth - 1)))
    found = []
    for layer in range(depth):
        reader: Any = objective.readers[layer]
        x = hidden if layer == depth - 1 else tapped[layer]
        logits = reader.output(reader.norm(x))
        following, ahead = (model.logits(x), logits) if layer == depth - 1 else logits.chunk(2, -1)
        one = cross_entropy(following.flatten(0, 1), tokens[:, 1:].flatten())
        two = cross_entropy(ahead[:, :-1].flatten(0, 1), tokens[:, 2:].flatten())
        found.append((one.item(), two.item()))
    return found


@pytest.fixture
def deep() -> tuple[Any, DeepSupervision, Tensor]:
    torch.manual_seed(0)
    model = build("deep-char", "tiny", 23, {"layers": 4})
    objective = DeepSupervision.of(model)
    return model, objective, torch.randint(23, (3, 11))


@pytest.mark.parametrize(
    ("progress", "layers"), [(0.0, (0, 1, 2, 3)), (0.2, (1, 2, 3)), (0.374, (2, 3)), (0.375, (3,))]
)
def test_loss_by_closed_form(
    deep: tuple[Any, DeepSupervision, Tensor], progress: float, layers: tuple[int, ...]
) -> None:
    model, objective, tokens = deep
    loss, metrics, _ = objective(model, TokenBatch(tokens), None, progress)
    found = pieces(model, objective, tokens)
    assert loss.item() == pytest.approx(sum(found[layer][0] + 0.5 * found[layer][1] for layer in layers))
    assert float(metrics["nats"]) == pytest.approx(30 * found[3][0])
    loss.backward()
    for layer, reader in enumerate(objective.readers):
        gradients = [parameter.grad for parameter in reader.parameters()]
        assert all(gradient is not None for gradient in gradients)
        assert any(bool(gradient.any()) for gradient in gradients if gradient is not None) == (layer in layers)


def test_invalid_tokens_do_not_count(deep: tuple[Any, DeepSupervision, Tensor]) -> None:
    model, objective, tokens = deep
    valid = torch.ones(3, 10, dtype=torch.bool)
    valid[1, 6:], valid[2] = False, False
    loss, metrics, _ = objective(model, TokenBatch(tokens, valid=valid), None, 0.0)
    rows = [pieces(model, objective, tokens[:1]), pieces(model, objective, tokens[1:2, :7])]
    want = 0.0
    for layer in range(4):
        (one, two), (shorter, shorter_two) = rows[0][layer], rows[1][layer]
        want += (10 * one + 6 * shorter) / 16 + 0.5 * (9 * two + 5 * shorter_two) / 14
    assert loss.item() == pytest.approx(want, rel=1e-5)
    assert float(metrics["nats"]) == pytest.approx(10 * rows[0][3][0] + 6 * rows[1][3][0], rel=1e-5)


def test_one_token_has_none_after_next(deep: tuple[Any, DeepSupervision, Tensor]) -> None:
    model, objective, tokens = deep
    loss, _, _ = objective(model, TokenBatch(tokens[:, :2]), None, 0.9)
    assert loss.item() == pytest.approx(NextTokenLoss()(model, TokenBatch(tokens[:, :2]), None, 0.9)[0].item())


def test_measures_as_next_token(deep: tuple[Any, DeepSupervision, Tensor]) -> None:
    model, objective, tokens = deep
    got, want = (each(model, TokenBatch(tokens), None, 0.0) for each in (objective.eval(), NextTokenLoss()))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1]["nats"], want[1]["nats"])


def test_paper_model_has_the_papers_size() -> None:
    """235 million parameters in training, 219 million afterwards (their table 2)."""
    with torch.device("meta"):
        model = configure("deep-char", "paper").build()
        readers = DeepSupervision.of(model)
    own, extra = (sum(parameter.numel() for parameter in module.parameters()) for module in (model, readers))
    assert round(own / 1e6) == 219
    assert round((own + extra) / 1e6) in (235, 236)


def test_a_model_that_hides_its_layers_is_refused() -> None:
    with pytest.raises(KinformerError, match="reads the layers of a model, but Linear shows none"):
        TASKS["next-token"].objective("deep-supervision", nn.Linear(1, 1))
    assert isinstance(TASKS["next-token"].objective(None, nn.Linear(1, 1)), NextTokenLoss)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "optimizer": "muon"}], ids=["plain", "accumulated, muon"])
@pytest.mark.parametrize("steps", [8, 24], ids=["after the last stop", "amid the stops"])
def test_resumed_run_ends_with_the_same_bits(corpus: Corpus, tmp_path: Path, options: Any, steps: int) -> None:
    options = RUN | options | {"steps": steps, "keep": 6}
    train(corpus, tmp_path / "whole", **options)
    again = rewound(tmp_path / "whole", tmp_path / "again")
    for late in sorted((again / "checkpoints").iterdir())[1:]:
        for file in late.iterdir():
            file.unlink()
        late.rmdir()
    resumed = trainer(corpus, again, **options)
    assert resumed.step == 4
    resumed.run()
    assert gap(tmp_path / "whole", again) == 0.0
    assert curve(again) == curve(tmp_path / "whole")
    from safetensors.torch import load_file

    ends = [
        load_file(max((place / "checkpoints").iterdir()) / "objective.safetensors")
        for place in (again, tmp_path / "whole")
    ]
    assert ends[0].keys() == ends[1].keys() == DeepSupervision(32, 256, 4).state_dict().keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_accumulation_is_the_big_batch(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path / "one", **RUN)
    train(corpus, tmp_path / "four", accumulate=4, **RUN)
    assert curve(tmp_path / "four") == pytest.approx(curve(tmp_path / "one"), rel=1e-6)


def test_segments_carry_the_state(corpus: Corpus, tmp_path: Path) -> None:
    options = {"model": {"member": "linear-transformer"}, "objective": "deep-supervision", "segments": True}
    train(corpus, tmp_path / "one", **options)
    train(corpus, tmp_path / "two", accumulate=2, **options)
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-6)
    train(corpus, tmp_path / "windows", **options | {"segments": False})
    assert curve(tmp_path / "windows") != curve(tmp_path / "one")


def test_readers_are_no_part_of_the_model_and_the_log_tells_next_tokens(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path, **RUN)
    assert not any("readers" in name for name in weights(tmp_path))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, last = records[0], records[-1]
    assert first["loss"] > 4 * 1.5 * 5.4 and first["bits_per_byte"] == pytest.approx(8, abs=0.3)
    assert last["loss"] == pytest.approx(1.5 * last["bits_per_byte"] * math.log(2), rel=0.1)


def test_member_trains_by_it_unless_told_otherwise(text: Path, tmp_path: Path, capsys: Any) -> None:
    assert MEMBERS["deep-char"].objective == "deep-supervision" and MEMBERS["gpt"].objective == "next-token"
    sizes = "--recipe tiny --length 16 --batch-size 4 --steps 4 --validation-tokens 256 --threads 1"
    options = sizes.split()
    for name, told in (("own", []), ("plain", ["--objective", "next-token"])):
        command = ["train", "deep-char", "--data", str(text), "--out", str(tmp_path / name)]
        assert main([*command, *options, *told]) == 0
    assert open_run(tmp_path / "own").training["objective"] == "deep-supervision"
    assert open_run(tmp_path / "plain").training["objective"] == "next-token"
    for name, kept in (("own", True), ("plain", False)):
        newest = max((tmp_path / name / "checkpoints").iterdir())
        assert (newest / "objective.safetensors").is_file() == kept
    assert kinformer.load(tmp_path / "own")(torch.zeros(1, 4, dtype=torch.int64))[0].shape == (1, 4, 256)
    capsys.readouterr()
    again = ["train", "deep-char", "--out", str(tmp_path / "own"), "--resume"]
    assert main([*again, "--steps", "6"]) == 0
    assert main([*again, "--objective", "next-token"]) == 2
    assert "was begun with deep-supervision" in capsys.readouterr().err
    segments = ["train", "deep-char", "--data", str(text), "--out", str(tmp_path / "segments"), "--segments"]
    assert main([*segments, *options]) == 2
    assert "positions end at 128" in capsys.readouterr().err
