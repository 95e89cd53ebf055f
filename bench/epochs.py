"""Cost of epochs: for publishing, for an atomic group, and for a group's frontier.

`python -m bench epochs --rounds 7`. Each is compared with the same without epochs. Contenders take turns, on one
Postgres with one node.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from bench import _postgres as postgres
from bench import _report as report
from bench._frontiers import Frontiers
from bench._report import Beside, Claim, Series
from bench.peers.ours import POLL, node
from sublet import Publisher, Session
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions

T = TypeVar("T")

VALUE_BYTES = 100
BLOCK = 1000
TARGET = 0.9
WAIT_S = 60.0
PROSE = """Messages of {value} bytes to one stream by columns in blocks of {block:,}, {messages:,} in each of {rounds}
rounds, in which the contenders take turns; a first round does not count. *publish* is the throughput of one publisher
to the last acknowledgement: without epochs, and with `publisher.in_epoch(epoch)` and `publisher.advance(...,
    wait=False)`
after every {paces} messages. *consume* is that of one session, from its first batch to the last message, of what was
published with such epochs and is completed: by an atomic group, over a group that is not. *Renewal* is the transaction
with which a leader sees and writes how far an atomic group with {streams:,} streams has consumed: once with all streams
consumed to the end, so that the frontier moves, and once with all of them behind, each at an epoch of its own; beside
statements over as many rows, and beside the publisher's call, which changes one row. Medians over {statement_rounds}
rounds."""


class Side:
    """A publisher to a database; `pace`: messages per epoch, or None for no epochs."""

    def __init__(self, url: str, pace: int | None) -> None:
        self.url, self._pace = url, pace
        self.publisher = Publisher(url, space="default")
        self._epochs = count()

    def publish(self, blocks: list[pa.Array]) -> None:
        """Publish all blocks, and wait for the last."""
        each = len(blocks) if self._pace is None else self._pace // BLOCK
        for first in range(0, len(blocks), each):
            self._part(blocks[first : first + each])
        self.publisher.flush()

    def _part(self, blocks: list[pa.Array]) -> None:
        epoch = next(self._epochs)
        to = self.publisher if self._pace is None else self.publisher.in_epoch(epoch)
        for values in blocks:
            to.publish_batch({"topic": "t", "value": values})
        if self._pace is not None:
            self.publisher.advance(epoch + 1, wait=False)


class Consuming:
    """Groups that are each read from beginning to end by one session, and deleted."""

    def __init__(self, url: str, batch_bytes: int) -> None:
        self._url, self._batch_bytes = url, batch_bytes
        self._store = PostgresGroupStore(url)
        self._numbers = count()

    def close(self) -> None:
        """Close the connection."""
        self._store.close()

    def consume(self, atomic: bool, messages: int) -> tuple[int, float]:
        """Return (messages after the first batch, seconds)."""
        subscription = f"$share/g{next(self._numbers)}/#"
        options = GroupOptions(StartingPosition.parse("earliest"), atomic=atomic)
        self._store.declare_group(Subscription.parse(subscription), options)
        try:
            with Session(subscription, self._url, max_batch_bytes=self._batch_bytes) as session:
                return _read(session, messages)
        finally:
            self._store.delete_group(Subscription.parse(subscription))


def _read(session: Session, messages: int) -> tuple[int, float]:
    first = session.poll(WAIT_S)
    started = time.perf_counter()
    assert first is not None, f"nothing came within {WAIT_S:g} s"
    seen = len(first)
    while seen < messages:
        batch = session.poll(WAIT_S)
        assert batch is not None, f"{seen} of {messages} messages came, and then nothing within {WAIT_S:g} s"
        seen += len(batch)
    return seen - len(first), time.perf_counter() - started


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the tables."""
    options = _options(arguments)
    series = Series()
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(postgres.server())
        sides = _publishing(opened, server, options.paces)
        groups = _consuming(opened, server, options)
        for number in range(options.rounds + 1):
            turned, counted = number % 2 == 1, series if number else Series()
            _publish(sides, options.messages, counted, turned)
            _consume(groups, options.messages, counted, turned)
            print(f"round {number} of {options.rounds}", flush=True)
    with postgres.place() as (url, _):
        frontiers = Frontiers(url, options.streams)
        with contextlib.closing(frontiers):
            figures = frontiers.figures(options.statement_rounds)
    _publish_report(options, series, figures)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench epochs", description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000_000, help="per round and contender")
    parser.add_argument("--paces", type=int, nargs="+", default=[20_000, 1000], help="messages to an epoch, by 1000")
    parser.add_argument("--batch-bytes", type=int, default=4 * 1024 * 1024, help="of a consumer's batch")
    parser.add_argument("--streams", type=int, default=10_000, help="of the group whose frontier moves")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--statement-rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    return parser.parse_args(arguments)


def _blocks(messages: int) -> list[pa.Array]:
    return [pa.array([os.urandom(VALUE_BYTES) for _ in range(BLOCK)], pa.binary()) for _ in range(messages // BLOCK)]


def _publishing(opened: contextlib.ExitStack, server: str, paces: list[int]) -> dict[int | None, Side]:
    """Create a database for each pace, and one without epochs for None."""
    sides = {pace: Side(postgres.database(server, 2 * n + 1), pace) for n, pace in enumerate([None, *paces])}
    for side in sides.values():
        opened.callback(side.publisher.close)
    return sides


def _consuming(opened: contextlib.ExitStack, server: str, options: argparse.Namespace) -> dict[int, Consuming]:
    """Create for each pace a database with a node and all messages to be consumed."""
    groups, directory = {}, Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sublet-bench-")))
    for n, pace in enumerate(options.paces):
        side = Side(postgres.database(server, 2 * n + 101), pace)
        side.publish(_blocks(options.messages))
        side.publisher.close()
        opened.enter_context(node(side.url, POLL, directory / f"{pace}.log"))
        groups[pace] = opened.enter_context(contextlib.closing(Consuming(side.url, options.batch_bytes)))
    return groups


def _publish(sides: dict[int | None, Side], messages: int, series: Series, turned: bool) -> None:
    blocks = _blocks(messages)
    for pace in _in_turn(list(sides), turned):
        gc.collect()
        started = time.perf_counter()
        sides[pace].publish(blocks)
        series.add(_published(pace), BLOCK * len(blocks), time.perf_counter() - started)


def _consume(groups: dict[int, Consuming], messages: int, series: Series, turned: bool) -> None:
    for pace, each in groups.items():
        for atomic in _in_turn([False, True], turned):
            gc.collect()
            series.add(_consumed(pace, atomic), *each.consume(atomic, messages // BLOCK * BLOCK))


def _in_turn(contenders: list[T], turned: bool) -> list[T]:
    return contenders[::-1] if turned else contenders


def _published(pace: int | None) -> str:
    return "publish without epochs" if pace is None else f"publish, epochs of {pace}"


def _consumed(pace: int, atomic: bool) -> str:
    return f"consume, {'atomic' if atomic else 'plain'}, epochs of {pace}"


def _claims(paces: list[int]) -> list[Claim]:
    publishing = [
        Claim(f"publish, an epoch per {pace:,} / without", _published(pace), _published(None), TARGET) for pace in paces
    ]
    consuming = [
        Claim(f"consume, an epoch per {pace:,}: atomic / plain", _consumed(pace, True), _consumed(pace, False), TARGET)
        for pace in paces
    ]
    return publishing + consuming


def _publish_report(options: argparse.Namespace, series: Series, figures: list[Beside]) -> None:
    names = ("messages", "paces", "batch_bytes", "streams", "rounds", "statement_rounds")
    settings = {name: getattr(options, name) for name in names} | {"value_bytes": VALUE_BYTES}
    section = report.write("epochs", settings, series, _claims(options.paces), options.json, figures)
    paces = " or ".join(f"{pace:,}" for pace in options.paces)
    prose = PROSE.format(**settings | {"value": VALUE_BYTES, "block": BLOCK, "paces": paces})
    report.page(options.page, "epochs", prose, section)
    print(section)


if __name__ == "__main__":
    main()
