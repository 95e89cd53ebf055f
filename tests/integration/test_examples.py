"""The examples run, as their pages say, and their checks notice what they are for."""

from __future__ import annotations

import signal
import subprocess
import sys

import psycopg
import pyarrow as pa
import pytest

from examples._stage import a_stage
from examples.hourly_closing import consumer
from examples.hourly_closing.__main__ import wrong
from sublet_storage.db.connect import connect
from sublet_storage.node_directory import list_nodes
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import ROOT

TOTAL, EARLY = "with another total than in the data", "closed before all of it was added up"
RIGHT: dict[str, list[int]] = {"not closed": [], "closed more than once": [], TOTAL: [], EARLY: []}
SOURCE = pa.table({"hour": [1, 1, 2], "row": [0, 1, 2], "distance": [10, 20, 30]})


@pytest.mark.long
def test_hourly_closing() -> None:
    command = [sys.executable, "-m", "examples.hourly_closing", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=115)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "closed  38 of 38 hours; the end" in said
    assert "2013-01-02" in said
    assert "killed consumer-" in said
    assert "killed node-" in said


def test_the_callers_settings_are_not_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are for another database: its nodes would not start."""
    for name in ("SUBLET_DATABASE_URL_FILE", "SUBLET_SCHEMA"):
        monkeypatch.setenv(name, "callers")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with a_stage() as stage, connect(stage.url) as connection:
            first = stage.processes["node-1"]
            eventually(lambda: first.poll() is not None or list_nodes(connection), WAIT_S)
            assert first.poll() is None, stage.processes.tail_log("node-1")
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("parts", "closed_before", "late", "bad"),
    [
        ([(1, 7, 1, 10), (1, 8, 1, 20), (2, 7, 1, 30)], 3, [], {}),
        ([(1, 7, 1, 10), (1, 8, 1, 20), (2, 7, 1, 30)], 2, [], {"not closed": [2]}),
        ([(1, 7, 1, 10), (2, 7, 1, 30)], 3, [], {TOTAL: [1]}),
        ([(1, 7, 2, 30), (2, 7, 1, 30), (3, 7, 1, 5)], 4, [], {TOTAL: [3]}),
        ([(1, 7, 1, 10), (2, 7, 1, 30)], 3, [(1, 8, 1, 20)], {TOTAL: [1], EARLY: [1]}),
    ],
    ids=["right", "an hour open", "a part missing", "an hour too many", "closed too early"],
)
def test_hours_are_compared_with_the_data(
    empty_database: str,
    parts: list[tuple[int, ...]],
    closed_before: int,
    late: list[tuple[int, ...]],
    bad: dict[str, list[int]],
) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute(consumer.TABLES)
        connection.cursor().executemany(consumer.ADD, parts)
        connection.execute(consumer.CLOSE, ("one", closed_before))
        connection.cursor().executemany(consumer.ADD, late)
        connection.execute(consumer.CLOSE, ("another", closed_before))
        assert wrong(connection, SOURCE) == RIGHT | bad
