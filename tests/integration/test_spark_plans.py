"""What Spark pickles, into plans, tasks and closures, has the database's address and nothing secret."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo
from pyspark import cloudpickle

from sublet_borrower.spark.common.source_columns import all_columns
from sublet_borrower.spark.job import cluster_checks
from sublet_borrower.spark.job.consumption import consume
from sublet_borrower.spark.sink.writer import batch_writer, stream_writer
from sublet_borrower.spark.source.batch_options import batch_options
from sublet_borrower.spark.source.batch_reader import SubletBatchReader
from sublet_borrower.spark.source.micro_batch_transaction import Guard
from sublet_storage.db.database_url import parse_url
from sublet_storage.producer import Publisher
from tests.integration.sink_kit import SCHEMA

pytestmark = pytest.mark.conforms("X3")

PASSWORD = "pl4nted-p@ss"


@pytest.fixture
def secret(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The database, in the environment, with secrets."""
    url = make_conninfo(database, password=PASSWORD, sslpassword=PASSWORD, options=f"-c a.b={PASSWORD}")
    monkeypatch.setenv("SUBLET_DATABASE_URL", url)
    return url


def pickled(value: object) -> bytes:
    data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    assert b"pl4nted" not in data
    return data


def test_tasks_of_a_query_have_no_secret(secret: str) -> None:
    with Publisher() as publisher:
        publisher.publish("t", "1")
    reader = SubletBatchReader(batch_options({}), all_columns())
    (task,) = reader.partitions()
    pickled(reader)
    there: Any = cloudpickle.loads(pickled(task))
    assert parse_url(there.address)["dbname"] == parse_url(secret)["dbname"]
    assert sum(batch.num_rows for batch in reader.read(there)) == 1


def test_a_sink_and_a_guard_have_no_secret(secret: str) -> None:
    for made in (batch_writer, stream_writer):
        there: Any = cloudpickle.loads(pickled(made({"topic": "t"}, SCHEMA, False)))
        with there.target.open_connection() as (url, conn):
            assert parse_url(url)["password"] == PASSWORD
            assert conn.info.dbname == parse_url(secret)["dbname"]
    pickled(Guard("checkpoint"))


def test_a_jobs_closure_has_no_secret(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closures: list[bytes] = []

    def map_in_arrow(function: object, *_: object, **__: object) -> Any:
        closures.append(pickled(function))
        return SimpleNamespace(collect=list)

    spark = SimpleNamespace(addTag=print, range=lambda *_: SimpleNamespace(mapInArrow=map_in_arrow))
    monkeypatch.setattr(cluster_checks, "check_cluster", lambda *_: None)
    monkeypatch.setattr(cluster_checks, "read_setting", lambda *_: "local[2]")
    monkeypatch.setattr(cluster_checks, "spark_context", lambda spark: None)
    assert consume(spark, "$share/g/#", print, tasks=1).result(60.0) == []
    assert str(parse_url(secret)["dbname"]).encode() in closures[0]
