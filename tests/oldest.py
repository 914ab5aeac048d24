"""The oldest versions that pyproject allows, as constraints for pip: ``python tests/oldest.py > constraints.txt``."""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements():
    """All requirements of the package and its extras, as text."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    return [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]


def oldest(requirement):
    """The name of a requirement, and its lowest version: ``tyro>=1.0.5,<2`` is ``("tyro", "1.0.5")``."""
    name, version = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\d.]+)", requirement).groups()
    return name, version


def constraints():
    """One ``name==version`` for every package, sorted by name."""
    pairs = {}
    for requirement in requirements():
        name, version = oldest(requirement)
        assert pairs.setdefault(name, version) == version, f"{name} has two lowest versions"
    return [f"{name}=={version}" for name, version in sorted(pairs.items())]


if __name__ == "__main__":
    print("\n".join(constraints()))
