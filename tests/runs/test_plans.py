"""What is trained where nothing but a member is named: its recipe, the usual task, and a length that both allow."""

import re
from dataclasses import replace

import pytest
import torch

from kinformer.family.build import configure
from kinformer.family.table import MEMBERS
from kinformer.lab.comparison.options import CompareOptions
from kinformer.lab.comparison.plan import base_of, contestants, entrants, with_length
from kinformer.lab.comparison.training import command_of
from kinformer.lab.runs.options import TrainOptions
from kinformer.lab.runs.planner import Planner, checked, open_planner, planner_for, training_of_paper
from kinformer.lab.tasks.table import options_for, task_for
from kinformer.lab.training.data_module import ObjectiveModule
from kinformer.lab.training.distributed import Group
from kinformer.lab.training.schedule import stages_of
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError, spelled

FOR_IMAGES = {("image-transformer", "tiny-2d"), ("image-transformer", "small-2d")}
"""Recipes whose usual task is next-token, but whose pattern is for images: they name the task to give."""
NEED_DATA = {"classify", "trajectories"}
SEPARATE = {"stack": {"kind": "exits", "classifiers": "separate"}, "head.tied": False}


@pytest.fixture(scope="module")
def opened(cache, text_file, tmp_path_factory):
    """The planner of a task on its usual data, or on a text of as many bytes as the longest row, opened once."""
    planners = {}
    book = tmp_path_factory.mktemp("text") / "words.txt"
    book.write_bytes(text_file.read_bytes() * 12)

    def planner(options, task) -> Planner:
        spec = str(book) if task.data.default == "stdlib" else task.data.default
        if task.name not in planners:
            vocabulary = {"train_tokenizer": 300} if task.data.tokenized and task.name == "translate" else {}
            planners[task.name] = planner_for(replace(options, **vocabulary), task, spec)
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
        longest = MEMBERS[name].training.get(recipe, {}).get("length", 512)
        assert plan.settings.length == decided if decided else plan.settings.length <= longest


@pytest.mark.parametrize("name", [name for name, record in MEMBERS.items() if record.training])
def test_a_papers_training_is_options_of_its_recipes(name):
    record = MEMBERS[name]
    for recipe, training in record.training.items():
        task = task_for(record.task, configure(name, recipe), name)
        settings, of_task = training_of_paper(TrainOptions(member=name, recipe=recipe, out="nowhere"), task)
        assert recipe in record.recipes and settings | of_task == training
        assert vars(Settings(**settings)).items() >= settings.items()
        assert vars(options_for(task, "Options", of_task)).items() >= of_task.items()


@pytest.mark.parametrize("name", MEMBERS)
def test_every_recipe_of_a_paper_brings_its_training_or_says_so(name):
    record = MEMBERS[name]
    told = {
        recipe
        for departure in map(spelled, record.departures)
        if (match := re.fullmatch(r"the recipe (.*) is trained by the usual settings: .*", departure))
        for recipe in match[1].split(", ")
    }
    papers = {recipe for recipe in record.recipes if recipe.startswith("paper")}
    assert papers - record.training.keys() == told


@pytest.mark.parametrize("name", MEMBERS)
def test_a_training_that_is_not_confirmed_exists(name):
    record = MEMBERS[name]
    for departure in map(spelled, record.departures):
        if match := re.fullmatch(r".* of the recipe (.*) is not confirmed against the paper", departure):
            assert set(match[1].split(", ")) <= record.training.keys()


@pytest.mark.parametrize(
    ("name", "recipe", "last"),
    [
        ("swin", "paper", 1e-5),
        ("deit", "paper-384", 5e-6),
        ("convformer", "paper", 1e-5),
        ("compressive", "paper", 1e-6),
        ("adaptive-span", "paper", 0.07),
        ("adaptive-span", "paper-large", 0.007),
        ("sha-rnn", "paper", 1e-3),
        ("big-bird", "paper", 0.0),
    ],
)
def test_the_learning_rate_ends_as_in_the_authors_code(name, recipe, last):
    settings = stages_of(
        Settings(**{key: value for key, value in MEMBERS[name].training[recipe].items() if hasattr(Settings, key)})
    )[-1].settings
    ends = settings.lr if settings.schedule == "constant" else settings.lr * settings.min_lr_ratio
    assert ends == pytest.approx(last)


def test_a_recipe_of_a_paper_brings_its_augmentation():
    """DeiT's recipe changes images as in its table 9, unless another task trains it or options say otherwise."""

    def planned(task, **more):
        options = TrainOptions(member="deit", recipe="paper", task=task, data="digits", out="nowhere", **more)
        return open_planner(options)[1].task_options

    assert planned("vision").items() >= {"smoothing": 0.1, "repeats": 3}.items()
    assert planned("vision", task_options={"repeats": 1})["repeats"] == 1
    assert "augment" not in planned("mae")
    with pytest.raises(KinformerError, match=r"repeats 3: .* augment changes none; give that too, or repeats 1\.$"):
        planned("vision", task_options={"augment": "none"})


def test_the_stages_of_dsa_have_constant_rates_from_their_first_step():
    stages = stages_of(Settings(**MEMBERS["dsa"].training["paper"]))
    assert [(stage.settings.schedule, stage.settings.warmup) for stage in stages] == [("constant", 0)] * 2


def test_a_recipe_is_trained_as_in_its_paper_unless_set_otherwise(opened):
    def settings(**given):
        options = TrainOptions(member="bert", out="nowhere", **given)
        return opened(options, task_for(None, configure("bert"), "bert")).plan(options).settings

    plain, paper = settings(), settings(recipe="paper")
    assert (plain.lr, plain.schedule, plain.steps, plain.weight_decay) == (1e-3, "cosine", 1000, 0.1)
    training = MEMBERS["bert"].training["paper"]
    assert vars(paper) == vars(plain) | training
    changed = settings(recipe="paper", lr=3e-4, warmup=0.05, steps=7)
    assert vars(changed) == vars(paper) | {
        "lr": 3e-4, "warmup": 0.05, "steps": 7, "validation_tokens": changed.validated(),
    }  # fmt: skip
    assert (timed := settings(recipe="paper", minutes=3.0)).steps is None and timed.lr == 1e-4


def test_a_comparison_trains_alike_whatever_the_papers_did(text_file, tmp_path):
    options = CompareOptions(recipe="paper-t12", data=str(text_file), length=64, out=str(tmp_path / "out"))
    (contestant,) = contestants(entrants(("deep-char",), {}), options)
    assert contestant.error is None
    settings = contestant.base.settings()
    assert (settings.schedule, settings.warmup, settings.weight_decay, settings.momentum) == ("cosine", 0.05, 0.1, 0.9)


def test_a_comparison_has_no_stages():
    (entrant,) = entrants(("local",), {})
    options = CompareOptions(recipe="paper-longformer", length=64)
    base = base_of(entrant, options, task_for(None, configure("local", "tiny"), "local"))
    assert base.settings().stages == () and "training.stages=[]" in command_of(base)


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


def gradients_of(planner, task, options):
    """A step's batch through model and objective, backwards: the gradient of every weight that is trained."""
    plan = checked(planner.plan(options), task, Group(torch.device("cpu")))
    torch.manual_seed(0)
    model = plan.config.build().train()
    data = task.data_module(plan)
    data.begin(model, {})
    module = ObjectiveModule(model, task.objective(plan.settings.objective, model, data), "fp32").train()
    module(data.batch(0, 0, 1), None, 0.5)[0].backward()
    return {key: weight.grad for key, weight in module.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("name", MEMBERS)
def test_every_weight_learns_in_a_step_of_its_task(opened, name):
    options = TrainOptions(member=name, recipe="tiny", out="nowhere", batch_size=2)
    task = task_for(None, configure(name, "tiny"), name)
    if task.data.default is None:
        assert task.name in NEED_DATA
        return
    missing = [key for key, gradient in gradients_of(opened(options, task), task, options).items() if gradient is None]
    assert not missing


@pytest.mark.parametrize("name", ["tensorized", "gpt"])
def test_every_remedy_for_rows_that_are_too_long_works(opened, name):
    task = task_for(None, configure(name, "tiny"), name)

    def planned(length, **changes):
        options = TrainOptions(member=name, recipe="tiny", out="nowhere", length=length, set=changes)
        return checked(opened(options, task).plan(options), task, Group(torch.device("cpu")))

    with pytest.raises(KinformerError) as refused:
        planned(500)
    shorter = re.search(r"give `length` (\d+) or less", refused.value.message)
    changes = dict(re.findall(r"`set` ([\w.*]+)=(\d+)", refused.value.message))
    assert planned(int(shorter[1])).settings.length == int(shorter[1])
    assert changes and planned(500, **{path: int(value) for path, value in changes.items()}).settings.length == 500


def test_a_remedy_for_an_odd_width_works():
    with pytest.raises(KinformerError, match=r"give an even one, or set=\{\"layers.\*.mixer.positions\": False\}"):
        configure("tensorized", "tiny", set={"dim": 33}).build()
    configure("tensorized", "tiny", set={"dim": 33, "layers.*.mixer.positions": False}).build()


@pytest.mark.parametrize(
    ("name", "task", "changes", "sentence"),
    [
        ("vanilla", None, SEPARATE, "give objective exits"),
        ("gpt", None, SEPARATE, "give objective exits"),
        ("gpt", "recall", SEPARATE, "recall has none that trains them"),
    ],
)
def test_exits_that_nothing_would_train_are_refused(opened, name, task, changes, sentence):
    options = TrainOptions(member=name, recipe="tiny", out="nowhere", task=task, set=changes)
    record = task_for(task, configure(name, "tiny"), name)
    with pytest.raises(KinformerError, match=sentence):
        checked(opened(options, record).plan(options), record, Group(torch.device("cpu")))


def test_the_losses_of_exits_train_all_their_weights(opened):
    options = TrainOptions(member="gpt", recipe="tiny", out="nowhere", batch_size=2, set=SEPARATE, objective="exits")
    task = task_for(None, configure("gpt", "tiny"), "gpt")
    gradients = gradients_of(opened(options, task), task, options)
    assert any(key.startswith("model.exit_heads") for key in gradients)
    assert not [key for key, gradient in gradients.items() if gradient is None]
