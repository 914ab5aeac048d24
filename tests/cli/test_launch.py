"""What ``kinformer launch`` prints: valid for bash, with the training's words as they came. That torchrun's
line trains is shown in ``tests/training/test_distributed.py``."""

import json
import shlex
import subprocess

import pytest

WORDS = ["train", "gpt", "--data", "my 'shards' $HOME", "--steps", "1k", "--strategy", "fsdp", "--out", "runs/a b"]


def printed(cli, to, *more, words=WORDS):
    code, out, err = cli("launch", "--to", to, *more, "--", *words)
    assert (code, err) == (0, "")
    return out


def checked(script):
    """The script, which bash can read, and the words of its training."""
    read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")
    assert f"-m kinformer {shlex.join(WORDS)}" in script
    return script


def test_a_line_for_every_machine(cli):
    assert checked(printed(cli, "torchrun", "--processes", 2)).startswith("torchrun --standalone --nproc-per-node 2 ")
    line = checked(printed(cli, "torchrun", "--nodes", 2, "--host", "node1", "--restarts", 0))
    assert "--nnodes 2 " in line and "--rdzv-endpoint node1:29500 --nproc-per-node 8 --max-restarts 0 " in line


def test_a_script_for_slurm(cli, tmp_path):
    script = checked(printed(cli, "slurm", "--nodes", 2))
    assert script.startswith("#!/bin/bash\n#SBATCH ") and "#SBATCH --gpus-per-node=8\n" in script
    resumed = checked(printed(cli, "slurm", words=[*WORDS, "--resume", "--device", "cpu"]).replace(
        shlex.join([*WORDS, "--resume", "--device", "cpu"]), shlex.join(WORDS)
    ))  # fmt: skip
    assert "--resume" not in resumed and "gpus" not in resumed


def test_the_script_resumes_a_run_that_has_begun(cli, tmp_path):
    """Slurm's commands print here what they are given."""
    script = printed(cli, "slurm").replace("srun torchrun", "echo")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node1\necho node2\n")
    (tmp_path / "scontrol").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}

    def told():
        run = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, check=True)
        return run.stdout.decode().split()

    assert "node1:29500" in told() and told()[-1] == "b"
    (tmp_path / "runs" / "a b").mkdir(parents=True)
    (tmp_path / "runs" / "a b" / "config.json").write_text("{}")
    assert told()[-1] == "--resume"


def test_two_dashes_may_be_left_out(cli):
    assert cli("launch", "--to", "slurm", *WORDS)[:2] == (0, printed(cli, "slurm"))


def test_json(cli):
    assert json.loads(printed(cli, "slurm", "--json"))["script"] == printed(cli, "slurm")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("launch", "launch: needs the training at its end"),
        ("launch -- evaluate x", "launch: needs the training at its end"),
        ("launch train gtp", "did you mean 'gpt'"),
        ("launch train gpt", "--out: is needed to resume a run, and by several machines"),
        ("launch --nodes 2 -- train gpt --out x", "--host: torchrun's line needs the first machine's name"),
        ("launch -- train gpt --out x --devices 4", "--devices 4: 1 x 8 are 8 processes; leave --devices out."),
        ("launch -- train gpt --out x --parallel tp=2", "--parallel tp=2: 1 x 8 are 8 processes; give sizes whose pro"),
        ("launch -- train gpt --out x --stepps 3", "train: Unrecognized options: --stepps"),
    ],
)
def test_mistakes_are_one_sentence(cli, arguments, told):
    code, out, err = cli(*arguments.split())
    assert (code, out) == (2, "") and told in err and err.count("\n") == 1
