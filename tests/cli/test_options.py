"""Options: in groups, with an example; counts; a file of them; what other tools call them; completion."""

import json
import math
import re
import subprocess
from dataclasses import MISSING, fields
from typing import get_args, get_type_hints

import pytest

from kinformer.lab.cli import main as command_line
from kinformer.lab.cli.form import bare, flags, form_of, parse
from kinformer.lab.tasks.table import TASKS
from kinformer.runtime.errors import KinformerError


def forms(name):
    command = command_line.COMMANDS[name]
    return command.options(), command.tasks


def parsed(name, *arguments):
    options, kind = forms(name)
    return parse(options, kind, arguments, prog=f"kinformer {name}", description="")


def test_help_begins_with_what_is_needed_and_ends_with_an_example(cli):
    out = cli("train", "gpt", "--help")[1]
    titles = re.findall(r"^\W*?((?:[\w-]+ )?(?:options|arguments))(?: \W*)?$", out, re.MULTILINE)
    assert titles[:2] == ["positional arguments", "options"] and titles[-2:] == ["machine options", "general options"]
    assert "optimisation options" in titles and "next-token options" in titles
    assert re.findall(r"^\W*?(--[a-z][\w-]*)", out, re.MULTILINE)[:4] == ["--data", "--out", "--minutes", "--steps"]
    assert "(default: None)" not in out
    assert out.endswith("example:\n  kinformer train gpt --data book.txt --out runs/book --minutes 5\n")


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_every_option_has_help_and_the_example_is_one_of_the_command(cli, name, tmp_path):
    out = cli(name, "--help")[1]
    if command_line.COMMANDS[name].tasks is not None:
        for task in TASKS:  # a command shows the options of one task
            (tmp_path / "config.json").write_text(json.dumps({"task": {"name": task}}))
            out = cli(name, tmp_path, "--help")[1] + out
    example = out.splitlines()[-1]
    assert f"kinformer {name}" in example
    known = flags(form_of(*forms(name)))
    assert all(f"--{flag}" in out or "Positional" in str(hint) for flag, hint in known.items())
    assert all(flag in known for flag in re.findall(r"--([\w-]+)", example))


@pytest.mark.parametrize(("text", "steps"), [("12", 12), ("1k", 1000), ("1.5k", 1500), ("2M", 2_000_000)])
def test_counts_may_be_thousands_and_millions(text, steps):
    assert parsed("train", "gpt", "--out", "x", "--steps", text).steps == steps
    assert parsed("evaluate", "x", "--first", text).first == steps


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "train gpt --out x --dim 128",
            "train: --dim 128: is not an option but part of the model; give --set dim=128.",
        ),
        ("train gpt --out x --dropout=0.1", "--dropout 0.1: is not an option but part of the model; give --set drop"),
        ("train gpt --out x --n-layers 3", "give --set layers=3."),
        ("train gpt --out x --vocab-size 99", "give --set input.vocab_size=99."),
        (
            "train gpt --out x --epochs 3",
            "train: --epochs 3: training does not count epochs; give --steps N or --minutes N.",
        ),
        ("train gpt --out x --learning-rate 1", "train: --learning-rate 1: did you mean --lr?"),
        ("train gpt --out x --batch 4", "train: --batch 4: did you mean --batch-size?"),
        ("train gpt --epochs 3", "training does not count epochs"),
        ("generate x --max_tokens 3", "did you mean --max-new-tokens?"),
        ("list --dim 3", "list: Unrecognized options: --dim, 3; see kinformer list --help."),
        (
            "train gpt --out x --steps 1.2345k",
            "--steps: '1.2345k' is not a whole number, such as 16",
        ),
        ("train gpt --out x --steps 3G", "'3G' is not a whole number"),
    ],
)
def test_usual_names_of_other_tools_are_understood(cli, arguments, told):
    code, out, err = cli(*arguments.split())
    assert (code, out) == (2, "") and told in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("device", "told"),
    [
        (
            "mps",
            "--device mps: lacks float64, which positions need; use cpu or auto.",
        ),
        ("cuda", "--device cuda: there is no GPU that PyTorch can use here; use cpu or auto."),
        ("cuda:1", "--device cuda:1: there is no GPU that PyTorch can use here; use cpu or auto."),
        ("gpu", "--device gpu: cannot be used here"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(cli, gpt_run, tmp_path, monkeypatch, device, told):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (("train", "gpt", "--out", tmp_path / "run"), ("generate", gpt_run, "--prompt", "a")):
        code, out, err = cli(*command, "--device", device)
        assert (code, out) == (2, "") and told in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_every_synonym_is_one_of_something():
    from kinformer.lab.cli.form import MODEL, OPTIONS, SENTENCES

    known = set().union(*(flags(form_of(*forms(name))) for name in command_line.COMMANDS))
    assert set(OPTIONS.values()) | {option for option, _ in SENTENCES.values()} <= known and set(MODEL)


def test_a_file_of_options(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'member = "gpt"\nout = "here"\nbatch_size = 16\nlr = 1e-2\nresume = true\ncompile = false\nsteps = "2k"\n'
        'set = {dim = 256, "layers.*.mixer.pattern" = {kind = "local", window = 4}}\nsegments = true\n'
    )
    options = parsed("train", "--config", str(path), "--lr", "0.5", "--set", "dim=8")
    assert (options.member, options.out, options.batch_size, options.lr) == ("gpt", "here", 16, 0.5)
    assert (options.resume, options.compile, options.steps, dict(options.task_options)) == (
        True,
        False,
        2000,
        {"segments": True},
    )
    assert options.set == {"dim": "8", "layers.*.mixer.pattern": '{"kind": "local", "window": 4}'}
    assert parsed("train", "linear-transformer", f"--config={path}").member == "linear-transformer"
    path.write_text('folders = ["a", "b"]\nmax-bytes = 9\nstop_ = 1\n'.replace("stop_ = 1\n", ""))
    options = parsed("evaluate", "--config", str(path))
    assert (options.folders, options.first) == (("a", "b"), 9)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("batchsize = 3", "'batchsize' is not an option; did you mean 'batch-size'"),
        ("steps = [", "is not TOML"),
        ('resume = "yes"', "resume is 'yes' but must be true or false."),
        ("steps = true", "steps is True but must be a text or a number."),
        ('steps = "x"', "--steps: 'x' is not a whole number"),
        ('config = "x"', "'config' is not an option"),
    ],
)
def test_a_file_of_options_that_is_wrong_is_one_sentence(cli, tmp_path, text, told):
    path = tmp_path / "run.toml"
    path.write_text(text)
    code, out, err = cli("train", "gpt", "--out", tmp_path / "run", "--config", path)
    assert (code, out) == (2, "") and told in err and err.count("\n") == 1
    assert "the file does not exist" in cli("train", "gpt", "--out", "x", "--config", tmp_path / "none.toml")[2]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("kinformer trai", "train"), ("kinformer train big", "big-bird"), ("kinformer train gpt --warm", "--warmup")],
)
def test_bash_completes_commands_members_and_options(cli, typed, offered):
    script = cli("completion", "bash")[1]
    words = typed.split()
    code = f'{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _kinformer; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [offered] and not done.stderr
    assert cli("completion", "zsh")[1].endswith(script) and "bashcompinit" in cli("completion", "zsh")[1]


ZERO_MEANS = {
    "seed", "walk_seed", "min_lr_ratio", "warmup", "weight_decay", "momentum", "beta2", "clip", "table_lr", "ema",
    "validate_every", "patience", "checkpoint_every", "checkpoint_minutes", "average", "probes", "weight",
    "temperature", "action_temperature", "overlap", "sweep", "tolerance", "cloning_steps", "return_weight", "discount",
    "gae_lambda", "clip_ratio", "kl_stop", "entropy_weight", "value_weight", "smoothing", "label_smoothing",
    "length_penalty", "local_views", "teacher_momentum", "rows", "port", "max_waiting", "plateau_patience", "alpha",
    "beta", "restarts", "env_processes",
}  # fmt: skip
"""Options of which 0 is a value like others, or switches something off."""


def numeric_options():
    kinds = ("Options", "EvaluationOptions", "GenerationOptions")
    classes = [forms(name)[0] for name in command_line.COMMANDS]
    for options in dict.fromkeys(classes + [getattr(task, kind) for task in TASKS.values() for kind in kinds]):
        for name, hint in get_type_hints(options, include_extras=True).items():
            types = set(get_args(bare(hint)) or (bare(hint),)) & {int, float}
            if types:
                yield pytest.param(options, name, types.pop(), id=f"{options.__module__}.{options.__name__}-{name}")


@pytest.mark.parametrize("option", ["--data", "--out"])
def test_an_empty_path_is_not_the_current_folder(option, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text " * 200)
    assert command_line.main(["train", "gpt", "--out", "run", option, ""]) == 2
    assert capsys.readouterr().err == f"kinformer: {option} is empty but must be a path; give one, or leave it out.\n"


@pytest.mark.parametrize(("options", "name", "kind"), list(numeric_options()))
def test_numbers_out_of_range_are_refused(options, name, kind):
    needed = {each.name: "x" for each in fields(options) if each.default is each.default_factory is MISSING}
    wrong = [
        kind(-1),
        *([math.nan, math.inf, -math.inf] if kind is float else []),
        *[kind(0)] * (name not in ZERO_MEANS),
    ]
    for value in wrong:
        with pytest.raises(KinformerError, match=name) as told:
            options(**needed, **{name: value})
        assert str(told.value).count(".\n") == 0 and str(told.value).endswith(".")


@pytest.mark.parametrize("option", ["optimizer", "precision", "schedule"])
def test_choices_are_listed_in_order_and_without_pythons_none(cli, option):
    code, out, err = cli("train", "gpt", "--out", "x", f"--{option}", "foo")
    assert (code, out) == (2, "") and err.startswith(f"kinformer: train: --{option}: 'foo' is not one of ")
    names = re.search("one of (.*); see", err)[1].split(", ")
    assert names == sorted(names) and "None" not in names and len(names) > 1


@pytest.mark.parametrize(("text", "number"), [("1e9", 10**9), ("1.5e3", 1500), ("100k", 100_000), ("2M", 2_000_000)])
def test_whole_numbers_have_short_forms(text, number):
    from kinformer.runtime.parsing import parse_count

    assert parse_count(text) == number
    with pytest.raises(ValueError, match="such as 16, 100k, 2M or 1e9"):
        parse_count("1.5e0")
