"""One Spark for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.java_archive import java_options
from tests.spark.session import CACHE, spark_session
from tests.spark.stage import Stage, a_stage


@pytest.fixture(scope="session", autouse=True)
def _quick_java() -> Iterator[None]:
    """For every JVM that a test or what it starts may start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", java_options(CACHE))
        yield


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
