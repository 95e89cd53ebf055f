"""`Guard` without a database: which ranges of a batch are done, which batches are refused, and what a lost commit was.

With a real one it is tested in `tests/integration/test_guard.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from sublet_borrower.planner.grant_key_files import PlannerGrantKeys
from sublet_borrower.planner.planned_ranges import PlannedRange
from sublet_borrower.spark.source import micro_batch_transaction as module
from sublet_borrower.spark.source.micro_batch_transaction import Guard
from sublet_borrower.spark.source.offsets import (
    check_offset_version,
    check_owner,
    decode_ranges,
    encode_offset,
    is_sublet_offset,
)
from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    InvalidSetting,
    MicroBatchFenced,
    SubletError,
    UnknownOutcome,
    UsageError,
)
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_storage.groups.consumer_progress import LastPlannedRange, PostgresTransactionId, SessionIdentity
from tests.kit import GRANT_KEY

ONE, OTHER = PlannedRange(1, 10, 0, 5), PlannedRange(2, 20, 3, 9)


def plan(planned: PlannedRange, status: str) -> LastPlannedRange | None:
    """What its session has planned last of the stream."""
    doubt = InDoubtRange(planned.grant_id, planned.start, planned.end, 60.0)
    match status:
        case "none":
            return None
        case "other":
            return LastPlannedRange(InDoubtRange(planned.grant_id, planned.start, 99, 60.0), True, True, 7)
        case "put off":
            return LastPlannedRange(planned.cut, False, True, 7)
        case "reserved":
            return LastPlannedRange(doubt, True, True, None)
        case "done":
            return LastPlannedRange(doubt, False, False, None)
        case _:
            return LastPlannedRange(doubt, True, True, 7)


class World:
    """In the place of the database: what is planned of the two streams, and what is done in a transaction."""

    def __init__(self) -> None:
        self.status = {1: "held", 2: "held"}
        self.advanced: list[int] = []
        self.has_written, self.loses = False, ""
        self.known_keys = {(1, 7): GRANT_KEY, (2, 7): GRANT_KEY}
        self.is_committed: bool | None = True
        self.after_loss: dict[int, str] = {}

    def connect(self, *_: object, **__: object) -> Any:
        info = SimpleNamespace(transaction_status=TransactionStatus.IDLE)
        return SimpleNamespace(closed=False, close=lambda: None, info=info)

    def read_last_planned_ranges(
        self, connection: object, group_id: int, session: SessionIdentity, streams: list[int]
    ) -> dict[int, LastPlannedRange]:
        if session.epoch == 1:
            return {}
        found = {stream: plan(each, self.status[stream]) for stream, each in ((1, ONE), (2, OTHER))}
        return {stream: each for stream, each in found.items() if stream in streams and each is not None}

    def advance(
        self, connection: object, group_id: int, stream_id: int, grant_id: int, *more: object, **__: object
    ) -> PostgresTransactionId:
        assert (group_id, grant_id) == (3, 7)
        self.advanced.append(stream_id)
        return PostgresTransactionId("t", "1")

    @contextmanager
    def user_transaction(self, connection: Any, settle: Callable[[], None]) -> Iterator[None]:
        yield
        if self.loses == "before":
            connection.closed = True
            raise psycopg.OperationalError("gone away")
        settle()
        if self.loses:
            self.status.update(self.after_loss)
            connection.closed = self.loses == "in"
            raise psycopg.OperationalError("gone away")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    progress = SimpleNamespace(
        compute_idle_limit_s=lambda seconds: seconds,
        read_last_planned_ranges=world.read_last_planned_ranges,
        advance=world.advance,
        is_committed=lambda connection, attempt: world.is_committed,
    )
    keys = [
        PlannerGrantKeys(SessionIdentity("s", 1), {}),
        PlannerGrantKeys(SessionIdentity("s", 2), world.known_keys),
        PlannerGrantKeys(SessionIdentity("s", 1), {}),
    ]
    monkeypatch.setattr(module, "consumer_progress", progress)
    monkeypatch.setattr(module, "connect", world.connect)
    monkeypatch.setattr(module, "driver_url", lambda *_: None)
    monkeypatch.setattr(module, "open_database", lambda *_: nullcontext(SimpleNamespace(url="")))
    monkeypatch.setattr(module, "read_grant_keys", lambda subscription, session: keys)
    monkeypatch.setattr(module, "user_transaction", world.user_transaction)
    monkeypatch.setattr(module, "has_written", lambda connection: world.has_written)
    return world


def offset(*ranges: PlannedRange, session: str = "s") -> dict[str, Any]:
    return encode_offset(ranges, group_id=3, session=session, subscription="$share/g/#")


def logged(folder: Path, number: int, *offsets: object) -> None:
    (folder / "offsets").mkdir(exist_ok=True)
    (folder / "offsets" / str(number)).write_text("\n".join(["v1", "{}", *map(json.dumps, offsets)]))


FENCED = MicroBatchFenced


@pytest.mark.parametrize(
    ("first", "second", "has_written", "advanced", "fenced"),
    [
        ("held", "held", True, [1, 2], ""),
        ("held", "put off", True, [1], ""),
        ("held", "done", True, [1], ""),
        ("done", "done", False, [], ""),
        ("put off", "none", False, [], ""),
        ("done", "done", True, [], "all of it was done before, or put off"),
        ("held", "reserved", False, [1], r"only a part is this query's to do now, stream 2 \[3, 9\) is not"),
        ("held", "none", True, [1], r"only a part is this query's"),
        ("other", "held", True, [2], r"only a part is this query's to do now, stream 1 \[0, 5\) is not"),
        ("reserved", "done", True, [], r"stream 1 \[0, 5\) is not this query's to do now"),
        ("none", "other", False, [], ""),
    ],
)
def test_a_batch_is_done_completely_or_not_at_all(
    world: World, tmp_path: Path, first: str, second: str, has_written: bool, advanced: list[int], fenced: str
) -> None:
    """One of which nothing is left may be empty, and nothing may be written with it."""
    world.status = {1: first, 2: second}
    world.has_written = has_written
    logged(tmp_path, 0, offset(ONE, OTHER))
    with pytest.raises(FENCED, match=fenced) if fenced else nullcontext(), Guard(tmp_path)(0):
        pass
    assert world.advanced == advanced


def test_a_batch_without_anything_may_be_written(world: World, tmp_path: Path) -> None:
    """There is nothing of sublet's in it."""
    world.has_written = True
    logged(tmp_path, 0, {})
    with Guard(tmp_path)(0):
        pass
    assert world.advanced == []


def test_without_its_key_nothing_is_done(world: World, tmp_path: Path) -> None:
    del world.known_keys[2, 7]
    logged(tmp_path, 0, offset(ONE, OTHER))
    with pytest.raises(FENCED, match="the key of stream 2 was not handed on to this process"), Guard(tmp_path)(0):
        pass


@pytest.mark.parametrize(
    ("loses", "after", "is_committed", "raised", "said"),
    [
        ("before", {}, True, DatabaseUnreachable, "lost before the commit, nothing of batch 0 was written"),
        ("in", {1: "held"}, True, DatabaseUnreachable, "nothing of batch 0 was written"),
        ("in", {1: "done"}, False, DatabaseUnreachable, "nothing of batch 0 was written"),
        ("in", {1: "done"}, True, None, ""),
        ("in", {1: "done"}, None, None, ""),
        ("in", {1: "put off"}, True, None, ""),
        ("in", {1: "none"}, True, UnknownOutcome, r"of stream 1 is another range than \[0, 5\)"),
        ("in", {1: "other"}, True, UnknownOutcome, r"of stream 1 is another range than \[0, 5\)"),
        ("error", {1: "done"}, True, psycopg.OperationalError, "gone away"),
    ],
)
def test_what_became_of_a_lost_commit(
    world: World,
    tmp_path: Path,
    loses: str,
    after: dict[int, str],
    is_committed: bool | None,
    raised: type[Exception] | None,
    said: str,
) -> None:
    """It is done where the server says so, and the group's progress shows it; what is not a loss is raised as it is."""
    world.loses, world.after_loss, world.is_committed = loses, after, is_committed
    logged(tmp_path, 0, offset(ONE))
    with pytest.raises(raised, match=said) if raised else nullcontext(), Guard(tmp_path)(0):
        pass


@pytest.mark.parametrize(("read", "is_known"), [(offset(ONE), True), ({}, False)])
def test_a_lost_commit_of_nothing_of_sublets(
    world: World, tmp_path: Path, read: dict[str, Any], is_known: bool
) -> None:
    """Nobody can say what became of it; of a batch that was done before it is known."""
    world.status, world.loses, world.is_committed = {1: "done", 2: "done"}, "in", False
    logged(tmp_path, 0, read)
    with nullcontext() if is_known else pytest.raises(UnknownOutcome, match="nobody can say"), Guard(tmp_path)(0):
        pass


def test_only_what_a_batch_adds_is_done(world: World, tmp_path: Path) -> None:
    """Of a source without new messages the log has what the batch before had."""
    kafka = {"topic": {"0": 7}}
    logged(tmp_path, 4, offset(ONE), offset(ONE, session="t"), kafka)
    logged(tmp_path, 5, offset(ONE), offset(OTHER, session="t"), kafka)
    with Guard(tmp_path)(5):
        pass
    assert world.advanced == [2]


@pytest.mark.parametrize(
    ("offsets", "raised", "said"),
    [
        ([{"topic": {"0": 7}}], UsageError, "batch 0 in checkpoint .* has nothing that was read from sublet"),
        ([{**offset(ONE), "more": 1}], InvalidSetting, "in a form that this version of sublet does not know"),
    ],
)
def test_what_cannot_be_guarded(
    world: World, tmp_path: Path, offsets: list[Any], raised: type[SubletError], said: str
) -> None:
    logged(tmp_path, 0, *offsets)
    guard = Guard(tmp_path)
    with pytest.raises(raised, match=said), guard(0):
        pass
    logged(tmp_path, 0, {})
    with guard(0), pytest.raises(UsageError, match="another block of this guard is under way"), guard(0):
        pass
    with guard(0):
        pass


# --- offsets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "is_ours", "is_refused"),
    [
        (offset(ONE), True, False),
        (encode_offset([ONE], [OTHER], group_id=3, session="s", subscription="x"), True, False),
        ({"session": "s", "streams": {}}, False, True),
        ({**offset(ONE), "more": 1}, False, True),
        ({"streams": {}}, False, False),
        ({}, False, False),
        (17, False, False),
        (None, False, False),
        (["session", "streams"], False, False),
    ],
)
def test_an_offset_is_known_by_its_fields(stored: Any, is_ours: bool, is_refused: bool) -> None:
    """One of another release of this source is refused, one of another source is not its business."""
    assert is_sublet_offset(stored) is is_ours
    with pytest.raises(InvalidSetting, match="does not know") if is_refused else nullcontext():
        check_offset_version(stored)


def test_a_checkpoint_has_one_owner() -> None:
    for session, subscription, is_refused in (
        ("s", "$share/g/#", False),
        ("t", "$share/g/#", True),
        ("s", "$share/h/#", True),
    ):
        check_owner({}, session, subscription)
        with pytest.raises(InvalidSetting, match="belongs to session 's'") if is_refused else nullcontext():
            check_owner(offset(ONE), session, subscription)
    assert (decode_ranges({}), decode_ranges(offset(ONE, OTHER))) == ([], [ONE, OTHER])
