"""What a run shows of itself: samples during training, the page report.html, and its curve as a picture."""

import json
import re
import shutil

import pytest
import torch

import kinformer
from kinformer.lab.runs.report import Reporter, ticks
from kinformer.lab.runs.run import open_run
from kinformer.lab.training.logging import BITS_PER_BYTE, METRICS, Smoothing, history_of
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors

SMALL = {"recipe": "tiny", "steps": 6, "length": 16, "batch_size": 2, "device": "cpu", "validate_every": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text_file):
    """Two runs of the same data, whose name is HTML: without samples, and with samples."""
    folder = tmp_path_factory.mktemp("report")
    data = folder / "<b>&words.txt"
    data.write_bytes(text_file.read_bytes())
    options = {"data": data, **SMALL}
    return [kinformer.train("rope", out=folder / name, **options, **more) for name, more in (
        ("plain", {}), ("sampled", {"sample_every": 3})
    )]  # fmt: skip


def test_samples_are_logged_and_change_nothing(runs):
    plain, sampled = runs
    rows = [json.loads(line) for line in (sampled.folder / METRICS).read_text().splitlines()]
    samples = [row for row in rows if "sample" in row]
    assert [row["step"] for row in samples] == [3, 6]
    assert all(letter.isprintable() or letter == "\n" for row in samples for letter in row["sample"])
    weights = [load_tensors(run.folder / "model.safetensors")[0] for run in runs]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_the_page_holds_the_run_and_needs_nothing_else(runs):
    plain, sampled = runs
    page = (sampled.folder / "report.html").read_text()
    assert "<h1>rope (tiny) on &lt;b&gt;&amp;words.txt</h1>" in page and "<b>" not in page
    assert str(sampled.folder.parent) not in page and not re.search(r"(src|href)=.?(http|/)", page)
    assert page.count('class="pt"') == 3 and "best validation" in page and "<h2>Samples</h2>" in page
    assert ':root[data-theme="dark"]' in page and "most memory of the process" in page
    assert "<h2>Samples</h2>" not in (plain.folder / "report.html").read_text()


def test_a_log_of_strangers_opens_no_file_and_ends_no_training(runs, tmp_path):
    folder = shutil.copytree(runs[0].folder, tmp_path / "run")
    (tmp_path / "secret").write_bytes(b"secret")
    rows = [{"step": 6, "sample": "text", "image": "../secret"}, {"step": "7", "sample": "words"}, {"step": True}]
    rows.append({"step": 6, "bits_per_byte": 10**400})
    with (folder / METRICS).open("a") as log:
        log.writelines(json.dumps(row) + "\n" for row in rows)
    run = open_run(folder)
    Reporter(run, run.model(), [BITS_PER_BYTE], torch.device("cpu")).write()
    page = (folder / "report.html").read_text()
    assert "<pre>text</pre>" in page and "<pre>words</pre>" not in page and "data:image" not in page


def test_axes_have_round_numbers():
    assert [text for _, text in ticks(0, 437, least=1)] == ["0", "100", "200", "300", "400"]
    assert [text for _, text in ticks(0, 3, least=1)] == ["0", "1", "2", "3"]
    assert [text for _, text in ticks(1.234, 1.391)] == ["1.25", "1.30", "1.35"]
    assert ticks(-7.1, 25.0) == [(-0.0, "0"), (10, "10"), (20, "20")]


def test_the_curve_is_drawn(cli, runs, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = cli("draw", runs[0].folder, "--curve", "--out", tmp_path / "curve.svg", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["metric"] == "bits_per_byte" and len(facts["validation"]) == 3
    assert "validation" in (tmp_path / "curve.svg").read_text()
    with pytest.raises(KinformerError, match="is not a run folder"):
        kinformer.draw("gpt", curve=True, out=tmp_path / "no.png")


@pytest.fixture
def gpt_log(tmp_path):
    (tmp_path / METRICS).write_text(
        '{"step": 1, "bits_per_byte": 4.0}\n{"step": 2, "bits_per_byte": NaN}\n'
        '{"step": 3, "bits_per_byte": 2.0, "validation_bits_per_byte": 3.0}\n{"step": 4, "sample": "a"}\n{"ste'
    )
    return tmp_path


def test_training_is_smoothed(gpt_log):
    history = history_of(gpt_log, [BITS_PER_BYTE])
    assert history.steps == 4 and history.validation == [(3, 3.0)] and history.samples[0]["sample"] == "a"
    assert history.training == [(1, 4.0), (3, pytest.approx((0.8 * 4 + 2) / 1.8))]
    assert Smoothing()({"loss": 1.0, "return": float("nan")})["loss"] == 1.0


@pytest.mark.parametrize(
    ("member", "options", "told"),
    [
        ("bert", {}, "sample_every 3: the task mlm does not generate samples"),
        ("gpt", {"task": "recall"}, "sample_every 3: the task recall does not generate samples"),
        ("gpt", {"devices": 2}, "sample_every 3: one process draws samples"),
    ],
)
def test_what_has_no_samples_is_refused(member, options, told, text_file, tmp_path):
    data = {} if "task" in options else {"data": text_file}
    with pytest.raises(KinformerError, match=told):
        kinformer.train(member, out=tmp_path / "run", sample_every=3, **SMALL, **data, **options)


@pytest.mark.parametrize("member", ["image-transformer", "vit"])
def test_images_are_drawn_or_classified(member, tmp_path):
    task = "image" if member == "image-transformer" else "vision"
    sizes = {"recipe": "tiny", "steps": 1, "batch_size": 2, "device": "cpu"}
    run = kinformer.train(member, out=tmp_path / "run", task=task, sample_every=1, validate_every=0, **sizes)
    page = (run.folder / "report.html").read_text()
    assert ("data:image/png;base64," in page) == (task == "image") and "<h3>step 1</h3>" in page
