"""Cost of push for publishers: throughput with notifications to a node, over throughput without.

`python -m bench push_cost --rounds 7`. Databases on one Postgres, each with a node: appends to the first are not
announced, those to the second are, and those to the third are also received by as many direct listeners as there are
slots. Publishers to them take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from bench import _postgres as postgres
from bench import _report as report
from bench._report import Claim, Series
from bench.peers.ours import POLL, node
from bench.peers.system import SystemUnavailable
from sublet_storage.db.connect import connect, resolve_schema_name
from sublet_storage.notify.drivers import registry
from sublet_storage.notify.drivers.listener_slots import DEFAULT_LISTENER_SLOTS
from sublet_storage.notify.drivers.postgres import channel_name
from sublet_storage.producer import Publisher

VALUE_BYTES = 100
BLOCK = 1000
TOPIC = "t"
DRIVER = "postgres"
TARGET = 0.9
WAIT_S = 20.0
"""Time within which a publisher must have begun to notify the node."""
PATHS = {"columns": "publish_batch of 1000", "calls": "publish message by message"}
PROSE = """Throughput of one publisher to the last acknowledgement, with a node that listens by *{driver}* and is
notified of what is appended, over throughput without: with a node that looks by itself (*poll*). {received}Messages
of {value} bytes to one stream, {columns:,} by columns in blocks of {block:,}, and {calls:,} by a call for each, in
each of {rounds} rounds, in which they take turns; the first round does not count. Publisher, node and Postgres share
the machine, so that what the node does with them is in the figure too. Ratios are medians of the rounds' ratios."""
RECEIVED = """*Received*: notifications wake, besides the node, {listeners} processes that receive them
[themselves](notifications.md#direct-listeners), on the same machine. """


class Side:
    """A database with its node and a publisher to it."""

    def __init__(self, url: str) -> None:
        self.publisher = Publisher(url)

    def columns(self, blocks: list[pa.Array]) -> None:
        """Publish whole blocks, and wait for the last."""
        for values in blocks:
            self.publisher.publish_batch({"topic": TOPIC, "value": values})
        self.publisher.flush()

    def calls(self, values: list[bytes]) -> None:
        """Publish message by message, and wait for the last."""
        for value in values:
            self.publisher.publish(TOPIC, value)
        self.publisher.flush()


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    options = _options(arguments)
    series = Series()
    with contextlib.ExitStack() as opened:
        try:
            sides, conn = _sides(opened, options.driver, options.listeners)
        except SystemUnavailable as reason:
            print(f"nothing is measured with {options.driver!r}: {reason}")
            return
        contenders = _contenders(sides, options.messages, options.calls)
        for number in range(options.rounds + 1):
            conn.execute("checkpoint")
            _round(contenders, series if number else Series(), turn(tuple(sides), number))
            print(f"round {number} of {options.rounds}", flush=True)
    _publish_report(options, series)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench push_cost", description=__doc__)
    parser.add_argument("--driver", default=DRIVER, help="how the node that is notified listens")
    parser.add_argument("--messages", type=int, default=1_000_000, help="by columns, per round and side")
    parser.add_argument("--calls", type=int, default=100_000, help="one by one, per round and side")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--listeners", type=int, default=DEFAULT_LISTENER_SLOTS, help="processes that are notified as well"
    )
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    return parser.parse_args(arguments)


def turn(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Return the names in the order of that round: each is first in turn."""
    first = number % len(names)
    return names[first:] + names[:first]


def _sides(
    opened: contextlib.ExitStack, driver: str, listeners: int
) -> tuple[dict[str, Side], psycopg.Connection[Any]]:
    """Return {name: side}, and a connection to the server of all. Raise `SystemUnavailable` if the driver cannot be
    used."""
    server = opened.enter_context(postgres.server())
    directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sublet-bench-")))
    urls = {"off": postgres.database(server, 1), "on": postgres.database(server, 3)}
    if driver == DRIVER and listeners:
        urls["received"] = postgres.database(server, 5)
    for name, url in urls.items():
        opened.enter_context(node(url, POLL if name == "off" else driver, directory / f"{name}.log"))
    sides = {name: Side(url) for name, url in urls.items()}
    for side in sides.values():
        opened.callback(side.publisher.close)
    for name in tuple(sides)[1:]:
        _await_notifications(sides[name], urls[name], driver)
    if "received" in urls:
        _listen(opened, urls["received"], listeners)
    return sides, opened.enter_context(connect(server))


def _listen(opened: contextlib.ExitStack, url: str, listeners: int) -> None:
    """Start listeners, and wait until they listen. Raise `SystemUnavailable` if they do not within `WAIT_S`."""
    command = [sys.executable, "-m", "bench._listener", url]
    for _ in range(listeners):
        process = opened.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, cwd=report.ROOT))
        assert process.stdin is not None
        opened.callback(process.stdin.close)
    deadline = time.monotonic() + WAIT_S
    listening = """
    select count(*) from pg_stat_activity where application_name = 'sublet direct listener' and query like 'listen%'"""
    with connect(url) as conn:
        while conn.execute(listening).fetchone() != (listeners,):
            if time.monotonic() > deadline:
                raise SystemUnavailable(
                    f"fewer than {listeners} processes listen {WAIT_S:g} s after they were started."
                )
            time.sleep(0.1)


def _await_notifications(side: Side, url: str, driver: str) -> None:
    """Publish until the node is notified; with a driver whose notifications no other process can see, for `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    if driver == DRIVER:
        if not any(_received(side, url, deadline)):
            raise SystemUnavailable(f"publishers did not notify the node within {WAIT_S:g} s of publishing.")
    elif registry.load_driver(driver)(url).capabilities.is_push:
        while time.monotonic() < deadline:
            side.calls([b"value"])
            time.sleep(0.1)


def _received(side: Side, url: str, deadline: float) -> Iterator[bool]:
    with connect(url) as conn:
        conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel_name(resolve_schema_name()))))
        while time.monotonic() < deadline:
            side.calls([b"value"])
            yield any(True for _ in conn.notifies(timeout=0.1, stop_after=1))


def _contenders(sides: dict[str, Side], messages: int, calls: int) -> dict[str, tuple[int, Callable[[], None]]]:
    """Return {name: (messages, what publishes them)}; those that are compared are adjacent."""
    blocks = [pa.array([os.urandom(VALUE_BYTES) for _ in range(BLOCK)], pa.binary()) for _ in range(messages // BLOCK)]
    values = [os.urandom(VALUE_BYTES) for _ in range(calls)]
    found: dict[str, tuple[int, Callable[[], None]]] = {}
    for name, side in sides.items():
        found[f"columns {name}"] = (BLOCK * len(blocks), partial(side.columns, blocks))
        found[f"calls {name}"] = (calls, partial(side.calls, values))
    return found


def _round(contenders: dict[str, tuple[int, Callable[[], None]]], series: Series, names: tuple[str, ...]) -> None:
    for way in PATHS:
        for name in names:
            messages, publish = contenders[f"{way} {name}"]
            gc.collect()
            started = time.perf_counter()
            publish()
            series.add(f"{way} {name}", messages, time.perf_counter() - started)


def _publish_report(options: argparse.Namespace, series: Series) -> None:
    claims = [Claim(f"{PATHS[way]}: push {options.driver} / none", f"{way} on", f"{way} off", TARGET) for way in PATHS]
    received = ""
    if "columns received" in series.rates:
        received = RECEIVED.format(listeners=options.listeners)
        claims += [
            Claim(f"{PATHS[way]}: push, received / none", f"{way} received", f"{way} off", TARGET) for way in PATHS
        ]
    settings = {
        "driver": options.driver,
        "messages": options.messages,
        "calls": options.calls,
        "listeners": options.listeners,
        "rounds": options.rounds,
        "value_bytes": VALUE_BYTES,
    }
    section = report.write("push_cost", settings, series, claims, options.json)
    prose = PROSE.format(
        driver=options.driver,
        received=received,
        value=VALUE_BYTES,
        columns=options.messages,
        block=BLOCK,
        calls=options.calls,
        rounds=options.rounds,
    )
    report.page(options.page, "push_cost", prose, section)
    print(section)


if __name__ == "__main__":
    main()
