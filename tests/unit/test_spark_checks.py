"""What is said of Spark's settings, of bad arguments and of no database before a task is started."""

from __future__ import annotations

import importlib.util
import socket
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from sublet.demo.local_spark import open_local_session
from sublet_borrower.consumer.runner import RetryPolicy
from sublet_borrower.consumer.session import Session
from sublet_borrower.spark.common import database_reachability
from sublet_borrower.spark.common.database_credentials import driver_url
from sublet_borrower.spark.common.database_reachability import (
    check_database_exists,
    check_socket_reachable,
    keep_server_running,
    resolve_database,
)
from sublet_borrower.spark.common.source_columns import all_columns
from sublet_borrower.spark.common.source_options import stream_options
from sublet_borrower.spark.job import cluster_checks
from sublet_borrower.spark.job.cluster_checks import SparkSettingsWarning, check_cluster, check_policy
from sublet_borrower.spark.job.consumption import consume
from sublet_borrower.spark.sink.writer import batch_writer
from sublet_borrower.spark.source.batch_options import batch_options
from sublet_borrower.spark.source.batch_reader import SubletBatchReader
from sublet_borrower.spark.source.stream_reader import SubletStreamReader
from sublet_protocol.domain.errors import (
    InvalidFilter,
    InvalidSetting,
    InvalidSubscription,
    InvalidTopic,
    SubletError,
    Unavailable,
)
from sublet_protocol.domain.subscriptions import Subscription

IDLE = "spark.sql.execution.pyspark.udf"


class Spark:
    """A session as far as its settings go; without `cores` it is one of Spark Connect."""

    def __init__(self, master: str, cores: int | None = None, **settings: str) -> None:
        self.conf = {"spark.master": master, **{key.replace("_", "."): value for key, value in settings.items()}}
        self._cores = cores

    @property
    def sparkContext(self) -> SimpleNamespace:  # noqa: N802 Spark's name
        if self._cores is None:
            raise RuntimeError("not on Spark Connect")
        return SimpleNamespace(defaultParallelism=self._cores)

    def range(self) -> None:
        """What makes it a session."""


def work(batch: Any) -> None:
    """The user's."""


def said(spark: Spark, tasks: int = 1) -> list[str]:
    """The warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_cluster(spark, work, tasks)
    assert all(warning.category is SparkSettingsWarning for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]", "local[2,4]", "local[*, 99]"])
def test_a_local_spark_without_retries_is_warned_of(master: str) -> None:
    [warning] = said(Spark(master))
    assert "ends the whole job" in warning
    assert ",1000]" in warning


def test_a_cluster_without_retries_is_warned_of() -> None:
    [warning] = said(Spark("spark://h:1", 8))
    assert "4 times" in warning
    assert "set spark.task.maxFailures=1000" in warning
    assert said(Spark("spark://h:1", 8, spark_task_maxFailures="100")) == []
    assert "99 times" in said(Spark("spark://h:1", 8, spark_task_maxFailures="99"))[0]


def test_more_tasks_than_slots_is_warned_of() -> None:
    enough = {"spark_task_maxFailures": "1000"}
    assert said(Spark("local[2,1000]"), 2) == []
    assert "3 tasks and 2 slots" in said(Spark("local[2,1000]"), 3)[0]
    assert said(Spark("yarn", 8, **enough), 8) == []
    assert "8 tasks and 4 slots" in said(Spark("yarn", 8, spark_task_cpus="2", **enough), 8)[0]
    assert said(Spark("yarn", 8, spark_dynamicAllocation_enabled="true", **enough), 9) == []
    assert said(Spark("yarn", 8, spark_default_parallelism="8", **enough), 9) == [], "nor where the figure is a user's"
    assert said(Spark("yarn", 2, **enough), 9) == [], "Spark says so without executors, too"
    assert "3 tasks and 2 slots" in said(Spark("local[*,1000]", 2), 3)[0]
    assert said(Spark("sc://h", None, **enough), 9) == [], "on Spark Connect it cannot be known"


def test_an_idle_limit_that_kills_is_refused() -> None:
    idle = {"spark_task_maxFailures": "1000", f"{IDLE}.idleTimeoutSeconds": "60"}
    assert said(Spark("yarn", 8, **idle)) == []
    assert said(Spark("yarn", 8, spark_task_maxFailures="1000", **{f"{IDLE}.killOnIdleTimeout": "true"})) == []
    with pytest.raises(InvalidSetting, match=r"idleTimeoutSeconds is 60 and .* Turn one of them off"):
        check_cluster(Spark("yarn", 8, **idle, **{f"{IDLE}.killOnIdleTimeout": "true"}), work, 1)


@pytest.mark.parametrize(
    ("spark", "fn", "tasks", "reported"),
    [
        (None, work, 1, r"spark is None: a SparkSession is needed\. SparkSession\.builder"),
        (SimpleNamespace(conf={}), work, 1, "spark is a SimpleNamespace: a SparkSession is needed"),
        (SimpleNamespace(range=range), work, 1, "spark is a SimpleNamespace: a SparkSession is needed"),
        ("local", work, 1, "spark is a str: a SparkSession is needed"),
        (Spark("local"), None, 1, "fn is None: a function of one batch is needed"),
        (Spark("local"), work, 0, "tasks is 0: .* at least one task must consume"),
        (Spark("local"), work, "4", "tasks is '4': it must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(spark: Any, fn: Any, tasks: Any, reported: str) -> None:
    with pytest.raises(InvalidSetting, match=reported):
        consume(spark, "$share/g/#", fn, tasks=tasks)


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"name": ""}, "name is '': a session's name is not empty"),
        ({"name": 5}, "name is 5: a session's name is a text"),
        ({"name": "a\0"}, "must be printable"),
        ({"name": "n" * 201}, "it has 201 bytes of UTF-8, and at most 200"),
        ({"nodes": [5]}, "node 5: a leader node's address is HOST:PORT"),
        ({"weight": "1"}, "weight is '1': it is a number"),
        ({"weight": 0.0}, "weight is 0.0: it must be from 0.001 to 10000"),
        ({"weight": float("nan")}, "weight is nan"),
        ({"weight": float("inf")}, "weight is inf"),
        ({"starting_position": "yesterday"}, "'yesterday': a group starts at latest, earliest, offset:N, or a time"),
        ({"retry_policy": {"max_attempts": 3}}, r"retry_policy is a dict: give a RetryPolicy\("),
        ({"max_batch_bytes": 0}, "max_batch_bytes is 0: it must be positive"),
        ({"max_batch_bytes": 1.5}, "max_batch_bytes is 1.5: it is a whole number"),
    ],
    ids=str,
)
def test_arguments_that_no_node_would_take_are_refused(wrong: dict[str, Any], reported: str) -> None:
    """Before anything begins."""
    with pytest.raises(InvalidSetting, match=reported):
        consume(Spark("local[2,1000]"), "$share/g/#", work, tasks=1, **wrong)
    if not {"name", "nodes", "retry_policy"} & wrong.keys():
        with pytest.raises(InvalidSetting, match=reported):
            Session("$share/g/#", **wrong)


@pytest.mark.conforms("E24")
@pytest.mark.parametrize(
    ("subscription", "error", "reported"),
    [
        ("orders/#", InvalidSubscription, r"\$share/GROUP/FILTER"),
        ("$share/g/a#", InvalidFilter, "filter 'a#': # stands alone"),
    ],
)
def test_a_malformed_subscription_is_refused(subscription: str, error: type[SubletError], reported: str) -> None:
    with pytest.raises(error, match=reported):
        consume(Spark("local[2,1000]"), subscription, work, tasks=1)
    with pytest.raises(error, match=reported):
        Session(subscription)


def test_dead_letters_are_not_consumed_again() -> None:
    spark = Spark("local[2,1000]")
    with pytest.raises(InvalidSetting, match=r"published to topic 'orders/bad', which \$share/g/orders/# matches"):
        consume(spark, "$share/g/orders/#", work, tasks=1, retry_policy=RetryPolicy(dead_letter_topic="orders/bad"))
    with pytest.raises(InvalidTopic, match=r"no wildcards"):
        RetryPolicy(dead_letter_topic="failed/#")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pandas is not installed.*pip install 'sublet\[spark\]'"):
        cluster_checks.check_cluster(Spark("local[2,1000]"), work, 1)
    with pytest.raises(Unavailable, match=r"pyspark is not installed.*pip install 'sublet\[spark\]'"):
        open_local_session("x", 1)


def test_records_need_not_be_dead_lettered() -> None:
    for policy in (None, RetryPolicy(max_attempts=2), RetryPolicy(dead_letter_topic="dead/orders")):
        check_policy(Subscription.parse("$share/g/orders/#"), policy)


# --- no process of Spark makes a database: it knows what was in the environment when Spark was started ----------------


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


def test_a_socket_must_be_on_this_machine(bare: Path) -> None:
    """An address may be anywhere."""
    check_socket_reachable(f"postgresql:///app?host={bare}", "driver")
    for url in ("postgresql://db/app", "postgresql:///app", "dbname=app hostaddr=127.0.0.1"):
        check_socket_reachable(url, "driver")
    with pytest.raises(InvalidSetting, match=f"a database that only driver can reach: the Unix socket in {bare}/none"):
        check_socket_reachable(f"postgresql:///app?host={bare}/none", "driver")


def test_an_embedded_server_is_held_once(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each process that uses it, on the driver's machine."""
    opened: list[str | None] = []
    held: list[Path] = []

    def open_database(url: str | None, data_dir: str | None) -> Any:
        opened.append(data_dir)
        return nullcontext(SimpleNamespace(url="", data_dir=None if data_dir is None else Path(data_dir)))

    class Server:
        def __init__(self, data_dir: Path) -> None:
            self.start = lambda: held.append(data_dir)

    monkeypatch.setattr(database_reachability, "open_database", open_database)
    monkeypatch.setattr(database_reachability, "EmbeddedPostgres", Server)
    here, directory = socket.gethostname(), str(bare / "data")
    resolve_database("postgresql://db/app", None)
    keep_server_running(None, here)
    keep_server_running(directory, f"not-{here}")
    assert (opened, held) == ([None], [])
    for _ in range(2):
        keep_server_running(directory, here)
    assert (opened, held) == ([None, directory], [bare / "data"])
    resolve_database(None, directory)
    assert held == [bare / "data"]
