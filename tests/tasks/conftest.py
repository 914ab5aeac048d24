"""What tests of tasks share."""

import pytest

from kinformer.lab.data.images import read_images


@pytest.fixture(scope="module")
def digits(cache):
    """The 1,797 digits that come with the package."""
    return read_images("digits")
