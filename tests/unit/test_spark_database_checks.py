"""Spark's planning processes know what was in the environment when Spark was started: they never make a database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from sublet_borrower.spark.common.database_credentials import driver_url
from sublet_borrower.spark.common.database_reachability import check_database_exists
from sublet_borrower.spark.common.source_columns import all_columns
from sublet_borrower.spark.common.source_options import stream_options
from sublet_borrower.spark.sink.writer import batch_writer
from sublet_borrower.spark.source.batch_options import batch_options
from sublet_borrower.spark.source.batch_reader import SubletBatchReader
from sublet_borrower.spark.source.stream_reader import SubletStreamReader
from sublet_protocol.domain.errors import InvalidSetting

VALUE = StructType([StructField("value", BinaryType())])


def read(options: dict[str, str]) -> Any:
    return SubletBatchReader(batch_options(options), all_columns()).partitions()


def stream(options: dict[str, str]) -> Any:
    given = {"subscription": "$share/g/#", "sessionName": "s", **options}
    reader = SubletStreamReader(stream_options(given), all_columns())
    return reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())


def write(options: dict[str, str]) -> Any:
    return batch_writer({"topic": "t", **options}, VALUE, False)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No database is named, and none was made."""
    monkeypatch.delenv("SUBLET_DATABASE_URL", raising=False)
    monkeypatch.setenv("SUBLET_DATA_DIR", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize("use", [read, stream, write])
def test_spark_makes_no_database(use: Callable[[dict[str, str]], Any], bare: Path) -> None:
    with pytest.raises(InvalidSetting, match=f"no embedded one in {bare}/home. Give the option url, or set"):
        use({})
    with pytest.raises(InvalidSetting, match=f"there is no database in {bare}/typo. Correct it, or make one there"):
        use({"dataDir": f"{bare}/typo"})
    assert not list(bare.iterdir())


def test_a_database_that_is_named_is_left_to_be_found(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "home" / "pg").mkdir(parents=True)
    check_database_exists(None, None)
    check_database_exists(None, str(bare / "home"))
    monkeypatch.setenv("SUBLET_DATA_DIR", str(bare / "other"))
    check_database_exists("postgresql://db/app", None)
    monkeypatch.setenv("SUBLET_DATABASE_URL", "postgresql://db/app")
    check_database_exists(driver_url(None, None, "env"), None)
