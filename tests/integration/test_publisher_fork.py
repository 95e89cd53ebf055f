"""A process forked from one that publishes: what it inherited says so, and the parent's goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme import ROOT


def act(story: str, place: str | Path) -> None:
    command = [sys.executable, "-m", "tests.processes.forking", story, str(place)]
    done = subprocess.run(command, check=False, cwd=ROOT, timeout=90, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.conforms("W1")
@pytest.mark.parametrize(
    "story",
    [
        pytest.param("every_use_in_a_child_is_refused", marks=pytest.mark.long),
        "a_child_that_drops_it_touches_nothing",
        "a_childs_copies_of_connections_lead_nowhere",
        pytest.param("the_async_twin_refuses_too", marks=pytest.mark.long),
    ],
)
def test_a_child_cannot_publish_by_its_parents(database: str, story: str) -> None:
    act(story, database)


def test_a_child_does_not_stop_its_parents_server(server_home: Path) -> None:
    act("a_child_does_not_stop_the_server", server_home / "data")
