"""What goes wrong while a file is read."""

import pytest

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import reading


def test_its_contents_are_blamed():
    with pytest.raises(KinformerError, match=r"a\.json: is damaged \(no such key\); restore it"), reading("a.json"):
        raise ValueError("no such key.")


def test_a_broken_installation_is_not():
    with pytest.raises(ImportError), reading("a.json"):
        raise ImportError("cannot import name")
