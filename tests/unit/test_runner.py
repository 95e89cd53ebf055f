"""A function that raises: tried again, then stopped with the record named; what did not succeed does not count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pyarrow as pa
import pytest

from sublet_borrower.consumer.runner import RetryPolicy, RunSummary, run
from sublet_borrower.machine.events import ProgressReported, StreamGranted, StreamRemoved
from sublet_borrower.streams.batch import Batch
from sublet_borrower.streams.complete_epoch_stream import CompleteEpochStream
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_borrower.streams.session_assignment import SessionAssignment
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.errors import DatabaseUnreachable, InvalidSetting, UsageError, UserFunctionFailed
from sublet_protocol.messages.borrower_leader import Grant, GrantEndOutcome
from tests.kit import GRANT_KEY

AT_ONCE = RetryPolicy(max_attempts=3, backoff_s=0.0, max_backoff_s=0.0)
FIRST = 100


class Source:
    """A session with these many messages in each of its batches, all of one stream that begins at `FIRST`."""

    def __init__(self, *sizes: int, key: bytes | None = b"k", consumed: ConsumedFrontier | None = None) -> None:
        self.reports: list[ProgressReported] = []
        self.handler = SessionAssignment(self.reports.append)
        grant = Grant("b", 1, 7, 1, FIRST, 1, 0, 1 << 64, "#", consumed=consumed, grant_key=GRANT_KEY)
        self.handler.apply_update(StreamGranted(grant))
        self.granted = cast("GrantedStream", self.handler.next_readable(lambda _: True))
        self.sizes, self.key, self.left_out = list(sizes), key, 0
        self.waits: list[float] = []
        self.trusted = True
        self.is_closed = False
        self.on_wait: Callable[[], None] = lambda: None

    def poll(self, timeout_s: float | None = None) -> Batch | None:
        if not self.sizes or self.is_closed:
            return None
        first = self.granted.next_read_offset
        count = self.sizes.pop(0)
        end = first + count + self.left_out
        if isinstance(self.granted, CompleteEpochStream):
            self.granted.outstanding[first] = first
        else:
            assert self.granted.advance_read(first, end, end)
        self.handler.mark_delivered(self.granted, first)
        offsets = list(range(first, first + count))
        table = pa.table({"offset": offsets, "topic": ["t"] * len(offsets), "key": [self.key] * len(offsets)})
        return Batch(table, first, end, self.granted, self.handler.mark_acknowledged, self.handler.mark_progress)

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        self.on_wait()

    def may_continue(self, batch: Batch) -> bool:
        return self.trusted

    def take_away(self) -> None:
        """Somebody else has the stream now."""
        self.handler.apply_update(StreamRemoved(7, 1, GrantEndOutcome.LOST))

    @property
    def acknowledged(self) -> int:
        """The offset before which all counts as done."""
        return self.reports[-1].position if self.reports else FIRST


class Function:
    """Raises where one of its messages is among `bad`, for so many calls; remembers every offset it got through."""

    def __init__(self, *bad: int, calls: int = 1 << 30) -> None:
        self.bad, self.calls = {FIRST + offset for offset in bad}, calls
        self.done: list[int] = []
        self.called = 0

    def __call__(self, batch: Batch) -> None:
        self.called += 1
        offsets = batch.table.column("offset").to_pylist()
        if self.bad.intersection(offsets) and self.calls > 0:
            self.calls -= 1
            raise ValueError("cannot")
        self.done.extend(offsets)


def test_a_batch_counts_when_the_function_returns() -> None:
    source, summary = Source(3, 2), RunSummary()
    seen: list[tuple[int, int]] = []
    run(source, lambda batch: seen.append((source.acknowledged, summary.messages)), summary=summary)
    assert seen == [(FIRST, 0), (FIRST + 3, 3)]
    assert (source.acknowledged, summary) == (FIRST + 5, RunSummary(batches=2, messages=5))


def test_a_failed_batch_is_tried_again_entirely() -> None:
    source, function = Source(4), Function(1, calls=2)
    summary = run(source, function, policy=AT_ONCE)
    assert function.done == [*range(FIRST, FIRST + 4)]
    assert (summary, len(source.waits)) == (RunSummary(batches=1, messages=4, failures=2), 2)


@pytest.mark.parametrize(("bad", "calls"), [(2, 1), (2, 4), (3, 4)])
def test_what_a_function_has_done_is_not_tried_again(bad: int, calls: int) -> None:
    """It commits record by record; what is left is given to it, and at last record by record."""
    source, seen, failures = Source(4), list[int](), iter(range(calls))

    def one_by_one(batch: Batch) -> None:
        assert len(batch), "there is nothing left to do"
        for row in range(len(batch)):
            record = batch.slice(row, 1)
            if record.first == FIRST + bad and next(failures, None) is not None:
                raise ValueError("cannot")
            record.complete_transaction()
            seen.append(record.first)

    summary = run(source, one_by_one, policy=AT_ONCE)
    assert seen == [*range(FIRST, FIRST + 4)]
    assert (summary.failures, source.acknowledged) == (calls, FIRST + 4)


@pytest.mark.parametrize(("error", "failures"), [(ValueError("cannot"), 1), (DatabaseUnreachable("away"), 0)])
@pytest.mark.parametrize("finish", [Batch.ack, Batch.complete_transaction])
def test_what_a_function_finished_is_done(finish: Callable[[Batch], None], error: Exception, failures: int) -> None:
    """Though it raises then."""
    source, called = Source(2), list[Batch]()

    def work(batch: Batch) -> None:
        called.append(batch)
        finish(batch)
        raise error

    assert run(source, work, policy=AT_ONCE) == RunSummary(batches=1, messages=2, failures=failures)
    assert (len(called), source.acknowledged) == (1, FIRST + 2)


def test_of_an_atomic_group_no_part_is_tried() -> None:
    """It would divide epochs. Nor is a record named, or a dead letter offered."""
    source, sizes = Source(4, consumed=ConsumedFrontier(FIRST, LowerFrontier(((1,),)))), list[int]()
    source.left_out = 2

    def fail(batch: Batch) -> None:
        sizes.append(len(batch))
        raise ValueError("cannot")

    with pytest.raises(UserFunctionFailed) as failed:
        run(source, fail, policy=AT_ONCE)
    assert str(failed.value) == (
        f"the function failed 3 times in a row in offsets [{FIRST}, {FIRST + 6}) of stream 7, whose epochs are "
        "processed entirely: ValueError: cannot. Progress ends before these offsets: mend the function, or let it pass "
        "over what it cannot process, and start again."
    )
    assert (failed.value.stream_id, failed.value.offset) == (7, FIRST)
    assert sizes == [4] * AT_ONCE.max_attempts


@pytest.mark.parametrize("bad", [(0,), (1,), (4,), (7,), (8,), (8, 5, 6)])
def test_the_first_bad_record_is_named(bad: tuple[int, ...]) -> None:
    """All before it counts, and nothing else."""
    source, function, first = Source(9, 5), Function(*bad), FIRST + min(bad)
    with pytest.raises(UserFunctionFailed, match=f"3 times in a row at stream 7, offset {first} ") as failed:
        run(source, function, policy=AT_ONCE)
    assert (failed.value.stream_id, failed.value.offset) == (7, first)
    assert "(topic 't', key 'k'): ValueError: cannot. Progress ends before this record" in str(failed.value)
    assert isinstance(failed.value.__cause__, ValueError)
    assert source.acknowledged == first
    assert function.done == list(range(FIRST, first)), "each once, in order, and none after the bad one"


def test_bad_only_in_company_is_nobodys_fault() -> None:
    source = Source(8)

    def only_small(batch: Batch) -> None:
        if len(batch) > 2:
            raise MemoryError

    summary = run(source, only_small, policy=AT_ONCE)
    assert (source.acknowledged, summary.batches, summary.messages) == (FIRST + 8, 1, 8)


def test_a_single_record_has_all_its_tries() -> None:
    """Beside those of its batch."""
    with pytest.raises(UserFunctionFailed):
        run(Source(2), Function(1, calls=2 * AT_ONCE.max_attempts), policy=AT_ONCE)
    source = Source(2)
    run(source, Function(1, calls=2 * AT_ONCE.max_attempts - 1), policy=AT_ONCE)
    assert source.acknowledged == FIRST + 2


def test_with_the_database_away_it_tries_the_same() -> None:
    source, parts = Source(4), []

    def work(batch: Batch) -> None:
        parts.append((batch.first, len(batch)))
        if len(parts) < 3 * AT_ONCE.max_attempts:
            raise DatabaseUnreachable("away")

    summary = run(source, work, policy=AT_ONCE)
    assert parts == [(FIRST, 4)] * 3 * AT_ONCE.max_attempts
    assert summary == RunSummary(batches=1, messages=4)


def test_what_is_done_is_not_tried_with_nothing() -> None:
    """Where only what does not match lies behind the last that was done."""
    source, called = Source(2), list[Batch]()
    source.left_out = 1

    def work(batch: Batch) -> None:
        called.append(batch)
        batch.ack(FIRST + 2)
        raise DatabaseUnreachable("away")

    run(source, work, policy=AT_ONCE)
    assert (len(called), source.acknowledged) == (1, FIRST + 3)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ends", [False, True])
def test_a_stream_lost_between_tries_is_dropped(ends: bool) -> None:
    """And a session that ends by then ends the run. What was not done does not count."""
    source, function = Source(2, 2) if ends else Source(2), Function(0)

    def lose() -> None:
        if ends:
            source.trusted, source.is_closed = False, True
        else:
            source.take_away()

    source.on_wait = lose
    assert run(source, function, policy=AT_ONCE) == RunSummary(failures=1, lost_batches=1)
    assert (function.called, source.acknowledged) == (1, FIRST), "no call begins on what somebody else has"


@pytest.mark.conforms("E29")
def test_no_call_begins_without_trust() -> None:
    """Be it the first, another try or one with a part: each loses it, and it is back for who waits for it."""
    source, function, begun = Source(4), Function(2), list[bool]()
    source.trusted = False

    def lose_trust(batch: Batch) -> None:
        begun.append(source.trusted)
        source.trusted = False
        function(batch)

    def come_back() -> None:
        source.trusted = source.waits[-1] > 0

    source.on_wait = come_back
    with pytest.raises(UserFunctionFailed, match=f"offset {FIRST + 2}"):
        run(source, lose_trust, policy=AT_ONCE)
    assert source.acknowledged == FIRST + 2
    assert begun == [True] * len(begun)
    assert len(begun) > AT_ONCE.max_attempts


async def in_the_event_loop(batch: Batch) -> None:
    """Do nothing, unless somebody awaits it."""


def one_by_one(batch: Batch) -> Iterator[int]:
    """Do nothing, unless somebody takes what it yields."""
    yield len(batch)


@pytest.mark.parametrize(
    "function", [in_the_event_loop, one_by_one, lambda batch: map(print, [batch])], ids=["async", "yields", "map"]
)
def test_work_that_nobody_runs_does_not_count(function: Callable[[Batch], object]) -> None:
    source = Source(1, 1)
    with pytest.raises(UsageError, match=r"the function returned a .*, which nobody runs"):
        run(source, function, policy=AT_ONCE)
    assert source.acknowledged == FIRST


def test_an_error_without_a_text_is_blamed() -> None:
    """A user's exception whose text raises."""

    class Wordless(Exception):
        def __str__(self) -> str:
            raise LookupError

    def fail(batch: Batch) -> None:
        raise Wordless

    with pytest.raises(UserFunctionFailed, match=f"offset {FIRST} .*Wordless: .its text cannot be had: LookupError"):
        run(Source(1), fail, policy=AT_ONCE)


@pytest.mark.parametrize("leaving", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_passes_and_does_not_count(leaving: BaseException) -> None:
    source, called = Source(1, 1), []

    def leave(batch: Batch) -> None:
        called.append(batch)
        raise leaving

    with pytest.raises(type(leaving)):
        run(source, leave, policy=AT_ONCE)
    assert (len(called), source.acknowledged) == (1, FIRST)


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (None, "key none)"),
        ("ключ".encode(), "key 'ключ')"),
        (b"\xff\x00", r"key b'\xff\x00')"),
        (b"x" * 60, "key '" + "x" * 60 + "')"),
        (b"x" * 200, "key '" + "x" * 60 + "'... of 200 bytes)"),
    ],
)
def test_a_key_is_shown_as_text_and_cut(key: bytes | None, shown: str) -> None:
    with pytest.raises(UserFunctionFailed) as failed:
        run(Source(1, key=key), Function(0), policy=AT_ONCE)
    assert shown in str(failed.value)


def test_pauses_double_and_vary() -> None:
    policy = RetryPolicy(backoff_s=0.2, max_backoff_s=1.0)
    backoffs = [policy.new_backoff() for _ in range(50)]
    for longest in (0.2, 0.4, 0.8, *[1.0] * 100):
        pauses = {each.draw_pause_s() for each in backoffs}
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
    assert RetryPolicy(max_attempts=1, backoff_s=0.0, max_backoff_s=0.0).new_backoff().draw_pause_s() == 0.0


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"max_attempts": 0}, "max_attempts is 0: give a whole number of at least 1"),
        ({"max_attempts": 2.5}, "max_attempts is 2.5: give a whole number"),
        ({"max_attempts": True}, "max_attempts is True: give a whole number"),
        ({"backoff_s": -1.0}, "backoff_s is -1.0 and max_backoff_s is 5.0: neither may be negative"),
        ({"backoff_s": 9.0}, "backoff_s is 9.0 and max_backoff_s is 5.0: .* the first must be at most the second"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float], reported: str) -> None:
    with pytest.raises(InvalidSetting, match=reported):
        RetryPolicy(**wrong)  # type: ignore[arg-type]
