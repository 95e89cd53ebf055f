"""What one task of a query reads: ranges are divided, and put together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublet_borrower.spark.source.range_reader import MultiRangePartition, RangePartition, plan_tasks
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_storage.readers.epoch_steps import BlockRun, EpochStep


def ranges(*sizes: int) -> list[RangePartition]:
    """One of each stream, from offset 100 on."""
    return [
        RangePartition(stream, 1, 100, 100 + size, "#", "default", "postgresql://", None, "here", True, 0)
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


def test_a_step_is_of_one_task() -> None:
    (of_stream,) = ranges(8)
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
