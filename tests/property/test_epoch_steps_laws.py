"""Reading a stream in whole epochs, over any history of it, joined anywhere, and begun anew between any two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, Epoch, LowerFrontier, UpperFrontier
from sublet_storage.log.block_encoder import BlockEpochRange, add_position_columns
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.readers.epoch_steps import (
    BlockEpochSummaries,
    BlockEpochSummary,
    BlockRun,
    EpochStep,
    EpochStepPlanner,
)

MOST = 5


def epochs(numbers: int) -> st.SearchStrategy[Epoch]:
    return st.tuples(*[st.integers(0, MOST)] * numbers)


@dataclass
class Log:
    """One stream of one space, as the database would have it."""

    numbers: int
    lower: LowerFrontier
    messages: list[Epoch | None] = field(default_factory=list)
    marks: list[BlockEpochSummary] = field(default_factory=list)

    def append(self, block: list[Epoch | None]) -> None:
        allowed = [epoch for epoch in block if epoch is None or self.lower.admits(epoch)]
        if allowed:
            first, some = len(self.messages), {epoch for epoch in allowed if epoch is not None}
            least, greatest = LowerFrontier.from_epochs(some).least, UpperFrontier.from_epochs(some).greatest
            found = BlockEpochRange(least, greatest, None in allowed) if some else None
            self.messages += allowed
            self.marks.append(BlockEpochSummary(first, len(self.messages), len(allowed), self.lower, found))

    def advance(self, by: list[Epoch]) -> None:
        self.lower = self.lower.intersect(LowerFrontier.from_epochs(by))

    def compact(self) -> None:
        """Merge the last two blocks that have the same epochs."""
        for place in range(len(self.marks) - 1, 0, -1):
            one, other = self.marks[place - 1 : place + 1]
            if one.has_same_epochs(other):
                self.marks[place - 1 : place + 1] = [replace(one, end=other.end, size=one.size + other.size)]
                return

    def complete(self) -> None:
        self.advance([(MOST + 1,) * self.numbers])

    def look(self, scanned: int, most: int) -> BlockEpochSummaries:
        behind = tuple(mark for mark in self.marks if mark.end > scanned)[:most]
        return BlockEpochSummaries(behind, len(self.messages), False, self.lower, 1)

    def rows(self, start: int, end: int) -> pa.RecordBatch:
        """Return the rows as a reader finds them."""
        found = self.messages[start:end]
        same = {"topic": "t", "key": None, "value": b"v", "headers": None, "timestamp": 0}
        rows = [{**same, "epoch": epoch and list(epoch)} for epoch in found]
        return add_position_columns(pa.RecordBatch.from_pylist(rows, schema=BLOCK_SCHEMA), 1, start)

    def begun(self, before: int) -> UpperFrontier:
        """Return the epochs begun before an offset, by whole blocks."""
        greatest = [g for mark in self.marks if mark.first < before and mark.epochs for g in mark.epochs.greatest]
        return UpperFrontier.from_epochs(greatest)


def is_completed(log: Log, epoch: Epoch | None) -> bool:
    return epoch is None or not log.lower.admits(epoch)


class Consumer:
    """Reads, a step at a time, and may begin anew between two steps."""

    def __init__(self, log: Log, position: int, consumed: ConsumedFrontier) -> None:
        self.log, self.plan = log, EpochStepPlanner(position, consumed)
        self.first, self.begun = position, consumed
        self.given: list[int] = []

    def go_on(self, pages: int, limit: int) -> bool:
        self.plan.add_summaries(self.log.look(self.plan.scanned, pages))
        step = self.plan.next_step(limit)
        if step is None:
            return False
        offsets = [offset for run in step.runs for offset in self._read(step, run)]
        assert all(is_completed(self.log, self.log.messages[offset]) for offset in offsets), "an epoch in part"
        self.given += offsets
        self.plan.complete_step(step)
        assert (self.plan.position, self.plan.consumed) == (step.position, step.consumed)
        assert self.plan.position <= self.plan.scanned
        return True

    def _read(self, step: object, run: object) -> list[int]:
        batch = self.log.rows(run.start, min(run.end + 2, len(self.log.messages)))  # type: ignore[attr-defined]
        return step.filter_batch(run, batch).column("offset").to_pylist()  # type: ignore[attr-defined,no-any-return]

    def begin_anew(self) -> None:
        self.plan = EpochStepPlanner(self.plan.position, self.plan.consumed)

    def wanted(self) -> list[int]:
        """Return the messages due once all epochs are completed."""
        return [
            offset
            for offset, epoch in enumerate(self.log.messages)
            if offset >= self.first and (epoch is None or self.begun.needs(epoch))
        ]


@pytest.mark.conforms("S8", "S3")
@pytest.mark.parametrize("numbers", [1, 2])
@settings(max_examples=200)
@given(data=st.data())
def test_every_epoch_is_given_out_entirely_and_once(numbers: int, data: st.DataObject) -> None:
    log = Log(numbers, LowerFrontier.from_epochs([(0,) * numbers]))
    consumer: Consumer | None = None
    for _ in range(data.draw(st.integers(1, 14), label="events")):
        match data.draw(st.sampled_from(["append", "append", "advance", "read", "anew", "join", "compact"])):
            case "append":
                log.append(data.draw(st.lists(st.none() | epochs(numbers), min_size=1, max_size=4), label="block"))
            case "advance":
                log.advance(data.draw(st.lists(epochs(numbers), min_size=1, max_size=2), label="advance"))
            case "compact":
                log.compact()
            case "join" if consumer is None:
                position = data.draw(st.integers(0, len(log.messages)), label="position")
                lower = log.lower.after_completing(log.begun(position))
                consumer = Consumer(log, position, ConsumedFrontier(position, lower))
            case "read" if consumer is not None:
                consumer.go_on(data.draw(st.integers(1, 3)), data.draw(st.integers(0, 6)))
            case "anew" if consumer is not None:
                consumer.begin_anew()
            case _:
                pass
    consumer = consumer or Consumer(log, 0, ConsumedFrontier(0))
    log.complete()
    for _ in range(10 * len(log.marks) + 10):
        consumer.go_on(pages=2, limit=3)
    assert sorted(consumer.given) == consumer.wanted()
    assert consumer.plan.position == len(log.messages)
    _check_atomic(log, consumer)


def _check_atomic(log: Log, consumer: Consumer) -> None:
    """Check that of each epoch all messages were delivered, or none."""
    given = set(consumer.given)
    for epoch in {epoch for epoch in log.messages if epoch is not None}:
        of_it = {offset for offset, other in enumerate(log.messages) if other == epoch}
        assert of_it <= given or not of_it & given


@settings(max_examples=200)
@given(data=st.data())
def test_a_step_is_no_larger_than_it_must_be(data: st.DataObject) -> None:
    log = Log(1, LowerFrontier.from_epochs([(0,)]))
    for epoch in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 3))):
            log.append([(epoch,)] * data.draw(st.integers(1, 4)))
        log.advance([(epoch + 1,)])
    limit = data.draw(st.integers(1, 8))
    plan = EpochStepPlanner(0, ConsumedFrontier(0))
    plan.add_summaries(log.look(0, 1_000))
    while (step := plan.next_step(limit)) is not None:
        taken = {epoch for run in step.runs for epoch in log.messages[run.start : run.end]}
        assert sum(run.size for run in step.runs) <= limit or len(taken) == 1, "more than one epoch, and too many bytes"
        plan.complete_step(step)
    assert plan.position == len(log.messages)


def test_blocks_merged_meanwhile_are_read_once() -> None:
    log = Log(1, LowerFrontier.from_epochs([(0,)]))
    for _ in range(3):
        log.append([(1,), None])
    consumer = Consumer(log, 0, ConsumedFrontier(0))
    consumer.plan.add_summaries(log.look(0, most=2))
    log.compact()
    log.compact()
    log.complete()
    assert consumer.go_on(pages=1, limit=100)
    assert consumer.given == list(range(6))


FIVE, SIX, IN_FIVE = LowerFrontier(((5,),)), LowerFrontier(((6,),)), BlockEpochRange(((5,),), ((5,),))


def test_the_rest_of_a_merged_block_stays_behind() -> None:
    later = BlockEpochRange(((6,),), ((9,),))
    done, merged = BlockEpochSummary(0, 5, 1, FIVE, IN_FIVE), BlockEpochSummary(5, 20, 1, SIX, later)
    plan = EpochStepPlanner(0, ConsumedFrontier(10, FIVE))
    marks = (done, merged, BlockEpochSummary(20, 30, 1, SIX, later))
    plan.add_summaries(BlockEpochSummaries(marks, 30, False, SIX, 1))
    step = plan.next_step(limit_bytes=0)
    assert step is not None
    assert ([(run.start, run.end) for run in step.runs], step.position, step.consumed.upto) == ([(0, 5)], 5, 10)


def test_blocks_stored_elsewhere_are_read_as_well() -> None:
    plan = EpochStepPlanner(0, ConsumedFrontier(0))
    marks = (BlockEpochSummary(0, 5, 0, None, None), BlockEpochSummary(5, 9, 0, None, IN_FIVE))
    plan.add_summaries(BlockEpochSummaries(marks, 9, False, SIX, 1))
    step = plan.next_step(limit_bytes=1)
    assert step is not None
    assert ([(run.start, run.end) for run in step.runs], step.position) == ([(0, 9)], 9)


def test_a_step_reads_the_offsets_of_its_runs() -> None:
    """And gives nothing of a page without any."""
    runs = tuple(BlockRun(start, start + 10, 1, False) for start in (10, 30))
    step = EpochStep(runs, ConsumedFrontier(0), 40, ConsumedFrontier(40))
    asked = ((0, 10), (0, 11), (19, 21), (20, 30), (39, 50), (40, 50))
    assert [step.reads(*offsets) for offsets in asked] == [False, True, True, False, True, False]
    log = Log(1, LowerFrontier.from_epochs([(0,)]))
    log.append([(1,), None])
    assert step.filter_batch(runs[0], log.rows(0, 2).slice(0, 0)).num_rows == 0
