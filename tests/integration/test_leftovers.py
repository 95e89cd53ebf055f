"""What a run of the tests leaves behind, in runs of pytest of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.kit import eventually
from tests.leftovers import MEMORY

CONFTEST = """
import os
from pathlib import Path
from tests.leftovers import Leftovers

def pytest_configure(config):
    config.pluginmanager.register(Leftovers())
    Path(__file__).with_name("folder").write_text(os.environ["TMPDIR"])
"""
TIDY = "def test_tidy(tmp_path):\n    (tmp_path / 'file').write_text('x')\n"
UNTIDY = "import subprocess\n\ndef test_untidy():\n    subprocess.Popen(['sleep', '1000'])\n"
ENDLESS = "import subprocess\n\ndef test_endless():\n    subprocess.run(['sleep', '1000'])\n"


def run(directory: Path, test: str, *, is_place_given: bool = True) -> subprocess.Popen[str]:
    """Start pytest on `test`, with `directory` for its temporary files, or where it puts them by itself."""
    project = directory / "project"
    project.mkdir()
    (project / "conftest.py").write_text(CONFTEST)
    (project / "test_it.py").write_text(test)
    (directory / "tmp").mkdir()
    own = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(project), str(project)],
        env=own | ({"TMPDIR": str(directory / "tmp")} if is_place_given else {}),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def folder_of(directory: Path) -> Path:
    """The folder of the run's temporary files, once it has begun."""
    return Path((directory / "project/folder").read_text())


def sleepers(directory: Path) -> list[psutil.Process]:
    folder = str(folder_of(directory)) if (directory / "project/folder").exists() else "none yet"
    return [
        process
        for process in psutil.process_iter(["name", "environ"])
        if process.info["name"] == "sleep" and folder in (process.info["environ"] or {}).get("TMPDIR", "")
    ]


def files_left(directory: Path) -> list[Path]:
    return list((directory / "tmp").iterdir())


def test_a_process_left_behind_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_END_TIMEOUT_S", "0")
    with run(tmp_path, UNTIDY) as pytest_run:
        output, _ = pytest_run.communicate(timeout=100)
    assert pytest_run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "left behind by the tests, and ended: process" in output
    assert "sleep 1000" in output
    assert sleepers(tmp_path) == []
    assert files_left(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_after_a_signal_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    with run(tmp_path, ENDLESS) as pytest_run:
        eventually(lambda: sleepers(tmp_path), timeout_s=60)
        os.kill(pytest_run.pid, number)
        pytest_run.communicate(timeout=100)
    assert pytest_run.returncode == pytest.ExitCode.INTERRUPTED
    assert sleepers(tmp_path) == []
    assert files_left(tmp_path) == []


def test_a_killed_runs_files_go_with_the_next(tmp_path: Path) -> None:
    """At least those in memory. The next is a tidy one, which leaves none itself."""
    for part in ("first", "second"):
        (tmp_path / part).mkdir()
    with run(tmp_path / "first", ENDLESS, is_place_given=False) as pytest_run:
        (sleeper,) = eventually(lambda: sleepers(tmp_path / "first"), timeout_s=60)
        pytest_run.kill()
        pytest_run.communicate(timeout=100)
        sleeper.kill()
    folder = folder_of(tmp_path / "first")
    assert folder.exists()
    with run(tmp_path / "second", TIDY) as pytest_run:
        output, _ = pytest_run.communicate(timeout=100)
    assert (pytest_run.returncode, files_left(tmp_path / "second")) == (0, []), output
    assert not folder.exists() or not folder.is_relative_to(MEMORY)
    shutil.rmtree(folder, ignore_errors=True)
