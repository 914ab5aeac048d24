"""The tests of one part of the package: ``python tests/part.py mixers/linear`` prints their files.

They are the files that are named like the part, such as ``tests/kernels/test_linear.py``, and the files of the part's
room, such as ``tests/mixers``, that import it. Where there are none, they are all files that import the part.
"""

import re
import sys
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "kinformer"


def files_for(part: str) -> list[Path]:
    """Return the test files of a module or folder below ``src/kinformer``, such as ``mixers/linear``."""
    room, name = Path(part).parent.name, Path(part).name
    module = re.compile(rf"\bkinformer\.{part.replace('/', '[.]')}\b")
    files = sorted(TESTS.rglob("test_*.py"))
    named = [path for path in files if f"_{name}_" in f"{path.stem}_"]
    importing = [path for path in files if module.search(path.read_text(encoding="utf-8"))]
    near = [path for path in importing if path.parent.name == room]
    return sorted({*named, *near}) or importing


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    if not part or not ((PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()):
        sys.exit(
            f"PART={part or '(none)'} is not a module or folder below src/kinformer; give, say, PART=mixers/linear"
        )
    files = files_for(part)
    if not files:
        print(f"no test file is named like {part} or imports it: only the laws run", file=sys.stderr)
    print(*(path.relative_to(TESTS.parent) for path in files), sep="\n")
