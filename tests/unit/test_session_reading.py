"""How a session reads: page by page, with an eye on the time, on its leader's word, and on whoever wants it to end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sublet_borrower.agent.session_event_queue import SessionEventQueue
from sublet_borrower.consumer import database_or_node_access, group_membership, max_poll_interval
from sublet_borrower.consumer import session as session_module
from sublet_borrower.consumer.async_session import AsyncSession
from sublet_borrower.consumer.next_batch_reader import NextBatchReader
from sublet_borrower.consumer.redelivery_queue import RedeliveryQueue
from sublet_borrower.consumer.session import Session
from sublet_borrower.fetch import stream_fetcher
from sublet_borrower.fetch.stream_fetcher import SessionStreamFetcher
from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.machine.events import ProgressReported, RevokeStarted, StreamGranted
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_borrower.streams.session_assignment import SessionAssignment
from sublet_protocol.domain.errors import (
    PageUnreadable,
    PayloadDamaged,
    PayloadObjectUnreadable,
    PayloadUnavailable,
    PoisonBlock,
    PositionBeyondHead,
    PositionGone,
    SubscriptionEnded,
    UsageError,
)
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, Grant
from sublet_storage.log.fetch import LogPage
from tests.interrupted_calls import run_interrupted
from tests.kit import GRANT_KEY, WAIT_S, eventually, in_loop
from tests.unit import test_assignment, test_batch, test_complete_epoch_stream

STREAM, OTHER, HEAD = 7, 8, 1_000


def granted(stream_id: int, grant_id: int = 1, position: int = 0) -> StreamGranted:
    return StreamGranted(Grant("b", 1, stream_id, grant_id, position, 3, 0, 1 << 64, "none/#", grant_key=GRANT_KEY))


class Agent:
    """In the agent's place: grants two streams for ever, and confirms the end at once."""

    def __init__(self) -> None:
        self.handle = 0
        self.given_up: list[tuple[int, str]] = []
        self.is_closed = False
        self.reports: list[ProgressReported] = []
        self.inbox = SessionEventQueue()
        self.wanted: dict[str, object] = {}
        self.trusts: Callable[[], bool] = lambda: True
        self.held_back: tuple[int, ...] = ()

    def subscribe(self, subscription: str, inbox: SessionEventQueue, **wanted: object) -> int:
        self.inbox, self.wanted = inbox, wanted
        self.handle += 1
        for stream_id in (STREAM, OTHER):
            inbox.put(granted(stream_id, self.handle))
        return self.handle

    def unsubscribe(self, handle: int) -> None:
        self.inbox.put(SubscriptionClosed(handle, BorrowerEndReason.DONE, ""))

    def give_up(self, handle: int, reason: str) -> None:
        self.given_up.append((handle, reason))
        self.unsubscribe(handle)

    def report_progress(self, handle: int, progress: ProgressReported) -> None:
        self.reports.append(progress)

    def may_start_call(self, handle: int, stream_id: int, grant_id: int) -> bool:
        return stream_id not in self.held_back

    def may_continue(self, handle: int, stream_id: int, grant_id: int) -> bool:
        return self.trusts()

    def group_id(self, handle: int) -> int:
        return 1

    def close(self) -> None:
        self.is_closed = True


class Reader:
    """In the reader's place: streams of `HEAD` messages of which the filter matches none, a page has one."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.before_page: Callable[[int], None] = lambda number: None
        self.gone: dict[int, Exception | None] = {}
        self.messages: tuple[pa.RecordBatch, ...] = ()

    def warm_up(self, filter: TopicFilter) -> None:
        """Nothing to prepare."""

    def fetch(self, granted: GrantedStream, allowed: Callable[[GrantedStream], bool]) -> LogPage | None:
        self.read.append(granted.stream_id)
        self.before_page(len(self.read))
        if granted.stream_id in self.gone:
            if (problem := self.gone[granted.stream_id]) is None:
                return None  # the database is away
            raise problem
        page = LogPage(self.messages, granted.next_read_offset, granted.next_read_offset + 1, HEAD, False)
        return page if allowed(granted) and granted.advance_read(page.start, page.position, page.head) else None

    def fetch_heads(self, stream_ids: object) -> list[tuple[int, int]]:
        return []

    def close(self) -> None:
        """Nothing to close."""


Skim = Callable[..., None]
NO_BATCH: Any = SimpleNamespace(stream_id=STREAM, grant_id=1)


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that opening a database waits for."""
    gate = threading.Event()
    gate.set()
    yield gate
    gate.set()


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch, agent: Agent, reader: Reader, gate: threading.Event) -> None:
    """Sessions without a server."""

    def open_database(*_: object) -> AbstractContextManager[Any]:
        gate.wait(WAIT_S)
        return contextlib.nullcontext(SimpleNamespace(url=""))

    monkeypatch.setattr(database_or_node_access, "open_database", open_database)
    monkeypatch.setattr(group_membership, "AgentLoop", lambda *_: agent)
    monkeypatch.setattr(database_or_node_access, "DatabaseMessageReader", lambda *_: reader)


@pytest.fixture
def session(_alone: None) -> Iterator[Session]:
    with Session("$share/g/none/#") as session:
        yield session


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What the network's thread is to call later."""
    later: list[Callable[[], object]] = []
    loop = SimpleNamespace(
        call_soon_threadsafe=lambda function, *arguments: function(*arguments),
        call_later=lambda _, *call: later.append(partial(*call)),
    )
    monkeypatch.setattr(max_poll_interval, "network_loop", lambda: loop)
    return later


@pytest.fixture
def skim(session: Session, reader: Reader) -> Skim:
    """Return a function that reads pages without messages; before the last it drains the session, or wakes it up."""

    def run(last: int, before: Mapping[int, Callable[[], object]], *, wake: bool = False) -> None:
        def before_page(number: int) -> None:
            before.get(number, lambda: None)()
            if number == last:
                (session.wakeup if wake else session.drain)()

        reader.before_page = before_page
        assert session.poll() is None
        assert len(reader.read) == last

    return run


@pytest.fixture
def _a_page_takes_a_second(monkeypatch: pytest.MonkeyPatch, reader: Reader) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: float(len(reader.read)))


def test_closing_waits_until_its_time_is_over(session: Session, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing says that the session has left."""
    clock = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(group_membership, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(agent, "unsubscribe", lambda handle: None)
    session.close()
    assert session.is_closed


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(("name", "is_stable", "epoch"), [("a", True, 5), ("a", False, 0), (None, True, 0)])
def test_only_a_stable_name_has_an_epoch(
    monkeypatch: pytest.MonkeyPatch, agent: Agent, name: str | None, is_stable: bool, epoch: int
) -> None:
    """By which its newest session fences those before it."""
    monkeypatch.setattr(database_or_node_access, "connect", lambda *_, **__: contextlib.nullcontext())
    drawn = SimpleNamespace(next_session_epoch=lambda *_: 5)
    monkeypatch.setattr(database_or_node_access, "consumer_progress", drawn)
    Session("$share/g/none/#", name=name, is_name_stable=is_stable).close()
    assert (agent.wanted["session"], agent.wanted["session_epoch"]) == (name, epoch)


@pytest.mark.usefixtures("_alone", "timers")
def test_a_session_broken_off_as_it_opens_is_closed(monkeypatch: pytest.MonkeyPatch, agent: Agent) -> None:
    """Wherever an exception of a signal handler comes: nobody has the session, to close the agent that goes on."""
    made: list[object] = []

    def make_agent(*_: object) -> Agent:
        made.append(agent)
        return agent

    monkeypatch.setattr(group_membership, "AgentLoop", make_agent)
    where = Path(session_module.__file__), Path(max_poll_interval.__file__)
    for place in itertools.count(1):
        made.clear()
        agent.is_closed = False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session, broken = run_interrupted(lambda: Session("$share/g/none/#"), place, *where)
            gc.collect()
        if session is not None:
            session.close()
            break
        assert agent.is_closed == bool(made), broken
        assert not [each for each in caught if "dropped" in str(each.message)], broken
    assert place > 20


def test_a_session_ends_with_its_own_subscription(session: Session, agent: Agent) -> None:
    agent.inbox.put(SubscriptionClosed(0, BorrowerEndReason.DENIED, "that of before"))
    session.wait(0.0)
    agent.inbox.put(SubscriptionClosed(1, BorrowerEndReason.DENIED, "it is refused"))
    with pytest.raises(SubscriptionEnded, match="it is refused"):
        session.wait(0.0)
    assert session.is_closed


@pytest.mark.parametrize("wake", [False, True], ids=["a drain", "a wakeup"])
def test_the_skipping_ends(session: Session, skim: Skim, wake: bool) -> None:
    skim(5, {}, wake=wake)
    assert session.is_closed is not wake
    if wake:
        skim(9, {}, wake=True)


@pytest.mark.conforms("E8")
def test_a_revoked_stream_is_read_no_more(skim: Skim, reader: Reader, agent: Agent) -> None:
    """Its final progress is reported."""
    skim(25, {5: lambda: agent.inbox.put(RevokeStarted(STREAM, 1))})
    assert reader.read[5:] == [OTHER] * 20
    assert next(said for said in agent.reports if said.is_final) == ProgressReported(STREAM, 1, 3, True, 0, 997)


@pytest.mark.conforms("E34")
def test_without_trust_no_batch_is_given_out(session: Session, reader: Reader, agent: Agent) -> None:
    """The position stays."""
    reader.messages = (pa.record_batch({"value": [b"x"]}),)
    agent.trusts = lambda: False
    assert session.poll(0.2) is None, "the page took longer than the leader's word is good, say"
    assert session.assignment() == {STREAM: 0, OTHER: 0}
    agent.inbox.put(RevokeStarted(OTHER, 1))
    assert agent.reports[-1] == ProgressReported(OTHER, 1, 0, True, 0, HEAD), "it is in nobody's hand"
    agent.trusts = lambda: True
    batch = session.poll(5.0)
    assert batch is not None
    assert (batch.stream_id, batch.first) == (STREAM, 0)


def test_a_stream_that_may_not_start_is_not_read(skim: Skim, reader: Reader, agent: Agent) -> None:
    agent.held_back = (STREAM,)
    skim(10, {})
    assert reader.read == [OTHER] * 10


def test_draining_waits_for_what_failed(session: Session, reader: Reader, agent: Agent) -> None:
    """Nothing else is read meanwhile."""
    reader.messages = (pa.record_batch({"value": [b"x"], "offset": [0]}),)
    with contextlib.suppress(RuntimeError):
        for _ in session:
            raise RuntimeError
    agent.trusts = lambda: False
    session.drain()
    assert session.poll(0.2) is None
    assert (reader.read, session.is_closed) == ([STREAM], False)
    agent.trusts = lambda: True
    batch = session.poll(5.0)
    assert batch is not None
    assert (batch.stream_id, batch.first) == (STREAM, 0)
    assert session.poll() is None
    assert (reader.read, session.is_closed) == ([STREAM], True)


@pytest.mark.usefixtures("_a_page_takes_a_second")
@pytest.mark.parametrize("kind", [PayloadObjectUnreadable, PageUnreadable])
def test_an_unreadable_payload_is_tried_again(
    skim: Skim, reader: Reader, agent: Agent, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    """All other streams go on."""
    reader.gone = {STREAM: kind("its payload is damaged.")}
    skim(50, {35: reader.gone.clear})
    assert [number for number, read in enumerate(reader.read[:40], 1) if read == STREAM][:4] == [1, 12, 23, 34]
    assert reader.read[44:].count(STREAM) >= 2, "it goes on"
    (said,) = [each for each in caplog.messages if "is damaged" in each]
    assert said.startswith("stream unreadable, retrying: subscription=")
    reported = [(each.position, each.read_error) for each in agent.reports if each.stream_id == STREAM]
    assert reported[:2] == [(0, "its payload is damaged."), (0, "")]


@pytest.mark.conforms("W10")
@pytest.mark.parametrize("kind", [PoisonBlock, PayloadDamaged])
def test_a_stream_with_a_poison_block_is_handed_back(
    skim: Skim, reader: Reader, agent: Agent, caplog: pytest.LogCaptureFixture, kind: type[PoisonBlock]
) -> None:
    """All other streams go on."""
    poison = kind(STREAM, (3, 5), "cannot be decoded: garbage.")
    skim(30, {7: lambda: reader.gone.update({STREAM: poison})})
    assert (reader.read[6], STREAM in reader.read[7:]) == (STREAM, False)
    (said,) = [each for each in agent.reports if each.is_final and each.stream_id == STREAM]
    assert (said.position, said.read_error, said.poison) == (3, str(poison), 5)
    assert [each.count(str(poison)) for each in caplog.messages] == [1]


def test_an_outage_of_a_place_is_logged_once(
    skim: Skim, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its end is logged for each stream."""
    caplog.set_level("INFO")
    monkeypatch.setattr(stream_fetcher, "UNAVAILABLE_RETRY_S", 0.0)
    away = PayloadUnavailable("the place is away.")

    def go() -> None:
        reader.gone.update({STREAM: away, OTHER: away})

    skim(120, {10: go, 40: reader.gone.clear, 60: go, 90: reader.gone.clear})
    said = [each for each in caplog.messages if "unreadable" in each]
    assert [each.rpartition(": ")[2] for each in said] == ["the place is away."] * 2
    assert sorted(each for each in caplog.messages if "readable again" in each) == sorted(
        f"stream readable again: subscription=$share/g/none/# stream_id={each}" for each in (STREAM, OTHER) * 2
    )


def test_a_stream_is_not_readable_before_it_was_read(
    skim: Skim, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes while the database is away shows nothing of a payload."""
    caplog.set_level("INFO")
    monkeypatch.setattr(stream_fetcher, "UNAVAILABLE_RETRY_S", 0.0)
    reader.gone = {STREAM: PayloadUnavailable("the place is away.")}
    skim(40, {10: lambda: reader.gone.update({STREAM: None}), 30: reader.gone.clear})
    (number,) = [number for number, each in enumerate(caplog.messages) if "readable again" in each]
    assert caplog.messages[number].endswith(f"stream_id={STREAM}")
    assert not reader.gone


@pytest.mark.parametrize("is_unreadable", [False, True])
def test_a_page_that_does_not_come_ends_the_turn(is_unreadable: bool) -> None:
    """Unless it never will: then the stream has moved on."""
    nothing: Any = SimpleNamespace(fetch=lambda *_: None, fetch_block_summaries=lambda _: None)
    assignment = SessionAssignment(print)
    fetcher = SessionStreamFetcher("$share/g/#", nothing, assignment, 100, whole_epochs=True)
    for run in (None, (None, None)):
        stream: Any = SimpleNamespace(
            next_run=run,
            is_unreadable=is_unreadable,
            step_planner=SimpleNamespace(scanned=0),
            begin_step=lambda limit_bytes: False,
        )
        assert fetcher.fetch_epochs(stream, lambda _: True) is is_unreadable


@pytest.mark.parametrize(
    ("known", "may_have_more", "moves_on"), [(0, True, False), (1, True, True), (0, False, True), (1, False, True)]
)
def test_a_stream_moves_on_with_its_summaries(known: int, may_have_more: bool, moves_on: bool) -> None:
    """If there are new ones, or none to come: else it is the next stream's turn."""
    reader: Any = SimpleNamespace(fetch_block_summaries=lambda _: "summaries")
    assignment: Any = SimpleNamespace(mark_readable=lambda _: False)
    planner = SimpleNamespace(scanned=5)
    stream: Any = SimpleNamespace(
        next_run=None,
        may_have_more=may_have_more,
        step_planner=planner,
        begin_step=lambda limit_bytes: False,
        add_summaries=lambda _: setattr(planner, "scanned", 5 + known),
    )
    fetcher = SessionStreamFetcher("$share/g/#", reader, assignment, 100, whole_epochs=True)
    assert fetcher.fetch_epochs(stream, lambda _: True) is moves_on


@pytest.mark.usefixtures("_a_page_takes_a_second")
def test_the_time_is_looked_at_between_two_pages(session: Session, reader: Reader) -> None:
    assert session.poll(10.0) is None
    assert len(reader.read) == 10
    assert session.poll(0.0) is None
    assert len(reader.read) == 11, "each call gets on, however short"


@pytest.mark.conforms("P10")
def test_a_stream_beyond_its_head_is_handed_back(
    skim: Skim, reader: Reader, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    """All other streams go on."""
    problem = PositionBeyondHead("stream 7: offset 9 is beyond the head 5.")
    reader.gone = {STREAM: problem}
    skim(20, {})
    assert reader.read.count(STREAM) == 1
    (said,) = [each for each in agent.reports if each.stream_id == STREAM]
    assert (said.is_final, said.is_beyond_head, said.read_error) == (True, True, str(problem))
    assert [each.count(str(problem)) for each in caplog.messages] == [1]


@pytest.mark.conforms("W4")
def test_a_stream_without_position_is_named_once(
    skim: Skim, reader: Reader, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    """All other streams go on, and it does when it is granted again."""
    problem = PositionGone(STREAM, 0, 5)
    reader.gone = {STREAM: problem}

    def lend() -> None:
        assert {report.stream_id for report in agent.reports} <= {OTHER}
        reader.gone = {}
        agent.inbox.put(granted(STREAM, 2, 5))

    skim(30, {20: lend})
    assert (reader.read[:20].count(STREAM), reader.read[20:].count(STREAM)) == (1, 5)
    assert [each.count(str(problem)) for each in caplog.messages] == [1]


@pytest.mark.usefixtures("_alone")
@in_loop
async def test_an_async_session_is_open_when_it_has_opened(gate: threading.Event) -> None:
    """For each of several tasks, and closed when it has closed; then it is of no use."""
    gate.clear()
    session = AsyncSession("$share/g/none/#")
    assert (session.is_closed, session.may_continue(NO_BATCH)) == (False, False)
    opening = [asyncio.ensure_future(session.open()) for _ in range(2)]
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(session.close())
    await asyncio.sleep(0)
    is_closed = [session.is_closed]
    gate.set()
    assert await asyncio.gather(*opening) == [session] * 2
    await closing
    assert [*is_closed, session.is_closed] == [False, True]
    with pytest.raises(UsageError, match="this session is closed"):
        async for _ in session:
            pass


@pytest.mark.usefixtures("_alone")
@in_loop
async def test_an_async_wait_ends_with_its_session(agent: Agent) -> None:
    """Whether that is drained, or still closing."""
    async with asyncio.timeout(WAIT_S), AsyncSession("$share/g/none/#") as drained:
        drained.drain()
        assert await drained.poll() is None
        await drained.wait(3600.0)
        assert drained.is_closed
    async with asyncio.timeout(WAIT_S), AsyncSession("$share/g/none/#") as session:
        leave, agent.unsubscribe = agent.unsubscribe, lambda handle: None  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(session.wait(3600.0))
        closing = asyncio.ensure_future(session.close())
        await waiting
        assert not closing.done()
        leave(agent.handle)
        await closing


@pytest.mark.usefixtures("_alone")
@in_loop
async def test_an_async_poll_is_broken_off_by_its_time_only(agent: Agent, reader: Reader) -> None:
    """Or by the end: no batch is given out then, though it was fetched, nor is it raised that the group refuses it."""
    gate, fetched = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        reader.messages = (pa.record_batch({"value": [b"x"]}),) if number > 3 else ()
        if number == 5:
            fetched.set()
            gate.wait(WAIT_S)

    reader.before_page = wait
    async with asyncio.timeout(WAIT_S), AsyncSession("$share/g/none/#") as session:
        await session.open()
        polling = asyncio.ensure_future(session.poll(WAIT_S))
        await session.wait(0.0)
        batch = await polling
        assert batch is not None
        assert session.may_continue(batch)
        agent.trusts = lambda: False
        assert not session.may_continue(batch)
        agent.trusts = lambda: True
        polling = asyncio.ensure_future(session.poll())
        await asyncio.to_thread(fetched.wait, WAIT_S)
        agent.inbox.put(SubscriptionClosed(1, BorrowerEndReason.DENIED, "it is refused"))
        waiting = asyncio.ensure_future(session.wait(0.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(session.close())
        await asyncio.sleep(0)
        gate.set()
        assert await polling is None
        await waiting
        await closing


@pytest.mark.conforms("E36")
@pytest.mark.usefixtures("_alone")
def test_who_is_away_too_long_is_given_up_once(
    timers: list[Callable[[], object]], agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next poll joins again, and no `wait` before it ends the session, nor does a timer of the time before."""
    now = [0.0]
    monkeypatch.setattr(max_poll_interval, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Session("$share/g/none/#") as session:
        (check,) = timers
        check()
        assert (len(timers), agent.given_up) == (2, [])
        now[0] = 3600.0
        check()
        assert (len(timers), agent.given_up[0][0]) == (2, 1)
        session.wait(0.0)
        assert not session.is_closed
        assert session.poll(0.0) is None
        assert (agent.handle, set(session.assignment())) == (2, {STREAM, OTHER})
        now[0] = 7200.0
        check()
        assert len(agent.given_up) == 1
    timers[-1]()
    assert (len(timers), len(agent.given_up)) == (3, 1)


@pytest.mark.usefixtures("_alone")
def test_a_timer_keeps_no_closed_session(timers: list[Callable[[], object]], agent: Agent) -> None:
    Session("$share/g/none/#").close()
    inbox, agent.inbox = weakref.ref(agent.inbox), SessionEventQueue()
    gc.collect()
    assert inbox() is None
    timers[0]()
    assert len(timers) == 1


@pytest.mark.conforms("E36")
@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("is_forked", [False, True])
def test_a_dropped_session_leaves_its_group(
    timers: list[Callable[[], object]], agent: Agent, monkeypatch: pytest.MonkeyPatch, is_forked: bool
) -> None:
    """And closes all as soon as it has left; not in a forked child, whose parent goes on."""
    session = Session("$share/g/none/#", settings=replace(BorrowerSettings(), unsubscribe_timeout_s=86_400.0))
    with warnings.catch_warnings(record=True) as caught, monkeypatch.context() as fork:
        warnings.simplefilter("always")
        if is_forked:
            fork.setattr(os, "getpid", lambda: -1)
        del session
        gc.collect()
    texts = [str(each.message) for each in caught if "dropped" in str(each.message)]
    assert [f"made at {__file__}:" in text for text in texts] == [True] * (not is_forked)
    if not is_forked:
        eventually(lambda: agent.is_closed)
        assert agent.given_up == [(1, "its session was dropped without being closed")]
    assert (len(timers), agent.is_closed) == (1, not is_forked)


@pytest.mark.usefixtures("_alone")
def test_a_fork_ends_no_session_of_its_parent(agent: Agent, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor acknowledges its batch."""
    reader.messages = (pa.record_batch({"value": [b"x"]}),)

    async def leave(session: AsyncSession) -> None:
        with monkeypatch.context() as fork:
            async with session:
                assert await session.poll(WAIT_S) is not None
                fork.setattr(os, "getpid", lambda: -1)
        assert (agent.reports, session.is_closed) == ([], False)
        await session.close()

    with Session("$share/g/none/#") as plain:
        with monkeypatch.context() as fork, plain:
            assert plain.poll(WAIT_S) is not None
            fork.setattr(os, "getpid", lambda: -1)
        assert (agent.reports, plain.is_closed) == ([], False)
    agent.reports.clear()
    session = AsyncSession("$share/g/none/#")
    asyncio.run(leave(session))
    assert session.is_closed


@pytest.mark.conforms("E37")
@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("fails", [False, True])
def test_a_failed_block_acknowledges_nothing(agent: Agent, reader: Reader, fails: bool) -> None:
    reader.messages = (pa.record_batch({"value": [b"x"]}),)

    def end(batch: object) -> None:
        assert batch is not None
        if fails:
            raise ZeroDivisionError

    async def poll() -> None:
        async with AsyncSession("$share/g/none/#") as session:
            end(await session.poll(WAIT_S))

    with contextlib.suppress(ZeroDivisionError), Session("$share/g/none/#") as session:
        end(session.poll(WAIT_S))
    with contextlib.suppress(ZeroDivisionError):
        asyncio.run(poll())
    assert [each.position for each in agent.reports if each.position] == [1, 1] * (not fails)


@pytest.mark.usefixtures("_alone")
def test_a_loop_leaves_acknowledging_to_its_user(agent: Agent, reader: Reader) -> None:
    """Without `auto_ack`, however the loop was left: its batch does not come again either."""
    reader.messages = (pa.record_batch({"value": [b"x"], "offset": [0]}),)
    with Session("$share/g/none/#", auto_ack=False) as session:
        for _ in session:
            break
        with contextlib.suppress(ZeroDivisionError):
            for batch in session:
                assert (batch.stream_id, batch.first) == (OTHER, 0)
                raise ZeroDivisionError
        following = session.poll(WAIT_S)
        assert following is not None
        assert (following.stream_id, following.first) == (STREAM, 1)
    assert {each.position for each in agent.reports} <= {0}


def test_a_batch_that_is_done_has_not_failed(
    session: Session, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    """Though a transaction of it was not committed: its user has acknowledged it."""
    reader.messages = (pa.record_batch({"value": [b"x"], "offset": [0]}),)
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError):
            for _ in session:
                raise ZeroDivisionError
    batch = session.poll(WAIT_S)
    assert batch is not None
    assert batch.attempts.failures == 2
    batch.begin_transaction()
    batch.ack()
    following = session.poll(WAIT_S)
    assert following is not None
    assert following.stream_id == OTHER
    assert "failed repeatedly" not in caplog.text


def test_only_its_own_batches_are_in_a_transaction(session: Session) -> None:
    anything: Any = "b"
    others = test_batch.given(test_assignment.Play(), 1)
    cases = (((others,), "is of another session"), ((anything,), "'b' is no batch"), ((), "name the batches it is for"))
    for batches, reported in cases:
        with pytest.raises(UsageError, match=reported), session.transaction(*batches):
            pass


def between_two_steps() -> GrantedStream:
    play = test_complete_epoch_stream.Play(1, completed=2)
    stream = play.granted
    play.read()
    return stream


MAY_READ: dict[str, tuple[Callable[[], GrantedStream], set[str]]] = {
    "messages": (lambda: test_assignment.Play().granted, {"start"}),
    "between two steps": (between_two_steps, {"start"}),
    "in a step": (lambda: test_complete_epoch_stream.Play(1, completed=2).granted, {"continue", "drain"}),
}


@pytest.mark.conforms("E29", "E35")
@pytest.mark.parametrize("is_in_doubt", [False, True])
@pytest.mark.parametrize(("make", "when"), MAY_READ.values(), ids=MAY_READ)
def test_what_a_stream_is_read_on_for(make: Callable[[], GrantedStream], when: set[str], is_in_doubt: bool) -> None:
    """A new call, or the rest of a step of epochs, and nothing behind a batch whose outcome is unknown."""
    cases = {"start": (True, False, False), "continue": (False, True, False), "drain": (True, True, True)}
    no_transaction: Any = contextlib.nullcontext
    found, stream = set(), make()
    for name, (may_start, may_continue, is_draining) in cases.items():
        allowed: list[bool] = []
        assignment = SimpleNamespace(
            retry_deferred=lambda _: None, next_readable=lambda may, to=allowed: to.append(may(stream))
        )
        member: Any = SimpleNamespace(
            subscription="$share/g/#",
            reader=None,
            assignment=assignment,
            may_start_call=lambda *_, answer=may_start: answer,
            may_continue=lambda *_, answer=may_continue: answer,
        )
        doubt: Any = SimpleNamespace(is_in_doubt=lambda stream_id: is_in_doubt)
        reader = NextBatchReader(member, doubt, RedeliveryQueue("$share/g/#"), 1, whole_epochs=False)
        reader.is_draining = is_draining
        assert reader.read_next(no_transaction) == (None, False)
        assert reader.may_redeliver(NO_BATCH) is (may_continue and not is_in_doubt)
        if allowed == [True]:
            found.add(name)
    assert found == (set() if is_in_doubt else when)
