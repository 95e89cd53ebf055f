"""Encodes messages to the wire format and decodes them.

Encoding is total. Decoding trusts nothing: what is missing, out of range, too long or too many raises
`MalformedMessage`, whose text goes to the sender. The bounds are those of `sublet_protocol.domain.limits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, assert_never

from sublet_protocol.domain.epoch_frontiers import GroupFrontier
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.limits import (
    MAX_BORROWERS,
    MAX_HOLD_S,
    MAX_ITEMS,
    MAX_START_BYTES,
    MAX_SUBSCRIPTION_BYTES,
    MAX_TOPIC_BYTES,
    MAX_WEIGHT,
    MIN_WEIGHT,
)
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    Grant,
    GrantEndOutcome,
    HeldGrant,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    PingResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    RevokeFinished,
    StreamProgress,
    ToBorrower,
    ToLeader,
    UpdateProgress,
)
from sublet_protocol.messages.field_checks import (
    MalformedMessage,
    check_count_number,
    check_entries,
    check_explanation,
    check_id,
    check_natural,
    check_naturals,
    check_part,
    check_range,
    check_streams,
    check_text,
    check_time,
)
from sublet_protocol.messages.wire_fields import (
    decode_borrower_and_term,
    decode_consumed,
    decode_frontier,
    decode_in_doubt,
    decode_reason,
    decode_stream_fields,
    encode_consumed,
    encode_frontier,
    encode_in_doubt,
    encode_stream_fields,
    truncate_explanation,
)
from sublet_protocol.v1 import sublet_pb2 as pb

MAX_SPACES = 10_000
"""Maximum number of spaces whose epochs one answer has."""

MAX_WITHOUT = 100_000
"""Most streams that an answer to a ping leaves out."""

_END_REASONS = {
    BorrowerEndReason.RETRY: pb.END_RETRY,
    BorrowerEndReason.DELETED: pb.END_DELETED,
    BorrowerEndReason.FENCED: pb.END_FENCED,
    BorrowerEndReason.DENIED: pb.END_DENIED,
    BorrowerEndReason.DONE: pb.END_DONE,
}
_REVOKED_REASONS = {
    GrantEndOutcome.SAVED: pb.REVOKED_SAVED,
    GrantEndOutcome.FINISHED: pb.REVOKED_FINISHED,
    GrantEndOutcome.LOST: pb.REVOKED_LOST,
}
_END_REASONS_BACK = {wire: reason for reason, wire in _END_REASONS.items()}
_REVOKED_REASONS_BACK = {wire: reason for reason, wire in _REVOKED_REASONS.items()}


def count_items(wire: Any) -> int:
    """Return for how many items a `ToLeader` counts: for each borrower, stream and epoch; for 1 without any."""
    kind = wire.WhichOneof("message")
    message: Any = getattr(wire, kind) if kind else None
    match kind:
        case "leader_wanted":
            items = _count_streams(message.reclaim)
        case "ping":
            items = len(message.borrower_ids)
        case "update_progress" | "disconnect":
            doubts = (stream.in_doubt for stream in message.streams if stream.HasField("in_doubt"))
            items = _count_streams(message.streams, doubts)
        case _:
            return 1
    return max(items, 1)


def _count_streams(streams: Sequence[Any], doubts: Iterable[Any] = ()) -> int:
    """Return how many streams these are, and epochs beyond one of each, which counts with its stream."""
    if len(streams) > MAX_ITEMS:
        return len(streams)  # too many already, perhaps hundreds of thousands: none is looked at
    frontiers = (each.consumed.lower.least for each in (*streams, *doubts) if each.HasField("consumed"))
    return len(streams) + sum(max(len(least) - 1, 0) for least in frontiers)


# --- to the leader --------------------------------------------------------------------------------------------------


def encode_to_leader(message: ToLeader) -> Any:
    """Return a `sublet.v1.ToLeader`."""
    match message:
        case LeaderWanted():
            return pb.ToLeader(leader_wanted=_encode_leader_wanted(message))
        case Ping(borrower_ids, sent_at):
            return pb.ToLeader(ping=pb.Ping(borrower_ids=borrower_ids, sent_at=sent_at))
        case UpdateProgress(borrower_id, term, streams):
            report = pb.UpdateProgress(borrower_id=borrower_id, term=term, streams=_encode_progress(streams))
            return pb.ToLeader(update_progress=report)
        case RevokeFinished():
            return pb.ToLeader(revoke_finished=pb.RevokeFinished(**encode_stream_fields(message)))
        case Disconnect(borrower_id, term, streams, reason, more):
            disconnect = pb.Disconnect(
                borrower_id=borrower_id, term=term, reason=truncate_explanation(reason), more=more
            )
            disconnect.streams.extend(_encode_progress(streams))
            return pb.ToLeader(disconnect=disconnect)
        case _:
            assert_never(message)


def _encode_leader_wanted(message: LeaderWanted) -> Any:
    reclaim = (
        pb.HeldGrant(
            stream_id=held.stream_id,
            grant_id=held.grant_id,
            position=held.position,
            consumed=encode_consumed(held.consumed),
        )
        for held in message.reclaim
    )
    return pb.LeaderWanted(
        borrower_id=message.borrower_id,
        subscription=message.subscription,
        group_id=message.group_id,
        weight=message.weight,
        session=message.session,
        leaving=message.leaving,
        reclaim=reclaim,
        starting_position=message.starting_position,
        predecessor=message.predecessor,
        session_epoch=message.session_epoch,
        borrower_number=message.borrower_number,
        more=message.more,
        lock_valid_s=message.lock_valid_s,
    )


def _encode_progress(streams: Iterable[StreamProgress]) -> list[Any]:
    return [
        pb.StreamProgress(
            stream_id=stream.stream_id,
            grant_id=stream.grant_id,
            position=stream.position,
            final=stream.final,
            size=stream.size,
            lag=stream.lag,
            delivered_end=stream.delivered_end,
            consumed=encode_consumed(stream.consumed),
            in_doubt=encode_in_doubt(stream.in_doubt),
            read_error=truncate_explanation(stream.read_error) or None,
            poison=stream.poison,
            beyond_head=stream.beyond_head,
        )
        for stream in streams
    ]


def decode_to_leader(wire: Any) -> ToLeader:
    """Return a message for a leader. Raise `MalformedMessage`."""
    kind = wire.WhichOneof("message")
    if kind is None:
        raise MalformedMessage("a message to the leader: it is empty, or of a kind this version does not know")
    message: ToLeader = _TO_LEADER[kind](getattr(wire, kind))
    return message


def _decode_leader_wanted(wire: Any) -> LeaderWanted:
    check_streams("reclaim", (held.stream_id for held in wire.reclaim), len(wire.reclaim))
    check_part("reclaim", len(wire.reclaim), wire.more)
    return LeaderWanted(
        borrower_id=check_id("borrower_id", wire.borrower_id),
        subscription=check_text("subscription", wire.subscription, MAX_SUBSCRIPTION_BYTES),
        group_id=check_natural("group_id", wire.group_id) if wire.HasField("group_id") else None,
        weight=check_range("weight", wire.weight, MIN_WEIGHT, MAX_WEIGHT),
        session=check_id("session", wire.session) if wire.HasField("session") else None,
        leaving=wire.leaving,
        reclaim=tuple(
            HeldGrant(**check_naturals(held, "stream_id", "grant_id", "position"), consumed=decode_consumed(held))
            for held in wire.reclaim
        ),
        starting_position=check_text("starting_position", wire.starting_position, MAX_START_BYTES),
        predecessor=check_id("predecessor", wire.predecessor) if wire.HasField("predecessor") else None,
        session_epoch=check_natural("session_epoch", wire.session_epoch),
        borrower_number=check_count_number("borrower_number", wire.borrower_number),
        more=wire.more,
        lock_valid_s=check_range("lock_valid_s", wire.lock_valid_s, 0.0, MAX_HOLD_S),
    )


def _decode_ping(wire: Any) -> Ping:
    check_entries("borrower_ids", wire.borrower_ids, MAX_BORROWERS)
    if len(set(wire.borrower_ids)) < len(wire.borrower_ids):
        raise MalformedMessage("borrower_ids: one is in it twice; name each borrower once")
    return Ping(
        tuple(check_id("borrower_id", borrower_id) for borrower_id in wire.borrower_ids),
        check_time("sent_at", wire.sent_at),
    )


def _decode_update_progress(wire: Any) -> UpdateProgress:
    return UpdateProgress(*decode_borrower_and_term(wire), _decode_progress(wire.streams))


def _decode_revoke_finished(wire: Any) -> RevokeFinished:
    return RevokeFinished(**decode_stream_fields(wire))


def _decode_disconnect(wire: Any) -> Disconnect:
    reason = check_explanation("reason", wire.reason)
    check_part("streams", len(wire.streams), wire.more)
    return Disconnect(*decode_borrower_and_term(wire), _decode_progress(wire.streams), reason, wire.more)


def _decode_progress(streams: Sequence[Any]) -> tuple[StreamProgress, ...]:
    check_streams("streams", (stream.stream_id for stream in streams), len(streams))
    return tuple(
        StreamProgress(
            **check_naturals(stream, "stream_id", "grant_id", "position", "size", "delivered_end", "poison"),
            final=stream.final,
            lag=check_natural("lag", stream.lag) if stream.HasField("lag") else None,
            consumed=decode_consumed(stream),
            in_doubt=decode_in_doubt(stream),
            read_error=check_explanation("read_error", stream.read_error),
            beyond_head=stream.beyond_head,
        )
        for stream in streams
    )


_TO_LEADER: dict[str, Callable[[Any], ToLeader]] = {
    "leader_wanted": _decode_leader_wanted,
    "ping": _decode_ping,
    "update_progress": _decode_update_progress,
    "revoke_finished": _decode_revoke_finished,
    "disconnect": _decode_disconnect,
}


# --- to the borrower ------------------------------------------------------------------------------------------------


def encode_to_borrower(message: ToBorrower) -> Any:
    """Return a `sublet.v1.ToBorrower`."""
    match message:
        case LeaderConnectResponse(borrower_id, term, group_id, address):
            response = pb.LeaderConnectResponse(borrower_id=borrower_id, term=term, group_id=group_id, address=address)
            return pb.ToBorrower(leader_connect_response=response)
        case PingResponse():
            return pb.ToBorrower(ping_response=_encode_ping_response(message))
        case Grant():
            return pb.ToBorrower(grant=_encode_grant(message))
        case Revoke():
            return pb.ToBorrower(revoke=pb.Revoke(**encode_stream_fields(message)))
        case Revoked(reason=reason):
            return pb.ToBorrower(revoked=pb.Revoked(**encode_stream_fields(message), reason=_REVOKED_REASONS[reason]))
        case ProgressSaved():
            return pb.ToBorrower(progress_saved=_encode_progress_saved(message))
        case Invalidate(borrower_id, term, reason, detail):
            end = pb.Invalidate(
                borrower_id=borrower_id, term=term, reason=_END_REASONS[reason], detail=truncate_explanation(detail)
            )
            return pb.ToBorrower(invalidate=end)
        case _:
            assert_never(message)


def _encode_ping_response(message: PingResponse) -> Any:
    return pb.PingResponse(
        borrower_id=message.borrower_id,
        term=message.term,
        sent_at=message.sent_at,
        valid_for_s=message.valid_for_s,
        epochs=map(_encode_group_frontier, message.epochs),
        without=(pb.StreamGrant(stream_id=stream, grant_id=grant) for stream, grant in message.without),
    )


@lru_cache(maxsize=64)
def _encode_group_frontier(frontier: GroupFrontier) -> Any:
    """Return a `GroupFrontier`, to be copied: the answers to all members of a group have the same, of up to thousands
    of epochs."""
    return pb.GroupFrontier(
        space=frontier.space,
        space_id=frontier.space_id,
        consumed=encode_frontier(frontier.consumed),
        lower=encode_frontier(frontier.lower),
    )


@lru_cache(maxsize=64)
def measure_group_frontier(frontier: GroupFrontier) -> int:
    """Return its bytes in an answer to a ping, nearly: they are measured once for all members of a group."""
    return 4 + int(_encode_group_frontier(frontier).ByteSize())


def _encode_progress_saved(message: ProgressSaved) -> Any:
    return pb.ProgressSaved(
        **encode_stream_fields(message),
        position=message.position,
        consumed=encode_consumed(message.consumed),
        in_doubt=encode_in_doubt(message.in_doubt),
    )


def _encode_grant(message: Grant) -> Any:
    return pb.Grant(
        **encode_stream_fields(message),
        position=message.position,
        generation_id=message.generation_id,
        hash_from=message.hash_from,
        hash_last=message.hash_to - 1,
        filter=message.filter,
        end_offset=message.end_offset,
        consumed=encode_consumed(message.consumed),
        in_doubt=encode_in_doubt(message.in_doubt),
        grant_key=message.grant_key.reveal(),
    )


def decode_to_borrower(wire: Any) -> ToBorrower:
    """Return a message for a borrower. Raise `MalformedMessage`."""
    kind = wire.WhichOneof("message")
    if kind is None:
        raise MalformedMessage("a message to the borrower: it is empty, or of a kind this version does not know")
    message: ToBorrower = _TO_BORROWER[kind](getattr(wire, kind))
    return message


def _decode_connect_response(wire: Any) -> LeaderConnectResponse:
    group_id, address = check_natural("group_id", wire.group_id), check_id("address", wire.address, may_be_empty=True)
    return LeaderConnectResponse(*decode_borrower_and_term(wire), group_id, address)


def _decode_ping_response(wire: Any) -> PingResponse:
    check_entries("epochs", wire.epochs, MAX_SPACES)
    epochs = tuple(
        GroupFrontier(
            check_text("space", frontier.space, MAX_SUBSCRIPTION_BYTES),
            check_natural("space_id", frontier.space_id),
            decode_frontier(frontier.consumed),
            decode_frontier(frontier.lower),
        )
        for frontier in wire.epochs
    )
    times = check_time("sent_at", wire.sent_at), check_time("valid_for_s", wire.valid_for_s)
    check_entries("without", wire.without, MAX_WITHOUT)
    without = tuple(
        (check_natural("stream_id", grant.stream_id), check_natural("grant_id", grant.grant_id))
        for grant in wire.without
    )
    return PingResponse(*decode_borrower_and_term(wire), *times, epochs, without)


def _decode_grant(wire: Any) -> Grant:
    if wire.hash_from > wire.hash_last:
        raise MalformedMessage(f"hash range {wire.hash_from} to {wire.hash_last}: it ends before it begins")
    if len(wire.grant_key) != GrantSecret.BYTES:
        raise MalformedMessage(f"grant_key: {len(wire.grant_key)} bytes, and it has {GrantSecret.BYTES}")
    return Grant(
        **decode_stream_fields(wire),
        **check_naturals(wire, "position", "generation_id"),
        hash_from=wire.hash_from,
        hash_to=wire.hash_last + 1,
        filter=check_text("filter", wire.filter, MAX_TOPIC_BYTES),
        end_offset=check_natural("end_offset", wire.end_offset) if wire.HasField("end_offset") else None,
        consumed=decode_consumed(wire),
        in_doubt=decode_in_doubt(wire),
        grant_key=GrantSecret(wire.grant_key),
    )


def _decode_revoke(wire: Any) -> Revoke:
    return Revoke(**decode_stream_fields(wire))


def _decode_revoked(wire: Any) -> Revoked:
    return Revoked(**decode_stream_fields(wire), reason=decode_reason("reason", wire.reason, _REVOKED_REASONS_BACK))


def _decode_progress_saved(wire: Any) -> ProgressSaved:
    position = check_natural("position", wire.position)
    consumed, in_doubt = decode_consumed(wire), decode_in_doubt(wire)
    return ProgressSaved(**decode_stream_fields(wire), position=position, consumed=consumed, in_doubt=in_doubt)


def _decode_invalidate(wire: Any) -> Invalidate:
    reason = decode_reason("reason", wire.reason, _END_REASONS_BACK)
    return Invalidate(*decode_borrower_and_term(wire), reason, check_explanation("detail", wire.detail))


_TO_BORROWER: dict[str, Callable[[Any], ToBorrower]] = {
    "leader_connect_response": _decode_connect_response,
    "ping_response": _decode_ping_response,
    "grant": _decode_grant,
    "revoke": _decode_revoke,
    "revoked": _decode_revoked,
    "progress_saved": _decode_progress_saved,
    "invalidate": _decode_invalidate,
}
