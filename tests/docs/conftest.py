"""The generator of pages can be imported, as for Sphinx."""

import sys

import pytest

from tests.docs.written import DOCS


@pytest.fixture(scope="session", autouse=True)
def generator():
    sys.path.insert(0, str(DOCS))
    yield
    sys.path.remove(str(DOCS))
