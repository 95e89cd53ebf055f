"""Asking one node after the other: who is asked when, what is waited for, and what is said about it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest

from sublet_borrower.fetch import node_reader as module
from sublet_borrower.fetch.node_reader import NodeMessageReader
from sublet_borrower.node_client.node_calls import RetryableCallError
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_protocol.domain.errors import (
    PositionBeyondHead,
    PositionGone,
    ProtocolMismatch,
    SubletError,
    Unavailable,
    UsageError,
)
from sublet_protocol.domain.limits import MAX_STREAMS
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.member_reads import (
    FetchedPage,
    FetchPositionGone,
    encode_fetch_reply,
    encode_heads_reply,
    encode_session_epoch_reply,
)
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_storage.log.fetch import LogPage
from sublet_storage.util.retry import MAX_PAUSE_S
from tests.kit import GRANT_KEY


class Calls:
    """In the place of the nodes: each answers by a script, and what it is asked is remembered."""

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.requests: list[Any] = []
        self.timeouts: list[float] = []
        self.script: dict[str, list[Any]] = {}
        self.closed = self.turned = 0

    def reader(self, **script: Sequence[Any]) -> NodeMessageReader:
        """One that asks these nodes, which answer so."""
        self.nodes, self.script = list(script), {node: list(answers) for node, answers in script.items()}
        return NodeMessageReader(self.nodes, 100, 30.0)

    @property
    def address(self) -> str:
        return self.nodes[0]

    def use_next_node(self) -> None:
        self.turned += 1
        self.nodes.append(self.nodes.pop(0))

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        self.asked.append((self.address, method))
        self.requests.append(request)
        self.timeouts.append(timeout_s)
        answer = self.script[self.address].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1


class Clock:
    """In the place of `time`: it goes on when somebody sleeps."""

    now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


SHARE = Subscription.parse("$share/g/#")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(module, "FailoverNodeClient", lambda nodes: calls)
    return calls


def lost(node: str, after_s: float = 0.0) -> RetryableCallError:
    return RetryableCallError(node, "connection refused", after_s)


def found(start: int, end: int) -> Any:
    return encode_fetch_reply(FetchedPage(start, end, 100, is_closed=False))


def granted() -> GrantedStream:
    return GrantedStream(7, 1, 3, TopicFilter("a/#"), 5, grant_key=GRANT_KEY)


def always(_: GrantedStream) -> bool:
    return True


def heads(head: int) -> Any:
    return encode_heads_reply({7: (head, False)})


# --- the next node ----------------------------------------------------------------------------------------------------


@pytest.mark.conforms("P6")
def test_a_lost_node_is_left_for_the_next(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    reader = calls.reader(a=[heads(9), lost("a")], b=[found(5, 8), heads(10)])
    stream = granted()
    assert reader.fetch_heads([7]) == [(7, 9)]
    assert reader.fetch(stream, always) == LogPage((), 5, 8, 100, False)
    assert reader.fetch_heads([7]) == [(7, 10)]
    assert calls.asked == [("a", "Heads"), ("a", "Read"), ("b", "Read"), ("b", "Heads")], "it stays with the next"
    calls.script = {"b": [lost("b")], "a": [encode_session_epoch_reply(17)]}
    assert reader.next_session_epoch(SHARE, "etl") == 17
    assert caplog.records == []


def test_heads_of_many_streams_are_asked_in_parts(calls: Calls) -> None:
    """One that is not answered is asked again with the next poll."""
    reader = calls.reader(a=[heads(9), lost("a")])
    assert reader.fetch_heads(range(1, MAX_STREAMS + 2)) == [(7, 9)]
    assert [len(request.stream_ids) for request in calls.requests] == [MAX_STREAMS, 1]


@pytest.mark.parametrize("refusal", [ProtocolMismatch("versions"), SubletError("the node failed")])
def test_a_refusing_node_is_left_for_the_next(calls: Calls, refusal: SubletError) -> None:
    """Where all refuse, that is raised."""
    reader = calls.reader(a=[refusal, refusal], b=[heads(9), refusal])
    assert reader.fetch_heads([7]) == [(7, 9)]
    with pytest.raises(type(refusal), match=str(refusal)):
        reader.fetch_heads([7])


def test_it_waits_for_a_node_that_is_away(calls: Calls, clock: Clock) -> None:
    """Though another has refused."""
    reader = calls.reader(a=[ProtocolMismatch("versions")] * 2, b=[lost("b"), heads(9)])
    assert reader.fetch_heads([7]) == []
    clock.sleep(1.0)
    assert reader.fetch_heads([7]) == [(7, 9)]


@pytest.mark.parametrize("error", [PositionBeyondHead("beyond"), UsageError("no such filter")])
def test_a_wrong_request_is_asked_of_one_node(calls: Calls, error: SubletError) -> None:
    reader = calls.reader(a=[error], b=[])
    with pytest.raises(type(error)):
        reader.fetch(granted(), always)
    assert calls.asked == [("a", "Read")]


@pytest.mark.parametrize(
    "answer",
    [
        pb.FetchReply(start=5, position=4, head=9),
        pb.FetchReply(start=5, position=9, head=8),
        pb.FetchReply(start=5, position=6, head=9, messages=b"no arrow"),
        pb.FetchReply(start=-1, position=6, head=9),
    ],
)
@pytest.mark.conforms("X4")
def test_an_answer_that_cannot_be_is_a_node_lost(calls: Calls, answer: Any) -> None:
    reader = calls.reader(a=[answer], b=[found(5, 8)])
    stream = granted()
    assert reader.fetch(stream, always) is not None
    assert stream.next_read_offset == 8


@pytest.mark.conforms("P2")
def test_only_the_next_page_is_taken(calls: Calls) -> None:
    reader = calls.reader(a=[found(3, 7), found(6, 9), found(5, 8)])
    stream = granted()
    for _ in ("a repeat", "of the future"):
        assert reader.fetch(stream, always) is None
        assert (stream.next_read_offset, stream.head) == (5, None)
    assert reader.fetch(stream, always) is not None


@pytest.mark.conforms("P2")
def test_what_is_gone_is_raised(calls: Calls) -> None:
    reader = calls.reader(a=[encode_fetch_reply(FetchPositionGone(9)), encode_fetch_reply(FetchPositionGone(None))])
    for oldest in (9, None):
        with pytest.raises(PositionGone) as gone:
            reader.fetch(granted(), always)
        assert (gone.value.stream_id, gone.value.offset, gone.value.oldest) == (7, 5, oldest)


@pytest.mark.conforms("E34")
def test_a_page_that_may_not_be_taken_is_discarded(calls: Calls) -> None:
    """By the time that it has come."""
    reader, stream = calls.reader(a=[found(5, 8), found(5, 8)]), granted()
    assert reader.fetch(stream, lambda _: False) is None
    assert stream.next_read_offset == 5
    assert reader.fetch(stream, always) is not None


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_waiting_is_said_once_and_so_is_going_on(calls: Calls, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    reader = calls.reader(a=[lost("a")] * 3 + [found(5, 6), lost("a")], b=[lost("b")] * 4)
    stream = granted()
    for _ in range(3):
        assert reader.fetch(stream, always) is None
        clock.sleep(5.0)
    assert reader.fetch(stream, always) is not None
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "no node available for reads, retrying: node b: connection refused",
        "node available for reads again",
    ]
    assert reader.fetch(stream, always) is None
    assert len(caplog.records) == 3, "it waits again"


@pytest.mark.conforms("X4")
def test_no_node_is_asked_before_its_time(calls: Calls, clock: Clock) -> None:
    reader = calls.reader(a=[lost("a", after_s=2.0), heads(9)])
    assert reader.fetch_heads([7]) == []
    clock.sleep(1.9)
    assert reader.fetch_heads([7]) == []
    assert len(calls.asked) == 1
    clock.now = 1002.0
    assert reader.fetch_heads([7]) == [(7, 9)], "at its time it is"
    assert calls.turned == 0, "over the same connection"


def test_pauses_grow_until_a_node_answers(calls: Calls, clock: Clock) -> None:
    reader = calls.reader(a=[lost("a")] * 7 + [heads(9), lost("a"), heads(9)])
    waited: list[float] = []
    for _ in range(10):
        began, before = clock.now, len(calls.asked)
        while len(calls.asked) == before:
            reader.fetch_heads([7])
            clock.sleep(0.01)
        waited.append(clock.now - 0.01 - began)
    longest = [0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 0, 0.05]  # up to half of each is random
    assert all(most / 2 - 0.025 <= each <= most + 0.025 for each, most in zip(waited, longest, strict=True)), waited


@pytest.mark.conforms("P6")
def test_a_round_ends_with_the_read_timeout(calls: Calls, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one begins with the next node."""
    reader = calls.reader(frozen=[lost("frozen")], good=[heads(9)])
    ask = calls.call

    def slowly(method: str, request: Any, timeout_s: float) -> Any:
        clock.sleep(timeout_s if calls.address == "frozen" else 0.0)
        return ask(method, request, timeout_s)

    monkeypatch.setattr(calls, "call", slowly)
    began = clock.now
    assert reader.fetch_heads([7]) == []
    assert clock.now == began + 30.0
    clock.sleep(0.1)
    assert reader.fetch_heads([7]) == [(7, 9)]
    assert calls.timeouts == [30.0, 30.0]


# --- the beginning ----------------------------------------------------------------------------------------------------


def test_the_first_node_is_waited_for(calls: Calls, clock: Clock) -> None:
    """Then it says whom it asked."""
    away, back = [lost("b:2")] * 100, [lost("b:2")] * 2
    reader = calls.reader(**{"a:1": away, "b:2": [*back, heads(1), *away]})
    reader.warm_up()
    assert max(calls.timeouts) <= module.FIRST_NODE_TIMEOUT_S / 2, "one that is silent must not take the other's time"
    began = clock.now
    with pytest.raises(Unavailable, match=r"no node answers at a:1, b:2\. .* connection refused\. Given up after 10 s"):
        reader.warm_up()
    assert 0 <= module.FIRST_NODE_TIMEOUT_S - (clock.now - began) <= MAX_PAUSE_S


def test_a_cluster_of_another_release_is_named_at_once(calls: Calls, clock: Clock) -> None:
    reader = calls.reader(a=[ProtocolMismatch("versions 1 and 2")], b=[ProtocolMismatch("versions 1 and 2")])
    with pytest.raises(ProtocolMismatch, match="versions 1 and 2"):
        reader.warm_up()
    assert clock.now == 1000.0


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_fork_asks_nobody_and_closes_nothing(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = calls.reader(a=[])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (
        lambda: reader.fetch(granted(), always),
        lambda: reader.fetch_heads([7]),
        reader.warm_up,
        lambda: reader.next_session_epoch(SHARE, "etl"),
    ):
        with pytest.raises(UsageError, match="do not come along when a process forks"):
            use()
    reader.close()
    assert (calls.asked, calls.closed) == ([], 0)
