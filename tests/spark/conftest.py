"""One Spark for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.session import spark_session
from tests.spark.stage import Stage, a_stage


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Three slots, and retries of tasks that die."""
    session = spark_session("local[3,1000]")
    yield session
    session.stop()


@pytest.fixture
def stage(database: str, tmp_path: Path) -> Iterator[Stage]:
    """A database, nodes and records of the test's own."""
    with a_stage(database, tmp_path) as stage:
        yield stage
