"""How a session reads: page by page, with an eye on the time, on its leader's word, and on whoever wants it to end."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sublet_borrower.agent.session_event_queue import SessionEventQueue
from sublet_borrower.consumer import database_or_node_access, group_membership
from sublet_borrower.consumer.session import Session
from sublet_borrower.fetch import stream_fetcher
from sublet_borrower.fetch.stream_fetcher import SessionStreamFetcher
from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.machine.events import ProgressReported, RevokeStarted, StreamGranted
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
)
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, Grant
from sublet_storage.log.fetch import LogPage
from tests.kit import GRANT_KEY

STREAM, OTHER, HEAD = 7, 8, 1_000


def granted(stream_id: int, grant_id: int = 1, position: int = 0) -> StreamGranted:
    return StreamGranted(Grant("b", 1, stream_id, grant_id, position, 3, 0, 1 << 64, "none/#", grant_key=GRANT_KEY))


class Agent:
    """In the agent's place: grants two streams for ever, and confirms the end at once."""

    def __init__(self) -> None:
        self.reports: list[ProgressReported] = []
        self.inbox = SessionEventQueue()
        self.trusts: Callable[[], bool] = lambda: True

    def subscribe(self, subscription: str, inbox: SessionEventQueue, **wanted: object) -> int:
        self.inbox = inbox
        for stream_id in (STREAM, OTHER):
            inbox.put(granted(stream_id))
        return 1

    def unsubscribe(self, handle: int) -> None:
        self.inbox.put(SubscriptionClosed(handle, BorrowerEndReason.DONE, ""))

    def report_progress(self, handle: int, progress: ProgressReported) -> None:
        self.reports.append(progress)

    def may_start_call(self, handle: int, stream_id: int, grant_id: int) -> bool:
        return True

    def may_continue(self, handle: int, stream_id: int, grant_id: int) -> bool:
        return self.trusts()

    def group_id(self, handle: int) -> int:
        return 1

    def close(self) -> None:
        """Nothing to close."""


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


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, agent: Agent, reader: Reader) -> Iterator[Session]:
    monkeypatch.setattr(
        database_or_node_access, "open_database", lambda *_: contextlib.nullcontext(SimpleNamespace(url=""))
    )
    monkeypatch.setattr(group_membership, "AgentLoop", lambda *_: agent)
    monkeypatch.setattr(database_or_node_access, "DatabaseMessageReader", lambda *_: reader)
    with Session("$share/g/none/#") as session:
        yield session


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
