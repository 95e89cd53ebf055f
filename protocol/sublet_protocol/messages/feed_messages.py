"""Requests and replies of feeds on the wire, for publishing and reading through nodes.

Decoding trusts nothing, on either side: what is missing, out of range, too long or too many is an error for its sender
alone. Messages travel as Arrow, which is opaque to this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from sublet_protocol.domain.errors import ProtocolMismatch
from sublet_protocol.domain.limits import (
    ENVELOPE_BYTES,
    MAX_BOOKMARK_STREAMS,
    MAX_PUBLISH_BYTES,
    MAX_START_BYTES,
)
from sublet_protocol.domain.subscriptions import Bookmark, StartingPosition
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.messages.field_checks import (
    MalformedMessage,
    check_count_number,
    check_id,
    check_number,
    check_streams,
    check_text,
)
from sublet_protocol.v1 import sublet_pb2 as pb

MAX_BATCH_BYTES = MAX_PUBLISH_BYTES - ENVELOPE_BYTES
"""Largest batch of a `Publish`, as Arrow."""

MAX_BATCH_MESSAGES = 10_000
"""Most messages in one."""

MAX_MESSAGE_BYTES = 1 << 20
"""Largest message in one: topic, key, value and headers together."""

HEARTBEAT_INTERVAL_S = 2.0
"""Maximum time between two pages of a node in a `History` or a `Follow`."""

ERROR_METADATA = "sublet-error"
"""Header of a rejection: the name of the error in `sublet_protocol.domain.errors`. A retry is useless, also at another
node, except for `PayloadUnavailable`."""


class FeedPublishRequest(Struct, frozen=True):
    """A batch. `number` grows by one under one incarnation of a producer; `messages` is an Arrow IPC record batch."""

    producer: str
    incarnation: int
    number: int
    messages: bytes


class PublishedSpan(Struct, frozen=True):
    """The messages of a batch that went to one stream: number `rows[i]` lies at `first_offset + i`."""

    stream_id: int
    first_offset: int
    rows: Sequence[int]


class PublishResult(Struct, frozen=True):
    """The answer that the batch is durable. `is_duplicate`: it was already. `spans` None: where it lies is no longer
    stored.
    """

    spans: tuple[PublishedSpan, ...] | None
    is_duplicate: bool = False


class FeedReadRequest(Struct, frozen=True):
    """A request to read matching messages from a position. Every page of the answer has its `subscription_id`."""

    filter: TopicFilter
    starting_position: StartingPosition | Bookmark
    subscription_id: str


class FeedPage(Struct, frozen=True):
    """A page of one stream, from `start` up to before `position`; or a bookmark; or neither, which keeps the call
    alive.

    `messages` is an Arrow IPC stream, None where nothing matches. `is_gone`: retention has taken what was at `start`,
    and `oldest_offset` is the oldest that is left (None: nothing).
    """

    subscription_id: str
    bookmark: Bookmark | None = None
    stream_id: int = 0
    start: int = 0
    position: int = 0
    messages: bytes | None = None
    is_gone: bool = False
    oldest_offset: int | None = None


# --- publish --------------------------------------------------------------------------------------------------------


def encode_publish(batch: FeedPublishRequest) -> Any:
    """Return a `PublishRequest`."""
    return pb.PublishRequest(
        protocol_version=PROTOCOL_VERSION,
        producer=batch.producer,
        incarnation=batch.incarnation,
        number=batch.number,
        messages=batch.messages,
    )


def decode_publish(wire: Any) -> FeedPublishRequest:
    """Return a batch. Raise `MalformedMessage`, and `ProtocolMismatch` for another version."""
    check_request(wire)
    if not wire.messages or len(wire.messages) > MAX_BATCH_BYTES:
        raise MalformedMessage(
            f"messages of {len(wire.messages)} bytes: a batch has 1 to {MAX_BATCH_BYTES}. Send several, or none."
        )
    number = check_count_number("number", wire.number, min_value=1)
    return FeedPublishRequest(
        check_id("producer", wire.producer), check_count_number("incarnation", wire.incarnation), number, wire.messages
    )


def encode_published(answer: PublishResult, count: int) -> Any:
    """Encode a `PublishReply` for a batch of `count` messages."""
    parts = [
        pb.PublishedPart(
            stream_id=part.stream_id,
            first_offset=part.first_offset,
            count=len(part.rows),
            rows=() if len(part.rows) == count else part.rows,
        )
        for part in answer.spans or ()
    ]
    return pb.PublishReply(is_duplicate=answer.is_duplicate, parts=parts)


def decode_published(wire: Any, count: int) -> PublishResult:
    """Return the outcome of a batch of `count` messages. Raise `MalformedMessage` unless each has one place."""
    if wire.is_duplicate and not wire.parts:
        return PublishResult(None, True)
    parts = tuple(_decode_part(part) for part in wire.parts)
    if sorted(row for part in parts for row in part.rows) != list(range(count)):
        raise MalformedMessage(f"an answer with parts of {[len(part.rows) for part in parts]} for {count} messages")
    return PublishResult(parts, wire.is_duplicate)


def _decode_part(wire: Any) -> PublishedSpan:
    if wire.count > MAX_BATCH_MESSAGES or len(wire.rows) not in (0, wire.count):
        raise MalformedMessage(f"a part of {wire.count} messages with {len(wire.rows)} rows")
    rows: Sequence[int] = tuple(wire.rows) if wire.rows else range(wire.count)
    return PublishedSpan(
        check_number("stream_id", wire.stream_id, min_value=1), check_number("first_offset", wire.first_offset), rows
    )


# --- read -----------------------------------------------------------------------------------------------------------


def encode_read(read: FeedReadRequest, kind: Any) -> Any:
    """Return a `HistoryRequest` or a `FollowRequest`: `kind`."""
    begin = (
        {"starting_position": str(read.starting_position)}
        if isinstance(read.starting_position, StartingPosition)
        else {"bookmark": _encode_bookmark(read.starting_position)}
    )
    return kind(
        protocol_version=PROTOCOL_VERSION, filter=read.filter.text, subscription_id=read.subscription_id, **begin
    )


def decode_read(wire: Any) -> FeedReadRequest:
    """Return what to read. Raise `MalformedMessage`, `InvalidFilter`, `UsageError`, `ProtocolMismatch`."""
    check_request(wire)
    match wire.WhichOneof("from"):
        case "starting_position":
            check_text("starting_position", wire.starting_position, MAX_START_BYTES, may_be_empty=True)
            begin: StartingPosition | Bookmark = StartingPosition.parse(wire.starting_position)
        case "bookmark":
            begin = _decode_bookmark(wire.bookmark)
        case _:
            raise MalformedMessage("from: it is missing. Give a starting_position (latest, say) or a bookmark.")
    return FeedReadRequest(TopicFilter(wire.filter), begin, check_id("subscription_id", wire.subscription_id))


def encode_page(page: FeedPage) -> Any:
    """Return a `FeedPage`."""
    return pb.FeedPage(
        subscription_id=page.subscription_id,
        bookmark=None if page.bookmark is None else _encode_bookmark(page.bookmark),
        stream_id=page.stream_id,
        start=page.start,
        position=page.position,
        messages=page.messages or b"",
        gone=pb.FeedGone(oldest=page.oldest_offset) if page.is_gone else None,
    )


def decode_page(wire: Any) -> FeedPage:
    """Return a page. Raise `MalformedMessage`."""
    start, position = check_number("start", wire.start), check_number("position", wire.position)
    if position < start:
        raise MalformedMessage(f"a page from {start} to {position}: it ends before it begins")
    return FeedPage(
        subscription_id=check_id("subscription_id", wire.subscription_id),
        bookmark=_decode_bookmark(wire.bookmark) if wire.HasField("bookmark") else None,
        stream_id=check_number("stream_id", wire.stream_id),
        start=start,
        position=position,
        messages=wire.messages or None,
        is_gone=wire.HasField("gone"),
        oldest_offset=check_number("oldest", wire.gone.oldest) if wire.gone.HasField("oldest") else None,
    )


def is_heartbeat(wire: Any) -> bool:
    """Return whether a page only keeps the call alive."""
    return not (wire.stream_id or wire.HasField("bookmark"))


# --- fields ---------------------------------------------------------------------------------------------------------


def _encode_bookmark(bookmark: Bookmark) -> Any:
    positions = [pb.FeedPosition(stream_id=stream, offset=offset) for stream, offset in bookmark.offsets.items()]
    return pb.FeedBookmark(known=bookmark.known, positions=positions, timeline=bookmark.timeline)


def _decode_bookmark(wire: Any) -> Bookmark:
    streams = (each.stream_id for each in wire.positions)
    check_streams("bookmark", streams, len(wire.positions), MAX_BOOKMARK_STREAMS)
    timeline = wire.timeline if wire.HasField("timeline") else None
    return Bookmark(wire.known, {each.stream_id: each.offset for each in wire.positions}, timeline)


def check_request(wire: Any) -> None:
    """Raise `ProtocolMismatch` for a client of another version."""
    if (version := wire.protocol_version) != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"protocol version {version}: this node speaks {PROTOCOL_VERSION}, the client {version}. Bring both to the "
            "same release of sublet."
        )
