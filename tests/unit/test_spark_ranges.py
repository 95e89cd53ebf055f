"""What one task of a query reads: ranges are divided, and put together, and read page by page."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
from psycopg.pq import TransactionStatus

from sublet_borrower.spark.source import range_reader as module
from sublet_borrower.spark.source.range_reader import MultiRangePartition, RangePartition, plan_tasks, read_task
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import PositionBeyondHead, PositionGone, SubletError
from sublet_storage.log.fetch import LogPage
from sublet_storage.readers.epoch_steps import BlockRun, EpochStep


def ranges(*sizes: int) -> list[RangePartition]:
    """One of each stream, from offset 100 on."""
    return [
        RangePartition(stream, 1, 100, 100 + size, "#", "default", "postgresql://", "sublet", "here", True, 0)
        for stream, size in enumerate(sizes, 1)
    ]


def shape(sizes: list[int], least: int | None, most: int | None) -> list[list[tuple[int, int]]]:
    """(stream, messages) of each task."""
    tasks = plan_tasks(ranges(*sizes), least, most)
    parts = [task.ranges if isinstance(task, MultiRangePartition) else (task,) for task in tasks]
    return [
        [(part.stream_id, part.max_messages) for part in each if isinstance(part, RangePartition)] for each in parts
    ]


def test_one_task_for_each_stream_by_default() -> None:
    assert shape([5, 0, 7], None, None) == [[(1, 5)], [(3, 7)]], "of what has nothing there is none"
    assert shape([5, 7], None, 2) == [[(1, 5)], [(2, 7)]]
    assert shape([], 3, 3) == []
    assert shape([10, 1], 2, None) == [[(1, 10)], [(2, 1)]], "there are as many as asked for"


def test_no_more_tasks_than_messages() -> None:
    assert shape([2, 1, 0], 2**62, None) == [[(1, 1)], [(1, 1)], [(2, 1)]]


@pytest.mark.parametrize("size", [8, 0])
def test_a_step_is_of_one_task(size: int) -> None:
    """Also one that reads again what lies before its position."""
    (of_stream,) = ranges(size)
    run = BlockRun(100, 108, 800, is_fully_matching=True)
    step = replace(of_stream, step=EpochStep((run,), ConsumedFrontier(100), 108, ConsumedFrontier(108)))
    assert list(plan_tasks([step], 4, None)) == [step]


def test_tasks_have_about_one_size() -> None:
    assert shape([1, 9, 4, 6, 2], None, 2) == [[(2, 9), (5, 2)], [(1, 1), (3, 4), (4, 6)]]
    assert shape([1, 9, 4, 6, 2], None, 1) == [[(1, 1), (2, 9), (3, 4), (4, 6), (5, 2)]]


@pytest.mark.parametrize("sizes", [[10, 1], [1, 10, 1], [3, 3, 3, 3, 3], [100], [1] * 16])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_as_many_tasks_as_are_asked_for(sizes: list[int], count: int) -> None:
    tasks = shape(sizes, count, count)
    assert len(tasks) == count
    read: dict[int, int] = {}
    for stream, messages in (part for task in tasks for part in task):
        read[stream] = read.get(stream, 0) + messages
    assert read == dict(enumerate(sizes, 1))


class Log:
    """In a database's place: a stream in pages of four messages, of which some may be gone."""

    def __init__(self, head: int, gone: int = 0) -> None:
        self.head, self.gone = head, gone

    def fetch(self, _: object, stream_id: int, offset: int, *, end: int, **__: object) -> LogPage:
        assert offset < min(end, self.head)
        if offset < self.gone:
            raise PositionGone(stream_id, offset, self.gone if self.gone < self.head else None)
        upto = min(offset + 4, end, self.head)
        batch = pa.record_batch({"offset": pa.array(range(offset, upto), pa.int64())})
        return LogPage((batch,), offset, upto, self.head, False)


def read(monkeypatch: pytest.MonkeyPatch, log: Log, partition: RangePartition) -> list[int]:
    """The offsets that a task reads of a log."""
    idle = SimpleNamespace(transaction_status=TransactionStatus.IDLE)
    connection = SimpleNamespace(closed=False, info=idle, timeline_number=lambda: 0, close=lambda: None)
    monkeypatch.setattr("sublet_storage.db.connect.connect", lambda *_, **__: connection)
    monkeypatch.setattr("sublet_storage.log.fetch.fetch", log.fetch)
    monkeypatch.setattr(module, "freeze_loaded_objects", lambda: None)
    batches = read_task(replace(partition, address="postgresql://ranges"), pa.schema([("offset", pa.int64())]))
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


@pytest.mark.parametrize(
    ("log", "first"), [(Log(110), 100), (Log(111, 100), 100), (Log(110, 105), 105), (Log(110, 110), 110)]
)
def test_a_range_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch, log: Log, first: int) -> None:
    """From what there is of it; and of a step only its parts."""
    (partition,) = ranges(10)
    assert read(monkeypatch, log, replace(partition, fail_on_data_loss=False)) == [*range(first, 110)]
    runs = tuple(BlockRun(start, end, 1, is_fully_matching=True) for start, end in ((101, 103), (106, 108)))
    step = EpochStep(runs, ConsumedFrontier(100), 108, ConsumedFrontier(108))
    found = read(monkeypatch, log, replace(partition, fail_on_data_loss=False, step=step))
    assert found == [offset for offset in (101, 102, 106, 107) if offset >= first]


@pytest.mark.parametrize(("log", "error"), [(Log(109), PositionBeyondHead), (Log(110, 101), PositionGone)])
def test_a_range_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, log: Log, error: type[SubletError]
) -> None:
    (partition,) = ranges(10)
    with pytest.raises(error):
        read(monkeypatch, log, partition)
