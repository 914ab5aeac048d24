"""What every test shares: a deterministic Hypothesis without deadlines, processes that do not fight for cores, Triton's
interpreter where there is no GPU, and what each test costs."""

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():  # before anything imports Triton, which PyTorch's compiler does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings  # noqa: E402

from tests.processor_time import ProcessorTime  # noqa: E402

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


def pytest_configure(config):
    config.pluginmanager.register(ProcessorTime())


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """About 14,000 bytes of words in lines; a twentieth of it is the test split."""
    words = random.Random(0).choices(["wind", "tree", "naïve", "river", "€", "sings", "under"], k=2500)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(
        "\n".join(" ".join(words[start : start + 9]) for start in range(0, len(words), 9)), encoding="utf-8"
    )
    return path
