"""Distillation: what a teacher says, learnt as a class or as probabilities, by a token of its own or not."""

import pytest
import torch
from torch.nn import functional

import kinformer
from kinformer.core.encoder import SequenceContext
from kinformer.family.build import configure
from kinformer.lab.runs.rows import teacher_of
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.options import VisionOptions
from kinformer.lab.tasks.vision import Distillation, ImageBatch, ImageClassification
from kinformer.mixers.convolutions import SeparableConvolution
from kinformer.runtime.errors import KinformerError

SMALL = {"recipe": "tiny", "batch_size": 16, "threads": 1, "device": "cpu", "quiet": True}
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, cache):
    return kinformer.train("convformer", out=tmp_path_factory.mktemp("teacher") / "run", steps=40, lr=3e-3, **SMALL)


def batch(rows=6):
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(rows, 3, 32, 32, generator=generator), torch.randint(10, (rows,), generator=generator)
    return ImageBatch(images, labels, torch.ones(rows, 1))


def losses(student, options):
    """The objective's loss, and student's and teacher's logits."""
    teacher, model, data = (
        kinformer.build("convformer", recipe="tiny").eval(),
        kinformer.build(student, recipe="tiny").train(),
        batch(),
    )
    loss, metrics, _ = Distillation(teacher, options)(model, data, None, 0.0)
    assert metrics["predicted"] == 6
    return loss, model(data.images), teacher(data.images), data.labels


@pytest.mark.parametrize("student", ["deit", "vit"])
def test_hard(student):
    loss, logits, told, labels = losses(student, VisionOptions(teacher="x", distillation_weight=0.3))
    first, second = logits.unbind(1) if student == "deit" else (logits, logits)
    want = 0.7 * functional.cross_entropy(first, labels) + 0.3 * functional.cross_entropy(second, told.argmax(-1))
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize("student", ["deit", "vit"])
def test_soft(student):
    options = VisionOptions(teacher="x", distillation="soft", distillation_weight=0.9, distillation_temperature=2.0)
    loss, logits, told, labels = losses(student, options)
    first, second = logits.unbind(1) if student == "deit" else (logits, logits)
    p = (told / 2).softmax(-1)
    divergence = (p * (p.log() - (second / 2).log_softmax(-1))).sum(-1).mean()
    want = 0.1 * functional.cross_entropy(first, labels) + 0.9 * 4 * divergence
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)


def test_the_teacher_is_asked_in_training_alone():
    model, data = kinformer.build("deit", recipe="tiny").eval(), batch()
    plain, told = (
        each(model, data, None, 1.0) for each in (ImageClassification(), Distillation(None, VisionOptions()))
    )
    assert plain[0].item() == pytest.approx(told[0].item(), rel=1e-6)
    assert plain[0].item() == pytest.approx(functional.cross_entropy(model(data.images), data.labels).item(), rel=1e-5)


def test_two_heads_in_training_and_their_mean_elsewhere():
    model, images = kinformer.build("deit", recipe="tiny"), torch.rand(2, 3, 32, 32)
    both = model.train()(images)
    assert both.shape == (2, 2, 10)
    assert torch.allclose(model.eval()(images), both.mean(1), atol=1e-6)


def test_a_student_learns_from_a_run(teacher, tmp_path):
    run = kinformer.train("deit", teacher=teacher.folder, out=tmp_path / "run", steps=2, **SMALL)
    assert run.options.teacher == str(teacher.folder.resolve())
    assert all(not parameter.requires_grad for parameter in teacher_of(open_run(run.folder)).parameters())
    again = kinformer.train("deit", out=tmp_path / "run", resume=True, steps=3, quiet=True)
    assert again.options == run.options


def test_teachers_that_cannot_teach(teacher, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"some text " * 400)
    other = kinformer.train("gpt", data=str(text), out=tmp_path / "gpt", steps=1, length=8, **SMALL)
    for options, told in (
        ({"teacher": other.folder}, "is a run of the task next-token; give one of vision"),
        ({"teacher": tmp_path / "nothing"}, "nothing"),
        ({"teacher": teacher.folder, "distillation_temperature": 2.0}, "does nothing without distillation soft"),
        ({"distillation": "soft"}, "does nothing without teacher RUN"),
        ({"teacher": teacher.folder, "distillation_weight": 2.0}, "must lie between 0 and 1"),
    ):
        with pytest.raises(KinformerError, match=told):
            kinformer.train("deit", out=tmp_path / "run", steps=1, **SMALL, **options)


def test_a_separable_convolution_is_the_one_of_the_grid():
    mixer = SeparableConvolution.Config(kernel=3).build(4).double()
    x = torch.randn(2, 15, 4, dtype=torch.float64)
    wide = (x @ mixer.up.weight.T).relu().square().view(2, 3, 5, 8)
    want = torch.zeros(2, 3, 5, 8, dtype=torch.float64)
    for row in range(3):
        for column in range(5):
            for down in range(-1, 2):
                for across in range(-1, 2):
                    if 0 <= row + down < 3 and 0 <= column + across < 5:
                        kernel = mixer.depthwise.weight[:, 0, down + 1, across + 1]
                        want[:, row, column] += kernel * wide[:, row + down, column + across]
    assert torch.allclose(mixer(x, SequenceContext(grid=(3, 5))), want.flatten(1, 2) @ mixer.down.weight.T)


def test_what_mixes_images_reads_nothing_else():
    for member, told in (("bert", "is for the patches of images"), ("vit", "class_token = false")):
        with pytest.raises(KinformerError, match=told):
            configure(member, "tiny", set={"layers.*.mixer": "separable_convolution"}).build()
    with pytest.raises(KinformerError, match="kernel must be an odd number"):
        SeparableConvolution.Config(kernel=4)
    with pytest.raises(KinformerError, match="reads a distillation token"):
        configure("vit", "tiny", set={"head": {"kind": "distilled", "classes": 3}}).build()
