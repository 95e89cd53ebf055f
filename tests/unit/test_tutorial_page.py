"""The tutorial's line that kills an application does so in both kinds of shell, with job control and without."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.kit import WAIT_S, eventually
from tools.tutorial import PAGE

PYTHON = "#!/bin/sh\necho $$ > python.pid\nexec sleep 1000\n"
"""In place of the interpreter: a process that ends by a signal alone."""


def is_over(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("job_control", ["set +m", "set -m"], ids=["script", "terminal"])
def test_the_application_is_killed(tmp_path: Path, job_control: str) -> None:
    begin, kill = re.findall(r"^\$ (.*one\.pid.*)$", PAGE.read_text(), re.MULTILINE)
    (interpreter := tmp_path / "python").write_text(PYTHON)
    interpreter.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def run(line: str) -> None:
        command = ["bash", "-c", f"{job_control}; {line}"]
        subprocess.run(command, cwd=tmp_path, env=environment, start_new_session=True, check=True)

    run(begin)
    pid_file = tmp_path / "python.pid"
    application = psutil.Process(int(eventually(lambda: pid_file.read_text() if pid_file.exists() else "", WAIT_S)))
    try:
        run(kill)
        eventually(lambda: is_over(application), WAIT_S)
    finally:
        if not is_over(application):
            application.kill()
