"""Batches of whole epochs over two streams of one space: each epoch is in one batch, a batch can be done again, and an
epoch is given out though one of the streams has nothing of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.machine.events import ProgressReported, SavedProgress, StreamGranted
from sublet_borrower.planner import complete_epoch_planner
from sublet_borrower.planner.complete_epoch_planner import EpochPlanner
from sublet_borrower.planner.plan_ledger import MicroBatchPlanLedger
from sublet_borrower.planner.planned_ranges import PlanLimits, RunnablePlannedRange
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, Epoch, LowerFrontier
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.readers.epoch_steps import BlockEpochSummaries, EpochStep, EpochStepPlanner
from tests.kit import GRANT_KEY
from tests.property.test_epoch_steps_laws import MOST, Log, epochs, is_completed

STREAMS = (0, 1)
_grant_ids = count(1)


@pytest.fixture(autouse=True, scope="module")
def in_logs() -> Iterator[None]:
    """Marks are read from logs in memory, as often as anybody likes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(complete_epoch_planner, "TOGETHER_S", float("-inf"))
        patch.setattr(complete_epoch_planner, "COMPLETED_S", 0.0)
        yield


class TwoLogs(DatabaseMessageReader):
    """Reads two logs."""

    def __init__(self, logs: tuple[Log, Log]) -> None:
        self._logs = logs

    def fetch_summaries_behind(
        self, stream_id: int, grant_id: int, generation_id: int, offset: int
    ) -> BlockEpochSummaries:
        return self._logs[stream_id].look(offset, 1_000)

    def fetch_frontiers(self, stream_ids: Iterable[int]) -> Mapping[int, BlockEpochSummaries]:
        return {stream: self._logs[stream].look(0, 0) for stream in stream_ids}


class Query:
    """Two streams, a process that plans them, and its batches: {stream: offsets} of each."""

    def __init__(self, logs: tuple[Log, Log]) -> None:
        self.logs = logs
        self.batches: list[dict[int, list[int]]] = []
        self.rows = dict.fromkeys(STREAMS, (0, ConsumedFrontier(0)))
        self._saved: list[ProgressReported] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """The process dies between two batches, and the next is granted both streams."""
        self.planning = MicroBatchPlanLedger(self._report, 60.0)
        self.planning.restore((), ())
        self.epochs = EpochPlanner(self.planning, TwoLogs(self.logs), "$share/g/#")
        for stream, (position, consumed) in self.rows.items():
            grant = Grant(
                "b", 1, stream, next(_grant_ids), position, 1, 0, 1, "#", consumed=consumed, grant_key=GRANT_KEY
            )
            self.planning.apply_update(StreamGranted(grant))

    def _report(self, said: ProgressReported) -> None:
        assert said.consumed is not None
        self.rows[said.stream_id] = said.position, said.consumed
        self._saved.append(said)

    def advance(self, by: list[Epoch]) -> None:
        for log in self.logs:
            log.advance(by)

    def batch(self, most: PlanLimits, *, finite: bool = False) -> bool:
        """One batch, and once more as another process would do it, from what a checkpoint and the rows say."""
        self.planning.update_heads((stream, len(log.messages)) for stream, log in enumerate(self.logs))
        steps = self.epochs.plan_steps(most, lambda _: True, finite=finite)
        self.planning.plan_steps(steps)
        self._write()
        begun = self.planning.take_saved_plans()
        if begun:
            given = {each.planned.stream_id: self._read(each.planned.stream_id, each.step) for each in begun}
            for each in begun:
                assert self._again(each) == given[each.planned.stream_id], "done again it has other messages"
            self.planning.acknowledge(each.planned for each in begun)
            self.planning.report_progress()
            self._write()
            self.batches.append(given)
        return bool(steps)

    def _write(self) -> None:
        saved, self._saved = self._saved, []
        for said in saved:
            self.planning.apply_update(
                SavedProgress(said.stream_id, said.grant_id, said.position, said.in_doubt, said.consumed)
            )

    def _again(self, begun: RunnablePlannedRange) -> list[int]:
        assert begun.step is not None
        stream, step = begun.planned.stream_id, begun.step
        log = self.logs[stream]
        log.compact()
        plan = EpochStepPlanner(begun.position, step.start_frontier)
        plan.add_summaries(log.look(plan.scanned, 1_000))
        return self._read(stream, plan.step_to(step.consumed.upto, step.consumed.lower))

    def _read(self, stream: int, step: EpochStep | None) -> list[int]:
        assert step is not None
        log = self.logs[stream]
        return [
            offset
            for run in step.runs
            for offset in step.filter_batch(run, log.rows(run.start, min(run.end + 2, len(log.messages))))
            .column("offset")
            .to_pylist()
        ]

    def run_now(self, most: PlanLimits) -> None:
        """A process that gives out what is there and completed, and ends, whatever comes meanwhile."""
        self.begin_anew()
        there = {
            (stream, offset)
            for stream, log in enumerate(self.logs)
            for offset, epoch in enumerate(log.messages)
            if is_completed(log, epoch)
        }
        for _ in range(200):
            if not self.batch(most, finite=True) and self.planning.is_caught_up({}):
                break
            self.logs[0].append([None])
            self.advance([(MOST,) * self.logs[0].numbers])
        assert self.planning.is_caught_up({}), "it goes on"
        assert self.given() == there
        self.begin_anew()

    def given(self) -> set[tuple[int, int]]:
        """Return the messages of all batches: (stream, offset)."""
        return {(stream, offset) for batch in self.batches for stream, some in batch.items() for offset in some}

    def check(self) -> None:
        """Check that every message was delivered once, and each epoch in one batch."""
        for stream in STREAMS:
            given = [offset for batch in self.batches for offset in batch.get(stream, ())]
            assert sorted(given) == list(range(len(self.logs[stream].messages)))
        of_batch: dict[Epoch, set[int]] = {}
        for number, batch in enumerate(self.batches):
            for stream, offsets in batch.items():
                for offset in offsets:
                    if (epoch := self.logs[stream].messages[offset]) is not None:
                        of_batch.setdefault(epoch, set()).add(number)
        assert all(len(numbers) == 1 for numbers in of_batch.values()), of_batch


def acts(numbers: int) -> st.SearchStrategy[list[tuple[str, int, list[Epoch | None], int]]]:
    block = st.lists(st.none() | epochs(numbers), min_size=1, max_size=4)
    word = st.sampled_from(["append", "append", "append", "advance", "batch", "batch", "anew", "now"])
    return st.lists(st.tuples(word, st.sampled_from(STREAMS), block, st.sampled_from([0, 1, 3, 9])), max_size=40)


@pytest.mark.conforms("S11")
@pytest.mark.parametrize("numbers", [1, 2])
@settings(max_examples=300)
@given(data=st.data())
def test_each_epoch_is_in_one_repeatable_batch(numbers: int, data: st.DataObject) -> None:
    lower = LowerFrontier(((0,) * numbers,))
    query = Query((Log(numbers, lower), Log(numbers, lower)))
    for word, stream, block, most in data.draw(acts(numbers)):
        if word == "append":
            query.logs[stream].append(block)
        elif word == "advance":
            by = [epoch for epoch in block if epoch is not None]
            query.advance(by or [(0,) * numbers])
        elif word == "anew":
            query.begin_anew()
        elif word == "now":
            query.run_now(PlanLimits(max_messages=most or None))
        else:
            query.batch(PlanLimits(max_messages=most or None))
    query.advance([(MOST + 1,) * numbers])
    for _ in range(200):
        if not query.batch(PlanLimits(max_messages=2)):
            break
    query.check()


def test_a_stream_without_the_last_epochs_ends() -> None:
    """Its last batch ends before the last epoch of the other one."""
    lower = LowerFrontier(((0,),))
    query = Query((Log(1, lower), Log(1, lower)))
    query.logs[0].append([(0,)])
    for epoch in range(3):
        query.logs[1].append([(epoch,)])
        query.advance([(epoch + 1,)])
    query.run_now(PlanLimits(max_messages=1))


def test_who_waits_for_an_epoch_looks_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a batch is asked for."""
    monkeypatch.setattr(complete_epoch_planner, "COMPLETED_S", 3600.0)
    lower = LowerFrontier(((0,),))
    query = Query((Log(1, lower), Log(1, lower)))
    query.logs[0].append([(1,)])
    query.batch(PlanLimits())
    query.advance([(2,)])
    query.batch(PlanLimits())
    assert not query.given()
    query.begin_anew()
    query.batch(PlanLimits())
    assert query.given() == {(0, 0)}
