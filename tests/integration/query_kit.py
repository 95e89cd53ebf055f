"""Spark's micro-batch engine in small: the calls it makes, in the order it makes them, with a place to die at each.

A `Checkpoint` is what survives, a `Run` is one process of the query. The sink is idempotent by batch, as a good one is:
a batch that it has is not written again, but what it was given then has to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from sublet_borrower.consumer.group_membership import GroupMembership
from sublet_borrower.planner import micro_batch_planner
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.common.source_columns import all_columns
from sublet_borrower.spark.common.source_options import StreamingQueryOptions, stream_options
from sublet_borrower.spark.source.stream_reader import SubletStreamReader
from tests.kit import eventually
from tests.kit_nodes import SPEED

POINTS = ("planned", "logged", "read", "sunk", "committed")
"""Where a run can die: behind the plan, the checkpoint's log, the reading, the sink, the checkpoint's commit."""

Rows = list[tuple[int, int, bytes]]
"""(stream, offset, value)"""


class Died(Exception):
    """The process of the query is gone."""


@dataclass
class Checkpoint:
    """What the query has on disk, and its sink. `runs`: what each attempt at a batch was given."""

    offsets: list[dict[str, Any]] = field(default_factory=list)
    committed: int = -1
    sink: dict[int, Rows] = field(default_factory=dict)
    runs: list[tuple[int, Rows]] = field(default_factory=list)

    def values(self) -> list[bytes]:
        return sorted(value for rows in self.sink.values() for _, _, value in rows)


class Fast(StreamingQueryOptions):
    __slots__ = ()

    def settings(self) -> BorrowerSettings:
        return BorrowerSettings().scaled(SPEED)


class Run:
    """One process of a query, from its start to its death or its stop."""

    def __init__(self, checkpoint: Checkpoint, url: str, **options: object) -> None:
        given = {"url": url, "subscription": "$share/g/#", "sessionName": "etl", "startingPosition": "earliest"}
        given.update({name: str(value) for name, value in options.items()})
        found = stream_options(given)
        fast = Fast(**{name: getattr(found, name) for name in StreamingQueryOptions.__slots__})
        self.checkpoint, self.reader = checkpoint, SubletStreamReader(fast, all_columns())
        self._limit: ReadLimit = self.reader.getDefaultReadLimit()
        self._members: list[GroupMembership[Any]] = []
        self._begun = self._is_gone = False

    @contextmanager
    def _as_members(self) -> Iterator[None]:
        """Note with what it joins the group."""

        def make(*arguments: Any, **named: Any) -> GroupMembership[Any]:
            self._members.append(GroupMembership(*arguments, **named))
            return self._members[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(micro_batch_planner, "GroupMembership", make)
            yield

    def join(self) -> None:
        """Join the group, and look at nothing yet."""
        with self._as_members():
            self.reader.partitions(self.reader.initialOffset(), self.reader.initialOffset())

    def step(self, die: str = "") -> bool:
        """One round of the engine; False where there was nothing to do."""
        with self._as_members():
            return self._step(die)

    def _step(self, die: str) -> bool:
        if not self._begun:
            self._begun = True
            self.reader.initialOffset()
            if len(self.checkpoint.offsets) > self.checkpoint.committed + 1:
                self._run(die)
                return True
        start = self.checkpoint.offsets[-1] if self.checkpoint.offsets else {}
        end = self.reader.latestOffset(start, self._limit)
        self._die("planned", die)
        if end == start:
            return False
        self.checkpoint.offsets.append(end)
        self._die("logged", die)
        self._run(die)
        return True

    def _run(self, die: str) -> None:
        number = len(self.checkpoint.offsets) - 1
        start = self.checkpoint.offsets[number - 1] if number else self.reader.initialOffset()
        partitions = self.reader.partitions(start, self.checkpoint.offsets[number])
        rows = rows_of(batch for one in partitions for batch in self.reader.read(one))
        self.checkpoint.runs.append((number, rows))
        self._die("read", die)
        self.sink(number, rows)
        self._die("sunk", die)
        self.checkpoint.committed = number
        self._die("committed", die)

    def sink(self, number: int, rows: Rows) -> None:
        """Write a batch, where it is not written yet."""
        self.checkpoint.sink.setdefault(number, rows)

    def wait_until_granted(self, count: int) -> None:
        """Wait until it has streams with so many messages: its next batch takes all of them."""

        def has_all() -> bool:
            start = self.checkpoint.offsets[-1] if self.checkpoint.offsets else self.reader.initialOffset()
            with self._as_members():
                assert self.reader.latestOffset(start, ReadMaxRows(0)) == start
            progress = self.reader.reportLatestOffset()
            return progress is not None and progress["lag"] >= count

        eventually(has_all, 60.0, lambda: f"granted: {self.reader.reportLatestOffset()}")

    def until(self, count: int, die: str = "") -> None:
        """Go on until so many messages are in the sink."""

        def there() -> bool:
            self.step(die)
            return len(self.checkpoint.values()) >= count

        eventually(there, 30.0, lambda: f"{len(self.checkpoint.values())} in the sink: {self.checkpoint}")

    def until_dead(self, point: str) -> None:
        """Go on until it dies there."""
        with pytest.raises(Died):
            self.until(1_000, point)

    def _die(self, point: str, wanted: str) -> None:
        if point == wanted:
            self.vanish()
            raise Died(point)

    def vanish(self) -> None:
        """Gone without a word: whoever leads learns it by its silence."""
        (member,) = self._members
        member.agent.close(0.0)
        member.resources.close()
        self._is_gone = True

    def stop(self) -> None:
        if not self._is_gone:
            self.reader.stop()


Start = Callable[..., Run]


def rows_of(batches: Iterable[Any]) -> Rows:
    """Return the rows in the order of reading."""
    return [
        row
        for batch in batches
        for row in zip(
            batch.column("stream").to_pylist(),
            batch.column("offset").to_pylist(),
            batch.column("value").to_pylist(),
            strict=True,
        )
    ]
