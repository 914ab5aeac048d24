"""What README and the pages of the documentation hold: their Python, and the commands that they tell people to type."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(DOCS / f"{name}.md" for name in ("install", "tutorial", "layer")),
]
PAGES += sorted((DOCS / "howto").glob("*.md"))
PAGES += sorted((DOCS / "book").glob("*.md"))


def python_of(page: Path) -> list[str]:
    """The blocks of Python of a page, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of every ``kinformer`` command of a text, without what the shell makes of its line."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        for part in line.split(" && "):
            if part.strip().startswith("kinformer "):
                words = shlex.split(part.strip(), comments=True)
                ends = [index for index, word in enumerate(words) if word in ("<", ">", "|")]
                words = words[1 : ends[0]] if ends else words[1:]
                if "--" in words:  # what is launched
                    yield words[words.index("--") + 1 :]
                    words = words[: words.index("--")]
                yield words
