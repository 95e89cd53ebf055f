"""Sink, batch, streaming query and consuming tasks of a real Spark, with users who are members of one role each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sublet_storage.db.connect import connect
from sublet_storage.db.roles import DatabaseRole
from tests.kit_nodes import Fleet
from tests.role_kit import a_role_world
from tests.spark.connected import everything
from tests.spark.stage import SPEED
from tests.spark.test_sink import numbers, write

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.conforms("X6")]

COUNT = 300


def test_spark_does_with_the_least_role(spark: Any, tmp_path: Path) -> None:
    with a_role_world() as world:
        fleet = Fleet(world.of(DatabaseRole.NODE), tmp_path, SPEED)
        append, url = world.of(DatabaseRole.APPEND), world.of(DatabaseRole.CONSUME)
        world.execute(
            f"create table public.stored (value int); grant all on public.stored to user_of_{DatabaseRole.CONSUME}"
        )
        try:
            fleet.serve("n1")
            write(numbers(spark, 0, COUNT), append, topic="t/eu")
            found = everything(spark, url, tmp_path, COUNT, append)
            assert (found["source"], found["batch"], found["copied"]) == (list(range(COUNT)), COUNT, COUNT)
            assert found["resident"]["messages"] == COUNT
            with connect(url) as conn:
                stored = "select count(*), count(distinct value) from public.stored"
                assert conn.execute(stored).fetchone() == (COUNT, COUNT)
            assert "permission denied" not in fleet.nodes["n1"].output()
        finally:
            fleet.close()
