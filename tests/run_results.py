"""What a run leaves for the next: its duration, the minutes of each folder, and each test's outcome, day and commit."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tools.fault_results import CACHE_KEY

SELECTIONS = {"not long": "the tests of `make test`", "long": "the tests of `make test-rest`", "": "all tests"}
"""Descriptions of what a marker expression selects."""


class RunCosts:
    """Plugin of pytest that measures a run, for its summary and for the first lines of the next run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._started_at = time.monotonic()
        self._folder_seconds: dict[str, float] = defaultdict(float)
        self._passed_count = 0

    def pytest_report_header(self) -> list[str]:
        if not self._is_unfiltered():
            return []
        last = self._config.cache.get(self._cache_key(), None) if self._config.cache else None
        took = f"{last['passed']} passed in {_minutes(last['seconds'])} last time" if last else "not run here before"
        return [f"selected: {SELECTIONS.get(self._config.option.markexpr, self._config.option.markexpr)}; {took}"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = "/".join(Path(report.nodeid.partition("::")[0]).parts[:2])
        self._folder_seconds[folder] += report.duration
        self._passed_count += report.when == "call" and report.passed

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self._is_unfiltered() and self._config.cache:
            taken = {"seconds": time.monotonic() - self._started_at, "passed": self._passed_count}
            self._config.cache.set(self._cache_key(), taken)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._folder_seconds) > 1:
            by_cost = sorted(self._folder_seconds.items(), key=lambda each: -each[1])
            spent = ", ".join(f"{folder} {_minutes(s)}" for folder, s in by_cost)
            terminalreporter.write_line(f"minutes of all workers: {spent}")

    def _is_unfiltered(self) -> bool:
        option = self._config.option
        by_hand = self._config.args_source is pytest.Config.ArgsSource.ARGS or option.keyword or option.collectonly
        return not by_hand

    def _cache_key(self) -> str:
        return f"sublet/{self._config.option.markexpr or 'all'}"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class RunResults:
    """Plugin of pytest that stores the outcomes of a run beside those of earlier ones."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._run = [datetime.now(UTC).date().isoformat(), _commit(config)]
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        cache = self._config.cache if self._config.pluginmanager.hasplugin("cacheprovider") else None
        if cache and self._outcomes:
            new = {test: [outcome, *self._run] for test, outcome in self._outcomes.items()}
            cache.set(CACHE_KEY, cache.get(CACHE_KEY, {}) | new)


def _commit(config: pytest.Config) -> str:
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty"]
    described = subprocess.run(command, cwd=config.rootpath, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "no commit"
