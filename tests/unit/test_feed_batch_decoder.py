"""The Arrow of a stranger, and how much of anything a stranger may send."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from sublet_leader.feed.admission import AdmissionLimiter, NodeBusy
from sublet_leader.feed.batch_decoder import decode_batch
from sublet_leader.feed.publish import to_publish_result
from sublet_protocol.domain.errors import ProtocolMismatch, SubletError, UsageError, ValueTooLarge
from sublet_protocol.domain.subscriptions import MAX_OFFSET, Bookmark
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.messages.feed_messages import (
    MAX_BATCH_BYTES,
    MAX_BATCH_MESSAGES,
    MAX_MESSAGE_BYTES,
    FeedPublishRequest,
    PublishResult,
    decode_page,
    decode_publish,
    decode_published,
    decode_read,
    encode_publish,
    encode_published,
)
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.producer.multi_stream_batch import BatchStoreResult
from tests.unit.test_arrow_batch_decoder import message


def record_batch(count: int = 3, **fields: Any) -> pa.RecordBatch:
    row = {"topic": "t", "key": b"k", "value": b"v", "headers": [{"key": "h", "value": b"1"}], "timestamp": 1, **fields}
    return pa.RecordBatch.from_pylist([row] * count, schema=BLOCK_SCHEMA)


def stored(count: int = 3, **fields: Any) -> bytes:
    payload: bytes = record_batch(count, **fields).serialize().to_pybytes()
    return payload


def test_a_plain_batch_is_read() -> None:
    """Whatever its topics are: those are for the routes to refuse."""
    assert decode_batch(stored(topic="a/+")) == record_batch(topic="a/+")


def test_epochs_are_for_who_holds_them() -> None:
    """No producer at a node does."""
    with pytest.raises(UsageError, match="messages with an epoch: only a Publisher with access to the database"):
        decode_batch(stored(epoch=[7]))


@pytest.mark.conforms("X4")
def test_a_batch_that_grows_by_being_read_is_refused() -> None:
    bomb = message(record_batch(2, value=b"\0" * 500_000), "zstd")
    assert len(bomb) < 3000
    with pytest.raises(MalformedMessage, match="compressed"):
        decode_batch(bomb)


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("payload", "error", "story"),
    [
        (b"", MalformedMessage, "not an Arrow"),
        (b"\xff\xff\xff\xff\x10\0\0\0" + b"\0" * 16, MalformedMessage, "not an Arrow|header"),
        (BLOCK_SCHEMA.serialize().to_pybytes(), MalformedMessage, "schema"),
        (stored(0), MalformedMessage, "1 to 10000"),
        (stored(MAX_BATCH_MESSAGES + 1), MalformedMessage, "10001 messages"),
        (pa.record_batch({"topic": ["t"]}).serialize().to_pybytes(), MalformedMessage, "not an Arrow"),
        (stored(1, topic=None), SubletError, "null|not an Arrow"),
        (stored(1, timestamp=2**62), UsageError, "years 1 to 9999"),
        (stored(1, value=b"x" * MAX_MESSAGE_BYTES), ValueTooLarge, "1048576"),
        (stored(1, value=b"x" * MAX_BATCH_BYTES), MalformedMessage, str(MAX_BATCH_BYTES)),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes, error: type[Exception], story: str) -> None:
    with pytest.raises(error, match=story):
        decode_batch(payload)


@pytest.mark.conforms("X4")
def test_a_gate_lets_so_many_in_and_no_more() -> None:
    gate = AdmissionLimiter("batches", 2, 100, 30)
    gate.acquire(60)
    with pytest.raises(NodeBusy, match="30 ms") as busy:
        gate.acquire(41)
    assert busy.value.retry_after_ms == 30
    gate.acquire(40)
    with pytest.raises(NodeBusy, match="2 batches"):
        gate.acquire(0)
    gate.release(60)
    gate.acquire(60)
    assert (gate.inside, gate.bytes_inside) == (2, 100)


@pytest.mark.conforms("X4")
def test_a_gate_lets_in_so_many_of_a_principal() -> None:
    gate = AdmissionLimiter("reads", 4, 0, 30)
    for _ in range(2):
        gate.acquire(principal="user:a")
    with pytest.raises(NodeBusy, match=r"2 reads are under way of user:a; the limit is 2"):
        gate.acquire(principal="user:a")
    gate.acquire(principal="user:b")
    gate.release(principal="user:a")
    gate.acquire(principal="user:a")
    gate.acquire()
    with pytest.raises(NodeBusy, match="4 reads"):
        gate.acquire(principal="user:c")


@pytest.mark.conforms("X4")
def test_a_principal_has_half_of_the_bytes() -> None:
    """One request it has in any case, however large."""
    gate = AdmissionLimiter("batches", 10, 100, 30)
    gate.acquire(70, "user:a")
    gate.acquire(0, "user:a")
    gate.release(0, "user:a")
    with pytest.raises(NodeBusy, match="with this one 71 bytes; the limits are 5 and 50"):
        gate.acquire(1, "user:a")
    gate.acquire(20, "user:b")
    gate.release(70, "user:a")
    gate.acquire(10, "user:a")
    gate.acquire(30, "user:a")
    with pytest.raises(NodeBusy, match="with this one 41 bytes; the limits are 4 and 40"):
        gate.acquire(1, "user:a")
    gate.acquire(10, "user:b")


@pytest.mark.conforms("X4")
def test_a_request_grows_as_far_as_one_is_admitted() -> None:
    """Alone to any size, beside another one of its principal to half of what there is."""
    gate = AdmissionLimiter("reads", 10, 100, 30)
    with gate.admit(10, "user:a") as resize:
        resize(100)
        resize(10)
        with gate.admit(10, "user:a"):
            resize(40)
            with pytest.raises(NodeBusy):
                resize(41)
    assert (gate.inside, gate.bytes_inside) == (0, 0)


@pytest.mark.conforms("X4")
@pytest.mark.parametrize("size", [0, 1])
def test_principals_together_leave_some_to_the_next(size: int) -> None:
    """However many have as much as they get."""
    gate, had = AdmissionLimiter("reads", 64, 64, 30), Counter[str]()
    for principal in "abcdef":
        with suppress(NodeBusy):
            while True:
                gate.acquire(size, principal)
                had[principal] += 1
    assert had == {"a": 32, "b": 16, "c": 8, "d": 4, "e": 2, "f": 1}
    gate.acquire(size, "g")


@pytest.mark.conforms("X4")
def test_a_refusal_says_what_is_short() -> None:
    """Room for all, or a principal's part of it; what is no principal's is bounded by the room alone."""
    gate = AdmissionLimiter("reads", 4, 100, 30)
    gate.acquire(10, "a")
    with pytest.raises(NodeBusy, match="1 reads are under way, and with this one 105 bytes"):
        gate.acquire(95, "a")
    with pytest.raises(NodeBusy, match="1 reads are under way of a, and with this one 60 bytes"):
        gate.acquire(50, "a")
    with gate.admit() as resize, gate.admit():
        resize(60)


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("wire", "story"),
    [
        (pb.PublishReply(), "for 3"),
        (pb.PublishReply(parts=[pb.PublishedPart(stream_id=1, count=2)]), "for 3"),
        (pb.PublishReply(parts=[pb.PublishedPart(stream_id=1, count=4)]), "for 3"),
        (pb.PublishReply(parts=[pb.PublishedPart(stream_id=1, count=3, rows=[0, 1, 1])]), "for 3"),
        (pb.PublishReply(parts=[pb.PublishedPart(stream_id=1, count=3, rows=[0, 1])]), "2 rows"),
        (pb.PublishReply(parts=[pb.PublishedPart(stream_id=1, count=2**31)]), "a part of"),
        (pb.PublishReply(parts=[pb.PublishedPart(stream_id=0, count=3)]), "stream_id 0"),
    ],
)
def test_an_answer_gives_each_message_one_place(wire: Any, story: str) -> None:
    with pytest.raises(MalformedMessage, match=story):
        decode_published(wire, 3)


def test_an_answer_may_have_no_places_of_a_duplicate() -> None:
    """A node that does not know any more where a batch is says only that it is there."""
    unknown = to_publish_result(BatchStoreResult(None, True))
    assert decode_published(encode_published(unknown, 3), 3) == PublishResult(None, True)
    known = decode_published(pb.PublishReply(is_duplicate=True, parts=[pb.PublishedPart(stream_id=1, count=3)]), 3)
    assert (known.is_duplicate, len(known.spans or ())) == (True, 1)


@pytest.mark.conforms("X4")
def test_an_answer_may_have_a_batch_in_a_part() -> None:
    def answer(count: int) -> pb.PublishReply:
        return pb.PublishReply(parts=[pb.PublishedPart(stream_id=1, count=count)])

    (span,) = decode_published(answer(MAX_BATCH_MESSAGES), MAX_BATCH_MESSAGES).spans or ()
    assert len(span.rows) == MAX_BATCH_MESSAGES
    with pytest.raises(MalformedMessage, match="a part of"):
        decode_published(answer(MAX_BATCH_MESSAGES + 1), MAX_BATCH_MESSAGES + 1)


def test_requests_that_cannot_be_are_refused() -> None:
    good = encode_publish(FeedPublishRequest("p", 1, 1, b"x"))
    assert decode_publish(good) == FeedPublishRequest("p", 1, 1, b"x")
    good.protocol_version = PROTOCOL_VERSION + 1
    with pytest.raises(ProtocolMismatch, match=f"speaks {PROTOCOL_VERSION}, the client {PROTOCOL_VERSION + 1}"):
        decode_publish(good)
    with pytest.raises(MalformedMessage, match="from"):
        decode_read(pb.FollowRequest(protocol_version=PROTOCOL_VERSION, filter="#", subscription_id="s"))
    with pytest.raises(MalformedMessage, match="ends before it begins"):
        decode_page(pb.FeedPage(subscription_id="s", stream_id=1, start=5, position=4))
    for text in ("", "[]", "{}", '{"known": 1}', '{"known": -1, "offsets": {}}', '{"known": 1, "offsets": {"a": 1}}'):
        with pytest.raises(UsageError, match="bookmark"):
            Bookmark.parse(text)
    for number in (-1, MAX_OFFSET + 1, True):
        for known, offsets in ((number, {}), (1, {number: 1}), (1, {1: number})):
            with pytest.raises(UsageError, match="whole numbers"):
                Bookmark(known, offsets)
    for timeline in ("", "x" * 101, 7, ["x"]):
        with pytest.raises(UsageError, match="a timeline is a text of 1 to 100"):
            Bookmark.parse(f'{{"known": 1, "offsets": {{}}, "timeline": {json.dumps(timeline)}}}')


@pytest.mark.conforms("X4")
def test_a_batch_may_be_as_large_as_the_limit() -> None:
    largest = FeedPublishRequest("p", 1, 1, bytes(MAX_BATCH_BYTES))
    assert decode_publish(encode_publish(largest)) == largest
    with pytest.raises(MalformedMessage, match=f"1 to {MAX_BATCH_BYTES}"):
        decode_publish(encode_publish(replace(largest, messages=bytes(MAX_BATCH_BYTES + 1))))
