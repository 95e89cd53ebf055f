"""How far a batch of whole epochs goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.machine.events import ProgressReported, SavedProgress, StreamGranted
from sublet_borrower.planner import complete_epoch_planner
from sublet_borrower.planner.common_epoch_end import meet_completed, plan_steps
from sublet_borrower.planner.complete_epoch_planner import EpochPlanner
from sublet_borrower.planner.plan_ledger import MicroBatchPlanLedger
from sublet_borrower.planner.planned_ranges import PlanLimits, PlannedRange
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.log.block_encoder import BlockEpochRange
from sublet_storage.readers.epoch_steps import BlockEpochSummaries, BlockEpochSummary, EpochStepPlanner
from tests.kit import GRANT_KEY


def lower(epoch: int) -> LowerFrontier:
    return LowerFrontier(((epoch,),))


def stream(completed: int | None, *epochs: int) -> EpochStepPlanner:
    """A block of ten messages of each epoch, written when all before it was completed."""
    blocks = tuple(
        BlockEpochSummary(10 * number, 10 * number + 10, 100, lower(epoch), BlockEpochRange(((epoch,),), ((epoch,),)))
        for number, epoch in enumerate(epochs)
    )
    entire = EpochStepPlanner(0, ConsumedFrontier(0))
    entire.add_summaries(
        BlockEpochSummaries(blocks, 10 * len(blocks), False, None if completed is None else lower(completed), 1)
    )
    return entire


def unset_stream(count: int) -> EpochStepPlanner:
    """Blocks of ten messages without an epoch."""
    atomic = EpochStepPlanner(0, ConsumedFrontier(0))
    blocks = tuple(BlockEpochSummary(10 * number, 10 * number + 10, 100, None, None) for number in range(count))
    atomic.add_summaries(BlockEpochSummaries(blocks, 10 * count, False, None, 1))
    return atomic


def sizes(
    streams: dict[int, EpochStepPlanner], limits: PlanLimits | None = None, to: LowerFrontier | None = None
) -> dict[int, int | None]:
    """How many messages of each stream the next batch has."""
    return {s: step.max_messages for s, step in plan_steps(streams, limits or PlanLimits(), to).items()}


def test_of_streams_looked_at_in_turn_the_least_counts() -> None:
    streams = {1: stream(4, 1, 2, 3), 2: stream(3, 1, 2)}
    assert meet_completed(streams) == lower(3)
    assert sizes(streams) == {1: 20, 2: 20}


def test_a_step_ends_before_the_next_block() -> None:
    """And does not read it."""
    entire = EpochStepPlanner(0, ConsumedFrontier(0))
    blocks = tuple(BlockEpochSummary(start, start + 10, 100, None, None) for start in (0, 10))
    entire.add_summaries(BlockEpochSummaries(blocks, 20, False, None, 1))
    step = entire.step_to(10, None)
    assert ([(run.start, run.end) for run in step.runs], step.size) == ([(0, 10)], 100)


def test_without_epochs_all_is_given() -> None:
    entire = EpochStepPlanner(0, ConsumedFrontier(0))
    entire.add_summaries(BlockEpochSummaries((BlockEpochSummary(0, 10, 100, None, None),), 10, False, None, 1))
    assert meet_completed({1: entire}) is None
    assert sizes({1: entire}) == sizes({1: entire}, to=lower(2)) == {1: 10}
    assert sizes({}) == {}
    assert sizes({1: entire, 2: stream(9, 1, 2)}) == {1: 10, 2: 0}, "one of them knows of none"
    before = EpochStepPlanner(0, ConsumedFrontier(0))
    blocks = (BlockEpochSummary(0, 10, 100, None, None), BlockEpochSummary(10, 20, 100, lower(1), None))
    before.add_summaries(BlockEpochSummaries(blocks, 20, False, lower(2), 1))
    assert sizes({1: before}, PlanLimits(max_messages=1)) == {1: 10}, "what came before the first epoch"


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        (PlanLimits(max_messages=40), 20),
        (PlanLimits(max_bytes=400), 20),
        (PlanLimits(max_bytes=399), 10),
        (PlanLimits(max_messages=1), 10),
    ],
    ids=["messages", "bytes", "a byte less", "less than an epoch"],
)
def test_a_limit_ends_a_batch_behind_an_epoch(limits: PlanLimits, size: int) -> None:
    assert sizes({1: stream(9, 1, 2, 3), 2: stream(9, 1, 2, 3)}, limits) == {1: size, 2: size}


def test_epochs_of_several_numbers_end_batches_too() -> None:
    """In the order in which they were completed: the last frontier but one has the first epoch of that before it."""
    frontiers = [LowerFrontier(least) for least in (((0, 5), (3, 0)), ((0, 5),), ((1, 6),), ())]
    epochs = ((3, 0), (0, 5), (1, 6))
    entire = EpochStepPlanner(0, ConsumedFrontier(0))
    blocks = tuple(
        BlockEpochSummary(10 * number, 10 * number + 10, 100, frontiers[number], BlockEpochRange((epoch,), (epoch,)))
        for number, epoch in enumerate(epochs)
    )
    entire.add_summaries(BlockEpochSummaries(blocks, 30, False, frontiers[-1], 1))
    for frontier in frontiers[1:]:
        (step,) = plan_steps({1: entire}, PlanLimits(max_messages=1)).values()
        assert (step.max_messages, step.consumed.lower) == (10, frontier)
        entire.complete_step(step)


@pytest.mark.parametrize("completed", [None, lower(7)])
def test_messages_without_an_epoch_are_divided(completed: LowerFrontier | None) -> None:
    """Also behind the epochs that are completed, which come first and together."""
    streams = {number: EpochStepPlanner(0, ConsumedFrontier(0)) for number in (1, 2, 3)}
    blocks = [BlockEpochSummary(start, start + 10, 100, completed, None) for start in (0, 10, 20)]
    if completed is not None:
        blocks[0] = BlockEpochSummary(0, 10, 100, lower(1), BlockEpochRange(((1,),), ((1,),)))
    for number, atomic in streams.items():
        atomic.add_summaries(BlockEpochSummaries(tuple(blocks[:number]), 10 * number, False, completed, 1))
    planned = []
    for _ in range(3):
        steps = plan_steps(streams, PlanLimits(max_messages=1))
        for stream_id, step in steps.items():
            streams[stream_id].complete_step(step)
        planned.append({stream_id: step.max_messages for stream_id, step in steps.items() if step.runs})
    assert planned == [{1: 10, 2: 10, 3: 10}, {2: 10, 3: 10}, {3: 10}]
    assert plan_steps(streams, PlanLimits(max_messages=1)) == {}


def test_each_stream_has_its_turn() -> None:
    """Also one that has blocks of an epoch that is not completed, and takes no turn for these."""
    unset = [BlockEpochSummary(start, start + 10, 100, lower(5), None) for start in range(0, 60, 10)]
    open_block = BlockEpochSummary(0, 10, 100, lower(5), BlockEpochRange(((7,),), ((7,),)))
    streams = {number: EpochStepPlanner(0, ConsumedFrontier(0)) for number in (1, 2)}
    streams[1].add_summaries(BlockEpochSummaries((open_block, *unset[1:4]), 40, False, lower(5), 1))
    streams[2].add_summaries(BlockEpochSummaries(tuple(unset), 60, False, lower(5), 1))
    assert sizes(streams, PlanLimits(max_messages=20)) == {1: 10, 2: 10}
    for _ in range(2):
        steps = plan_steps(streams, PlanLimits(max_messages=20), poison={1: (30, 40)})
        assert {stream_id: step.max_messages for stream_id, step in steps.items()} == {1: 10, 2: 10}
        for stream_id, step in steps.items():
            streams[stream_id].complete_step(step)
    (poisoned, _) = plan_steps(streams, PlanLimits(), poison={1: (30, 40)}).values()
    assert poisoned.reads(30, 40), "nothing before it is left"


@pytest.mark.parametrize("blocks", [lambda *epochs: stream(9, *epochs), lambda *epochs: unset_stream(len(epochs))])
def test_a_batch_ends_before_poison(blocks: Callable[..., EpochStepPlanner]) -> None:
    """As much as lies before it, in one batch."""
    streams = {1: blocks(1, 2, 3, 4), 2: blocks(1, 2, 3, 4)}
    planned = plan_steps(streams, PlanLimits(), poison={1: (30, 40)})
    assert {stream_id: step.max_messages for stream_id, step in planned.items()} == {1: 30, 2: 30}


@pytest.mark.conforms("S11")
def test_a_batch_has_the_rest_of_a_begun_block() -> None:
    """As compaction leaves it: messages without epochs, of which those before offset 15 are consumed."""
    entire = EpochStepPlanner(0, ConsumedFrontier(15, lower(2)))
    blocks = (
        BlockEpochSummary(0, 10, 100, lower(1), BlockEpochRange(((7,),), ((7,),))),
        BlockEpochSummary(10, 20, 100, lower(2), None),
    )
    entire.add_summaries(BlockEpochSummaries(blocks, 20, False, lower(3), 1))
    (step,) = plan_steps({1: entire}, PlanLimits(max_messages=1)).values()
    assert step.consumed == ConsumedFrontier(20, lower(3))


@pytest.mark.conforms("S11", "S9")
def test_a_stream_with_nothing_left_is_not_moved() -> None:
    streams = {1: stream(2, 1), 2: stream(2)}
    assert list(plan_steps(streams, PlanLimits())) == [1]
    assert list(plan_steps({2: streams[2]}, PlanLimits())) == []
    waiting = stream(1, 1)
    waiting.complete_step(plan_steps({1: waiting}, PlanLimits())[1])
    assert (waiting.is_waiting, plan_steps({1: waiting}, PlanLimits())) == (True, {})


def test_a_query_that_ends_goes_no_further() -> None:
    assert sizes({1: stream(9, 1, 2, 3)}, to=lower(2)) == {1: 10}
    assert sizes({1: stream(2, 1, 2, 3)}, to=lower(3)) == {1: 10}, "nor behind what is completed"


class OneBlock(DatabaseMessageReader):
    """Reads streams with a block of ten messages each, of an epoch that is completed; `asked`: for what it was."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_away = self.is_away_later = False
        self.completed = 2

    def fetch_frontiers(self, stream_ids: Iterable[int]) -> Mapping[int, BlockEpochSummaries]:
        self.asked.append("frontiers")
        known = BlockEpochSummaries((), 10, False, lower(self.completed), 1)
        return {} if self.is_away else dict.fromkeys(stream_ids, known)

    def fetch_summaries_behind(
        self, stream_id: int, grant_id: int, generation_id: int, offset: int
    ) -> BlockEpochSummaries | None:
        self.asked.append("blocks")
        assert len(self.asked) < 10
        block = BlockEpochSummary(0, 10, 100, lower(1), BlockEpochRange(((1,),), ((1,),)))
        is_away = self.is_away or self.is_away_later
        return None if is_away else BlockEpochSummaries((block,), 10, False, lower(self.completed), 1)


def test_only_what_may_be_new_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, said = OneBlock(), list[ProgressReported]()
    ledger = MicroBatchPlanLedger(said.append, 60.0)
    ledger.restore((), ())
    grant = Grant("b", 1, 1, 50, 0, 1, 0, 1, "#", consumed=ConsumedFrontier(0), grant_key=GRANT_KEY)
    ledger.apply_update(StreamGranted(grant))

    def plan(planner: EpochPlanner, together_s: float = float("-inf")) -> list[str]:
        """What it asks for; the streams with a step come last."""
        monkeypatch.setattr(complete_epoch_planner, "TOGETHER_S", together_s)
        reader.asked.clear()
        steps = planner.plan_steps(PlanLimits(), lambda _: True, finite=False)
        ledger.plan_steps(steps if planner is last else {})
        return [*reader.asked, *map(str, steps)]

    first, last = (EpochPlanner(ledger, reader, "$share/g/#") for _ in range(2))
    monkeypatch.setattr(complete_epoch_planner, "COMPLETED_S", 3600.0)
    assert plan(first, 3600.0) == [], "other streams may come"
    reader.is_away = True
    assert plan(first) == ["frontiers"]
    reader.is_away, reader.is_away_later = False, True
    assert plan(first) == ["frontiers", "blocks"]
    reader.is_away_later = False
    assert plan(first) == ["frontiers", "blocks", "1"], "it is back"
    assert plan(first) == ["1"]
    monkeypatch.setattr(complete_epoch_planner, "COMPLETED_S", float("-inf"))
    assert plan(last) == ["frontiers", "1"]
    ledger.apply_update(SavedProgress(1, 50, 0, said[-1].in_doubt))
    ledger.acknowledge(runnable.planned for runnable in ledger.take_saved_plans())
    assert plan(last) == [], "no epoch is waited for"


def test_what_a_finite_plan_has_to_do_is_known_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a plan before it that goes on, when less was completed."""
    monkeypatch.setattr(complete_epoch_planner, "TOGETHER_S", float("-inf"))
    monkeypatch.setattr(complete_epoch_planner, "COMPLETED_S", float("-inf"))
    reader, ledger = OneBlock(), MicroBatchPlanLedger(lambda _: None, 60.0)
    ledger.restore((), ())
    ledger.apply_update(
        StreamGranted(Grant("b", 1, 1, 50, 0, 1, 0, 1, "#", consumed=ConsumedFrontier(0), grant_key=GRANT_KEY))
    )
    planner = EpochPlanner(ledger, reader, "$share/g/#")
    reader.completed = 1
    (step,) = planner.plan_steps(PlanLimits(), lambda _: True, finite=False).values()
    assert step.runs == ()
    reader.completed = 2
    (step,) = planner.plan_steps(PlanLimits(), lambda _: True, finite=True).values()
    assert step.runs


def test_a_stream_that_ends_before_its_plan_goes() -> None:
    """What was planned of it, under a former grant, is not there."""
    said = list[ProgressReported]()
    ledger, doubt = MicroBatchPlanLedger(said.append, 60.0), InDoubtRange(40, 0, 20, 60.0, ConsumedFrontier(20))
    ledger.restore((), [PlannedRange.from_in_doubt(1, doubt)])
    grant = Grant("b", 1, 1, 50, 0, 1, 0, 1, "#", consumed=ConsumedFrontier(0), in_doubt=doubt, grant_key=GRANT_KEY)
    ledger.apply_update(StreamGranted(grant))
    EpochPlanner(ledger, OneBlock(), "$share/g/#").restore_steps()
    assert [(each.stream_id, each.is_final) for each in said] == [(1, True)]
