"""Training in stages: where they begin, what they change, and a run killed around a border."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kinformer
from kinformer.family.build import configure, weight_shapes
from kinformer.family.table import MEMBERS
from kinformer.lab.runs.rows import config_of, plan_of, staged_rows
from kinformer.lab.runs.run import open_run
from kinformer.lab.training.loop import Updater, UpdateResult
from kinformer.lab.training.schedule import stage_at, stages_of
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from tests.training.tiny import curve, gap

WINDOWS = "layers.*.mixer.pattern.window"
STAGES: tuple[dict[str, Any], ...] = (
    {"steps": 3, "length": 8, "batch_size": 4, "lr": 0.01, "set": {WINDOWS: 3}},
    {"steps": 2, "length": 16, "batch_size": 4, "set": {WINDOWS: 3}},
    {"lr": 0.002, "warmup": 2},
)
SIZES: dict[str, Any] = {"recipe": "tiny", "length": 16, "batch_size": 2, "validation_tokens": 256, "log_every": 1}


class KilledError(Exception):
    """The end of a process, as far as its folder knows."""


def run(text: Path, folder: Path, **options: Any) -> Any:
    options = {"steps": 8, "stages": STAGES, "segments": True, "checkpoint_every": 2} | SIZES | options
    return kinformer.train("local", data=text, out=folder, **options)


def test_where_stages_begin_and_how_far_a_rate_reaches() -> None:
    first, second, last = stages_of(Settings(steps=8, length=16, batch_size=2, lr=1.0, stages=STAGES))
    assert [(stage.begin, stage.end) for stage in (first, second, last)] == [(0, 3), (3, 5), (5, None)]
    assert [stage.rates for stage in (first, second, last)] == [(0, 5), (0, 5), (5, None)]
    assert [stage.since for stage in (first, second, last)] == [0, 0, 5]
    assert [stage.settings.lr for stage in (first, second, last)] == [0.01, 0.01, 0.002]
    assert (second.settings.length, second.settings.batch_size, last.settings.batch_size) == (16, 4, 2)
    assert stage_at(Settings(steps=8, stages=STAGES), 4).number == 1
    alone = stages_of(Settings(steps=8))
    assert len(alone) == 1 and alone[0].rates == (0, None) and alone[0].settings == Settings(steps=8)


def test_a_run_killed_around_a_border_ends_as_one_that_was_not(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(text, tmp_path / "whole")
    update = Updater.__call__
    for killed_at in (2, 3, 5, 6):

        def killed(self: Updater, step: int, rate: float, progress: float, at: int = killed_at) -> UpdateResult:
            if step == at:
                raise KilledError
            return update(self, step, rate, progress)

        with monkeypatch.context() as patch:
            patch.setattr(Updater, "__call__", killed)
            options = {} if killed_at == 2 else {"resume": True}
            with pytest.raises(KilledError):
                run(text, tmp_path / "killed", **options)
    run(text, tmp_path / "killed", resume=True)
    assert gap(tmp_path / "whole", tmp_path / "killed") == 0.0
    assert curve(tmp_path / "whole") == curve(tmp_path / "killed") and len(curve(tmp_path / "whole")) == 8
    begun = [[line["step"], line["stage_length"]] for line in records(tmp_path / "killed") if "stage" in line]
    assert begun == [[1, 8], [4, 16], [6, 16]]
    assert open_run(tmp_path / "killed").config == open_run(tmp_path / "whole").config
    with pytest.raises(KinformerError, match="a resumed run keeps its settings"):
        run(text, tmp_path / "killed", resume=True, stages=[])


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_stage_is_a_run_of_its_sizes_and_windows(text: Path, tmp_path: Path) -> None:
    constant = {"schedule": "constant", "warmup": 0, "segments": False}
    run(text, tmp_path / "staged", steps=4, stages=[STAGES[0], {}], **constant)
    own = {"length": 8, "batch_size": 4, "lr": 0.01, "set": {WINDOWS: 3}}
    run(text, tmp_path / "alone", steps=3, stages=[], **constant | own)
    assert curve(tmp_path / "staged")[:3] == curve(tmp_path / "alone")
    wider = {"length": 8, "batch_size": 4, "lr": 0.01}
    run(text, tmp_path / "wider", steps=3, stages=[], **constant | wider)
    assert curve(tmp_path / "wider") != curve(tmp_path / "alone")


def test_rows_of_a_stage_are_shared_and_begin_anew(text: Path, tmp_path: Path) -> None:
    run(text, tmp_path / "run", steps=6)
    finished = open_run(tmp_path / "run")
    settings = Settings(**finished.training)
    plan = plan_of(finished, settings)
    first, second, _ = (staged_rows(finished, plan, stage, "cpu") for stage in stages_of(settings))
    assert first.batch(0, 0, 1).tokens.shape == (4, 9) and second.batch(3, 0, 1).tokens.shape == (4, 17)
    halves = [second.batch(4, rank, 2).tokens.numpy() for rank in (0, 1)]
    assert np.array_equal(np.concatenate(halves), second.batch(4, 0, 1).tokens.numpy())
    assert second.batch(3, 0, 1).reset[:, 0].all()
    assert second.batch(3, 0, 1).tokens[0, :9].tolist() != first.batch(0, 0, 1).tokens[0].tolist()


def test_the_best_weights_are_of_the_windows_that_the_run_ends_with(text: Path, tmp_path: Path) -> None:
    """Later stages are worse here by their rate; their windows are those of the run's config all the same."""
    stages = [{"steps": 4, "lr": 0.01, "set": {WINDOWS: 3}}, {"lr": 10.0, "warmup": 0}]
    summary = run(text, tmp_path / "run", steps=6, stages=stages, validate_every=2, clip=0.0)
    validated = {line["step"]: line["validation_bits_per_byte"] for line in records(tmp_path / "run") if "validation_bits_per_byte" in line}  # fmt: skip # noqa: E501
    assert min(validated, key=validated.__getitem__) <= 4
    assert summary.metrics["bits_per_byte"] == validated[6]


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ("often", "must be a list of tables"),
        ([3], "stage 1 is 3 but must be a table"),
        ([{"stepz": 3}, {}], "stage 1 does not have the setting 'stepz'; did you mean 'steps'?"),
        ([{"steps": 3, "length": "x"}, {}], "length of stage 1"),
        ([{"length": 3}, {}], "stage 1 does not say its steps"),
        ([{"steps": 3, "warmup": 2}, {}], "stage 1 has a warmup but no lr"),
        ([{"steps": 3}, {"length": 4}], "stage 2 is the last: it has the run's own length"),
        ([{"steps": 9}, {}], "take 9 steps, but the run has 8"),
        ([{"steps": 3, "set": {"layers.*.feed_forward.hidden_dim": 8}}, {}], "all stages train the same weights"),
        ([{"steps": 3, "set": {"layers.*.mixer.window": 8}}, {}], "stage 1: .*'window' is not a field"),
        ([{"steps": 3, "length": 10**6}, {}], "stage 1: "),
    ],
)
def test_stages_that_cannot_be_are_refused(text: Path, tmp_path: Path, stages: Any, told: str) -> None:
    with pytest.raises(KinformerError, match=told):
        run(text, tmp_path / "run", stages=stages)
    assert not (tmp_path / "run").exists()


def test_stages_count_steps_and_are_rows_of_data(text: Path, tmp_path: Path) -> None:
    with pytest.raises(KinformerError, match="`?stages`? count steps"):
        run(text, tmp_path / "run", steps=None, minutes=1.0)
    with pytest.raises(KinformerError, match="makes its rows by acting"):
        kinformer.train(
            "gtrxl", task="control", out=tmp_path / "run", recipe="tiny", steps=8, stages=[{"steps": 2}, {}]
        )


def test_the_language_model_of_longformer_in_its_phases() -> None:
    """The paper's sizes: 41 million parameters (table 2); windows of 32 to 8192 keys at first, and rows from 2,048 to
    23,040."""
    config: Any = configure("local", "paper-longformer")
    stages = stages_of(Settings(**MEMBERS["local"].training["paper-longformer"]))
    assert [stage.settings.length for stage in stages] == [2048, 4096, 8192, 16384, 23040]
    assert [stage.settings.lr * 2**stage.number for stage in stages] == [2.5e-4] * 5
    assert [stage.settings.warmup for stage in stages] == [10_000, 5000, 5000, 3500, 500]
    models: Any = [config_of(config, stages[0]), config]
    windows = [[layer.mixer.pattern.window for layer in model.layers] for model in models]
    assert windows[0][0] == 32 and windows[0][-1] == 8192 and windows[1][0] == 512
    assert sorted(windows[0]) == windows[0]
    assert config.layers[0].mixer.pattern.kind == "local"
    assert config.layers[-1].mixer.pattern.dilations == (1,) * 6 + (4,) * 2
    assert abs(sum(map(prod, weight_shapes(config).values())) / 41e6 - 1) < 0.02
