"""What a member sends that cannot be: the member gets an error and is over, the row is as it was, the group goes on."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    Invalidate,
    Revoked,
    StreamProgress,
    ToLeader,
    UpdateProgress,
)
from sublet_storage.groups.model.records import AdvancePosition, ForceRelease, LendingChange
from tests.unit.leader_bench import BORROWER, HEAD, Bench

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


def stream_of(bench: Bench, borrower_id: str) -> int:
    (stream_id,) = [stream_id for stream_id, holder in bench.holders().items() if holder == borrower_id]
    return stream_id


def progress(bench: Bench, stream_id: int, position: int, **more: object) -> StreamProgress:
    grant_id = bench.row(stream_id).grant_id
    return StreamProgress(stream_id, grant_id, position, **more)  # type: ignore[arg-type]


def reports(bench: Bench, stream_id: int, beyond: int) -> list[ToLeader]:
    grant_id = bench.row(stream_id).grant_id
    doubt = InDoubtRange(grant_id, 0, beyond, 60.0)
    final = progress(bench, stream_id, beyond, final=True)
    return [
        UpdateProgress(BORROWER, bench.term, (progress(bench, stream_id, beyond),)),
        UpdateProgress(BORROWER, bench.term, (final,)),
        UpdateProgress(BORROWER, bench.term, (progress(bench, stream_id, 1, in_doubt=doubt),)),
        UpdateProgress(BORROWER, bench.term, (progress(bench, stream_id, 1, final=True, delivered_end=beyond),)),
        Disconnect(BORROWER, bench.term, (final,)),
        Disconnect(BORROWER, bench.term, (progress(bench, stream_id, beyond),)),
    ]


@pytest.mark.parametrize("beyond", [HEAD + 1, MAX_OFFSET])
@pytest.mark.parametrize("kind", range(6))
def test_a_report_beyond_the_head_ends_its_sender(kind: int, beyond: int) -> None:
    bench = shared()
    stream_id, other = stream_of(bench, BORROWER), stream_of(bench, OTHER)
    bench.sent.clear()
    bench.receive(reports(bench, stream_id, beyond)[kind])
    bench.receive(UpdateProgress(OTHER, bench.term, (progress(bench, other, 60),)), agent="b")
    bench.settle()
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
    stream_id = stream_of(bench, BORROWER)
    bench.receive(reports(bench, stream_id, HEAD + 1)[0])
    judged, bench.entries = bench.entries, []
    bench.tick(bench.settings.eviction_timeout_s + 1)
    written, bench.entries = list[LendingChange](), [*judged, *bench.entries]
    while bench.entries:
        written += bench.entries
        bench.commit()
    assert [type(change) for change in written if change.stream_id == stream_id] == [AdvancePosition, ForceRelease]


def test_a_report_at_the_head_is_good() -> None:
    bench = shared()
    stream_id = stream_of(bench, BORROWER)
    doubt = InDoubtRange(bench.row(stream_id).grant_id, 0, HEAD, 60.0)
    bench.receive(UpdateProgress(BORROWER, bench.term, (progress(bench, stream_id, HEAD, in_doubt=doubt),)))
    bench.settle()
    assert (bench.row(stream_id).position, bench.row(stream_id).in_doubt) == (HEAD, doubt)


@pytest.mark.parametrize("beyond", [HEAD + 1, MAX_OFFSET])
def test_a_reclaim_beyond_the_head_ends_its_sender(beyond: int) -> None:
    bench = shared()
    stream_id, other = stream_of(bench, BORROWER), stream_of(bench, OTHER)
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
    assert bench.row(stream_id).position == before.position
    assert bench.stories == []


def test_a_grant_that_was_never_given_moves_nothing() -> None:
    """Nor does another term: the sender gets the answer that it does not have the stream, or is no member."""
    bench = shared()
    stream_id = stream_of(bench, BORROWER)
    before = bench.row(stream_id)
    bench.sent.clear()
    for grant_id in (0, before.grant_id - 1, before.grant_id + 1, MAX_OFFSET):
        bench.receive(UpdateProgress(BORROWER, bench.term, (StreamProgress(stream_id, grant_id, 50, True),)))
        assert [(one.stream_id, one.grant_id) for one in bench.received(Revoked)] == [(stream_id, grant_id)]
    for term in (0, bench.term - 1, bench.term + 1, MAX_OFFSET):
        bench.receive(UpdateProgress(BORROWER, term, (progress(bench, stream_id, 50),)))
        assert [one.reason for one in bench.received(Invalidate)] == [BorrowerEndReason.RETRY]
    bench.settle()
    assert bench.row(stream_id) == before
