"""Spark Connect: the same, with a server between the program and Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit_nodes import ROOT
from tests.spark.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.long]
COUNT = 300


def test_everything_works_through_spark_connect(stage: Stage, tmp_path: Path) -> None:
    stage.serve("n1")
    stage.publish(COUNT)
    stage.connection.execute("create table public.stored (value int)")
    place = tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-m", "tests.spark.connected", stage.url, str(place), str(COUNT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["session"] == "pyspark.sql.connect.session"
    assert found["source"] == list(range(COUNT))
    stored = stage.connection.execute("select value from public.stored order by value")
    assert [value for (value,) in stored] == list(range(COUNT))
    assert (found["batch"], found["copied"]) == (COUNT, COUNT)
    assert found["resident"] == {"messages": COUNT, "alive": 2, "lag": 0, "tasks": 2}
