"""Cost of TLS and of authorization: clients through a node with both, over one without.

`python -m bench tls --rounds 7`. Two nodes of one database; clients of both take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

from bench import _postgres as postgres
from bench import _report as report
from bench._report import Claim, Series
from bench.peers.processes import Running, module
from sublet import Feed
from sublet_borrower.node_client.node_calls import FailoverNodeClient
from sublet_protocol.domain.access.rights import AccessRule, Right
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.member_reads import encode_heads_request
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin import access_rules, access_tokens
from tests.integration.tls_kit import HOST, Certificates
from tests.kit import eventually

VALUE_BYTES = 100
BLOCK = 1000
CALLER = "user:bench"
WAIT_S = 60.0
CALL_S = 30.0
SIDES = ("plain", "TLS")
STREAM = 1
TARGETS = {"publish": 0.9, "read": 0.9, "call": 0.9, "member": 0.9, "connect": None}
TRANSPORTS = {
    "publish": "publishing through a node",
    "read": "reading history through a node",
    "call": "calls, one after the other",
    "member": "calls of a member, one after the other",
    "connect": "connections, each with one call",
}
PROSE = """Rates through a node with TLS, which asks for a token and for rights, over those through one without, on
the same database: messages of {value} bytes, {messages:,} by columns, published and then read; {calls:,} small calls
(the heads of no stream), one after the other, whose ratio is that of a call's latency; as many for the head of one
stream, whose groups the node that asks for rights looks up; and {connections:,} new
connections with one call each. {rounds} rounds, in which they take turns; the first does not count. Clients,
nodes and Postgres share the machine, so that both ends of the encryption are in the figures. Ratios are medians of
the rounds' ratios."""


class Side:
    """A client of one node."""

    def __init__(self, address: str, values: list[pa.Array]) -> None:
        self.address, self._values = address, values
        self._calls = FailoverNodeClient([address])
        self._topic = "tls" if address.startswith("tls:") else "plain"

    def publish(self) -> None:
        """Publish all messages, and wait for the last acknowledgement."""
        with Feed([self.address]) as feed:
            for values in self._values:
                feed.publish_batch({"topic": [self._topic] * len(values), "value": values})

    def read(self, count: int) -> None:
        """Read the first `count` of this side's messages."""
        with Feed([self.address]) as feed, feed.history(self._topic) as history:
            while count > 0 and (table := history.read(CALL_S)) is not None:
                count -= table.num_rows
        assert count <= 0, "there is more to be read"

    def call(self, count: int, streams: tuple[int, ...] = ()) -> None:
        """Make `count` calls one after another."""
        for _ in range(count):
            reply = self._calls.call("Heads", encode_heads_request(streams), CALL_S)
            assert len(reply.heads) == len(streams), "a head that its caller may have"

    def connect(self, count: int) -> None:
        """Open a connection for each call."""
        for _ in range(count):
            self._calls.close()
            self.call(1)


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    options = _options(arguments)
    series = Series()
    with contextlib.ExitStack() as opened:
        sides = _sides(opened, options.messages)
        works: dict[str, tuple[int, Callable[[Side], None]]] = {
            "publish": (options.messages, Side.publish),
            "read": (options.messages, partial(Side.read, count=options.messages)),
            "call": (options.calls, partial(Side.call, count=options.calls)),
            "member": (options.calls, partial(Side.call, count=options.calls, streams=(STREAM,))),
            "connect": (options.connections, partial(Side.connect, count=options.connections)),
        }
        for number in range(options.rounds + 1):
            names = SIDES if number % 2 else SIDES[::-1]
            for way, (count, work) in works.items():
                for name in names:
                    gc.collect()
                    started = time.perf_counter()
                    work(sides[name])
                    if number:
                        series.add(f"{way}, {name}", count, time.perf_counter() - started)
            print(f"round {number} of {options.rounds}", flush=True)
    _write(options, series)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench tls", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="published and read, per round and side")
    parser.add_argument("--calls", type=int, default=2_000, help="per round and side")
    parser.add_argument("--connections", type=int, default=200, help="per round and side")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    return parser.parse_args(arguments)


def _sides(opened: contextlib.ExitStack, messages: int) -> dict[str, Side]:
    url = postgres.database(opened.enter_context(postgres.server()), 1)
    directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sublet-bench-")))
    made = Certificates(directory / "tls")
    certificate, key = made.write("node", HOST)
    with connect(url) as conn:
        conn.execute("insert into consumer_group (kind, name, filter) values ('share', 'bench', '#')")
        reads = "insert into lending (group_id, stream_id, position) select group_id, %s, 0 from consumer_group"
        conn.execute(reads, (STREAM,))
        for right in (Right.PUBLISH, Right.READ, Right.JOIN):
            access_rules.allow(conn, AccessRule(CALLER, right, TopicFilter("#")))
        token, _ = access_tokens.make_token(conn, CALLER, 86_400.0)
    for name, value in (("SUBLET_TLS_CA", str(made.ca)), ("SUBLET_TOKEN", token.token.reveal())):
        os.environ[name] = value
        opened.callback(os.environ.pop, name)
    values = [
        pa.array([os.urandom(VALUE_BYTES) for _ in range(min(BLOCK, messages - first))], pa.binary())
        for first in range(0, messages, BLOCK)
    ]
    found = {}
    for name in SIDES:
        files = () if name == "plain" else ("--tls-cert", certificate, "--tls-key", key)
        command = ("leader", "--name", name, "--listen", f"{HOST}:0", *files)
        log, extra = directory / f"{name}.log", {"SUBLET_DATABASE_URL": url}
        process = opened.enter_context(module("sublet.cli", *command, log=log, extra=extra))
        found[name] = Side(_address(process), values)
    return found


def _address(process: Running) -> str:
    def serving() -> list[str]:
        process.check()
        return re.findall(r"serves on (\S+)", process.said())

    return str(eventually(serving, WAIT_S, process.said)[0])


def _write(options: argparse.Namespace, series: Series) -> None:
    claims = [
        Claim(f"{TRANSPORTS[way]}: TLS / plain", f"{way}, TLS", f"{way}, plain", TARGETS[way]) for way in TRANSPORTS
    ]
    settings = {name: getattr(options, name) for name in ("messages", "calls", "connections", "rounds")}
    settings["value_bytes"] = VALUE_BYTES
    section = report.write("tls", settings, series, claims, options.json)
    report.page(options.page, "tls", PROSE.format(value=VALUE_BYTES, **settings), section)
    print(section)


if __name__ == "__main__":
    main()
