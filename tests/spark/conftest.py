"""One Spark for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.job.consumption import Consumption, consume
from tests.spark.session import CACHE, java_options, spark_session
from tests.spark.stage import ALL, SPEED, Stage, a_stage
from tests.spark.work import Recorder


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
    with a_stage(database, tmp_path) as stage:
        yield stage


@pytest.fixture
def start(spark: Any, stage: Stage) -> Iterator[Callable[..., Consumption]]:
    """Starts consumptions in Spark's executors, which end with the test."""
    begun: list[Consumption] = []

    def begin(recorder: Recorder, tasks: int = 2, **options: Any) -> Consumption:
        options = {"starting_position": "earliest", "settings": BorrowerSettings().scaled(SPEED), **options}
        options.setdefault("on_attempt", recorder.begin)
        begun.append(consume(spark, ALL, recorder, tasks=tasks, url=stage.url, **options))
        return begun[-1]

    yield begin
    for consumption in begun:
        consumption.stop(5.0)
