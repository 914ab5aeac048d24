"""Every page of ``annotated`` proves that it computes what the library computes. Every member has a page, and so may a
mixer that no member has."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import kinformer
from kinformer.family.kinds import kinds

FOLDER = Path(__file__).parents[2] / "annotated"
PAGES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "proofs")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [*PAGES, "proofs"]:
        sys.modules.pop(name, None)


def test_a_page_that_differs_is_found(pages):
    proofs, page = importlib.import_module("proofs"), importlib.import_module("gpt")
    page.attention = lambda q, k, v: 1.0001 * v
    with pytest.raises(AssertionError, match="outputs: the page and the library differ by"):
        proofs.prove(page.proof)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_proves_itself(name, pages):
    importlib.import_module("proofs").prove(importlib.import_module(name).proof)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_stands_alone_and_is_short(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    page, proof = text.split("\n# --- proof ---\n")
    assert not re.search(r"^\s*(import|from) (?!torch|math)", page, re.MULTILINE)
    assert 50 <= len(page.splitlines()) <= 150
    assert "import kinformer" in proof


AVOIDED = r"\b(that of|those of|those that|those which|what it is|of which|such a one|as it is|goes on|is no|has no)\b"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_its_nouns(name):
    lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
    prose = " ".join(line[2:] for line in lines if line.startswith("# "))
    assert len(re.findall(AVOIDED, prose)) <= max(1, 0.002 * len(prose.split()))


def _header(name, field):
    """Return the names of a field of the paragraph ``*Paper: ... Members: ... Measured: ...*`` at a page's top."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8").replace("\n#", "")
    found = re.search(rf"\*Paper: .*{field}: (.*?)\.[ *]", text)
    assert found, f"annotated/{name}.py does not say {field}:"
    return re.findall(r"[\w-]+", found.group(1))


def test_every_member_has_a_page():
    described = [member for name in PAGES for member in _header(name, "(?:Members|Mixer)")]
    assert len(described) == len(set(described))
    members = {member.name for member in kinformer.members()}
    assert set(described) >= members and set(described) - members <= kinds()["mixer"].keys()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_a_result(name):
    assert all((RESULTS / f"{result}.json").is_file() for result in _header(name, "Measured"))
