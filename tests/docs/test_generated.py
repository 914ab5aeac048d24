"""Pages that follow from the tables: complete, true to what the library says, and without Sphinx."""

import json
import re
import runpy
from dataclasses import fields
from xml.etree import ElementTree

import pytest

from kinformer.family.build import configure
from kinformer.family.table import MEMBERS
from kinformer.lab.estimation.estimate import estimate
from kinformer.lab.tasks.table import TASKS
from tests.comparison.browser import Browser
from tests.docs.written import DOCS, ROOT, commands_of


@pytest.fixture(scope="module")
def local_page(tmp_path_factory):
    """The folder with the page of ``local``, and the page."""
    pytest.importorskip("matplotlib")
    from generator.members import write_member

    folder = tmp_path_factory.mktemp("site") / "members"
    write_member(folder, MEMBERS["local"])
    return folder, (folder / "local.md").read_text(encoding="utf-8")


def test_settings_name_extensions_that_fetch_nothing():
    settings = runpy.run_path(str(DOCS / "conf.py"))
    assert settings["html_theme"] == "furo" and "generator" in settings["extensions"]
    assert not any("intersphinx" in name for name in settings["extensions"])
    assert all((DOCS / name).exists() for name in settings["html_static_path"])


def test_a_members_page_has_what_it_computes_costs_and_departs_from(local_page):
    folder, page = local_page
    assert "<mi>softmax</mi>" in page and "<svg" in page
    assert (folder / "local.png").read_bytes().startswith(b"\x89PNG")
    assert MEMBERS["local"].use_when in page and MEMBERS["local"].avoid_when in page
    assert 'kinformer.layer("local", dim=512)' in page
    assert "| [What do members learn in four minutes each?](../results/quality.md) | bits per byte |  | 1.709 |" in page
    cost = estimate(configure("local", "small"), length=1024)
    row = next(line for line in page.splitlines() if line.startswith("| 1,024 |"))
    for flops in (cost.flops_inference, cost.flops_forward):
        assert f"{flops / 1024 / 1e6:.3g} M" in row
    assert f"{cost.state_bytes / 1024**2:.1f} MiB" in row
    for departure in MEMBERS["local"].departures:
        assert departure.split(",")[0] in page
    assert ["evaluate", "runs/local"] in list(commands_of(page))


@pytest.mark.parametrize("name", MEMBERS)
def test_blocks_are_drawn_whole(name):
    from generator.block import drawing, sublayers

    config = configure(name, "small")
    picture = ElementTree.fromstring(drawing(config))
    texts = [element.text for element in picture.iter("text")]
    assert f"head: {config.head.kind.replace('_', ' ')}" in texts
    for lines in (lines for sublayer in sublayers(config.layers[0]) for lines in sublayer.boxes):
        assert lines[0] in texts
    left, _, width, _ = map(float, picture.get("viewBox").split())
    assert all(left <= float(box.get("x")) and float(box.get("x")) + float(box.get("width")) <= left + width
               for box in picture.iter("rect"))  # fmt: skip


@pytest.mark.parametrize("name", MEMBERS)
def test_formulas_are_typeset_whole(name):
    from generator.typeset import GREEK, typeset

    from kinformer.lab.drawing.text import formulas

    greek = {letter: word for word, letter in GREEK.items()}
    for formula in formulas(configure(name, "small")):
        shown = ElementTree.fromstring(typeset(formula.lines))
        text = "".join(greek.get(letter, letter) for letter in "".join(shown.itertext()))
        words = re.sub(r"sum_|prod_", "", re.sub(r"\b(?:sqrt|sum|prod)\b(?=[_(])", "", " ".join(formula.lines)))
        assert sorted(re.sub(r"[^A-Za-z0-9]", "", text)) == sorted(re.sub(r"[^A-Za-z0-9]", "", words)), formula


def test_indices_roots_and_prose_are_told_apart():
    from generator.typeset import typeset

    page = typeset(["y_i = softmax_j(q . k_j / sqrt(dim)) v_j over the last ``window`` tokens,   z_(t-1) = a"])
    assert "<msub><mrow><mi>softmax</mi></mrow><mrow><mi>j</mi></mrow></msub>" in page
    assert "<msqrt><mi>dim</mi></msqrt>" in page and "over the last <code>window</code> tokens" in page
    assert "<msub><mrow><mi>z</mi></mrow><mrow><mi>t</mi><mo>−</mo><mn>1</mn></mrow></msub>" in page


def test_cards_colour_what_a_member_changes():
    from generator.card import PLAIN, boxes, legend, row, words
    from generator.gallery import FIRST

    changed = {name: [box.lines for box in boxes(MEMBERS[name]) if not box.plain] for name in MEMBERS}
    assert changed["gpt"] == changed["bert"] == changed["vanilla"] == []
    assert changed["local"] == [("softmax attention", "position: rope", "pattern: local")]
    assert all(changed[name] for name, member in MEMBERS.items() if member.axes)
    assert "reversible" in words(MEMBERS["reformer"])
    signs = ElementTree.fromstring(legend())
    assert {rect.get("class") for rect in signs.iter("rect")} == {"plain", "changed"} and len(signs) == 5
    assert [code.text for code in signs.iter("code")] == list(PLAIN.values())
    drawn = row([MEMBERS[name] for name in FIRST])
    assert (DOCS / "gallery.svg").read_text(encoding="utf-8") == drawn


def test_cards_are_filtered_in_a_browser(tmp_path):
    from generator.gallery import sheet

    style = (DOCS / "assets" / "style.css").read_text(encoding="utf-8")
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>x</title><style>{style}</style>"
    (tmp_path / "page.html").write_text(f"{head}<main>{sheet()}</main>", encoding="utf-8")
    browser = Browser()
    try:
        browser.size(390)
        browser.open(tmp_path / "page.html")
        assert browser.js("document.documentElement.scrollWidth") <= 390
        shown = "[...document.querySelectorAll('a.card')].filter(card => card.offsetParent).map(card => card.href)"
        assert len(browser.js(shown)) == len(MEMBERS)
        choose = (
            "for (const [name, value] of Object.entries({})) document.querySelector(`[name=${{name}}]`).value = value;"
        )
        wanted = {"axis": "pattern", "task": "next token"}
        fire = "document.querySelector('form.filters').dispatchEvent(new Event('change'));"
        browser.js(choose.format(json.dumps(wanted)) + fire)
        names = {href.rpartition("/")[2].removesuffix(".html") for href in browser.js(shown)}
        assert names == {name for name, member in MEMBERS.items() if "pattern" in member.axes and member.causal}
        count = f"{len(names)} of {len(MEMBERS)}"
        assert browser.js("document.querySelector('output').textContent") == count and browser.errors == []
    finally:
        browser.close()


def test_members_say_when_to_take_them():
    for name, member in MEMBERS.items():
        for clause in (member.use_when, member.avoid_when):
            assert clause and not clause.endswith("."), name


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_page_has_all_its_options_and_figures(name):
    from generator.tasks import task_page

    page, task = task_page(TASKS[name]), TASKS[name]
    for options in (task.Options, task.EvaluationOptions, task.GenerationOptions):
        for each in fields(options):
            assert f"`--{each.name.replace('_', '-')}`" in page
    assert all(f"`{metric.name}`" in page for metric in task.metrics)


@pytest.mark.parametrize("name", MEMBERS)
def test_how_a_member_is_trained_is_understood(name):
    from generator.commands import training

    from kinformer.lab.cli.form import flags, form_of
    from kinformer.lab.cli.train import Train

    lines = training(MEMBERS[name], configure(name, "small"))
    (train,) = [words for words in commands_of("\n".join(lines)) if words[:2] == ["train", name]]
    shown = {word[2:] for word in train if word.startswith("--")}
    assert shown <= flags(form_of(Train, "Options")).keys()
    assert all(f"--{need.replace('_', '-')}" in train for need in MEMBERS[name].needs)


def test_every_part_has_its_place():
    from generator.parts import slot_page

    from kinformer.family.kinds import kinds

    for slot, table in kinds().items():
        page = slot_page(slot)
        assert re.findall(r"^## `(\w+)`$", page, re.MULTILINE) == list(table)
        assert not re.search(r"^\| `\w+` \|  \|", page, re.MULTILINE), f"a setting of {slot} has no meaning"


def test_the_reference_has_every_public_name():
    from generator.parts import slot_page

    import kinformer
    from kinformer import interop, nn
    from kinformer.family.kinds import kinds

    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")]
    text = "\n".join([*pages, *map(slot_page, kinds())])
    objects = re.findall(r"^\.\. (?:auto|py:)(?:function|class|module):: (kinformer\.[\w.]+)", text, re.MULTILINE)
    for module, names in ((kinformer, kinformer.__all__), (nn, dir(nn)), (interop, interop.__all__)):
        missing = {f"{module.__name__}.{name}" for name in names} - set(objects)
        assert not missing, f"describe in docs/reference: {sorted(missing)}"
    assert len(objects) == len(set(objects))


def test_results_are_told_with_date_and_machine():
    from generator.results import results

    found = {result.name: result for result in results()}
    assert found.keys() == {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert found["hashing"].members >= {"reformer", "routing"} and "cores" in found["hashing"].machine
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", result.date) for result in found.values())


def test_every_result_has_a_row_in_the_index_and_a_page():
    from generator.results import BENCHMARKS, index, results

    assert index().keys() == {path.stem for path in (BENCHMARKS / "pages").glob("*.md")}
    for result in results():
        row = index()[result.name]
        assert row.question == result.question and result.question.endswith("?")
        assert (BENCHMARKS / row.call.split()[0]).is_file()
        sections = re.findall(r"^## (.+)$", result.body, re.MULTILINE)
        assert sections == ["Result", "What it shows", "What it does not show", "Command"], result.name
        for target in re.findall(r"\]\(([^)]+)\)", result.body):
            assert (BENCHMARKS / "pages" / target).is_file(), target


def test_claims_and_recipes_of_papers_are_listed(tmp_path):
    from generator import papers

    claims = list(papers._claims())
    assert {row[4] for row in claims} == {"yes", "partly", "no"} and len(claims) == len(set(claims))
    for member, *_, command in claims:
        assert re.match(r"\[([\w-]+)\]", member)[1] in MEMBERS and (ROOT / command.strip("`").split()[0]).is_file()
    recipes = {(name, recipe) for name, record in MEMBERS.items() for recipe in record.recipes if "paper" in recipe}
    rows = list(papers._recipes())
    assert {(re.match(r"\[([\w-]+)\]", row[0])[1], row[1]) for row in rows} == recipes
    assert all(row[2] for row in rows)
    dsa = next(row[2] for row in rows if row[0].startswith("[dsa]"))
    assert "in stage 1 steps 1,000" in dsa and "in stage 2 lr 7.3e-06" in dsa
    assert not any(row[3].startswith(("[Yes: ", "[No: ")) for row in claims)


def test_every_script_is_in_the_index():
    from generator.results import BENCHMARKS

    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in BENCHMARKS.glob("*.py")} - {
        "associative.py",
        "common.py",
        "peers.py",
        "equal_minutes.py",
    }
    assert scripts == set(re.findall(r"`(\w+\.py)", text)), scripts ^ set(re.findall(r"`(\w+\.py)", text))


def test_plots_hold_the_numbers_of_their_results(tmp_path):
    pytest.importorskip("matplotlib")
    from generator.charts import Bars, save
    from generator.plots import PLOTS
    from generator.results import results

    data = {result.name: result.data for result in results()}
    for name, plots_of in PLOTS.items():
        for plot in plots_of(data[name]):
            series = plot.groups if isinstance(plot, Bars) else plot.series
            assert series and all(len(values) > 0 for values in series.values()), name
    assert PLOTS["quality"](data["quality"])[0].groups[""]["local"] == pytest.approx(1.709, abs=5e-4)
    save(PLOTS["speech"](data["speech"]), tmp_path / "speech.png")
    assert (tmp_path / "speech.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", MEMBERS)
def test_evidence_of_a_record_exists(name):
    member = MEMBERS[name]
    for path in re.findall(r"tests/[\w/]+\.py", " ".join(member.parity)):
        assert (ROOT / path).is_file(), path
    for result in member.results:
        assert (ROOT / "benchmarks" / "results" / f"{result}.json").is_file(), result


def test_the_page_of_parity_names_tests_that_exist_and_every_member_with_an_oracle():
    from generator.members import parity_table

    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8") + parity_table().replace("\\_", "_")
    paths = set(re.findall(r"tests/[\w/]+\.py", text))
    assert len(paths) > 40 and all((ROOT / path).is_file() for path in paths)
    assert all(bool(member.parity) == (f"[`{name}`]" in text) for name, member in MEMBERS.items())


def test_docstrings_become_formulas_and_prose():
    from generator.docstrings import rst

    text = "What *it* is, ``x * y``:\n\n    y = a * x\n\nname: a thing\n    that hangs\nother_one: more"
    assert (
        rst(text)
        == "What \\*it\\* is, ``x * y``:\n\n::\n\n        y = a * x\n\nname: a thing that hangs\n\nother\\_one: more\n"
    )


def test_lines_about_parameters_become_a_table():
    from generator.docstrings import parameters, rst

    def absorb(q: int, k: int, window: int | None = None) -> None: ...

    text = rst(
        "What it does.\n\nq, k: tensors\n    of one shape\nwindow: its *length*\n\nErrors: none", parameters(absorb)
    )
    assert "* - ``q``, ``k``\n     - ``int``\n     -\n     - tensors of one shape" in text
    assert "* - ``window``\n     - ``int | None``\n     - ``None``\n     - its \\*length\\*" in text
    assert "Errors: none" in text


def test_pages_have_levels_landmarks_and_stops_of_the_tab_key():
    from generator.accessible import accessible

    page = (
        '<aside class="sidebar-drawer"><p class="caption" role="heading">A</p></aside><pre>x</pre>'
        '<div class="table-wrapper docutils"><th class="head text-right"><p></p></th></div>'
        '<aside class="toc-drawer no"><ul><li>a</li>\n<ul><li>b</li>\n</ul><li>c</li>\n</ul>'
    )
    result = accessible(page)
    assert (
        'aria-level="2"' in result and '<pre tabindex="0">' in result and '<td class="head text-right"></td>' in result
    )
    assert result.count("aria-label=") == 2 and '<div tabindex="0" class="table-wrapper docutils">' in result
    assert result.endswith("<ul><li>a</li><li>b</li>\n<li>c</li>\n</ul>") and accessible(result) == result
