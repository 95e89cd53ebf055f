"""Outcome, day and commit of each test's last run in this tree, for `tools.fault_results`."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime

import pytest

from tools.fault_results import CACHE_KEY


class RunResults:
    """Plugin of pytest that stores the outcomes of a run beside those of earlier ones."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._run = [datetime.now(UTC).date().isoformat(), _commit(config)]
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of one phase of a test: set-up, call or teardown."""
        if report.when == "call" or not report.passed:
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        """Store the outcomes."""
        cache = self._config.cache if self._config.pluginmanager.hasplugin("cacheprovider") else None
        if cache and self._outcomes:
            new = {test: [outcome, *self._run] for test, outcome in self._outcomes.items()}
            cache.set(CACHE_KEY, cache.get(CACHE_KEY, {}) | new)


def _commit(config: pytest.Config) -> str:
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty"]
    described = subprocess.run(command, cwd=config.rootpath, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "no commit"
