"""The help of commands: general options and those of one task, never all; what is rarely changed goes by ``--set``."""

import json
import re
import subprocess
import sys

import pytest

import kinformer
from kinformer.family.build import configure
from kinformer.family.table import members
from kinformer.lab.tasks.table import ALL, task_for
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import RARE

MOST = {"train": 46, "compare": 35, "evaluate": 22, "generate": 31}
"""Options that the general help of a command may show. Make another an option of a task, or a path of ``--set``."""


def shown(text):
    return re.findall(r"^[│| ]{1,2}(--[a-z][a-z0-9.-]*)", text, re.MULTILINE)  # deeper ones are words of a text


@pytest.mark.parametrize("command", MOST)
def test_the_general_help_is_short_and_names_the_tasks(cli, command):
    code, out, _ = cli(command, "--help")
    assert code == 0 and 15 < len(shown(out)) <= MOST[command]
    assert "tasks: " + ", ".join(ALL) in out and "--help" in out.split("options of a task")[1]
    assert not {"--pairs", "--segments", "--mask-share"} & set(shown(out))


@pytest.mark.parametrize(
    ("arguments", "has", "has_not"),
    [
        (("train", "gpt"), {"--segments"}, {"--mask-share", "--augment", "--pairs"}),
        (("train", "bert"), {"--mask-share"}, {"--segments", "--augment"}),
        (("train", "vit"), {"--augment", "--smoothing"}, {"--segments", "--mask-share"}),
        (("train", "gpt", "--task", "recall"), {"--pairs", "--symbols"}, {"--segments"}),
        (("train", "gtrxl", "--task=control"), {"--env", "--discount"}, {"--segments"}),
        (("compare", "gpt"), {"--segments"}, {"--pairs"}),
    ],
)
def test_the_help_of_a_member_has_the_options_of_its_task(cli, arguments, has, has_not):
    code, out, _ = cli(*arguments, "--help")
    assert code == 0 and has <= set(shown(out)) and not has_not & set(shown(out))


def test_the_help_of_a_run_has_the_options_of_its_task(cli, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"task": {"name": "recall"}}))
    out = cli("evaluate", tmp_path, "--help")[1]
    assert "--at-pairs" in shown(out) and "--contexts" not in shown(out)


def test_help_loads_no_pytorch():
    code = "import sys; from kinformer.lab.cli.main import main; main(['train', 'vit', '--help'])"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize("member", members(), ids=lambda member: member.name)
def test_records_name_the_task_that_training_takes(member):
    assert member.usual_task == task_for(None, configure(member.name, "tiny"), member.name).name


@pytest.mark.parametrize("name", RARE)
def test_rare_settings_go_by_set(cli, tmp_path, text_file, name):
    flag = f"--{name.replace('_', '-')}"
    value = getattr(Settings(), name)
    code, _, err = cli("train", "gpt", "--out", tmp_path / "run", flag, value)
    assert code == 2 and f"{flag} {value}: is a rarely changed setting; give --set training.{name}={value}" in err


def test_a_setting_by_set_is_that_of_the_run(cli, tmp_path, text_file):
    sizes = ("--recipe", "tiny", "--steps", 2, "--length", 16, "--batch-size", 2, "--device", "cpu", "--quiet")
    out = tmp_path / "run"
    changes = ("--set", "training.beta2=0.9", "--set", "training.keep=3", "--set", "dim=16")
    assert cli("train", "gpt", "--data", text_file, "--out", out, *sizes, *changes)[0] == 0
    run = kinformer.open_run(out)
    assert (run.training["beta2"], run.training["keep"], run.config.dim) == (0.9, 3, 16)
    code, _, err = cli("train", "gpt", "--out", out, "--resume", "--set", "training.beta2=0.8")
    assert code == 2 and "train: " not in err and "leave --set training.beta2 out" in err
    assert err.startswith(f"kinformer: --set training.beta2=0.8: the run in {out} was begun with 0.9, and")
    code, _, err = cli("train", "gpt", "--out", tmp_path / "no", "--set", "training.beta2=2")
    assert code == 2 and "--set training.beta2 is 2 but must be" in err
    for change, message in (("beat2=1", "did you mean 'beta2'"), ("keep=many", "keep is 'many' but must be a whole")):
        code, _, err = cli("train", "gpt", "--out", tmp_path / "no", "--set", f"training.{change}")
        assert code == 2 and message in err and err.count("\n") == 1
    (tmp_path / "run.toml").write_text('member = "gpt"\nkeep = 3\n')
    code, _, err = cli("train", "--config", tmp_path / "run.toml", "--out", tmp_path / "no")
    assert code == 2 and 'write set = {"training.keep" = 3}' in err
