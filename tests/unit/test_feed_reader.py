"""A reader of a feed: which page it gives out, when it asks the next node, and what it says of what is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from sublet_borrower.node_client import feed_reader as module
from sublet_borrower.node_client.feed_reader import RECEIVE_TIMEOUT_S, FeedReader, parse_feed_start
from sublet_borrower.node_client.node_calls import RetryableCallError
from sublet_leader.feed.history_and_follow import encode as encode_table
from sublet_protocol.domain.errors import InvalidFilter, PermissionDenied, PositionGone, Unavailable, UsageError
from sublet_protocol.domain.subscriptions import Bookmark, StartingPosition
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.feed_messages import FeedPage, encode_page
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_storage.log.block_encoder import DELIVERED_SCHEMA
from tests.kit import WAIT_S

WHEN = datetime(2026, 11, 30, tzinfo=UTC)
BEGINNING: dict[str, Any] = {"bookmark": Bookmark(2, {1: 0, 2: 5})}
LOST = RetryableCallError("n", "connection refused")


class Nodes:
    """In the place of the nodes and of a call to one: each call sends by its script, then nothing comes in time."""

    def __init__(self, *calls: list[Any]) -> None:
        self.calls = list(calls)
        self.asked: list[Any] = []
        self.address, self.idle_s = "n", 0.0
        self.turned = self.closed = 0

    def open_stream(self, request: Any) -> Nodes:
        self.asked.append(request)
        self.idle_s = 0.0
        return self

    def get(self, timeout_s: float) -> Any:
        answers = self.calls[len(self.asked) - 1] if len(self.asked) <= len(self.calls) else []
        answer = answers.pop(0) if answers else TimeoutError()
        if answer == "silent":
            self.idle_s, answer = RECEIVE_TIMEOUT_S, TimeoutError()
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return None
        return encode_page(FeedPage(self.asked[-1].subscription_id, **answer))

    def use_next_node(self) -> None:
        self.turned += 1

    def close(self) -> None:
        """Of the call: `FeedReader.close` ends both."""
        self.closed += 1


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[FeedReader, Nodes]]:
    """Make a reader whose nodes send this, a list for each call."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def make(*calls: list[Any], kind: Any = pb.FollowRequest, **more: Any) -> tuple[FeedReader, Nodes]:
        nodes = Nodes(*calls)
        monkeypatch.setattr(module, "FailoverNodeClient", lambda addresses: nodes)
        given = {"filter": "#", "start": "earliest", "on_data_loss": None, "node_timeout_s": 30.0, **more}
        return FeedReader(["n"], kind, **given), nodes

    return make


Make = Callable[..., tuple[FeedReader, Nodes]]


def page(start: int, end: int, stream: int = 1) -> dict[str, Any]:
    """One of messages that are called by their offsets."""
    rows = [
        {"topic": "t", "value": b"%d" % at, "timestamp": WHEN, "stream": stream, "offset": at}
        for at in range(start, end)
    ]
    messages = encode_table(pa.Table.from_pylist(rows, schema=DELIVERED_SCHEMA))
    return {"stream_id": stream, "start": start, "position": end, "messages": messages}


def gone(start: int, stream: int = 1) -> dict[str, Any]:
    """Retention has taken three messages."""
    return {"stream_id": stream, "start": start, "position": start + 3, "is_gone": True, "oldest_offset": start + 3}


def values(table: pa.Table | None) -> list[bytes] | None:
    return None if table is None else table.column("value").to_pylist()


def test_each_page_is_given_out_once(reader: Make) -> None:
    """The first too, which comes right behind where the beginning is; and nothing where nothing has come."""
    reading, nodes = reader([BEGINNING, page(0, 2), {}, page(2, 3)])
    assert [values(reading.read(0.0)) for _ in range(3)] == [[b"0", b"1"], [b"2"], None]
    assert not reading.is_finished
    assert (len(nodes.asked), nodes.turned) == (1, 0)


def test_history_has_an_end(reader: Make) -> None:
    reading, _ = reader([BEGINNING, page(0, 1), None], kind=pb.HistoryRequest)
    assert [values(table) for table in reading] == [[b"0"]]
    assert reading.is_finished
    assert reading.read(0.0) is None


def test_a_lost_node_is_left_at_the_next_read(reader: Make) -> None:
    """Where the time of this one is over; the next call begins where this one ended."""
    reading, nodes = reader([BEGINNING, page(0, 2), LOST], [page(2, 3)])
    assert values(reading.read(0.0)) == [b"0", b"1"]
    assert reading.read(0.0) is None
    assert (len(nodes.asked), nodes.turned) == (1, 1)
    assert values(reading.read(5.0)) == [b"2"]
    assert {each.stream_id: each.offset for each in nodes.asked[1].bookmark.positions} == {1: 2, 2: 5}


def test_a_refusal_is_raised_once(reader: Make) -> None:
    reading, _ = reader([BEGINNING, PermissionDenied("no right")], [page(0, 1)])
    with pytest.raises(PermissionDenied):
        reading.read(0.0)
    assert values(reading.read(0.0)) == [b"0"]


@pytest.mark.parametrize("answer", ["silent", None, LOST])
def test_a_node_without_a_beginning_is_left(reader: Make, answer: Any) -> None:
    """One that is silent for long, that ends without it, or that is away."""
    reading, nodes = reader([answer], [BEGINNING, page(0, 1)])
    assert nodes.turned == 1
    assert values(reading.read(0.0)) == [b"0"]


def test_nodes_that_are_away_are_given_up(reader: Make) -> None:
    with pytest.raises(Unavailable, match=r"node n: connection refused\. Given up after 0 s"):
        reader([LOST], node_timeout_s=0.0)


@pytest.mark.parametrize(
    ("start", "calls", "is_raised"),
    [
        ("earliest", [BEGINNING, gone(0)], False),
        ("offset:0", [BEGINNING, gone(0)], True),
        ("earliest", [BEGINNING, gone(5, 2)], True),
        ("earliest", [BEGINNING, {"bookmark": Bookmark(3, {1: 0, 2: 5, 3: 0})}, gone(0, 3)], True),
    ],
    ids=["of a beginning", "of an offset", "later", "of a stream that came later"],
)
def test_what_is_gone_is_raised(reader: Make, start: str, calls: list[Any], is_raised: bool) -> None:
    """Once, and not where all is read that there is."""
    reading, _ = reader([*calls, page(3, 4)], start=start)
    if is_raised:
        with pytest.raises(PositionGone):
            reading.read(0.0)
    if "stream_id" in calls[-1] and calls[-1]["stream_id"] == 1:
        assert values(reading.read(0.0)) == [b"3"]


def test_a_fork_ends_nothing_of_its_parents(reader: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, nodes = reader([BEGINNING])
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        with pytest.raises(UsageError, match="do not come along when a process forks"):
            reading.read(0.0)
        reading.close()
        reading.__del__()
        assert (nodes.closed, reading.is_finished) == (0, False)
    reading.__del__()
    assert nodes.closed == 1
    FeedReader.__new__(FeedReader).__del__()  # of one whose arguments were refused


LEFT_OPEN = """
from sublet_borrower.node_client import feed_reader, node_calls
from sublet_protocol.messages.feed_messages import Bookmark, FeedPage, encode_page
from sublet_protocol.v1 import sublet_pb2 as pb

class Nodes:
    def open_stream(self, request):
        beginning = encode_page(FeedPage(request.subscription_id, Bookmark(1, {})))
        return node_calls.FeedPagePrefetcher("n", lambda: iter([beginning]), str)

feed_reader.FailoverNodeClient = lambda addresses: Nodes()
reader = feed_reader.FeedReader(["n"], pb.FollowRequest, "#", "latest", None, 30.0)
"""


def test_a_program_ends_that_leaves_its_reader_open() -> None:
    subprocess.run([sys.executable, "-c", LEFT_OPEN], check=True, timeout=WAIT_S)


def test_a_filter_is_a_text(reader: Make) -> None:
    with pytest.raises(InvalidFilter, match=r"filter 5: it is a text, such as orders/#\."):
        reader([BEGINNING], filter=5)
    _, nodes = reader([BEGINNING], filter=TopicFilter("a/+"))
    assert nodes.asked[0].filter == "a/+"


@pytest.mark.parametrize(
    ("start", "parsed"),
    [
        (StartingPosition.LATEST, StartingPosition.LATEST),
        (Bookmark(2, {1: 5}), Bookmark(2, {1: 5})),
        (WHEN, StartingPosition.at_time(int(WHEN.timestamp() * 1_000_000))),
        (7, StartingPosition.at_offset(7)),
        (str(Bookmark(2, {1: 5})), Bookmark(2, {1: 5})),
        ("earliest", StartingPosition.EARLIEST),
        (True, None),
        (1.5, None),
    ],
    ids=str,
)
def test_a_start_is_one_of_few_types(start: Any, parsed: Any) -> None:
    if parsed is not None:
        assert parse_feed_start(start) == parsed
        return
    with pytest.raises(UsageError, match=f"start of type {type(start).__name__}: give earliest"):
        parse_feed_start(start)
