"""Publishing through nodes: which messages go into which batch, and what becomes of deliveries."""

from __future__ import annotations

import gc
import itertools
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from sublet_borrower.node_client import feed_client
from sublet_borrower.node_client import node_publish_sender as module
from sublet_borrower.node_client.feed_client import Feed
from sublet_borrower.node_client.node_calls import RetryableCallError
from sublet_protocol.domain.errors import Unavailable, UnknownOutcome, UsageError
from sublet_protocol.messages.feed_messages import PublishedSpan, PublishResult, encode_published
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.producer import delivery
from tests.kit import WAIT_S, eventually

LOST = RetryableCallError("n:1", "connection refused")


class Nodes:
    """In the place of the nodes: stores all in one stream, and takes nothing until it is opened."""

    address = "n:1"

    def __init__(self, addresses: Sequence[str]) -> None:
        self.batches: list[list[bytes]] = []
        self.opened, self.closed = threading.Event(), threading.Event()
        self.answer: Callable[[list[bytes]], Any] = self.store
        self.turned = 0

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        values = pa.ipc.read_record_batch(request.messages, BLOCK_SCHEMA).column("value").to_pylist()
        self.batches.append(values)
        assert self.opened.wait(WAIT_S)
        return self.answer(values)

    def store(self, values: list[bytes]) -> Any:
        first = sum(map(len, self.batches[:-1]))
        return encode_published(PublishResult((PublishedSpan(1, first, range(len(values))),)), len(values))

    def use_next_node(self) -> None:
        self.turned += 1

    def close(self) -> None:
        self.closed.set()
        self.opened.set()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes(())
    monkeypatch.setattr(module, "FailoverNodeClient", lambda addresses: nodes)
    return nodes


def publish_behind(nodes: Nodes, feed: Feed, *batches: Sequence[bytes]) -> list[tuple[Any, ...]]:
    """Publish a batch alone, these while it is under way, and return where those lie."""
    feed.publish("t", b"first")
    eventually(lambda: nodes.batches == [[b"first"]])
    deliveries = [feed.publish_batch({"topic": "t", "value": list(values)}) for values in batches]
    nodes.opened.set()
    return [delivery.result(WAIT_S) for delivery in deliveries]


@pytest.mark.parametrize(
    ("counts", "sent"),
    [((2, 2), [4]), ((2, 3), [2, 3]), ((4, 1), [4, 1]), ((5,), [2, 3]), ((9, 1), [4, 2, 4]), ((1, 1, 1), [3])],
    ids=str,
)
def test_a_batch_has_so_many_messages(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], sent: list[int]
) -> None:
    """Up to the limit, in their order; each delivery has the offsets of its own."""
    monkeypatch.setattr(module, "MAX_BATCH_MESSAGES", 4)
    values = [[b"%d.%d" % (number, row) for row in range(count)] for number, count in enumerate(counts)]
    with Feed("n:1") as feed:
        spans = publish_behind(nodes, feed, *values)
    assert [len(batch) for batch in nodes.batches[1:]] == sent
    assert [value for batch in nodes.batches[1:] for value in batch] == [value for each in values for value in each]
    offset = 1
    for of_batch, count in zip(spans, counts, strict=True):
        rows = [(span.first_offset + index, row) for span in of_batch for index, row in enumerate(span.rows)]
        assert rows == [(offset + row, row) for row in range(count)]
        assert all(isinstance(span.rows, range) and span.rows for span in of_batch)
        offset += count


@pytest.mark.parametrize(("count", "sent"), [(2, [4]), (3, [3, 3]), (7, [3, 4, 3, 4])])
def test_a_batch_has_so_many_bytes(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, count: int, sent: list[int]) -> None:
    """A message of more goes alone."""
    monkeypatch.setattr(module, "MAX_BATCH_BYTES", 64 * 1024 + 5_000)
    with Feed("n:1") as feed:
        publish_behind(nodes, feed, *[[b"x" * 1_000] * count] * 2)
        assert [len(batch) for batch in nodes.batches[1:]] == sent
        feed.publish_batch({"topic": "t", "value": [b"x" * 6_000] * 2})
    assert [len(batch) for batch in nodes.batches[-2:]] == [1, 1]


def test_messages_of_a_batch_go_to_several_streams(nodes: Nodes) -> None:
    """Each delivery has its own alone, in the order of their offsets."""

    def scatter(values: list[bytes]) -> Any:
        if values == [b"first"]:
            return nodes.store(values)
        spans = PublishedSpan(1, 10, (0, 2)), PublishedSpan(2, 20, (1, 3)), PublishedSpan(3, 30, (4,))
        return encode_published(PublishResult(spans), len(values))

    nodes.answer = scatter
    with Feed("n:1") as feed:
        one, other = publish_behind(nodes, feed, [b"0", b"1", b"2"], [b"3", b"4"])
    found = [[(span.stream, span.first_offset, list(map(int, span.rows))) for span in each] for each in (one, other)]
    assert found == [[(1, 10, [0, 2]), (2, 20, [1])], [(2, 21, [0]), (3, 30, [1])]]


@pytest.mark.parametrize(
    ("answer", "raised", "said"),
    [
        (UsageError("no such topic"), UsageError, "no such topic"),
        (pb.PublishReply(is_duplicate=True), MalformedMessage, "it is stored, but the node does not know where"),
    ],
    ids=["refused", "of unknown place"],
)
def test_a_final_answer_is_not_asked_for_again(nodes: Nodes, answer: Any, raised: type[Exception], said: str) -> None:
    """It fails its own messages alone; at the end of the block it is raised."""

    def refuse(values: list[bytes]) -> Any:
        if values != [b"bad"]:
            return nodes.store(values)
        if isinstance(answer, Exception):
            raise answer
        return answer

    nodes.answer = refuse
    nodes.opened.set()

    def use() -> None:
        with Feed("n:1") as feed:
            delivery = feed.publish("t", "bad")
            with pytest.raises(raised, match=said):
                delivery.result(WAIT_S)
            assert feed.publish("t", "good").result(WAIT_S).stream == 1

    with pytest.raises(raised, match=said):
        use()
    assert (nodes.batches, nodes.turned) == ([[b"bad"], [b"good"]], 0)


def test_what_is_not_answered_goes_to_the_next_node(nodes: Nodes) -> None:
    def lose(values: list[bytes]) -> Any:
        if not nodes.turned:
            raise LOST
        return nodes.store(values)

    nodes.answer = lose
    nodes.opened.set()
    with Feed("n:1") as feed:
        feed.publish("t", "a")
    assert (nodes.batches, nodes.turned) == ([[b"a"], [b"a"]], 1)


def test_what_waited_behind_a_failure_is_not_sent(nodes: Nodes) -> None:
    """If its time is over too."""

    def lose(values: list[bytes]) -> Any:
        raise LOST

    nodes.answer = lose
    feed = Feed("n:1", delivery_timeout_s=0.05)
    one = feed.publish("t", "one")
    eventually(lambda: nodes.batches)
    other, published_at = feed.publish("t", "other"), time.monotonic()
    eventually(lambda: time.monotonic() > published_at + 0.1)
    nodes.opened.set()
    with pytest.raises(UnknownOutcome, match=r"node n:1: connection refused\. Given up after 0\.05 s"):
        one.result(WAIT_S)
    with pytest.raises(Unavailable, match=r"not sent within 0\.05 s, as no node, n:1 the last, has answered"):
        other.result(WAIT_S)
    assert nodes.batches == [[b"one"]]
    with pytest.raises(Unavailable, match="Given up after"):
        feed.close()


@pytest.mark.parametrize(("after_s", "raised"), [(0.0, UnknownOutcome), (0.001, UsageError)], ids=["lost", "busy"])
def test_what_is_refused_later_may_be_stored(nodes: Nodes, after_s: float, raised: type[Exception]) -> None:
    """Where there was no answer before; a node that is busy has stored nothing."""

    def refuse(values: list[bytes]) -> Any:
        raise UsageError("no such topic.") if nodes.turned else RetryableCallError("n:1", "away", after_s)

    nodes.answer = refuse
    nodes.opened.set()
    feed = Feed("n:1")
    feed.publish("t", "a")
    with pytest.raises(raised, match=r"^no such topic\."):
        feed.close()


@pytest.mark.parametrize(
    ("after_s", "later_s", "times"), [(0.0, 1.0, 1), (0.0, 0.0, 1), (0.001, 1.0, 2)], ids=["lost", "asleep", "busy"]
)
def test_what_may_be_stored_is_not_sent_for_ever(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, after_s: float, later_s: float, times: int
) -> None:
    """What shows that it is stored is deleted after a week; of a machine that sleeps in a pause of the sender, too."""
    clock = itertools.chain([0.0, 0.0, 0.0, later_s], itertools.repeat(1.0))
    monkeypatch.setattr(delivery, "MAX_DOUBT_S", 0.5)
    monkeypatch.setattr(delivery, "boottime_clock", lambda: next(clock))

    def lose(values: list[bytes]) -> Any:
        if nodes.turned and after_s:
            raise UsageError("no such topic.")
        raise RetryableCallError("n:1", "away", after_s)

    nodes.answer = lose
    nodes.opened.set()
    feed = Feed("n:1", delivery_timeout_s=math.inf)
    feed.publish("t", "a")
    with pytest.raises(UsageError if after_s else UnknownOutcome):
        feed.close()
    assert len(nodes.batches) == times


@pytest.mark.parametrize("is_in_pause", [False, True])
def test_closing_gives_up_what_is_not_answered(nodes: Nodes, is_in_pause: bool) -> None:
    """It is sent to no other node then, and what waits behind it is not sent."""

    def lose(values: list[bytes]) -> Any:
        raise RetryableCallError("n:1", "connection refused", 60.0)

    nodes.answer = lose
    feed = Feed("n:1")
    delivery = feed.publish("t", "one")
    eventually(lambda: nodes.batches)
    waiting = feed.publish("t", "other")
    if is_in_pause:
        nodes.opened.set()
        eventually(lambda: nodes.turned)
    with pytest.raises(UnknownOutcome, match=r"no word from node n:1: .* before the feed was closed"):
        feed.close(0.0)
    with pytest.raises(UnknownOutcome, match="before the feed was closed"):
        delivery.result(WAIT_S)
    with pytest.raises(Unavailable, match=r"not sent .* Publish it again"):
        waiting.result(WAIT_S)
    assert (nodes.batches, nodes.turned) == ([[b"one"]], is_in_pause)


def test_what_a_sender_that_hangs_has_is_in_doubt(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "close", lambda: None)
    monkeypatch.setattr(feed_client, "SENDER_STOP_TIMEOUT_S", 0.0)
    feed = Feed("n:1")
    feed.publish("t", "one")
    eventually(lambda: nodes.batches)
    with pytest.raises(UnknownOutcome, match=r"no word within the 0\.0 s of close\(\)"):
        feed.close(0.0)
    nodes.opened.set()


def test_an_error_under_way_has_that_of_closing(nodes: Nodes) -> None:
    def refuse(values: list[bytes]) -> Any:
        raise UsageError("no such topic")

    nodes.answer = refuse
    nodes.opened.set()

    def use() -> None:
        with Feed("n:1") as feed:
            feed.publish("t", "bad")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        use()
    assert raised.value.__notes__ == ["and while closing the feed: no such topic"]


def test_a_fork_does_not_close_its_parents_feed(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.opened.set()
    feed = Feed("n:1")
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        feed.close()
        with pytest.raises(UsageError, match="do not come along when a process forks"):
            feed.publish("t", "a")
    assert feed.publish("t", "a").result(WAIT_S).stream == 1
    feed.close()
    assert nodes.closed.wait(WAIT_S)


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_dropped_feed_ends(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, is_forked: bool) -> None:
    """With all that is queued stored; not in a forked child, whose parent goes on."""
    nodes.opened.set()
    feed = Feed("n:1", linger_ms=60_000)
    delivery = feed.publish("t", "queued")
    with warnings.catch_warnings(record=True) as caught, monkeypatch.context() as fork:
        warnings.simplefilter("always")
        if is_forked:
            fork.setattr(os, "getpid", lambda: -1)
        del feed
        gc.collect()
    texts = [str(each.message) for each in caught if "a Feed, made at" in str(each.message)]
    assert [f"made at {__file__}:" in text for text in texts] == [True] * (not is_forked)
    if not is_forked:
        assert nodes.closed.wait(WAIT_S)
    assert delivery.is_done is not is_forked


def test_a_feed_that_read_nothing_has_no_bookmark(nodes: Nodes) -> None:
    with Feed("n:1") as feed, pytest.raises(UsageError, match=r"call history\(\) or follow\(\) first"):
        assert feed.bookmark


def test_epochs_are_refused_in_the_call_itself(nodes: Nodes) -> None:
    """Not in the deliveries of what is sent together with them."""
    with Feed("n:1") as feed:
        with pytest.raises(UsageError, match="messages with an epoch: only a Publisher"):
            feed.publish_batch({"topic": "t", "value": [b"x", b"y"], "epoch": [None, [7]]})
        assert nodes.batches == []
