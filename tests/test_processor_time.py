"""The plugin that tells slow tests, in sessions of its own."""

import pytest

from tests.processor_time import ProcessorTime

pytest_plugins = ["pytester"]

TESTS = """
import subprocess, sys, time

def work(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def test_sleeps():
    time.sleep(0.2)

def test_works():
    work(0.15)

def test_lets_work():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.15: pass"], check=True)
"""


@pytest.mark.parametrize("limit", [60.0, 0.1])
def test_slow_tests_are_named_and_fail_beyond_the_limit(pytester, capsys, limit):
    pytester.makepyfile(TESTS)
    failed = 2 if limit < 1 else 0
    pytester.inline_run("-p", "no:cacheprovider", plugins=[ProcessorTime(listed=0.1, limit=limit)]).assertoutcome(
        passed=3 - failed, failed=failed
    )
    told = capsys.readouterr().out
    named = told.partition("tests of more than 0.1 s of processor time")[2]
    assert "::test_works" in named and "::test_lets_work" in named and "::test_sleeps" not in named
    assert "s of processor time in 3 tests" in named
    assert ("0.1 s is the most for one test" in told) == bool(failed)
