"""What README, tutorial and how-tos show: their Python runs, their commands have the options that are shown."""

import re
import sys
from functools import cache
from types import ModuleType

import pytest

from kinformer.family.table import FAMILY
from kinformer.lab.cli.form import flags, form_of
from kinformer.lab.cli.main import COMMANDS
from tests.docs.written import DOCS, PAGES, commands_of, python_of

NEEDS = {"hugging_face.md": "transformers"}
OWN_PROCESSES = {"several_processes.md"}
LINES = 150


@cache
def flags_of(name):
    """What the command's options are called."""
    return flags(form_of(COMMANDS[name].options(), COMMANDS[name].tasks))


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=lambda page: page.stem)
def test_python_runs(page, tmp_path, monkeypatch):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    monkeypatch.chdir(tmp_path)
    module = ModuleType("__main__" if page.name not in OWN_PROCESSES else "shown")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where the compiler finds a page's classes
    for number, block in enumerate(python_of(page)):
        exec(compile(block, f"{page.name}[{number}]", "exec"), vars(module))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_have_the_options_that_are_shown(page):
    for name, *words in commands_of(page.read_text(encoding="utf-8")):
        if name == "launch" and "train" in words:  # which takes the training behind its options
            at = words.index("train")
            assert {word[2:] for word in words[:at] if word.startswith("--")} <= flags_of("launch").keys()
            name, *words = words[at:]
        shown = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
        assert shown <= flags_of(name).keys(), (name, words)
        if name in ("train", "show", "estimate"):
            assert words[0] in FAMILY or "/" in words[0], words


def test_commands_are_found():
    text = (
        "    kinformer train gpt --steps 3 \\\n        --out x   # so\n    kinformer generate x --audio - < tones.wav\n"
    )
    assert list(commands_of(text)) == [
        ["train", "gpt", "--steps", "3", "--out", "x"],
        ["generate", "x", "--audio", "-"],
    ]


def test_readme_is_short_and_its_links_lead_somewhere():
    text = PAGES[0].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (DOCS.parent / target).exists(), target


def test_readme_shows_what_its_first_lines_print(capsys):
    text = PAGES[0].read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    exec(compile(python_of(PAGES[0])[0], "README.md[0]", "exec"), {})
    assert capsys.readouterr().out == shown


def test_readme_counts_the_family():
    assert re.findall(r"All (\d+) members", PAGES[0].read_text(encoding="utf-8")) == [str(len(FAMILY))]


def test_every_how_to_is_in_the_index():
    listed = set(re.findall(r"^howto/(\w+)$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {page.stem for page in PAGES if page.parent.name == "howto"}
