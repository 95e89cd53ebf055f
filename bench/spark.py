"""Reading from storage into Spark, beside other sources, and the cost of a micro-batch.

`python -m bench spark --rounds 5`. Contenders take turns, on one Postgres, with one node to a database and one Spark.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import tempfile
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from bench import _postgres as postgres
from bench import _report as report
from bench._ceiling import ARROW_ROWS, VALUE_BYTES, payload
from bench._queries import PARTS, SLOTS, Counting, MicroBatch, batch, counted, spark_session, stream_for, stream_to_end
from bench._report import Beside, Claim, Series
from bench._rows import ADDRESS, PASSWORD, Table, driver
from bench.peers.ours import POLL, node
from sublet import Publisher, Session
from sublet.spark import consume
from sublet_storage.db.connect import connect
from sublet_storage.spaces.space_changes import reshard

BLOCKS = (1000, 10_000)
CEILING, BATCH_CEILING, ROWS = "ready batches, as a stream", "ready batches, as a table", "a row per message"
TASKS = {"minPartitions": str(SLOTS), "maxPartitions": str(SLOTS)}
"""As many as the source with ready batches has."""
OF_CEILING, OF_PLAIN, MICRO_BATCH = 0.85, 0.8, 1.15
PROSE = """{rows:,} messages of {value} bytes, each with a key and one of two topics, over {streams} streams, in blocks
of about {sizes}, are read from Postgres into Spark's sink that takes everything; `shared_buffers` of Postgres is
{shared_buffers}, a quarter of the machine's memory as its documentation advises; Spark has {slots} slots and its own
defaults, and of our options `minPartitions` and `maxPartitions` say {slots}. Medians over {rounds} rounds in which all
contenders take turns; a first round does not count, for Java compiles in it. *stream* is `readStream.format("sublet")`
with all its columns, by Trigger.AvailableNow in micro-batches of {batch_rows:,}: from the beginning of the second to
the end of the last, with all that Spark does in between. *table* is `spark.read.format("sublet")`, its planning
included. *Ready batches* are those of a Python data source that does nothing: rows of the same columns and sizes that
its process holds in memory, {arrow_rows:,} to an Arrow batch, over {slots} tasks. *Parquet* has the same rows, as Spark
wrote them, and the machine's memory has the files. *A row per message* is a table (offset, stream, topic, key, value,
time) of {table_rows:,} rows with a primary key, read by {reader} in {slots} key ranges. *In a task* is
`sublet.spark.consume` with one task and a function that counts, from its first batch to its last; *plain reader* is the
same function in a loop over a `Session` in Python, without Spark. Below it are micro-batches of two rows, in two tasks:
{micro_batches} in each round after {warm_up} that do not count, of our stream and of the source with ready batches, and
what Spark says of their parts. Its time to the next one's beginning counts what lies between two."""


class Stored:
    """A database with messages and a node: groups read it from the beginning."""

    def __init__(self, url: str, rows: int, streams: int, block: int) -> None:
        self.url, self.block, self.rows = url, block, max(rows // (block * streams), 1) * block * streams
        self._groups = count()
        with connect(url) as conn:
            reshard(conn, "default", streams)
        with Publisher(url, space="default", block_messages=2 * block, block_bytes=2**24) as publisher:
            for _ in range(self.rows // (block * streams)):
                publisher.publish_batch(payload(block * streams)).result()

    def subscription(self) -> str:
        """Return the subscription of a new group."""
        return f"$share/g{next(self._groups)}/#"

    def stream(self, spark: Any, batch_rows: int) -> Any:
        """Return a stream of a new group."""
        options = {"url": self.url, "subscription": self.subscription(), "sessionName": "bench"}
        options |= {
            "startingPosition": "earliest",
            "maxOffsetsPerTrigger": str(batch_rows),
        }
        options |= TASKS
        return spark.readStream.format("sublet").options(**options).load()

    def table(self, spark: Any) -> Any:
        """Return the whole log as a table."""
        return spark.read.format("sublet").options(url=self.url, **TASKS).load()


class Reading:
    """The contenders that read all rows."""

    def __init__(self, spark: Any, place: Path, batch_rows: int) -> None:
        self._spark, self._place, self._batch_rows = spark, place, batch_rows
        self._files = count()

    def contenders(self, stored: list[Stored], table: Table) -> dict[str, Callable[[], tuple[int, float]]]:
        """Return {name: a function that reads all rows and returns their number and the seconds}."""
        rows = stored[0].rows
        found: dict[str, Callable[[], tuple[int, float]]] = {}
        for each in stored:
            found |= self._ours(each)
        found[CEILING] = lambda: self._stream(self._ceiling(self._spark.readStream, rows))
        found[BATCH_CEILING] = lambda: self._batch(self._ceiling(self._spark.read, rows), rows)
        parquet = self._parquet(stored[-1])
        found["Parquet"] = lambda: self._batch(self._spark.read.parquet(parquet), stored[-1].rows)
        found[ROWS] = lambda: self._batch(table.frame(self._spark), table.count)
        return found

    def _ours(self, stored: Stored) -> dict[str, Callable[[], tuple[int, float]]]:
        spark, block = self._spark, stored.block
        return {
            f"stream, blocks of {block}": lambda: self._stream(stored.stream(spark, self._batch_rows)),
            f"table, blocks of {block}": lambda: self._batch(stored.table(spark), stored.rows),
            f"in a task, blocks of {block}": lambda: self._in_a_task(stored),
            f"plain reader, blocks of {block}": lambda: self._plain(stored),
        }

    def _stream(self, frame: Any) -> tuple[int, float]:
        return stream_to_end(frame, self._place)

    def _batch(self, frame: Any, rows: int) -> tuple[int, float]:
        return rows, batch(frame)

    def _ceiling(self, reader: Any, rows: int) -> Any:
        return reader.format("ceiling").options(rows=rows, partitions=SLOTS, batchRows=self._batch_rows).load()

    def _parquet(self, stored: Stored) -> str:
        path = str(self._place / "parquet")
        stored.table(self._spark).write.parquet(path)
        return path

    def _in_a_task(self, stored: Stored) -> tuple[int, float]:
        file = self._place / f"counted-{next(self._files)}"
        counting = Counting(file, stored.rows)
        with consume(
            self._spark,
            stored.subscription(),
            counting,
            tasks=1,
            url=stored.url,
            starting_position="earliest",
            name="bench",
        ):
            return counted(file)

    def _plain(self, stored: Stored) -> tuple[int, float]:
        file = self._place / f"counted-{next(self._files)}"
        counting = Counting(file, stored.rows)
        with Session(stored.subscription(), stored.url, starting_position="earliest") as session:
            while not counting.complete and (batch := session.poll()) is not None:
                counting(batch)
        return counted(file)


class Overhead:
    """Micro-batches with almost no rows, of both sources."""

    def __init__(self, stored: Stored, options: argparse.Namespace) -> None:
        self._stored, self._options = stored, options
        self._found: dict[str, list[tuple[MicroBatch, float]]] = {"ours": [], "ceiling": []}

    def measure(self, spark: Any, place: Path, turned: bool, counts: bool) -> None:
        """Run one round."""
        for who in ("ceiling", "ours") if turned else ("ours", "ceiling"):
            frame = self._stored.stream(spark, 2) if who == "ours" else self._ceiling(spark)
            found = stream_for(frame, place, self._options.warm_up, self._options.micro_batches + 1)
            periods = [1000 * (after.began - before.began) for before, after in pairwise(found)]
            if counts:
                self._found[who] += zip(found, periods, strict=False)

    def _ceiling(self, spark: Any) -> Any:
        return spark.readStream.format("ceiling").options(rows=2**40, partitions=2, batchRows=2).load()

    def figures(self) -> list[Beside]:
        """Return medians over all rounds."""
        figures = [
            self._beside("a micro-batch", lambda one, _: one.took_ms, MICRO_BATCH),
            self._beside("from its beginning to the next one's", lambda _, period: period),
        ]
        return figures + [self._beside(f"of it {part}", self._part(part)) for part in PARTS]

    def _part(self, part: str) -> Callable[[MicroBatch, float], float]:
        return lambda one, _: one.parts.get(part, 0)

    def _beside(self, what: str, value: Callable[[MicroBatch, float], float], at_most: float | None = None) -> Beside:
        ours, theirs = (statistics.median(value(*one) for one in self._found[who]) for who in ("ours", "ceiling"))
        return Beside(what, ours, "ms", "with ready batches", max(theirs, 0.5), at_most)


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the tables."""
    options = _options(arguments)
    series, jar = Series(), driver(options.jdbc_jar) if options.rows_by == "JDBC" else None
    with contextlib.ExitStack() as opened:
        place = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sublet-bench-")))
        place.chmod(0o755)
        tuned = {"shared_buffers": postgres.quarter_of_memory()}
        tuned |= {} if jar is None else {"listen_addresses": ADDRESS}
        server = opened.enter_context(postgres.server(tuned, PASSWORD))
        stored = [
            Stored(postgres.database(server, 2 * n + 1), options.rows, options.streams, block)
            for n, block in enumerate(options.blocks)
        ]
        few = Stored(postgres.database(server, 101), 4 * (options.warm_up + options.micro_batches), 2, 1)
        table = Table(postgres.database(server, 201), options.table_rows, SLOTS, jar)
        table.fill()
        for number, each in enumerate([*stored, few]):
            opened.enter_context(node(each.url, POLL, place / f"{number}.log"))
        conf = dict(pair.split("=", 1) for pair in options.conf)
        spark = opened.enter_context(spark_session(conf if jar is None else {"spark.jars": str(jar), **conf}))
        contenders = Reading(spark, place, options.batch_rows).contenders(stored, table)
        overhead = Overhead(few, options)
        for number in range(1 - options.warm_rounds, options.rounds + 1):
            turned = number % 2 == 1
            _read(contenders, series if number > 0 else Series(), turned)
            overhead.measure(spark, place, turned, counts=number > 0)
            print(f"round {number} of {options.rounds}", flush=True)
        _publish_report(options, series, overhead.figures(), table.reader)


def _read(contenders: dict[str, Callable[[], tuple[int, float]]], series: Series, turned: bool) -> None:
    for name in list(contenders)[::-1] if turned else contenders:
        gc.collect()
        series.add(name, *contenders[name]())


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench spark", description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000, help="per round and contender")
    parser.add_argument("--batch-rows", type=int, default=1_000_000, help="of a micro-batch")
    parser.add_argument("--table-rows", type=int, default=400_000, help="of the table with a row per message")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="messages to a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-rounds", type=int, default=1, help="before them, that do not count")
    parser.add_argument("--micro-batches", type=int, default=45, help="with two rows, in a round")
    parser.add_argument("--warm-up", type=int, default=15, help="micro-batches before them that do not count")
    parser.add_argument("--rows-by", choices=("JDBC", "psycopg"), default="JDBC", help="where there is a driver for it")
    parser.add_argument("--jdbc-jar", type=Path, default=None, help="Postgres's driver, if not where Debian has it")
    parser.add_argument("--conf", nargs="*", default=[], metavar="KEY=VALUE", help="settings of Spark")
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    return parser.parse_args(arguments)


def _claims(blocks: list[int], reader: str) -> list[Claim]:
    claims = [
        Claim(f"ready batches, as a stream / a row per message by {reader}", CEILING, ROWS, None),
        Claim(f"ready batches, as a table / a row per message by {reader}", BATCH_CEILING, ROWS, None),
    ]
    for block in blocks:
        stream, table, of = f"stream, blocks of {block}", f"table, blocks of {block}", f"blocks of {block:,}"
        task, plain = f"in a task, blocks of {block}", f"plain reader, blocks of {block}"
        claims += [
            Claim(f"stream / ready batches, {of}", stream, CEILING, OF_CEILING),
            Claim(f"stream / a row per message by {reader}, {of}", stream, ROWS, None),
            Claim(f"stream / Parquet, {of}", stream, "Parquet", None),
            Claim(f"table / ready batches, {of}", table, BATCH_CEILING, OF_CEILING),
            Claim(f"table / a row per message by {reader}, {of}", table, ROWS, None),
            Claim(f"in a task / plain reader, {of}", task, plain, OF_PLAIN),
        ]
    return claims


def _publish_report(options: argparse.Namespace, series: Series, figures: list[Beside], reader: str) -> None:
    names = ("rows", "batch_rows", "table_rows", "streams", "blocks", "rounds", "micro_batches", "warm_up", "conf")
    settings = {name: getattr(options, name) for name in names}
    settings |= {"value_bytes": VALUE_BYTES, "table_read_by": reader, "shared_buffers": postgres.quarter_of_memory()}
    section = report.write("spark", settings, series, _claims(options.blocks, reader), options.json, figures)
    sizes = " or ".join(f"{block:,}" for block in options.blocks)
    words = {"value": VALUE_BYTES, "slots": SLOTS, "arrow_rows": ARROW_ROWS, "reader": reader, "sizes": sizes}
    report.page(options.page, "spark", PROSE.format(**settings, **words), section)
    print(section)


if __name__ == "__main__":
    main()
