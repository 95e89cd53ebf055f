"""What a planner of micro-batches waits for, and how it ends, with a member and a database in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.machine.events import ProgressReported, SavedProgress, StreamGranted
from sublet_borrower.planner import micro_batch_planner as module
from sublet_borrower.planner.micro_batch_planner import MicroBatchPlanner
from sublet_borrower.planner.plan_ledger import MicroBatchPlanLedger
from sublet_borrower.planner.planned_ranges import PlanLimits, PlannedRange
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import DatabaseUnreachable, InvalidSetting, Unavailable
from sublet_protocol.domain.grant_keys import TIMELINE_US
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.consumer_progress import LaggingStream, LastPlannedRange
from sublet_storage.log import fetch as message_log
from tests.kit import GRANT_KEY

PLANNED = PlannedRange(1, 50, 10, 20)
DOUBT = InDoubtRange(50, 10, 20, 60.0)
KEY = (1, 50)
NO_LIMIT = PlanLimits()


class Ledger(MicroBatchPlanLedger):
    """A ledger that ends a test which goes round and round."""

    rounds = 0

    def hand_back(self) -> None:
        self.rounds += 1
        assert self.rounds < 10
        super().hand_back()


class Reader(DatabaseMessageReader):
    """In a database's place: each statement has the answers of a test, one by one, and then the last; None: away."""

    def __init__(self) -> None:
        self.plans: list[Any] = [{}]
        self.ended: list[Any] = [{}]
        self.lagging: list[Any] = [{}]
        self.names: list[Any] = [{}]
        self.heads: list[tuple[int, int]] = []
        self.asked: list[str] = []

    def query(self, read: Callable[[Any], Any]) -> Any:
        return read(self)

    def fetch_heads(self, stream_ids: object) -> list[tuple[int, int]]:
        return self.heads

    def fetch_frontiers(self, stream_ids: object) -> dict[int, Any]:
        return {}

    def answer(self, group_id: int | None, *_: object, statement: str) -> Any:
        assert group_id is not None
        self.asked.append(statement)
        assert len(self.asked) < 50
        answers = getattr(self, statement)
        return answers.pop(0) if len(answers) > 1 else answers[0]


class Member:
    """In a membership's place: `coming` is what happens at each wait, and `found` at each poll of
    heads that finds something."""

    subscription, url, session_epoch = "$share/g/#", "", 1
    group_id: int | None = None
    planner: MicroBatchPlanner

    def __init__(self, make_ledger: Callable[[Any], MicroBatchPlanLedger]) -> None:
        self.coming: list[Callable[[], object]] = []
        self.found: list[Callable[[], object]] = []
        self.assignment, self.reader = make_ledger(self.report), Reader()
        self.monitor = SimpleNamespace(poll=self.poll, wait_s=0.0)
        self.saves = True

    def join(self) -> None:
        pass

    def report(self, said: ProgressReported) -> None:
        if self.saves:
            self.assignment.apply_update(SavedProgress(said.stream_id, said.grant_id, said.position, said.in_doubt))

    def receive(self, wait_s: float = 0.0) -> None:
        if self.coming:
            self.coming.pop(0)()

    def poll(self) -> bool:
        if not self.found:
            return False
        self.found.pop(0)()
        return True

    def may_start_call(self, *_: object) -> bool:
        return True

    def be_named(self) -> None:
        self.group_id = 3

    def granting_group_id(self) -> int:
        assert self.group_id is not None
        return self.group_id

    def grant(self, consumed: ConsumedFrontier | None = None) -> None:
        grant = Grant("a/1", 1, 1, 50, 10, 1, 0, 99, "#", consumed=consumed, in_doubt=None, grant_key=GRANT_KEY)
        self.assignment.apply_update(StreamGranted(grant))

    def stop(self) -> None:
        pytest.fail("it waits on")


class ForeignKeyFile:
    """In a key file's place: its directory is another user's by now. That fails nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def add(self, grant: Grant) -> None:
        raise InvalidSetting("another user made it")


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Member:
    """Return the member of a planner, of which a leader has not answered yet; a parameter has options of it."""
    members: list[Member] = []

    def make(*arguments: Any, **_: object) -> Member:
        members.append(Member(arguments[1]))
        return members[0]

    for name, value in (
        ("MicroBatchPlanLedger", Ledger),
        ("GroupMembership", make),
        ("GrantKeyHandoffFile", ForeignKeyFile),
        ("PLAN_SAVED_TIMEOUT_S", 0.0),
        ("POLL_INTERVAL_S", 0.0),
    ):
        monkeypatch.setattr(module, name, value)
    for name, answer in (
        ("read_last_planned_ranges", "plans"),
        ("read_ended_grants", "ended"),
        ("read_lagging_streams", "lagging"),
    ):
        monkeypatch.setattr(consumer_progress, name, partial(Reader.answer, statement=answer))
    monkeypatch.setattr(message_log, "read_space_names", partial(Reader.answer, statement="names"))
    options = getattr(request, "param", {})
    planner = MicroBatchPlanner("$share/g/#", name="q", hold_s=60.0, granted_within_s=0.0, **options)
    members[0].planner = planner
    return members[0]


@pytest.mark.parametrize("granted", [False, True])
def test_a_join_is_awaited_with_a_stream_or_without(member: Member, granted: bool) -> None:
    member.coming = [member.be_named, *([member.grant] if granted else []), member.stop]
    member.planner.await_join(granted=granted)
    assert member.coming == [member.stop]


def test_a_join_is_awaited_for_a_while(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_TIMEOUT_S", 0.0)
    member.coming = [member.stop]
    member.planner.await_join(granted=True)


@pytest.mark.conforms("E26")
def test_nothing_is_known_before_a_leader_answers(member: Member) -> None:
    """Nor while the database is away: what was started is neither done nor lost."""
    assert member.planner.find_superseded([PLANNED]) is None
    member.reader.plans = [None, {1: LastPlannedRange(DOUBT, False, True, 50)}]
    member.coming = [lambda: None, member.be_named, lambda: None, member.stop]
    assert member.planner.resolve_started([PLANNED]) == ([], [])
    assert member.coming == [member.stop]


def test_an_old_checkpoint_is_behind_its_session(member: Member) -> None:
    member.be_named()
    member.reader.plans = [None, {1: LastPlannedRange(InDoubtRange(50, 20, 30, 60.0), False, True, 50)}]
    assert [member.planner.find_superseded([PLANNED]) for _ in range(2)] == [None, [PLANNED]]


@pytest.mark.parametrize(
    ("last", "is_old"),
    [
        (LastPlannedRange(InDoubtRange(60, 0, 5, 60.0), False, True, 60, 8.0), True),
        (LastPlannedRange(InDoubtRange(60, 0, 5, 60.0), False, True, 60, 7.0), False),
        (LastPlannedRange(InDoubtRange(60, 0, 5, 60.0), True, True, 60, 8.0), False),
        (LastPlannedRange(InDoubtRange(60, 5, 5, 0.0), False, True, 60, 8.0), False),
        (LastPlannedRange(InDoubtRange(TIMELINE_US, 0, 5, 60.0), False, True, 60, 8.0), False),
    ],
    ids=["later", "of its batch", "not done", "empty", "of another clock"],
)
def test_a_later_batch_may_be_of_other_streams(member: Member, last: LastPlannedRange, is_old: bool) -> None:
    member.be_named()
    member.reader.plans = [{1: LastPlannedRange(DOUBT, False, True, 50, 7.0), 2: last}]
    assert member.planner.find_superseded([PLANNED]) == ([PLANNED] if is_old else [])


def test_a_finite_query_waits_for_a_leader(member: Member) -> None:
    """Behind nothing it would end as if all was read."""
    with pytest.raises(Unavailable, match="no leader has answered within 0 s"):
        member.planner.find_superseded([PLANNED], finite=True)
    member.group_id, member.reader.plans = 3, [None]
    with pytest.raises(Unavailable, match="the database has not answered within 0 s"):
        member.planner.find_superseded([PLANNED], finite=True)
    member.group_id = None
    member.coming = [lambda: None, member.be_named]
    member.reader.plans = [{1: LastPlannedRange(InDoubtRange(50, 20, 30, 60.0), False, True, 50)}]
    assert member.planner.find_superseded([PLANNED], 3600.0) == [PLANNED]


@pytest.mark.conforms("E26")
@pytest.mark.parametrize(
    ("ended", "lost"),
    [
        ([{}], [PLANNED]),
        ([{KEY: (19, False)}], [PLANNED]),
        ([{KEY: (20, False)}], []),
        ([None, {KEY: (20, False)}], []),
    ],
    ids=["not in history", "ended before its end", "ended at its end", "database away"],
)
def test_history_says_what_was_done_of_a_lost_range(member: Member, ended: list[Any], lost: list[PlannedRange]) -> None:
    member.be_named()
    member.reader.ended = ended
    assert member.planner.resolve_started([PLANNED]) == ([], lost)


def test_what_a_poll_finds_is_planned_in_that_call(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is waited for; and only a finite plan asks where the streams end for the group."""
    monkeypatch.setattr(module, "PLAN_SAVED_TIMEOUT_S", 3600.0)
    member.be_named()
    member.coming = [lambda: None, member.stop]
    member.grant()
    member.reader.heads, member.found = [(1, 10)], [lambda: member.assignment.update_heads([(1, 20)])]
    member.planner.restore([])
    (found,) = member.planner.plan(NO_LIMIT)
    assert (found.planned, member.reader.asked) == (PLANNED, [])


def test_no_more_is_planned_behind_an_unsaved_plan(member: Member) -> None:
    """A poll that finds something does not lengthen the wait for a leader that is to save it."""
    member.be_named()
    member.grant()
    member.saves, member.reader.heads, member.found = False, [(1, 20)], [lambda: None] * 20
    member.planner.restore([])
    assert (member.planner.plan(NO_LIMIT), member.reader.asked) == ([], [])


@pytest.mark.parametrize("member", [{"whole_epochs": True}], indirect=True)
@pytest.mark.parametrize("is_atomic", [False, True])
def test_entire_epochs_need_an_atomic_group(member: Member, is_atomic: bool) -> None:
    member.grant(ConsumedFrontier(10) if is_atomic else None)
    with nullcontext() if is_atomic else pytest.raises(InvalidSetting, match="wholeEpochs is true, and the group of"):
        assert member.planner.plan(NO_LIMIT) == []


def test_the_name_of_a_space_is_read_once(member: Member) -> None:
    """It is waited for as long as a finite plan waits."""
    member.reader.names = [{1: "eu"}]
    assert [member.planner.spaces([KEY]) for _ in range(2)] == [{1: "eu"}] * 2
    assert member.reader.asked == ["names"]
    member.reader.names = [None]
    with pytest.raises(DatabaseUnreachable, match="could not be read for 0 s, as the database is away"):
        member.planner.spaces([(2, 50)])


@pytest.mark.conforms("E26")
def test_a_finite_plan_blames_a_silent_leader(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which nothing may begin any more; the database is there."""
    monkeypatch.setattr(member, "may_start_call", lambda *_: False)
    member.be_named()
    member.grant()
    member.reader.heads, member.reader.lagging = [(1, 20)], [{1: LaggingStream(1, 10, 20, "held", False)}]
    member.planner.restore([])
    with pytest.raises(Unavailable, match="no leader has answered"):
        member.planner.plan(NO_LIMIT, finite=True)


def lagging(position: int, head: int = 20, status: str = "free", is_anothers: bool = False) -> dict[int, LaggingStream]:
    return {2: LaggingStream(2, position, head, status, is_anothers)}


@pytest.mark.conforms("E26")
@pytest.mark.parametrize(
    ("later", "saves", "refusal"),
    [
        ({}, True, None),
        ({}, False, "no leader has written down what it plans"),
        (None, True, "the database has not answered"),
        (lagging(20, 30), True, None),
        (lagging(19), True, r"streams \[2\] of 1 were not granted"),
        (lagging(19, status="blocked"), True, None),
        (lagging(19, is_anothers=True), True, None),
        (lagging(19, is_anothers=True), False, "no leader has written down what it plans"),
        ({1: LaggingStream(1, 10, 20, "held", False)}, True, None),
        ({3: LaggingStream(3, 0, 1, "free", False)}, True, None),
    ],
    ids=[
        "done",
        "not saved here",
        "away",
        "at the end",
        "not granted",
        "blocked",
        "another's",
        "not saved",
        "done here",
        "new",
    ],
)
def test_a_finite_plan_ends_where_all_is_done(
    member: Member, later: dict[int, LaggingStream] | None, saves: bool, refusal: str | None
) -> None:
    """What was there at first, and is not done, fails it, unless another member is at work on it."""
    member.be_named()
    member.reader.lagging = [{1: LaggingStream(1, 10, 20, "held", False), **lagging(0)}, later]
    member.grant()
    member.saves, member.reader.heads = True, [(1, 20)]
    member.planner.restore([])
    if saves:
        (first,) = member.planner.plan(NO_LIMIT, finite=True)
        member.planner.acknowledge([first.planned])
    member.saves = saves
    with pytest.raises(Unavailable, match=refusal) if refusal else nullcontext():
        assert member.planner.plan(NO_LIMIT, finite=True) == []
