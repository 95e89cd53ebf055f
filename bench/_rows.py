"""A table with a row per message, which Spark reads through JDBC or psycopg."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa

from bench._ceiling import payload
from bench._report import ROOT

DEBIAN = "libpostgresql-jdbc-java"
INSTALLED = Path("/usr/share/java/postgresql.jar")
STORED = ROOT / ".cache" / "postgresql.jar"
ADDRESS = "127.83.85.66"
"""A loopback address that no other server uses, since the server's port is always the same."""
PASSWORD = "bench"
FETCHED = 10_000
"""Rows per round trip."""
CREATE = """
create table rows (off bigint primary key, stream bigint not null, topic text, key bytea, value bytea,
                   at timestamptz not null default clock_timestamp())"""
COLUMNS = "off bigint, stream bigint, topic string, key binary, value binary, at timestamp"


def driver(given: Path | None) -> Path | None:
    """Return the jar of Postgres's JDBC driver: the given one, the system's, or Debian's package. None if it cannot be
    had, or on other systems than Linux, where the address may be in use."""
    if sys.platform != "linux":
        return None
    return next((jar for jar in (given, INSTALLED, STORED) if jar is not None and jar.is_file()), None) or _downloaded()


def _downloaded() -> Path | None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return None
    with tempfile.TemporaryDirectory(prefix="sublet-bench-") as place:
        try:
            subprocess.run(["apt-get", "download", "-qq", DEBIAN], cwd=place, check=True, capture_output=True)
            (package,) = Path(place).glob("*.deb")
            subprocess.run(["dpkg", "-x", package, place], check=True, capture_output=True)
        except (subprocess.CalledProcessError, ValueError):
            return None
        STORED.parent.mkdir(exist_ok=True)
        shutil.copy(Path(place, *INSTALLED.parts[1:]), STORED)
    return STORED


@dataclass(frozen=True)
class Table:
    """A table of `count` rows in a database; without `jar` it is not read through JDBC."""

    url: str
    count: int
    partitions: int
    jar: Path | None

    @property
    def reader(self) -> str:
        """Return the client library by which it is read."""
        return "psycopg" if self.jar is None else "JDBC"

    def fill(self) -> None:
        """Create the table and its rows."""
        columns = payload(self.count)
        with psycopg.connect(self.url, autocommit=True) as conn:
            conn.execute(CREATE)
            with (
                conn.cursor() as cursor,
                cursor.copy("copy rows (off, stream, topic, key, value) from stdin (format binary)") as copy,
            ):
                copy.set_types(["int8", "int8", "text", "bytea", "bytea"])
                for off, row in enumerate(zip(*(column.to_pylist() for column in columns.values()), strict=True)):
                    copy.write_row((off, 1, *row))
            conn.execute("vacuum analyze rows")
            conn.execute("checkpoint")

    def frame(self, spark: Any) -> Any:
        """Return the whole table as a data frame."""
        if self.jar is None:
            return spark.range(0, self.partitions, 1, self.partitions).mapInArrow(self._read, COLUMNS)
        return (
            spark.read.format("jdbc")
            .option("driver", "org.postgresql.Driver")
            .option("url", f"jdbc:postgresql://{ADDRESS}{urlsplit(self.url).path}")
            .option("user", "postgres")
            .option("password", PASSWORD)
            .option("dbtable", "rows")
            .option("fetchsize", FETCHED)
            .option("partitionColumn", "off")
            .option("lowerBound", 0)
            .option("upperBound", self.count)
            .option("numPartitions", self.partitions)
            .load()
        )

    def _read(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the partition of each number, page by page."""
        types = [pa.int64(), pa.int64(), pa.string(), pa.binary(), pa.binary(), pa.timestamp("us", "UTC")]
        names = [column.split()[0] for column in COLUMNS.split(", ")]
        with psycopg.connect(self.url, options="-c timezone=UTC") as conn:
            for number in (number for batch in numbers for number in batch.column(0).to_pylist()):
                first, end = (self.count * each // self.partitions for each in (number, number + 1))
                for start in range(first, end, FETCHED):
                    found = conn.execute(
                        "select off, stream, topic, key, value, at from rows where off >= %s and off < %s order by off",
                        (start, min(start + FETCHED, end)),
                        binary=True,
                    ).fetchall()
                    columns = zip(*found, strict=True)
                    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
                    yield pa.RecordBatch.from_arrays(arrays, names)
