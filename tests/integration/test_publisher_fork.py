"""A process forked from one that publishes: what it inherited says so, and the parent's goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme import ROOT


def notify(story: str, place: str | Path) -> None:
    command = [sys.executable, "-m", "tests.processes.forking", story, str(place)]
    done = subprocess.run(command, check=False, cwd=ROOT, timeout=90, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.conforms("W1")
def test_every_use_in_a_child_is_refused_and_the_parents_goes_on(database: str) -> None:
    notify("every_use_in_a_child_is_refused", database)


def test_a_child_that_drops_or_leaves_what_it_inherited_touches_nothing_of_the_parents(database: str) -> None:
    notify("a_child_that_drops_it_touches_nothing", database)


def test_what_a_child_does_with_its_copy_of_a_connection_reaches_nobody(database: str) -> None:
    notify("a_childs_copies_of_connections_lead_nowhere", database)


def test_the_async_twin_refuses_too(database: str) -> None:
    notify("the_async_twin_refuses_too", database)


def test_a_child_does_not_stop_the_embedded_server_of_its_parent(server_home: Path) -> None:
    notify("a_child_does_not_stop_the_server", server_home / "data")
