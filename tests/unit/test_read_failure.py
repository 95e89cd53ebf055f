"""A stream that its holder cannot read on: when that is reported to the leader, how often, what history then says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublet_borrower.machine.events import LeaveRequested, ProgressReported
from sublet_borrower.machine.message_splitter import MAX_PART_BYTES, STREAM_BYTES
from sublet_borrower.machine.read_failure_report import PERSISTENT_AFTER_S, RETRY_INTERVAL_S, ReadFailureTracker
from sublet_protocol.domain.errors import PayloadObjectUnreadable, PayloadUnavailable
from sublet_protocol.domain.limits import MAX_EXPLANATION_CHARACTERS
from sublet_protocol.messages.borrower_leader import (
    Disconnect,
    HeldGrant,
    RevokeFinished,
    StreamProgress,
    UpdateProgress,
)
from sublet_protocol.messages.borrower_leader_codec import decode_to_leader, encode_to_leader
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.records import (
    READABLE,
    UNREADABLE,
    GroupOptions,
    HistoryRecord,
    OnPoison,
    StartingPosition,
)
from tests.unit.leader_bench import AGENT, BORROWER, Bench
from tests.unit.test_borrower_machine import GRANT, Play, connected


class Archived(PayloadObjectUnreadable):
    """Another kind of trouble with an object."""


AWAY, ARCHIVED, UNREAD = PayloadUnavailable("away."), Archived("archived."), PayloadObjectUnreadable("an I/O error.")


# --- what a session reports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [ARCHIVED, UNREAD])
def test_an_object_in_trouble_is_reported_once(problem: Exception) -> None:
    trouble = ReadFailureTracker()
    assert [trouble.record(problem, now) for now in (0.0, 10.0, 20.0)] == [True, False, False]
    assert trouble.reported_error == str(problem)
    assert trouble.clear()
    assert (trouble.current_error, trouble.reported_error, trouble.clear()) == ("", "", False)


def test_what_comes_and_goes_is_reported_now_and_then() -> None:
    trouble, reported = ReadFailureTracker(), 0
    for turn in range(60):
        reported += trouble.record((UNREAD, ARCHIVED, AWAY)[turn % 3], 10.0 * turn)
        trouble.clear()
    assert reported == 600 / RETRY_INTERVAL_S


def test_a_location_is_reported_when_it_stays_away() -> None:
    trouble = ReadFailureTracker()
    times = (5.0, 6.0, 5.0 + PERSISTENT_AFTER_S, 16.0)
    assert [trouble.record(AWAY, now) for now in times] == [False, False, True, False]
    assert trouble.clear()
    assert not trouble.record(AWAY, 17.0), "it was back meanwhile"
    assert not trouble.clear(), "of what was not reported the end is not either"


def test_another_failure_is_reported() -> None:
    trouble = ReadFailureTracker()
    assert trouble.record(PayloadObjectUnreadable("request 1 failed"), 0.0)
    assert not trouble.record(PayloadObjectUnreadable("request 2 failed"), 10.0)
    assert (trouble.current_error, trouble.reported_error) == ("request 2 failed", "request 1 failed")
    assert not trouble.record(ARCHIVED, 20.0)
    assert trouble.record(ARCHIVED, RETRY_INTERVAL_S)
    assert trouble.reported_error == "archived."


def test_whatever_a_library_raises_can_be_reported() -> None:
    trouble = ReadFailureTracker()
    trouble.record(Archived("\0\udcff\n" + "x" * 5000), 0.0)
    reported = UpdateProgress("a/1", 3, (StreamProgress(1, 2, 3, read_error=trouble.reported_error),))
    assert decode_to_leader(encode_to_leader(reported)) == reported
    assert reported.streams[0].read_error == "   " + "x" * (MAX_EXPLANATION_CHARACTERS - 3)


def test_a_failure_too_long_is_refused() -> None:
    long = UpdateProgress("a/1", 3, (StreamProgress(1, 2, 3, read_error="x" * (MAX_EXPLANATION_CHARACTERS + 1)),))
    wire = encode_to_leader(long)
    assert len(wire.update_progress.streams[0].read_error) == MAX_EXPLANATION_CHARACTERS, "what we send is cut"
    wire.update_progress.streams[0].read_error += "x"
    with pytest.raises(MalformedMessage, match="read_error"):
        decode_to_leader(wire)
    well = encode_to_leader(UpdateProgress("a/1", 3, (StreamProgress(1, 2, 3),)))
    assert not well.update_progress.streams[0].HasField("read_error")


# --- what a borrower passes on ---------------------------------------------------------------------------------------


def test_a_failure_is_passed_on_at_once() -> None:
    """To the next leader, too; and so is its end."""
    play = connected(GRANT)
    for said, passed_on in (("damaged", ["damaged"]), ("damaged", []), ("", [""])):
        play.do(ProgressReported(5, 50, 10, read_error=said))
        assert [each.read_error for each in play.reported()] == passed_on
        (stream,) = play.machine.successor_state().streams
        assert stream.read_error == stream.to_progress().read_error == said


@pytest.mark.conforms("P10")
def test_beyond_the_head_is_passed_on_while_leaving() -> None:
    """The next holder will not see it for itself; a predecessor's report is its successor's."""
    play = connected(GRANT)
    play.do(ProgressReported(5, 50, 12, is_final=True, read_error="beyond", is_beyond_head=True))
    (said,) = play.reported()
    assert (said.final, said.beyond_head, said.read_error) == (True, True, "beyond")
    (stream,) = play.machine.successor_state().streams
    assert stream.to_progress().beyond_head
    play.do(LeaveRequested())
    (left,) = [each for said in play.said(Disconnect) for each in said.streams]
    assert (left.final, left.beyond_head, left.read_error) == (True, True, "")


MANY, ERROR = range(1, 601), "é" * MAX_EXPLANATION_CHARACTERS


def all_in_trouble() -> Play:
    """Each of very many streams as long as it may be, none of which the leader has said to be saved."""
    play = connected(*(replace(GRANT, stream_id=number, grant_id=number) for number in MANY))
    for number in MANY:
        play.do(ProgressReported(number, number, GRANT.position, read_error=ERROR))
    return play


def test_many_failures_fit_into_messages() -> None:
    """Each is repeated: silence would be its end."""
    play = all_in_trouble()
    play.do(Tick(), at=play.now + play.machine.settings.resend_interval_s)
    sent = play.said(UpdateProgress)
    assert len(sent) == -(-len(MANY) // (MAX_PART_BYTES // (2 * MAX_EXPLANATION_CHARACTERS + STREAM_BYTES)))
    assert [(each.stream_id, each.read_error) for each in play.reported()] == [(number, ERROR) for number in MANY]
    assert all(encode_to_leader(said).ByteSize() < MAX_PART_BYTES for said in sent)


def test_who_leaves_reports_no_more_troubles() -> None:
    play = all_in_trouble()
    play.do(LeaveRequested())
    play.do(Tick(), at=play.now + play.machine.settings.unsubscribe_timeout_s)
    (said,) = play.said(Disconnect)
    assert [(each.stream_id, each.read_error) for each in said.streams] == [(number, "") for number in MANY]


# --- what a leader writes --------------------------------------------------------------------------------------------


def leading(on_poison: OnPoison = OnPoison.BLOCK) -> Bench:
    """A leader whose member has confirmed its stream."""
    bench = Bench(options=GroupOptions(StartingPosition.EARLIEST, on_poison=on_poison))
    bench.joined()
    bench.confirm()
    return bench


def report(bench: Bench, progress: StreamProgress, borrower_id: str = BORROWER) -> None:
    bench.receive(UpdateProgress(borrower_id, bench.term, (progress,)), AGENT)
    bench.settle()


def say(bench: Bench, trouble: str, *, final: bool = False) -> None:
    report(bench, StreamProgress(1, bench.grant_id(), 0, final, read_error=trouble))


def written(bench: Bench, *events: str) -> list[HistoryRecord]:
    lines = bench.store.history(bench.group.group_id)
    return [line for line in lines if line.event in (events or (UNREADABLE, READABLE))]


def test_history_has_a_failures_begin_and_end() -> None:
    bench = leading()
    for trouble in ("", "damaged", "damaged", "", ""):
        say(bench, trouble)
    lines = [(line.event, line.reason) for line in written(bench)]
    assert lines == [(UNREADABLE, "damaged"), (READABLE, "it can be read again")]
    assert (bench.holders(), bench.row().position) == ({1: BORROWER}, 0), "it changes nothing else"


def test_final_progress_reports_no_trouble() -> None:
    bench = leading()
    say(bench, "damaged", final=True)
    assert written(bench) == []


@pytest.mark.conforms("W10")
@pytest.mark.parametrize(
    ("on_poison", "row", "event"),
    [(OnPoison.BLOCK, ("blocked", 3, 0), "block"), (OnPoison.SKIP, ("held", 6, 3), "skip")],
)
def test_a_leader_blocks_at_or_skips_a_bad_block(on_poison: OnPoison, row: tuple[str, int, int], event: str) -> None:
    bench = leading(on_poison)
    reported = StreamProgress(1, bench.grant_id(), 3, True, read_error="garbage.", poison=6)
    report(bench, reported)
    bench.receive(RevokeFinished(BORROWER, bench.term, 1, reported.grant_id), AGENT)
    bench.pass_time(2.0, BORROWER)
    found = bench.row()
    assert (found.status, found.position, found.lost_message_count) == row
    (line,) = written(bench, event)
    assert (line.position, line.reason.partition(" ")[0]) == (3, "garbage.")


@pytest.mark.conforms("P10")
@pytest.mark.parametrize("leaves", [False, True])
def test_a_leader_blocks_what_was_beyond_the_head(leaves: bool) -> None:
    """Wherever the head is by then."""
    bench = leading()
    reported = StreamProgress(1, bench.grant_id(), 3, True, read_error="" if leaves else "beyond.", beyond_head=True)
    message = (Disconnect if leaves else UpdateProgress)(BORROWER, bench.term, (reported,))
    bench.receive(message, AGENT)
    bench.settle()
    assert (bench.row().status, bench.row().position) == ("blocked", 3)
    (line,) = written(bench, "block")
    reason = "its borrower found it to end before what it had read" if leaves else "beyond."
    assert (line.position, line.reason) == (3, reason)


def test_a_new_grant_begins_without_failure() -> None:
    bench = leading()
    say(bench, "damaged")
    bench.revoke(1)
    say(bench, "damaged", final=True)
    bench.pass_time(2.0, BORROWER)
    assert bench.holders() == {1: BORROWER}
    say(bench, "damaged")
    assert [line.event for line in written(bench)] == [UNREADABLE] * 2


def test_the_next_leader_receives_it_again() -> None:
    bench = leading()
    say(bench, "damaged")
    held = bench.held()
    bench.lead()
    bench.join("a/2", predecessor=BORROWER, reclaim=(HeldGrant(1, held.grant_id, 0),), group_id=bench.group.group_id)
    bench.settle()
    report(bench, StreamProgress(1, held.grant_id, 0, read_error="damaged"), "a/2")
    lines = [(line.event, line.borrower_id) for line in written(bench, UNREADABLE, "reclaim")]
    assert lines == [(UNREADABLE, BORROWER), ("reclaim", "a/2"), (UNREADABLE, "a/2")]
