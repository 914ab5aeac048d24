"""The annotated pages on the site: formulas, links and columns."""

import pytest

from kinformer.family.table import MEMBERS
from tests.annotated.test_pages import PAGES


def test_latex_becomes_mathml():
    from generator.latex import mathml

    formula = mathml(r"y_i = \sum_{j \le i} \frac{a}{\sqrt{d}} \mathrm{elu}(x)^2", display=True)
    assert formula.startswith('<math display="block"')
    assert "<msub><mi>y</mi><mi>i</mi></msub>" in formula
    assert "<munder><mo>∑</mo><mrow><mi>j</mi><mo>≤</mo><mi>i</mi></mrow></munder>" in formula
    assert "<mfrac><mrow><mi>a</mi></mrow><mrow><msqrt><mrow><mi>d</mi></mrow></msqrt></mrow></mfrac>" in formula
    assert '<mi mathvariant="normal">elu</mi>' in formula and "<mn>2</mn></msup>" in formula


@pytest.mark.parametrize("formula", [r"\unknown", "x_", "{x"])
def test_latex_outside_the_subset_is_an_error(formula):
    from generator.latex import mathml

    with pytest.raises(ValueError):
        mathml(formula)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_prose_beside_code(name):
    from generator import annotated

    each = next(page for page in annotated.pages() if page.name == name)
    text = annotated._page(each)
    assert "$" not in text.split("## The proof")[0].replace("```console", "")
    assert text.count(":::::{container} side") >= 2 and "](../results/" in text
    links = [f"../members/{name}.md" if name in MEMBERS else f"#part-mixer-{name}" for name in each.members]
    assert all(f"]({link.replace('_', '-') if link[0] == '#' else link})" in text for link in links)
