"""The task dino: the published loss, a teacher that follows, views; a pyramid learns level by level."""

import json

import numpy as np
import pytest
import torch

import kinformer
from kinformer.family.build import configure
from kinformer.lab.cli.main import main
from kinformer.lab.tasks.dino import (
    DinoBatch,
    DinoRows,
    Pieces,
    Prototypes,
    SelfDistillation,
    grids,
    nearest_classes,
    vectors_of,
    view_nats,
    views_of_features,
    views_of_pixels,
)
from kinformer.lab.tasks.images import ASPECTS, box, keep_features
from kinformer.lab.tasks.options import DinoOptions
from kinformer.lab.tasks.table import TASKS
from kinformer.lab.tasks.task import TrainingPlan
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors

SMALL = {"recipe": "tiny", "batch_size": 8, "threads": 1, "device": "cpu", "quiet": True}
FEW = {"prototypes": 16, "local_views": 2}
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def one(tmp_path_factory, cache):
    out = tmp_path_factory.mktemp("one") / "run"
    return kinformer.train("hipt", task="dino", out=out, steps=4, lr=3e-3, teacher_momentum=0.5, **FEW, **SMALL)


@pytest.fixture(scope="module")
def two(tmp_path_factory, one):
    out, more = tmp_path_factory.mktemp("two") / "run", {"level": 2, "teacher_momentum": 0.5}
    return kinformer.train("hipt", task="dino", init=one.folder, out=out, steps=4, lr=3e-3, **more, **FEW, **SMALL)


def batch(images):
    return DinoBatch(images, torch.ones(len(images), 4, dtype=torch.bool))


def test_the_loss_is_the_published_one():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(n, 3, 5, generator=generator, dtype=torch.float64) for n in (6, 2))
    centre = torch.randn(5, generator=generator, dtype=torch.float64)
    nats, entropy = view_nats(student, teacher, centre, 0.07)
    for row in range(3):
        terms, entropies = [], []
        for i in range(2):
            p = ((teacher[i, row] - centre) / 0.07).exp()
            p = p / p.sum()
            entropies.append(-sum(share * share.log() for share in p))
            for j in range(6):
                if i != j:
                    q = (student[j, row] / 0.1).exp()
                    terms.append(-sum(share * (each / q.sum()).log() for share, each in zip(p, q, strict=True)))
        assert len(terms) == 10 and nats[row].item() == pytest.approx(sum(terms).item() / 10, rel=1e-12)
        assert entropy[row].item() == pytest.approx(sum(entropies).item() / 2, rel=1e-12)


@pytest.mark.parametrize("level", [1, 2])
def test_the_teacher_is_the_running_mean_of_the_student(level):
    model = configure("hipt", "tiny").build()
    objective = SelfDistillation(model, DinoOptions(level=level, prototypes=7, local_views=1)).train()
    values = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8) if level == 1 else torch.rand(6, 16, 2, 2)
    loss, metrics, _ = objective(model, batch(values), None, 0.5)
    loss.backward()
    assert metrics["predicted"] == 6 and metrics["nats"].item() == pytest.approx(6 * loss.item(), rel=1e-5)
    assert all(weight.grad is not None for weight in objective.parameters() if weight.requires_grad)
    assert all(weight.grad is None for weight in model.parameters())
    teacher = model.input.lower[level - 1]
    with torch.no_grad():
        for weight in objective.student.parameters():
            weight.add_(1)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    told = objective.teacher_sums.clone()
    objective.learn(lambda total: total)
    share = (1 - 0.996) / 2  # half-way of the cosine from 0.996 to 1
    own = {id(weight) for name, weight in teacher.named_parameters() if "encoder" not in name}
    for name, weight in model.named_parameters():
        assert torch.allclose(
            weight - before[name], torch.full_like(weight, share if id(weight) in own else 0), atol=1e-6
        )
    assert torch.allclose(objective.centre, 0.1 * told[:-1] / 12) and objective.teacher_sums is None


def test_what_is_measured_does_not_depend_on_draws():
    model = configure("vit", "tiny").build().eval()
    objective = SelfDistillation(model, DinoOptions(**FEW)).eval()
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    losses = [objective(model, batch(images), None, 1.0)[0].item() for _ in range(2)]
    assert losses[0] == losses[1]


def test_views():
    assert grids((16, 16)) == ((14, 14), (6, 6)) and grids((4, 2)) == ((3, 2), (2, 1))
    images = torch.rand(3, 3, 32, 24, generator=torch.Generator().manual_seed(0))
    for flips in (False, True):
        drawn = [views_of_pixels(images, 4, 2, flips, torch.Generator().manual_seed(1)) for _ in range(2)]
        assert [tuple(view.shape) for view in drawn[0]] == [(3, 3, 28, 20)] * 2 + [(3, 3, 12, 8)] * 2
        assert all(torch.equal(*pair) for pair in zip(*drawn, strict=True))
        assert all(torch.equal(view, view.clamp(0, 1)) for view in drawn[0])
        assert not torch.allclose(drawn[0][0], drawn[0][1])
    black = views_of_pixels(torch.zeros(64, 1, 8, 8), 2, 1, False, torch.Generator().manual_seed(1))
    assert set(black[1].unique().tolist()) == {0.0}, "only what is bright is solarised"


def test_a_crop_shows_the_share_that_was_asked_for():
    ramp = torch.linspace(0, 1, 64).expand(200, 1, 64, 64)
    for least, most in ((0.4, 1.0), (0.8, 0.9)):
        view = box(ramp, (16, 16), (least, most), ASPECTS, torch.Generator().manual_seed(0))
        across = 16 / 15 * (view[:, 0, 0, -1] - view[:, 0, 0, 0])
        assert (least * 0.75) ** 0.5 - 0.02 < across.min() < (most * 4 / 3) ** 0.5 and across.max() < 1.05
        assert across.min() < least**0.5 and torch.allclose(view[:, :, 0], view[:, :, -1], atol=1e-4)


def test_a_narrow_head_tells_images_apart_from_the_beginning():
    torch.manual_seed(0)
    assert Prototypes(8, 16).layers(torch.randn(50, 8)).std(0).mean() > 0.05


def test_views_of_features_are_boxes_of_them():
    features = torch.arange(16.0).view(1, 1, 4, 4).repeat(50, 1, 1, 1)
    large, _, small = views_of_features(features, 1, False, torch.Generator().manual_seed(0))
    assert large.shape == (50, 1, 3, 3) and small.shape == (50, 1, 2, 2)
    offsets = torch.tensor([[0, 1], [4, 5]])
    assert torch.equal(small[:, 0], small[:, 0, :1, :1] + offsets)
    assert set(small[:, 0, 0, 0].tolist()) == {0, 1, 2, 4, 5, 6, 8, 9, 10}
    turned = views_of_features(features, 1, True, torch.Generator().manual_seed(0))[2][:, 0]
    assert {(row[0, 1] - row[0, 0]).item() for row in turned} == {-1, 1}


def test_pieces_are_the_grid_of_an_image(digits):
    pieces = Pieces(digits.train, (3, 5))
    assert pieces.grid == (3, 2) and len(pieces) == 6 * len(digits.train)
    whole = torch.zeros(9, 10, dtype=torch.uint8)
    whole[:8, :8] = torch.from_numpy(np.array(digits.train.pixels[4, :, :, 0]))
    found = pieces.take(np.arange(24, 30))
    assert torch.equal(found.view(3, 2, 3, 5).transpose(1, 2).reshape(9, 10), whole)


def rows(data, config, **options):
    settings = Settings(batch_size=8, length=4, seed=3)
    return DinoRows(TrainingPlan(config, data, settings, DinoOptions(**options), None))


def test_processes_share_the_rows_and_an_epoch_has_each_piece_once(digits, one):
    module = rows(digits, one.config)
    assert module.batch(0, 0, 1).values.shape == (8, 1, 2, 2) and len(module.pieces["train"]) == 16 * len(digits.train)
    for step in (0, 5):
        parts = [module.batch(step, rank, 2).values for rank in range(2)]
        assert torch.equal(module.batch(step, 0, 1).values, torch.cat(parts))
    held = [each.values for rank in range(2) for each in module.validation(rank, 2)]
    assert sum(map(len, held)) == module.held_out == 256


def test_features_of_frozen_levels_are_computed_once(digits, two, monkeypatch):
    model, module = kinformer.load(two.folder), rows(digits, two.config, level=2)
    TASKS["dino"].objective(None, model, module)
    input = model.input.lower[1].input
    first = module.batch(0, 0, 1).values
    assert torch.allclose(first, input.features(rows(digits, two.config, level=2).batch(0, 0, 1).values), atol=1e-6)
    monkeypatch.setattr(type(input), "features", None)
    assert torch.equal(module.batch(0, 0, 1).values, first)
    assert keep_features(configure("vit", "tiny").build().input, False) is None
    assert keep_features(configure("hipt", "tiny", set={"input.frozen": False}).build().input, False) is None
    assert keep_features(model.input, True) is None


def test_a_pyramid_learns_level_by_level(one, two, tmp_path):
    first, second = (load_tensors(run.folder / "model.safetensors")[0] for run in (one, two))
    assert two.config == one.config and two.options.level == 2
    lowest = "input.encoder.input.encoder."
    assert all(torch.equal(first[name], second[name]) for name in first if name.startswith((lowest, "stack", "head")))
    moved = "input.encoder.stack.layers.0.mixer.projection.qkv.weight"
    assert not torch.equal(first[moved], second[moved]) and first.keys() == second.keys()
    top = kinformer.train("hipt", init=two.folder, out=tmp_path / "top", steps=2, lr=3e-3, **SMALL)
    last = load_tensors(top.folder / "model.safetensors")[0]
    assert top.task.name == "vision" and all(
        torch.equal(second[name], last[name]) for name in last if "encoder." in name
    )
    assert not torch.equal(second["head.dense.weight"], last["head.dense.weight"])
    mean = {"head.pooling": "mean", "input.frozen": False}
    other = kinformer.train("hipt", init=two.folder, set=mean, out=tmp_path / "mean", steps=2, lr=3e-3, **SMALL)
    last = load_tensors(other.folder / "model.safetensors")[0]
    assert not torch.equal(second[moved], last[moved]) and "head.gate.score.weight" not in last


def test_frozen_parameters_that_begin_at_random_are_told(tmp_path, one, capsys):
    flags = ["--recipe", "tiny", "--batch-size", "4", "--steps", "1", "--threads", "1", "--validate-every", "0"]
    for number, (more, told) in enumerate(
        [((), True), (("--init", str(one.folder)), False), (("--task", "dino"), False)]
    ):
        assert main(["train", "hipt", *flags, *more, "--out", str(tmp_path / str(number))]) == 0
        assert ("frozen at random values: " in capsys.readouterr().err) == told


def test_a_resumed_run_ends_with_the_same_bits(tmp_path, one):
    options = (
        SMALL | FEW | {"task": "dino", "level": 2, "init": one.folder, "checkpoint_every": 2, "keep": 3, "steps": 4}
    )
    whole, cut = (kinformer.train("hipt", out=tmp_path / name, **options) for name in ("whole", "cut"))
    newest = max((cut.folder / "checkpoints").iterdir())
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    again = kinformer.train("hipt", out=tmp_path / "cut", resume=True, quiet=True)
    newest = [max((each.folder / "checkpoints").iterdir()) for each in (whole, again)]
    for file in ("model", "objective", "optimizer"):
        ends = [load_tensors(folder / f"{file}.safetensors")[0] for folder in newest]
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]) and ends[0].keys() == ends[1].keys()


def test_it_is_measured_by_the_nearest_images(two, digits, capsys):
    found = kinformer.evaluate(two.folder, first=50, nearest=5)
    assert list(found.metrics) == ["accuracy"] and found.facts["measured_images"] == 50 and found.facts["level"] == 2
    model = kinformer.load(two.folder)
    known, vectors = (vectors_of(model, 2, part, 50) for part in (digits.train, digits.test))
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(50))
    labels = torch.from_numpy(np.array(digits.train.labels[:50]))
    guesses = nearest_classes(vectors, known, labels, 3, 10)
    for vector, guess in zip(vectors, guesses, strict=True):
        votes = [0.0] * 10
        for index in sorted(range(50), key=lambda index: -float(vector @ known[index]))[:3]:
            votes[labels[index]] += float((vector @ known[index] / 0.07).exp())
        assert guess == max(range(10), key=votes.__getitem__)
    assert main(["evaluate", str(two.folder), "--first", "20", "--nearest", "1"]) == 0
    assert "by the 1 nearest training images, by vectors of level 2: 20 images" in capsys.readouterr().out


def test_images_without_labels(tmp_path, capsys):
    data = tmp_path / "grey.npz"
    np.savez(data, images=np.random.default_rng(0).integers(256, size=(40, 8, 8), dtype=np.uint8))
    flags = ["--recipe", "tiny", "--batch-size", "4", "--steps", "2", "--threads", "1", "--prototypes", "8", "--flip"]
    out = tmp_path / "run"
    assert main(["train", "vit", "--task", "dino", "--data", str(data), *flags, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    assert main(["evaluate", str(out)]) == 2
    assert "its images do not have labels" in capsys.readouterr().err
    assert main(["generate", str(out)]) == 2
    assert "train it on for the task vision" in capsys.readouterr().err


def test_what_does_not_go_together(tmp_path):
    for member, options, told in (
        ("hipt", {"level": 3}, "level 3: this model has 2 levels"),
        ("vit", {"level": 2}, "level 2: this model has 1 level"),
        ("deit", {}, '"head": "distilled".: views are compared by one vector'),
        ("vit", {"set": {"head.pooling": "gated"}}, "views are compared by one vector"),
        ("vit", {"prototypes": 1}, "prototypes"),
        ("vit", {"area": 1.5}, "area is 1.5"),
        ("vit", {"teacher_momentum": 1.5}, "teacher_momentum is 1.5"),
        ("vit", {"teacher_temperature": 0.0}, "teacher_temperature is 0"),
        ("bert", {}, "bert is an encoder"),
    ):
        with pytest.raises(KinformerError, match=told):
            kinformer.train(member, task="dino", out=tmp_path / "run", steps=1, **SMALL | options)
        assert not (tmp_path / "run").exists()
