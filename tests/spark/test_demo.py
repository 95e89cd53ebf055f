"""The demo as its user starts it: what it answers, and that Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.test_cli import processes_about
from tests.kit import eventually
from tests.readme import ROOT

pytestmark = pytest.mark.spark


@contextmanager
def the_demo(home: Path) -> Iterator[subprocess.Popen[str]]:
    """`sublet demo --json --keep home/kept` as a job of its own, prose in home/err."""
    with (home / "err").open("w") as prose:
        running = subprocess.Popen(
            [sys.executable, "-m", "sublet.cli", "demo", "--json", "--keep", str(home / "kept")],
            cwd=ROOT,
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            stderr=prose,
            text=True,
            start_new_session=True,
        )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def prose(home: Path) -> str:
    return (home / "err").read_text()


def nothing_runs(home: Path) -> None:
    eventually(lambda: not processes_about(home), 20, lambda: "\n".join(processes_about(home)))


@pytest.mark.conforms("E5", "E10", "E16", "E25")
@pytest.mark.long
def test_kills_lose_nothing(server_home: Path) -> None:
    """A worker and a leader are killed; every message is consumed, and every repeat was announced."""
    with the_demo(server_home) as running:
        said, _ = running.communicate(timeout=220)
    answer = json.loads(said)
    assert running.returncode == 0, prose(server_home)
    assert (answer["published"], answer["consumed"], answer["lost"]) == (336_776, 336_776, 0)
    assert (
        answer["duplicated"] == answer["explained_duplicates"] == sum(r["messages"] for r in answer["duplicate_ranges"])
    )
    assert answer["moves"] == len(answer["move_list"]) > 0
    assert any(move["forced"] or move["moved_from"] for move in answer["move_list"])
    assert answer["totals_match"] is True
    assert [kill["what"] for kill in answer["kills"]] == ["worker", "leader"]
    assert all(0.3 <= kill["consumed_share"] <= 0.7 for kill in answer["kills"])
    assert prose(server_home).count("killed") == 2
    assert "leads the group now" in prose(server_home)
    assert all(len(line) < 20 or line[6:8] == " s" for line in prose(server_home).splitlines()), prose(server_home)
    nothing_runs(server_home)
    assert list((server_home / "kept" / "records").glob("*.jsonl"))


@pytest.mark.long
def test_ctrl_c_ends_all_processes(server_home: Path) -> None:
    with the_demo(server_home) as running:
        eventually(lambda: "share 16 streams" in prose(server_home), 90, lambda: prose(server_home))
        assert processes_about(server_home)
        os.killpg(running.pid, signal.SIGINT)
        said, _ = running.communicate(timeout=40)
    assert (running.returncode, said) == (130, ""), prose(server_home)
    assert "Traceback" not in prose(server_home)
    assert prose(server_home).splitlines()[-1].endswith("interrupted: everything that was started has ended")
    nothing_runs(server_home)
