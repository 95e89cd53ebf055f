"""What a group's leader does at the very time that a grant is valid no more, or is to be taken, and not after it."""

from __future__ import annotations

from sublet_protocol.messages.borrower_leader import GrantEndOutcome, Ping, PingResponse
from sublet_storage.groups.model.records import ForceRelease, RecordHistory, ReleaseStream
from tests.unit.leader_bench import BORROWER, Bench, granted


def pinged() -> tuple[Bench, float]:
    """A named process has a stream, and is answered a ping; until when it may begin calls on it."""
    bench = Bench()
    bench.named(BORROWER, "etl", 1)
    bench.receive(Ping((BORROWER,), bench.now))
    return bench, bench.now + bench.settings.grant_validity_s


def writes(bench: Bench) -> list[type]:
    return [type(change) for change in bench.entries]


def fence(bench: Bench) -> None:
    """A newer process has its name."""
    bench.join("b/1", session="etl", session_epoch=2)


def test_what_is_valid_no_more_is_taken_at_once() -> None:
    bench, valid_until = pinged()
    bench.now = valid_until
    fence(bench)
    assert ForceRelease in writes(bench)


def test_what_is_still_valid_is_taken_then() -> None:
    bench, valid_until = pinged()
    bench.tick(1.0)
    fence(bench)
    assert writes(bench) == [RecordHistory]
    bench.settle()
    bench.now = valid_until
    bench.tick()
    assert ForceRelease in writes(bench)


def test_a_revoke_is_forced_at_its_deadline() -> None:
    """And is valid no longer than until then."""
    bench = granted()
    bench.revoke()
    bench.settle()
    deadline = bench.now + bench.settings.revoke_deadline_s
    bench.now = deadline - bench.settings.grant_validity_s
    bench.receive(Ping((BORROWER,), bench.now))
    [answer] = bench.received(PingResponse)
    assert answer.without == ((1, bench.grant_id()),)
    bench.now = deadline - 1.0
    bench.receive(Ping((BORROWER,), bench.now))
    assert bench.entries == []
    bench.now = deadline
    bench.tick()
    assert ForceRelease in writes(bench)


def test_final_progress_that_is_written_is_not_forced() -> None:
    """Though the answer comes after the deadline."""
    bench = granted()
    bench.revoke()
    bench.settle()
    bench.progress(7, final=True)
    written = bench.write()
    bench.now += bench.settings.revoke_deadline_s
    bench.receive(Ping((BORROWER,), bench.now))
    bench.tick()
    bench.give(written)
    bench.settle()
    assert (bench.row().position, bench.losses(), bench.forced()) == (7, [GrantEndOutcome.SAVED], [])
    assert [line.reason for line in bench.history("release")] == ["operator"]
    bench.receive(Ping((BORROWER,), bench.now))
    assert [answer.without for answer in bench.received(PingResponse)] == [()], "it was not taken"


def test_what_is_taken_from_one_that_is_succeeded() -> None:
    """Nobody is left to confirm it."""
    bench = granted()
    bench.revoke()
    bench.settle()
    bench.now += bench.settings.revoke_deadline_s
    bench.receive(Ping((BORROWER,), bench.now))
    bench.tick()
    written = bench.write()
    bench.join("a/2", predecessor=BORROWER)
    bench.give(written)
    assert (len(bench.forced()), bench.leader.members.unconfirmed) == (1, {})


def test_another_read_error_is_recorded_in_time() -> None:
    assert Bench().leader.streams.unreadable_count() == 0
    bench = granted(2)
    for count, error in enumerate(("no host", "no rights"), 1):
        bench.progress(0, read_error=error)
        assert writes(bench).count(RecordHistory) == 1, count
        assert bench.leader.streams.unreadable_count() == 1
        bench.settle()
        bench.now += bench.settings.resend_interval_s


def test_who_leaves_between_two_batches_just_left() -> None:
    bench = granted()
    bench.leave(bench.said(5, delivered_end=5))
    assert [change.reason for change in bench.entries if isinstance(change, ReleaseStream)] == ["its borrower left"]
