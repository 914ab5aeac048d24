"""What every test costs in processor time, which depends less than its seconds on what else the machine does.

The children of a test count once they have ended, and shared fixtures for the first test that asks for them.
"""

from __future__ import annotations

import os

import pytest

LISTED = 5.0
"""Seconds beyond which a test is named at the end of the session."""
LIMIT = 120.0
"""Seconds beyond which a step of a test (its fixtures, or the test itself) fails. Processors differ by a factor of 2.5:
what takes 25 s on one with AMX takes 60 s on one without."""
_NAME = "processor_seconds"


class ProcessorTime:
    """A plugin, in the processes that run tests and in the one that reports on them."""

    def __init__(self, listed: float = LISTED, limit: float = LIMIT) -> None:
        self.listed, self.limit, self._mark = listed, limit, spent()

    def pytest_runtest_logstart(self) -> None:
        self._mark = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = spent()
        seconds, self._mark = now - self._mark, now
        report.user_properties.append((_NAME, seconds))
        if report.passed and seconds > self.limit:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} ({report.when}) took {seconds:.0f} s of processor time, but {self.limit:g} s is the "
                "most for one test: share what its cases build, or make it smaller."
            )
        return report

    def pytest_terminal_summary(self, terminalreporter) -> None:
        total: dict[str, float] = {}
        for reports in terminalreporter.stats.values():
            for report in reports:
                for name, value in getattr(report, "user_properties", ()):
                    if name == _NAME:
                        total[report.nodeid] = total.get(report.nodeid, 0.0) + value
        slow = sorted(((seconds, test) for test, seconds in total.items() if seconds > self.listed), reverse=True)
        if slow:
            terminalreporter.section(f"tests of more than {self.listed:g} s of processor time")
            for seconds, test in slow:
                terminalreporter.line(f"{seconds:6.1f} s  {test}")
        if total:
            terminalreporter.line(f"{sum(total.values()):.0f} s of processor time in {len(total)} tests")


def spent() -> float:
    """Seconds that this process and those of its children that have ended had a processor."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
