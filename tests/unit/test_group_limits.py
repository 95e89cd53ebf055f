"""What a member sends that cannot be: the member gets an error and is over, the row is as it was, the group goes on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    HeldGrant,
    Invalidate,
    ToLeader,
    UpdateProgress,
)
from sublet_storage.groups.model.records import (
    UNREADABLE,
    AdvancePosition,
    ForceRelease,
    FreeReservedStream,
    GrantStream,
    LendingChange,
    ReclaimStream,
    RecordHistory,
    ReleaseStream,
)
from tests.unit.leader_bench import AGENT, BORROWER, HEAD, Bench, granted

pytestmark = pytest.mark.conforms("P10", "X4")

OTHER = "b/1"


def shared() -> Bench:
    """Two members with a stream each."""
    bench = Bench(2)
    bench.joined(BORROWER, OTHER)
    bench.pass_time(6.0, BORROWER, OTHER)
    bench.confirm()
    assert set(bench.holders().values()) == {BORROWER, OTHER}
    return bench


def reports(bench: Bench, stream_id: int, beyond: int) -> list[ToLeader]:
    doubt = InDoubtRange(bench.grant_id(stream_id), 0, beyond, 60.0)
    progress, final = bench.said(beyond, stream_id, final=False), bench.said(beyond, stream_id)
    odd = replace(progress, position=1, in_doubt=doubt), replace(final, position=1, delivered_end=beyond)
    return [
        *(UpdateProgress(BORROWER, bench.term, (each,)) for each in (progress, final, *odd)),
        *(Disconnect(BORROWER, bench.term, (each,)) for each in (final, progress)),
    ]


@pytest.mark.parametrize("beyond", [HEAD + 1, MAX_OFFSET])
@pytest.mark.parametrize("kind", range(6))
def test_a_report_beyond_the_head_ends_its_sender(kind: int, beyond: int) -> None:
    bench = shared()
    (stream_id,), (other,) = bench.streams_of(BORROWER), bench.streams_of(OTHER)
    bench.sent.clear()
    bench.receive(reports(bench, stream_id, beyond)[kind])
    bench.save(60, other, borrower_id=OTHER)
    (end,) = [message for to, message in bench.sent if isinstance(message, Invalidate)]
    assert (end.borrower_id, end.reason) == (BORROWER, BorrowerEndReason.DENIED)
    assert end.detail == f"stream {stream_id}: offset {beyond} is beyond the head {HEAD}"
    assert (bench.row(other).position, bench.row(other).borrower_id) == (60, OTHER)
    assert bench.row(stream_id).position <= 1
    bench.pass_time(60.0, OTHER)
    assert bench.holders() == {stream_id: OTHER, other: OTHER}, "it goes on with who is left"
    assert bench.stories == []


def test_a_grant_that_ends_anyway_ends_once() -> None:
    """Its holder was silent for too long while what it had sent was judged."""
    bench = shared()
    (stream_id,) = bench.streams_of(BORROWER)
    bench.receive(reports(bench, stream_id, HEAD + 1)[0])
    judged, bench.entries = bench.entries, []
    bench.evict()
    written, bench.entries = list[LendingChange](), [*judged, *bench.entries]
    while bench.entries:
        written += bench.entries
        bench.commit()
    assert [type(change) for change in written if change.stream_id == stream_id] == [AdvancePosition, ForceRelease]


@pytest.mark.parametrize("beyond", [HEAD + 1, MAX_OFFSET])
def test_a_reclaim_beyond_the_head_ends_its_sender(beyond: int) -> None:
    bench = shared()
    (stream_id,), (other,) = bench.streams_of(BORROWER), bench.streams_of(OTHER)
    before = bench.row(stream_id)
    bench.lead()
    bench.join("a/2", reclaim=(bench.held(stream_id, beyond),))
    bench.join("b/2", reclaim=(bench.held(other, 70),))
    bench.settle()
    (end,) = [message for _, message in bench.sent if isinstance(message, Invalidate)]
    assert (end.borrower_id, end.reason) == ("a/2", BorrowerEndReason.DENIED)
    assert bench.row(other).position == 70
    assert bench.row(stream_id) == before
    bench.pass_time(60.0, "b/2")
    assert bench.holders() == {stream_id: "b/2", other: "b/2"}
    assert (bench.row(stream_id).position, bench.stories) == (before.position, [])


def lines_of_reading(bench: Bench) -> list[tuple[str, str]]:
    return [(line.event, line.reason) for line in bench.history("unreadable", "readable")]


def test_what_waits_for_a_stream_is_bounded() -> None:
    """Whatever a holder sends while its stream is written: errors that change, progress, borrowers of one agent that
    take it from each other, also while it is revoked. The end of its grant is written at once behind it."""
    bench = granted()
    bench.progress(1)  # in flight from now on
    grant, number = bench.grant_id(), 2
    for attempt in range(300):
        bench.now += bench.settings.resend_interval_s / 10
        bench.progress(attempt % HEAD, borrower_id=f"{AGENT}/{number - 1}", read_error=f"damaged {attempt}")
        bench.join(f"{AGENT}/{number}", reclaim=(HeldGrant(1, grant, attempt % HEAD),), borrower_number=number)
        if attempt % 7 == 0:
            bench.revoke(1)
        number += 1
    in_flight, *waiting = bench.leader.pending_changes()
    assert isinstance(in_flight, AdvancePosition)
    kinds = [(type(change), getattr(change, "event", None)) for change in waiting]
    assert len(kinds) == len(set(kinds)) == 4, waiting
    bench.leave(bench.said(HEAD - 1), borrower_id=f"{AGENT}/{number - 1}")
    bench.settle()
    assert bench.row().position == HEAD - 1
    assert bench.grant_id() != grant


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (AdvancePosition(1, 7, 1), AdvancePosition(1, 8, 2)),
        (AdvancePosition(1, 7, 1), ReleaseStream(1, 8, 2, "left")),
        (RecordHistory(1, 7, UNREADABLE, "damaged"), ForceRelease(1, 8, "deadline")),
        (FreeReservedStream(1, 7, "its time is over"), RecordHistory(1, 7, UNREADABLE, "damaged")),
        (GrantStream(1, "a/1", "a", None, "allocated"), AdvancePosition(1, 7, 1)),
        (AdvancePosition(1, 7, 1), GrantStream(1, "a/1", "a", None, "allocated")),
    ],
    ids=lambda change: type(change).__name__,
)
def test_changes_of_two_grants_are_not_joined(earlier: LendingChange, later: LendingChange) -> None:
    streams = Bench().leader.streams
    for change in (earlier, later):
        streams.enqueue(change)
    entry = streams.get(1)
    assert entry is not None
    assert entry.queue == [earlier, later]


def test_joined_reclaims_keep_the_furthest_progress() -> None:
    """A later borrower that says less, and names no epoch, does not take back what an earlier one of its agent said."""
    bench = Bench()
    bench.join(session="s", session_epoch=4)
    bench.share()
    bench.progress(1)
    bench.join("a/2", reclaim=(bench.held(position=9),), session="s", session_epoch=4, borrower_number=2)
    bench.join("a/3", reclaim=(bench.held(position=4),), borrower_number=3)
    (_, reclaim) = bench.leader.pending_changes()
    assert isinstance(reclaim, ReclaimStream)
    assert (reclaim.borrower_id, reclaim.position, reclaim.session_epoch) == ("a/3", 9, 4)


def test_read_errors_are_recorded_at_a_bounded_rate() -> None:
    """At most one of a stream in the resend interval, and one line that it is over, also where borrowers of one agent
    take it from each other; the last state is recorded, though its holder says nothing more."""
    bench, interval_s, seconds = granted(), LeaderSettings().resend_interval_s, 20
    grant = bench.grant_id()
    for step in range(seconds * 10):
        bench.join(f"a/{step + 2}", reclaim=(HeldGrant(1, grant, 1),), borrower_number=step + 2)
        for text in ("x", "y", "", "z"):
            bench.progress(1, borrower_id=f"a/{step + 2}", read_error=text)
            bench.settle()
        bench.tick(interval_s / 10)
        bench.settle()
    bench.progress(1, borrower_id=f"a/{step + 2}", read_error="the last")
    bench.settle()
    for event in ("unreadable", "readable"):
        assert sum(line[0] == event for line in lines_of_reading(bench)) <= seconds + 1
    assert len(lines_of_reading(bench)) >= seconds / 2
    bench.pass_time(2 * interval_s)
    assert lines_of_reading(bench)[-1] == ("unreadable", "the last")


def test_an_end_does_not_wait_behind_read_errors() -> None:
    """A line of a read error that was not written yet is not written any more when the grant ends."""
    bench = granted(2)
    bench.progress(1)
    bench.progress(1, read_error="damaged")
    assert (bench.leader.streams.unreadable_count(), Bench().leader.streams.unreadable_count()) == (1, 0)
    bench.progress(5, final=True)
    assert [type(change) for change in bench.leader.pending_changes()] == [AdvancePosition, ReleaseStream]
    bench.settle()
    assert (lines_of_reading(bench), bench.leader.streams.unreadable_count()) == ([], 0)
