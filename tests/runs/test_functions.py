"""A run as an object: ``kinformer.train``, ``evaluate``, ``open_run`` and ``load``, with options by name."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import kinformer
from kinformer.models.decoder import Decoder
from kinformer.runtime.errors import KinformerError

SMALL = {"recipe": "tiny", "steps": 4, "length": 16, "batch_size": 4, "validation_tokens": 256, "device": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory, text_file):
    return kinformer.train(
        "linear-transformer", data=text_file, out=tmp_path_factory.mktemp("runs") / "linear", **SMALL
    )


def test_a_run_knows_what_it_is(run, text_file):
    assert (run.member, run.recipe, run.task.name, run.vocabulary) == (
        "linear-transformer",
        "tiny",
        "next-token",
        "bytes",
    )
    assert not run.options.segments and run.training["length"] == 16 and run.data["spec"] == str(text_file)
    assert isinstance(run.config, Decoder.Config) and run.config is run.config
    assert run.tokenizer.encode("ab").tolist() == [97, 98]
    assert list(run.metrics) == ["bits_per_byte"] and 0 < run.metrics["bits_per_byte"] < 16
    again = kinformer.open_run(run.folder)
    assert again == run and again.metrics == run.metrics
    model = run.model()
    assert not model.training and model(torch.zeros(1, 4, dtype=torch.int64))[0].shape == (1, 4, 256)


def test_evaluate_is_the_command(run, capsys):
    from kinformer.lab.cli.main import main

    found = kinformer.evaluate(run.folder, contexts="1x,2x", first=300, device="cpu")
    assert (
        main(["evaluate", str(run.folder), "--contexts", "1x,2x", "--first", "300", "--device", "cpu", "--json"]) == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert found.metrics == {"bits_per_byte": facts["bits_per_byte"]} and found.units[0].lower_is_better
    assert found.data == facts["data"] and [each["context"] for each in found.facts["lengths"]] == [16, 32]
    carried = kinformer.evaluate(run.folder, context="carried", baseline=True, first=300)
    assert carried.facts["carried"] and carried.baselines["ngram_bits_per_byte"] > 0
    assert kinformer.evaluate(run.folder, context=8, first=300).facts["context"] == 8


def test_a_prompt_may_be_an_array_or_lists(run):
    model = kinformer.load(run.folder)
    wanted = kinformer.generate(model, torch.tensor([[1, 2, 3], [4, 5, 6]]), max_new_tokens=4, temperature=0)
    lists = [[1, 2, 3], [4, 5, 6]]
    for prompt in (lists, np.array(lists), np.array(lists, np.uint8), tuple(lists), np.array(lists, np.int32)):
        assert torch.equal(kinformer.generate(model, prompt, max_new_tokens=4, temperature=0), wanted)
    for wrong, told in (
        ([[1, 2], [3]], "unlike length"),
        ([[0.5]], "whole numbers"),
        ([1, 2], "must be .batch, time."),
    ):
        with pytest.raises(KinformerError, match=told):
            kinformer.generate(model, wrong, max_new_tokens=4)


def test_types_are_there_for_who_reads_them():
    from pathlib import Path

    assert (Path(kinformer.__file__).parent / "py.typed").is_file()
    for name in set(kinformer.__all__) - {"tasks"}:  # the name of a folder too, and callable as that
        function = getattr(kinformer, name)
        assert function.__doc__ and function.__annotations__["return"] not in ("Any", None)
        assert all(f"{each}" in function.__doc__ for each in function.__annotations__ if each not in ("return",))


def test_a_run_goes_on(run, text_file, tmp_path):
    first = kinformer.train("gpt", data=text_file, out=tmp_path / "run", set={"dim": 16}, **SMALL)
    again = kinformer.train("gpt", out=tmp_path / "run", resume=True, steps=6)
    assert (first.config.dim, again.config.dim, again.training["steps"]) == (16, 16, 6)
    with pytest.raises(KinformerError, match="keeps its settings"):
        kinformer.train("gpt", out=tmp_path / "run", resume=True, batch_size=3)


def test_nothing_is_printed(text_file, tmp_path, capsys):
    kinformer.train("gpt", data=text_file, out=tmp_path / "run", **SMALL)
    kinformer.evaluate(tmp_path / "run", first=300)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batchsize": 3}, "kinformer.train: 'batchsize' is not an option; did you mean 'batch_size'"),
        ({"mask_share": 0.2}, "mask_share 0.2: is for the task mlm, not for next-token"),
        ({"task": "mlm"}, "gpt is causal, whose tasks are next-token"),
        ({"data": "no/such/file"}, "does not exist"),
        ({"segments": True}, '"position": "sinusoidal"'),
    ],
)
def test_mistakes_of_training(text_file, tmp_path, options, told):
    with pytest.raises(KinformerError) as error:
        kinformer.train("gpt", out=tmp_path / "run", **{"data": text_file, **SMALL, **options})
    assert told in str(error.value) and not (tmp_path / "run").exists()


def test_mistakes_of_measuring(run):
    with pytest.raises(KinformerError, match="kinformer.evaluate: 'contxts' is not an option; did you mean 'contexts'"):
        kinformer.evaluate(run.folder, contxts="1x")
    with pytest.raises(KinformerError, match="is not a run folder"):
        kinformer.evaluate(run.folder / "nothing")


def test_tasks_are_records():
    records = {task.name: task for task in kinformer.tasks()}
    assert {"next-token", "recall", "algorithm", "mlm", "classify", "listops", "translate"} <= records.keys()
    assert [records[name].metrics[0].name for name in ("next-token", "classify")] == ["bits_per_byte", "accuracy"]
    assert not records["classify"].metrics[0].lower_is_better and records["mlm"].metrics[0].lower_is_better
    code = "import sys, kinformer; kinformer.tasks(); import kinformer.lab.tasks.table; kinformer.tasks()"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_folder_of_an_older_version_is_one_sentence(run, tmp_path):
    config = json.loads((run.folder / "config.json").read_text())
    for change, told in (
        ({"schema": 1}, "has schema 1, but this version reads schema 2"),
        ({"schema": 3}, "has schema 3, but this version reads schema 2"),
        ({"task": {"name": "chess", "options": {}}}, "task: 'chess' is unknown"),
        ({"task": {"name": "mlm", "options": {"x": 1}}}, "'x' is not an option of the task mlm"),
        ({"task": {}}, "without a name or options"),
        ({"training": 3}, "training is 3, not a table"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(KinformerError) as error:
            kinformer.open_run(tmp_path)
        assert told in str(error.value) and str(tmp_path) in str(error.value)


def test_functions_leave_the_process_as_it_was(text_file, tmp_path):
    """Whoever evaluates after each epoch draws other masks in the next; ``tests.process_state`` checks every call."""
    options = {"recipe": "tiny", "length": 16, "batch_size": 2, "data": text_file, "device": "cpu", "threads": 1}
    torch.set_num_threads(2)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            want = torch.rand(4)
            torch.manual_seed(3)
            kinformer.train("gpt", out=tmp_path / "run", steps=2, quiet=True, **options)
            kinformer.evaluate(tmp_path / "run", first=200, threads=1)
            model = kinformer.load(tmp_path / "run")
            kinformer.generate(model, [[1, 2, 3]], max_new_tokens=4, seed=5)
            with pytest.raises(KinformerError):
                kinformer.train("gpt", out=tmp_path / "run", steps=2, quiet=True, **options)
            assert torch.equal(torch.rand(4), want) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
