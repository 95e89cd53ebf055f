"""What a run of the tests leaves behind: nothing, or the run fails and says what it was.

All temporary files of a run lie in one folder, to which TMPDIR leads its processes, so that both can be found by it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil
import pytest

END_TIMEOUT_S = float(os.environ.get("TESTS_END_TIMEOUT_S", "60"))
"""How long what a test has ended may take until it is gone, on a busy machine."""

OWN = "multiprocessing.resource_tracker"
"""A helper of Python's, which ends with the process that has started it."""


class Leftovers:
    """Gives a run its folder, and at the end looks for processes that still live. A plugin of pytest."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sublet-run-"))
        self._folder.chmod(0o755)  # servers that root starts run as somebody else
        self._found: list[str] = []
        os.environ["TMPDIR"] = str(self._folder)
        os.environ["SPARK_SUBMIT_OPTS"] = f"-Djava.io.tmpdir={self._folder}"
        tempfile.tempdir = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """End the processes that are left, which fails a run that was not broken off, and remove the folder."""
        is_aborted = exitstatus == pytest.ExitCode.INTERRUPTED
        deadline = time.monotonic() + (0 if is_aborted else END_TIMEOUT_S)
        while (living := self._living_processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._found = [_describe(process) for process in living]
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(living, END_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._found and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._found:
            terminalreporter.write_line(f"left behind by the tests, and ended: {line}")

    def _living_processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            traces = (process.environ().get("TMPDIR", ""), *process.cmdline())
        except psutil.Error:
            return False
        if any(OWN in trace for trace in traces):
            return False
        return any(str(self._folder) in trace for trace in traces)


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"process {process.pid}"
