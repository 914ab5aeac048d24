"""What is trained where nothing but a member is named: its recipe, the usual task, and a length that both allow."""

import pytest
import torch

from kinformer.comparison.entrants import entrants
from kinformer.comparison.options import CompareOptions
from kinformer.comparison.plan import contestants, with_length
from kinformer.family.build import configure
from kinformer.family.table import MEMBERS
from kinformer.runs.create import checked
from kinformer.runs.options import TrainOptions
from kinformer.runs.planning import Planner, planner_for
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.table import task_for
from kinformer.training.distributed import Group

FOR_IMAGES = {("image-transformer", "tiny-2d"), ("image-transformer", "small-2d")}
"""Recipes whose usual task is next-token, but whose pattern is for images: they name the task to give."""
NEED_DATA = {"classify", "trajectories"}


@pytest.fixture(scope="module")
def opened(cache, text_file):
    """The planner of a task on its usual data, or on a small text, opened once."""
    planners = {}

    def planner(options, task) -> Planner:
        spec = str(text_file) if task.data.default == "stdlib" else task.data.default
        if task.name not in planners:
            planners[task.name] = planner_for(options, task, spec)
        return planners[task.name]

    return planner


@pytest.mark.parametrize("name", MEMBERS)
def test_every_recipe_fits_the_usual_length_and_rows(opened, name):
    for recipe in MEMBERS[name].recipes:
        options = TrainOptions(member=name, recipe=recipe, out="nowhere")
        task = task_for("image" if (name, recipe) in FOR_IMAGES else None, configure(name, recipe), name)
        if task.data.default is None:
            assert task.name in NEED_DATA
            continue
        plan = checked(opened(options, task).plan(options), task, Group(torch.device("cpu")))
        decided = task.length(plan.data, plan.config)
        assert plan.settings.length == decided if decided else plan.settings.length <= 512


def test_a_recipe_for_images_says_so(opened):
    options = TrainOptions(member="image-transformer", recipe="tiny-2d", out="nowhere")
    task = task_for(None, configure("image-transformer", "tiny-2d"), "image-transformer")
    with pytest.raises(KinformerError, match="draw images with task image, or choose"):
        checked(opened(options, task).plan(options), task, Group(torch.device("cpu")))


def test_a_comparison_takes_a_length_for_all(text_file, tmp_path):
    options = CompareOptions(data=str(text_file), recipe="tiny", out=str(tmp_path / "out"))
    lengths = {name: with_length(entrants((name,), {}), options).length for name in ("gpt", "linear-transformer")}
    members = entrants(("linear-transformer", "gpt"), {})
    chosen = with_length(members, options)
    assert chosen.length == min(lengths.values()) < lengths["linear-transformer"] == 256
    for contestant in contestants(members, chosen):
        assert contestant.error is None and contestant.base.length == chosen.length
    assert with_length(members, CompareOptions(length=16)).length == 16
