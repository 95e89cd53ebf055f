"""The examples in Spark run, as their pages say, and their checks notice what they are for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from examples import _stage
from examples.windowed_miles import __main__ as windowed_miles
from tests.kit_nodes import ROOT
from tests.spark.session import quick_path

pytestmark = pytest.mark.spark

RUN_S = 240.0
NONE_WRONG = ["   0 flights lost", "   0 flights doubled", "   0 flights not in the data"]
NO_WINDOW_WRONG = [
    "   0 windows not written",
    "   0 windows written more than once",
    "   0 windows with another total than in the data",
]


def played(place: Path, name: str, *arguments: str) -> str:
    """What an example prints; it has to end well."""
    running = subprocess.Popen(
        [sys.executable, "-m", f"examples.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": quick_path(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = running.communicate(timeout=RUN_S)
    finally:
        running.terminate()  # it ends what it has started
        running.communicate()
    assert running.returncode == 0, said
    return said


@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("windowed_miles", ["1"], ["54 of 54 windows are closed", "2013-01-01", *NO_WINDOW_WRONG]),
        ("exactly_once", ["1", "--kills", "2"], ["killed worker ", "killed node-", "2 processes killed", *NONE_WRONG]),
        ("two_applications", ["1"], ["held by heavy: 6, light: 2", "held by light: 8", *NONE_WRONG]),
        ("blue_green", ["1"], ["both: {'blue': 4, 'green': 4}", "green alone: {'green': 8}", *NONE_WRONG]),
        ("publish_from_query", ["1"], ["killed the driver", "the end: 842 messages", *NONE_WRONG]),
    ],
)
@pytest.mark.long
def test_it_ends_well_and_reports_it(tmp_path: Path, name: str, arguments: list[str], wanted: list[str]) -> None:
    said = played(tmp_path, name, *arguments)
    assert [text for text in wanted if text not in said] == [], said


@pytest.mark.parametrize(
    ("rows", "bad"),
    [
        ([2, 0, 1], {}),
        ([0, 2], {"lost": [1]}),
        ([0, 1, 2, 1], {"doubled": [1]}),
        ([0, 1, 2, 3], {"not in the data": [3]}),
        ([], {"lost": [0, 1, 2]}),
    ],
)
def test_a_flight_that_is_lost_or_doubled_is_noticed(
    capsys: pytest.CaptureFixture[str], rows: list[int], bad: dict[str, list[int]]
) -> None:
    found = _stage.wrong(pa.table({"row": [0, 1, 2]}), rows)
    assert found == {"lost": [], "doubled": [], "not in the data": []} | bad
    assert _stage.verdict("flights", found) == int(bool(bad))
    for what, flights in bad.items():
        assert f"   {len(flights)} flights {what}: {flights[0]}" in capsys.readouterr().out


A, B = (7, "EWR"), (8, "JFK")


@pytest.mark.parametrize(
    ("found", "bad"),
    [
        ([(A, (2, 30)), (B, (1, 5))], {}),
        ([(A, (2, 30))], {"not written": [B]}),
        ([(A, (2, 30)), (B, (1, 5)), (B, (1, 5))], {"written more than once": [B]}),
        ([(A, (1, 10)), (B, (1, 5))], {"with another total than in the data": [A]}),
        ([(A, (3, 40)), (B, (1, 5))], {"with another total than in the data": [A]}),
    ],
)
def test_windows_are_compared_with_the_data(found: windowed_miles.Totals, bad: dict[str, list[object]]) -> None:
    source = pa.table({"hour": [7, 7, 8], "origin": ["EWR", "EWR", "JFK"], "row": [0, 1, 2], "distance": [10, 20, 5]})
    right: dict[str, list[object]] = {
        "not written": [],
        "written more than once": [],
        "with another total than in the data": [],
    }
    assert windowed_miles.wrong(windowed_miles.wanted(source), found) == right | bad
