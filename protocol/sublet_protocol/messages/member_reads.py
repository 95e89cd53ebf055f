"""Requests of group members without database access, on the wire.

They are for pages and ends of granted streams, and for session epochs. As in
`sublet_protocol.messages.feed_messages`, decoding trusts nothing on either side, and messages travel as Arrow, which is
opaque.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.messages.feed_messages import check_request
from sublet_protocol.messages.field_checks import MalformedMessage, check_id, check_number, check_streams
from sublet_protocol.v1 import sublet_pb2 as pb


class FetchRequest(Struct, frozen=True):
    """A request to read what matches in a stream from `position` on, about `limit_bytes` of it at most, under a
    grant.
    """

    stream_id: int
    position: int
    filter: TopicFilter
    generation_id: int
    limit_bytes: int
    grant_id: int


class FetchedPage(Struct, frozen=True):
    """The messages that match from `start` up to before `position`, of a stream that ends at `head`.

    `messages` is an Arrow IPC stream, None where nothing matches.
    """

    start: int
    position: int
    head: int
    is_closed: bool
    messages: bytes | None = None


class FetchPositionGone(Struct, frozen=True):
    """The reply that retention has taken the requested messages; `oldest_offset` is the oldest that is left of the
    stream, None: nothing.
    """

    oldest_offset: int | None


# --- a page ---------------------------------------------------------------------------------------------------------


def encode_fetch_request(request: FetchRequest) -> Any:
    """Return a `FetchRequest`."""
    return pb.FetchRequest(
        protocol_version=PROTOCOL_VERSION,
        stream_id=request.stream_id,
        position=request.position,
        filter=request.filter.text,
        generation_id=request.generation_id,
        limit_bytes=request.limit_bytes,
        grant_id=request.grant_id,
    )


def decode_fetch_request(wire: Any) -> FetchRequest:
    """Return what to read. Raise `MalformedMessage`, `InvalidFilter`, `ProtocolMismatch`."""
    check_request(wire)
    return FetchRequest(
        check_number("stream_id", wire.stream_id, min_value=1),
        check_number("position", wire.position),
        TopicFilter(wire.filter),
        check_number("generation_id", wire.generation_id, min_value=1),
        check_number("limit_bytes", wire.limit_bytes, min_value=1),
        check_number("grant_id", wire.grant_id, min_value=1),
    )


def encode_fetch_reply(page: FetchedPage | FetchPositionGone) -> Any:
    """Return a `FetchReply`."""
    if isinstance(page, FetchPositionGone):
        return pb.FetchReply(gone=pb.FeedGone(oldest=page.oldest_offset))
    return pb.FetchReply(
        start=page.start,
        position=page.position,
        head=page.head,
        closed=page.is_closed,
        messages=page.messages or b"",
    )


def decode_fetch_reply(wire: Any) -> FetchedPage | FetchPositionGone:
    """Return a page, or that it is gone. Raise `MalformedMessage`."""
    if wire.HasField("gone"):
        return FetchPositionGone(check_number("oldest", wire.gone.oldest) if wire.gone.HasField("oldest") else None)
    start, position, head = (check_number(name, getattr(wire, name)) for name in ("start", "position", "head"))
    if not start <= position <= head:
        raise MalformedMessage(f"a page from {start} to {position} of a stream that ends at {head}")
    return FetchedPage(start, position, head, wire.closed, wire.messages or None)


# --- heads, and epochs ----------------------------------------------------------------------------------------------


def encode_heads_request(stream_ids: Iterable[int]) -> Any:
    """Return a `HeadsRequest`."""
    return pb.HeadsRequest(protocol_version=PROTOCOL_VERSION, stream_ids=stream_ids)


def decode_heads_request(wire: Any) -> Sequence[int]:
    """Return the ids of the streams, perhaps none. Raise `MalformedMessage`, `ProtocolMismatch`."""
    check_request(wire)
    check_streams("heads", wire.stream_ids, len(wire.stream_ids))
    return [check_number("stream_id", stream_id, min_value=1) for stream_id in wire.stream_ids]


def encode_heads_reply(heads: Mapping[int, tuple[int, bool]]) -> Any:
    """Return a `HeadsReply`, of {stream: (head, closed)}."""
    return pb.HeadsReply(
        heads=[pb.StreamHead(stream_id=id, head=head, closed=closed) for id, (head, closed) in heads.items()]
    )


def decode_heads_reply(wire: Any) -> dict[int, tuple[int, bool]]:
    """Return {stream: (head, closed)}. Raise `MalformedMessage`."""
    return {
        check_number("stream_id", each.stream_id, min_value=1): (check_number("head", each.head), each.closed)
        for each in wire.heads
    }


def encode_session_epoch_request(subscription: str, session: str) -> Any:
    """Return a `SessionEpochRequest`."""
    return pb.SessionEpochRequest(protocol_version=PROTOCOL_VERSION, subscription=subscription, session=session)


def decode_session_epoch_request(wire: Any) -> tuple[Subscription, str]:
    """Return the subscription, and the session's name. Raise `ProtocolMismatch`, `UsageError` and
    `MalformedMessage`.
    """
    check_request(wire)
    return Subscription.parse(wire.subscription), check_id("session", wire.session)


def encode_session_epoch_reply(epoch: int) -> Any:
    """Return a `SessionEpochReply`."""
    return pb.SessionEpochReply(epoch=epoch)


def decode_session_epoch_reply(wire: Any) -> int:
    """Return the epoch; 0, which no session has, is none. Raise `MalformedMessage`."""
    return check_number("epoch", wire.epoch, min_value=1)
