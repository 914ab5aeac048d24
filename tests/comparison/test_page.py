"""The page: nothing from a network, a stranger's text escaped, contrast enough; and in a real browser, if there is one:
sorting, tooltips by pointer and keys, themes, phone width, no complaint of the console or of axe."""

import re
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from kinformer.lab.comparison.report import ASSETS, Chart, Series, markdown, page, svg
from kinformer.lab.comparison.words import departures
from tests.comparison.browser import Browser
from tests.comparison.conftest import comparison, entrant

HOSTILE = "<script>alert(1)</script>\"'&$x_1^{2"


@pytest.fixture(scope="module")
def html():
    first = entrant("alpha", [2.0, 2.05, 2.02])
    second = entrant("beta", [2.5, 2.45, 2.52], moved="the best is still at an end.")
    broken = entrant("gamma", [], error="its model: no memory", lengths=None, memory=None)
    return page(comparison(first, second, broken))


def test_it_holds_all_that_it_needs(html):
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', re.sub(r'xmlns(:\w+)?="[^"]*"', "", html))
    assert "@import" not in html and "url(http" not in html and "fetch(" not in html
    assert len(html) < 5_000_000
    assert "gamma is out. its model: no memory" in html


def test_text_of_strangers_is_escaped():
    made = comparison(
        entrant(HOSTILE, [2.0, 2.1], error=HOSTILE), entrant("b", [2.3]), command=HOSTILE, unit=HOSTILE, task=HOSTILE,
        data={"name": HOSTILE}, baselines={HOSTILE: 2.0}, seconds={HOSTILE: 1.0},
    )  # fmt: skip
    html = page(made)
    assert "<script>alert" not in html and html.count("<script>") == 1
    assert "&lt;script&gt;alert(1)" in html


LINK = "[x](http://y.z)![p](q) **b** _i_ `c` a|b ~~s~~ # h http://y.z"


def test_the_page_of_markdown_shows_the_text_of_strangers_as_it_is():
    made = comparison(
        entrant(HOSTILE, [2.0, 2.1]), entrant(LINK, [2.3]), entrant("broken", [], error=LINK),
        command="a\n\n" + HOSTILE, unit=HOSTILE, task=LINK,
        data={"name": HOSTILE, "version": LINK}, baselines={LINK: 2.0},
    )  # fmt: skip
    text = markdown(made)
    html = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)
    assert not re.findall("<(script|a|img|em|strong|code|s)[ >]", re.sub("(?s)<pre>.*?</pre>", "", html))
    assert html.count("<h1>") == 1 and "<h2" not in html
    cells = re.findall("<td>(.*?)</td>", html)
    assert {unescape(cell) for cell in cells} >= {HOSTILE, LINK}
    assert len({len(re.findall("<t[dh]\\b", row)) for row in html.split("<tr>")[1:]}) == 1


@pytest.mark.parametrize("name", ["1. x", "2) x", "- x", "+ x"])
def test_a_strangers_name_begins_no_list(name):
    made = comparison(entrant(name, [], error="no"), entrant("@all www.y.z", [2.0, 2.1]), entrant("b", [2.3, 2.2]))
    text = markdown(made)
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert html.count("<ul>") + html.count("<ol>") == 1 + bool(departures(made)) and f"{name} is out. no" in html
    prose = "\n".join(line for line in text.split("\n") if not line.startswith("    "))
    assert "@" not in prose and "www." not in prose and "@all www.y.z" in unescape(html)


def test_points_without_a_place_on_the_axes_are_left_out():
    points = [(1.0, 2.0, "one"), (0.0, 2.0, "none"), (2.0, float("nan"), "nan"), (10.0, 3.0, "ten")]
    drawn = svg(Chart("c", "title", "x", "y", [Series("a", 0, points), Series("b", 1, [])], log="x"))
    assert re.findall('data-tip="(.*?)"', drawn) == ["a: one", "a: ten"]


def luminance(colour):
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_enough_in_both_themes():
    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    themes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in style.split("}")[:2]]
    for theme in themes:
        for ground in ("paper", "panel"):
            for text in ("ink", "muted", "link", "good", "bad"):
                assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
            for number in range(8):
                assert contrast(theme[f"s{number}"], theme[ground]) >= 3, (number, ground)


@pytest.fixture(scope="module")
def browser(html, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(html, encoding="utf-8")
    opened = Browser()
    opened.size(1200)
    opened.prefers("light")
    opened.open(path)
    yield opened
    opened.close()


NAMES = "[...document.querySelectorAll('#table tbody th')].map(e => e.textContent.trim())"


def test_the_table_sorts(browser):
    assert browser.js(NAMES) == ["alpha", "beta", "gamma"]
    click = "document.querySelectorAll('#table thead button')[1].click();"
    assert browser.js(f"{click} {NAMES}") == ["alpha", "beta", "gamma"]
    assert browser.js(f"{click} {NAMES}") == ["beta", "alpha", "gamma"]  # what is not known stays last
    assert browser.js("document.querySelectorAll('#table thead th')[1].ariaSort") == "descending"


def test_points_tell_what_they_are_to_pointer_and_keys(browser):
    place = browser.js(
        "(() => { const point = document.querySelector('.plot .pt'); point.scrollIntoView({block: 'center'});"
        " const box = point.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]; })()"
    )
    browser.js("new Promise(done => setTimeout(done, 150))")
    browser.move(place[0] + 30, place[1] + 300)
    browser.move(*place)
    told = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"
    assert browser.js(told) == "alpha: 5 steps, 2.2233"
    browser.js("document.querySelector('.plot').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.js(told) == "alpha: 10 steps, 2.1233"
    browser.press("Escape")
    assert browser.js(told) == ""


def test_a_member_can_be_hidden(browser):
    shown = "document.querySelectorAll('g[data-series=\"1\"]:not(.off)').length"
    before = browser.js(shown)
    assert before > 5
    button = "document.querySelector('[data-toggle=\"1\"]')"
    assert browser.js(f"{button}.click(); {shown}") == 0
    assert browser.js(f"{button}.click(); {shown}") == before


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_and_phones(browser, theme):
    browser.prefers(theme)
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    assert browser.js(ground) == {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 20, 25)"}[theme]
    browser.js("document.getElementById('theme').click()")
    assert browser.js(ground) == {"dark": "rgb(255, 255, 255)", "light": "rgb(15, 20, 25)"}[theme]
    browser.js("document.getElementById('theme').click()")
    browser.size(360)
    assert browser.js("document.documentElement.scrollWidth") <= 360
    browser.size(1200)
    assert browser.errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, theme):
    found = find_spec("axe_core_python")
    if found is None or found.origin is None:
        pytest.skip("axe-core-python is not installed; pip install 'kinformer[test]' gets it")
    browser.prefers(theme)
    browser.js((Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8") + "; 1")
    browser.js("document.querySelectorAll('details').forEach(each => each.open = true)")
    result = browser.js("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map(v =>"
                        " [v.impact, v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 120))]))")  # fmt: skip
    assert [each for each in result if each[0] in ("serious", "critical")] == []
