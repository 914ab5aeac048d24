"""What every test shares: a deterministic Hypothesis without deadlines, processes that do not fight for cores, Triton's
interpreter where there is no GPU, what each test costs, and no search for garbage in what all tests share."""

import gc
import os
import random
import sys
from io import BytesIO
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
if sys.dont_write_bytecode:  # PYTHONDONTWRITEBYTECODE: every process would compile the package and the tests anew
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():  # before anything imports Triton, which PyTorch's compiler does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings  # noqa: E402

from tests import machine  # noqa: E402

if "KINFORMER_TEST_PROCESSOR" in os.environ:  # a class of the tables, in whose place this processor stands
    machine.pretend(os.environ["KINFORMER_TEST_PROCESSOR"])

from kinformer.lab.cli.main import main  # noqa: E402
from tests.process_state import check_functions  # noqa: E402
from tests.processor_time import ProcessorTime  # noqa: E402

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("steady")


def pytest_configure(config):
    check_functions()
    config.pluginmanager.register(ProcessorTime())


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is loaded while tests are collected stays, and is not searched for garbage, then or later. What tests load
    (a compiler, exporters) mostly stays as well, and is searched a tenth as often as in other processes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10 * gc.get_threshold()[0])
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def device():
    """The device named by KINFORMER_TEST_DEVICE is PyTorch's default one, on which the batteries run."""
    if "KINFORMER_TEST_DEVICE" in os.environ:
        torch.set_default_device(os.environ["KINFORMER_TEST_DEVICE"])


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """About 14,000 bytes of words in lines; a twentieth of it is the test split."""
    words = random.Random(0).choices(["wind", "tree", "naïve", "river", "€", "sings", "under"], k=2500)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(
        "\n".join(" ".join(words[start : start + 9]) for start in range(0, len(words), 9)), encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What is kept between runs, such as data that was read, is kept among the tests' own files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs a command line, given ``stdin`` in bytes; returns its exit code, standard output and standard error."""

    def run(*arguments, stdin=None):
        capsys.readouterr()
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=BytesIO(stdin)))
        threads = torch.get_num_threads()
        code = main([str(argument) for argument in arguments])
        torch.set_num_threads(threads)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.fixture(autouse=True)
def arithmetic():
    """Every test leaves products and the smallest numbers as PyTorch has them; commands choose them for a process."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)


@pytest.fixture
def run_cli(cli):
    """Runs a command line, which must succeed; returns its standard output."""

    def run(*arguments):
        code, out, err = cli(*arguments)
        assert code == 0, err
        return out

    return run


@pytest.fixture
def registrations():
    """Forget what a test registers; the value does it at once."""
    from kinformer.runtime import plugins

    def forget():
        plugins._registrations.clear()
        plugins.entry_points_of.cache_clear()

    yield forget
    forget()
