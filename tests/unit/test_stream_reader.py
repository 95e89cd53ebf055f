"""The streaming source without a group: what it resumes, and what it says of what others have got meanwhile.

With a real one it is tested in `tests/integration/test_stream_reader.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from sublet_borrower.planner.planned_ranges import PlannedRange, RunnablePlannedRange
from sublet_borrower.spark.common.source_columns import all_columns
from sublet_borrower.spark.common.source_options import stream_options
from sublet_borrower.spark.source import stream_reader as module
from sublet_borrower.spark.source.offsets import encode_offset
from sublet_borrower.spark.source.range_reader import RangePartition
from sublet_borrower.spark.source.stream_reader import SubletStreamReader
from sublet_protocol.domain.errors import InDoubtRangeReassigned, InvalidSetting

ONE, OTHER, NEXT = PlannedRange(1, 10, 0, 5), PlannedRange(2, 20, 3, 9), PlannedRange(1, 10, 5, 8)
IDENTITY: dict[str, Any] = {"group_id": 3, "session": "etl", "subscription": "$share/g/#"}


def runnable(planned: PlannedRange) -> RunnablePlannedRange:
    return RunnablePlannedRange(planned, planned.grant_id, planned.start, 1, "#")


class Planner:
    """In the place of the planner: plans what it is given, and knows what was lost and what came later."""

    name, subscription, group_id, url = "etl", IDENTITY["subscription"], 3, "postgresql://host/db"

    def __init__(self) -> None:
        self.planned: list[PlannedRange] = []
        self.lost: list[PlannedRange] = []
        self.superseded: list[PlannedRange] | None = []
        self.restored: list[tuple[list[PlannedRange], list[PlannedRange]]] = []
        self.acknowledged: list[PlannedRange] = []

    def restore(self, done: Any, started: Any) -> None:
        self.restored.append((list(done), list(started)))

    def resolve_started(self, started: Sequence[PlannedRange]) -> tuple[list[RunnablePlannedRange], list[PlannedRange]]:
        return [runnable(each) for each in started if each not in self.lost], self.lost

    def find_superseded(self, ranges: object, wait_s: float, *, finite: bool) -> list[PlannedRange] | None:
        return self.superseded

    def acknowledge(self, ranges: Sequence[PlannedRange]) -> None:
        self.acknowledged = list(ranges)

    def plan(self, *limits: object, finite: bool) -> list[RunnablePlannedRange]:
        return [runnable(each) for each in self.planned]

    def spaces(self, streams: Any) -> dict[int, str]:
        return {stream: "default" for stream, _ in streams}

    def unsaved_ranges(self) -> list[PlannedRange]:
        return []

    def await_join(self, *, granted: bool) -> None:
        """It has joined."""

    def put_off(self, poison: dict[PlannedRange, object]) -> None:
        assert not poison

    def lags(self) -> dict[int, tuple[int, int]]:
        return {2: (3, 9), 1: (5, 8)}


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planner]:
    planner, handler = Planner(), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("sublet_borrower.planner.micro_batch_planner.MicroBatchPlanner", lambda *_, **__: planner)
    monkeypatch.setattr(module, "poison_in", lambda partitions: {})
    yield planner
    signal.signal(signal.SIGTERM, handler)


def source(**options: str) -> SubletStreamReader:
    given = {"subscription": "$share/g/#", "sessionName": "etl", "url": "postgresql://host/db", **options}
    return SubletStreamReader(stream_options(given), all_columns())


def offset(*ranges: PlannedRange) -> dict[str, Any]:
    return encode_offset(ranges, **IDENTITY)


def read(reader: SubletStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(stream, start, end) of what its tasks read."""
    tasks = reader.partitions(start, end)
    return [(each.stream_id, each.start, each.end) for each in tasks if isinstance(each, RangePartition)]


def test_a_batch_takes_what_the_query_allows() -> None:
    """Of the two limits Spark gets that of messages."""
    both = {"maxOffsetsPerTrigger": "5", "maxBytesPerTrigger": "7"}
    limits = [source(**options).getDefaultReadLimit() for options in (both, {"maxBytesPerTrigger": "7"}, {})]
    assert [type(limit) for limit in limits] == [ReadMaxRows, ReadMaxBytes, ReadAllAvailable]
    assert isinstance(limits[0], ReadMaxRows)
    assert limits[0].max_rows == 5


def test_nothing_new_is_the_offset_before(planner: Planner) -> None:
    """Spark makes no batch then."""
    reader = source()
    assert reader.reportLatestOffset() is None
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    planner.planned = [ONE]
    assert reader.latestOffset(start, ReadAllAvailable()) == offset(ONE)
    planner.planned = []
    assert reader.latestOffset(offset(ONE), ReadAllAvailable()) == offset(ONE)
    assert planner.acknowledged == [ONE]
    assert reader.reportLatestOffset() == {"heads": {"1": 8, "2": 9}, "lag": 9}


def test_a_batch_of_this_process_is_not_resumed(planner: Planner) -> None:
    reader = source()
    planner.planned = [ONE, OTHER]
    end = reader.latestOffset({}, ReadAllAvailable())
    assert len(planner.restored) == 1
    for _ in range(2):
        assert read(reader, {}, end) == [(1, 0, 5), (2, 3, 9)]
    assert len(planner.restored) == 1


@pytest.mark.parametrize("policy", ["drop", "fail"])
def test_a_batch_of_another_process_is_resumed_once(
    planner: Planner, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """However often Spark asks for its tasks: without what others have got meanwhile, or not at all."""
    reader = source(onRangeLost=policy)
    planner.lost = [OTHER]
    end = offset(NEXT, OTHER)
    if policy == "fail":
        with pytest.raises(InDoubtRangeReassigned, match="had begun messages that others may have got meanwhile"):
            read(reader, offset(ONE), end)
        return
    for _ in range(2):
        assert read(reader, offset(ONE), end) == [(1, 5, 8)]
    assert planner.restored == [([ONE], [NEXT, OTHER])]
    assert "ranges lost, dropped as onRangeLost is drop" in caplog.text


@pytest.mark.parametrize("policy", ["drop", "fail"])
def test_an_old_checkpoint_is_noticed(planner: Planner, caplog: pytest.LogCaptureFixture, policy: str) -> None:
    """Its next batches have numbers that a sink may have stored already."""
    reader = source(onRangeLost=policy)
    planner.superseded = [ONE]
    text = "the checkpoint is older than what session 'etl' has done since: it ends at stream 1: 5, and"
    if policy == "fail":
        with pytest.raises(InvalidSetting, match=text):
            reader.latestOffset(offset(ONE), ReadAllAvailable())
    else:
        assert reader.latestOffset(offset(ONE), ReadAllAvailable()) == offset(ONE)
        assert text in caplog.text


@pytest.mark.parametrize("in_a_batch", [False, True])
def test_an_old_checkpoint_is_noticed_before_a_plan(planner: Planner, in_a_batch: bool) -> None:
    """A leader may be away for longer than the first call waits."""
    reader = source(onRangeLost="fail")
    planner.planned, planner.superseded = [NEXT], None
    if in_a_batch:
        assert read(reader, {}, offset(ONE)) == [(1, 0, 5)]
    for _ in range(2):
        assert reader.latestOffset(offset(ONE), ReadAllAvailable()) == offset(ONE)
    assert planner.acknowledged == []
    planner.superseded = [ONE]
    with pytest.raises(InvalidSetting, match="the checkpoint is older than what session 'etl' has done since"):
        reader.latestOffset(offset(ONE), ReadAllAvailable())


@pytest.mark.parametrize("in_a_batch", [False, True])
def test_a_checkpoint_is_checked_once(planner: Planner, in_a_batch: bool) -> None:
    """What it is behind afterwards is this process's own."""
    reader = source(onRangeLost="fail")
    planner.planned = [NEXT]
    if in_a_batch:
        assert read(reader, {}, offset(ONE)) == [(1, 0, 5)]
    for _ in range(2):
        assert reader.latestOffset(offset(ONE), ReadAllAvailable()) == offset(NEXT)
        planner.superseded = [ONE]


@pytest.mark.parametrize("schema", [None, "other"])
def test_a_task_has_the_drivers_schema(planner: Planner, monkeypatch: pytest.MonkeyPatch, schema: str | None) -> None:
    """Also the default: its worker may have had a job with another."""
    monkeypatch.setenv("SUBLET_SCHEMA", schema or "")
    (task,) = source().partitions({}, offset(ONE))
    assert isinstance(task, RangePartition)
    assert task.schema_name == (schema or "sublet")
