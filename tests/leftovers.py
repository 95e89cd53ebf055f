"""Checks that a run leaves no processes behind; otherwise it fails and lists them.

All temporary files of a run are in one folder, to which TMPDIR points in its processes, so that both can be found by
it. It is in memory, if there is enough of it and TMPDIR does not name another place: a hundred servers and a thousand
databases made and deleted on ext4 make each new file slower, as it does not use the inodes of the last minutes again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

END_TIMEOUT_S = float(os.environ.get("TESTS_END_TIMEOUT_S", "60"))
"""Time until a process that a test has stopped must be gone, on a busy machine."""

OWN = "multiprocessing.resource_tracker"
"""A helper process of Python, which ends with the process that has started it."""

PREFIX = "sublet-run-"
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 << 30
"""Free memory needed: each worker has a server, and each of its databases takes ten megabytes."""


class Leftovers:
    """Plugin of pytest that creates the folder of a run, and at its end looks for processes that are still running."""

    def __init__(self) -> None:
        _remove_leftovers(MEMORY)
        place = MEMORY if "TMPDIR" not in os.environ and _is_roomy(MEMORY) else None
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
        self._folder.chmod(0o755)  # servers started by root run as another user
        self._found: list[str] = []
        os.environ["TMPDIR"] = str(self._folder)
        os.environ["SPARK_SUBMIT_OPTS"] = f"-Djava.io.tmpdir={self._folder}"
        tempfile.tempdir = None
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # end like Ctrl-C, with a clean-up

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Stop the leftover processes, which fails a run that was not interrupted, and remove the folder."""
        is_aborted = exitstatus == pytest.ExitCode.INTERRUPTED
        deadline = time.monotonic() + (0 if is_aborted else END_TIMEOUT_S)
        while (living := [p for p in psutil.process_iter() if self._is_ours(p)]) and time.monotonic() < deadline:
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

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            traces = (process.environ().get("TMPDIR", ""), *process.cmdline())
        except psutil.Error:
            return False
        return any(str(self._folder) in trace for trace in traces) and not any(OWN in trace for trace in traces)


def _remove_leftovers(place: Path) -> None:
    """Remove the folders of runs that were killed, as they take memory."""
    for folder in place.glob(f"{PREFIX}*"):
        if not psutil.pid_exists(int(folder.name.removeprefix(PREFIX).partition("-")[0])):
            shutil.rmtree(folder, ignore_errors=True)


def _is_roomy(place: Path) -> bool:
    """Return whether there is room for a server, and its programs may be executed there."""
    if not os.access(place, os.W_OK):
        return False
    return not os.statvfs(place).f_flag & os.ST_NOEXEC and shutil.disk_usage(place).free >= MEMORY_BYTES


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}, {process.name()}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"process {process.pid}"
