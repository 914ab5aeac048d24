"""README's table is the family's, and its Python runs."""

import re
from pathlib import Path

from kinformer.family.table import markdown

README = Path(__file__).parents[1] / "README.md"


def test_the_table_is_the_familys():
    text = README.read_text(encoding="utf-8")
    shown = text.split("<!-- family:begin -->")[1].split("<!-- family:end -->")[0].strip()
    assert shown == markdown()


def test_the_python_runs():
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, scope)
    assert scope["new"].shape == (2, 20)
    assert scope["y"].shape == (3, 10, 16)
