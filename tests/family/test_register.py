"""Parts, members and tasks that a program registers: by name in ``set``, in saved runs and on the command line."""

import importlib
import sys
from dataclasses import replace

import pytest

import kinformer
from kinformer.core.contract import MixerConfig
from kinformer.family.kinds import kinds
from kinformer.family.table import FAMILY, member
from kinformer.lab.cli.main import main
from kinformer.lab.tasks.table import task, tasks
from kinformer.mixers.linear import LinearAttention
from kinformer.runtime import plugins
from kinformer.runtime.errors import KinformerError

FILE = """
from dataclasses import dataclass

import kinformer
from kinformer.mixers.linear import LinearAttention


class Sums(LinearAttention):
    @kinformer.register
    @dataclass(frozen=True, kw_only=True)
    class Config(LinearAttention.Config):
        kind = "sums_of_mine"
"""


@pytest.fixture
def sums():
    """A config class that nothing has registered yet."""

    class Sums(LinearAttention):
        class Config(LinearAttention.Config):
            kind = "sums_of_mine"

    return Sums.Config


def training(tmp_path, text_file, mixer):
    settings = {"recipe": "tiny", "steps": 1, "length": 16, "batch_size": 1}
    return kinformer.train("gpt", data=text_file, out=tmp_path / "run", set={"layers.*.mixer": mixer}, **settings)


def test_a_run_of_a_registered_mixer_loads_while_its_class_is_registered(tmp_path, text_file, sums, registrations):
    with pytest.raises(KinformerError, match=r"call kinformer.register\(.*Sums.Config\) before, or add the entry"):
        training(tmp_path, text_file, sums())
    assert kinformer.register(sums) is sums
    run = training(tmp_path, text_file, sums(num_heads=2))
    assert isinstance(kinformer.load(run.folder).layers[0].mixer, LinearAttention)
    assert (
        kinformer.build("gpt", recipe="tiny", set={"layers.*.mixer": "sums_of_mine"}).config.layers[0].mixer == sums()
    )
    registrations()
    with pytest.raises(KinformerError, match=r"is not registered here; call kinformer.register\(Sums.Config\) first"):
        kinformer.load(run.folder)


def test_a_file_that_the_user_names_registers_its_classes(tmp_path, text_file, capsys, monkeypatch, registrations):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file, out = tmp_path / "sums_of_mine.py", tmp_path / "run"
    file.write_text(FILE)
    line = f"train gpt --recipe tiny --data {text_file} --out {out} --set layers.*.mixer=sums_of_mine --steps 1"
    assert main(f"{line} --length 16 --batch-size 1 --import {file}".split()) == 0
    registrations()
    assert main(["show", str(out)]) == 2
    assert "name the file that does by --import" in capsys.readouterr().err
    sys.modules.pop("sums_of_mine")
    (tmp_path / "show.toml").write_text(f'import = "{file}"\n')
    assert main(["show", str(out), "--config", str(tmp_path / "show.toml")]) == 0


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("absent.py", None, "is not a Python file"),
        ("broken_of_mine.py", "1 / 0", r"cannot be run (ZeroDivisionError: division by zero); mend it"),
        ("json.py", "", "another module is called 'json'; rename the file"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(tmp_path, capsys, monkeypatch, name, text, sentence):
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.import_module("json")
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["list", "--import", str(tmp_path / name)]) == 2
    assert sentence in capsys.readouterr().err


def test_members_and_tasks_are_registered_too(registrations):
    mine = kinformer.register(member("gpt").__class__(**vars(member("gpt")) | {"name": "my-gpt"}))
    assert member("my-gpt") is mine and mine in kinformer.members()
    assert replace(mine, year=0).year == mine.year and replace(mine, year=0, paper="arXiv 1910.1, 2019").year == 2019
    with pytest.raises(KinformerError, match="the paper of the member 'my-gpt' does not have a year; give year"):
        replace(mine, year=0, paper="none")
    record = kinformer.register(task("next-token").derive(name="my-task"))
    assert task("my-task") is record and record in tasks()
    assert (FAMILY.package("my-gpt"), FAMILY.package("gpt")) == ("kinformer.register Member", None)


def test_what_cannot_be_registered_is_named(sums, registrations):
    for thing in (3, sums(), type("Nameless", (MixerConfig,), {})):
        with pytest.raises(KinformerError, match="register: "):
            kinformer.register(thing)
    with pytest.raises(KinformerError, match="the mixer 'linear' is Kinformer's own; give yours another name"):
        kinformer.register(type("Config", (LinearAttention.Config,), {}))
    kinformer.register(sums)
    other = kinformer.register(type("Config", (sums,), {}))  # as a notebook's cell that runs again
    assert kinds()["mixer"]["sums_of_mine"] is other


def test_a_layer_of_a_mixer_with_required_settings_is_refused_in_a_sentence(registrations):
    @kinformer.register
    class Needy(MixerConfig):
        kind = "needy"
        size: int

    with pytest.raises(KinformerError, match="the mixer 'needy' needs size, which must be given"):
        kinformer.layer("needy", 16)
    assert repr(next(record for record in kinformer.layers() if record.name == "needy")) == "<needy: causal>"


def test_a_registered_class_takes_the_place_of_the_run_s_own_package(registrations, sums):
    plugins.require_package("kinformer.register Sums.Config", "the mixer 'sums'", "sums-package 1.0")
    with pytest.raises(KinformerError, match="but here it is Kinformer's own"):
        plugins.require_package("kinformer.register Sums.Config", "the mixer 'sums'", plugins.KINFORMER)
