"""Encodes messages to the wire format and decodes them.

Encoding is total. Decoding trusts nothing: what is missing, out of range, too long or too many raises
`MalformedMessage`, whose text goes to the sender. Every size that a peer controls is bounded here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, assert_never

from sublet_protocol.domain.epochs import MAX_DIMENSIONS, ConsumedFrontier, GroupFrontier, LowerFrontier
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.in_doubt import InDoubtRange
from sublet_protocol.domain.keys import GrantKey
from sublet_protocol.messages.borrower_leader import (
    MAX_ID,
    MAX_READ_ERROR_CHARS,
    MAX_WEIGHT,
    BorrowerEndReason,
    Disconnect,
    Grant,
    GrantOutcome,
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
from sublet_protocol.v1 import sublet_pb2 as pb

Reason = TypeVar("Reason")

MAX_TEXT = 70_000
"""Longest subscription, filter or explanation, in characters."""

MAX_STREAMS = 100_000
"""Most streams in one message."""

MAX_BORROWERS = 10_000
"""Most borrowers in one ping."""

MAX_SPACES = 10_000
"""Maximum number of spaces whose epochs one answer has."""

MAX_ANTICHAIN = 1_000
"""Most epochs in one frontier."""

_END_REASONS = {
    BorrowerEndReason.RETRY: pb.END_RETRY,
    BorrowerEndReason.DELETED: pb.END_DELETED,
    BorrowerEndReason.FENCED: pb.END_FENCED,
    BorrowerEndReason.DENIED: pb.END_DENIED,
    BorrowerEndReason.DONE: pb.END_DONE,
}
_REVOKED_REASONS = {
    GrantOutcome.SAVED: pb.REVOKED_SAVED,
    GrantOutcome.FINISHED: pb.REVOKED_FINISHED,
    GrantOutcome.LOST: pb.REVOKED_LOST,
}
_END_REASONS_BACK = {wire: reason for reason, wire in _END_REASONS.items()}
_REVOKED_REASONS_BACK = {wire: reason for reason, wire in _REVOKED_REASONS.items()}


class MalformedMessage(UsageError):
    """A message that breaks the protocol's form; nothing of it was executed."""


# --- to the leader --------------------------------------------------------------------------------------------------


def encode_to_leader(message: ToLeader) -> Any:
    """Return a `sublet.v1.ToLeader`."""
    match message:
        case LeaderWanted():
            return pb.ToLeader(leader_wanted=_leader_wanted(message))
        case Ping(borrower_ids, sent_at):
            return pb.ToLeader(ping=pb.Ping(borrower_ids=borrower_ids, sent_at=sent_at))
        case UpdateProgress(borrower_id, term, streams):
            report = pb.UpdateProgress(borrower_id=borrower_id, term=term, streams=_progress(streams))
            return pb.ToLeader(update_progress=report)
        case RevokeFinished():
            return pb.ToLeader(revoke_finished=pb.RevokeFinished(**_stream_fields(message)))
        case Disconnect(borrower_id, term, streams, reason):
            disconnect = pb.Disconnect(borrower_id=borrower_id, term=term, streams=_progress(streams), reason=reason)
            return pb.ToLeader(disconnect=disconnect)
        case _:
            assert_never(message)


def _leader_wanted(message: LeaderWanted) -> Any:
    reclaim = (
        pb.HeldGrant(
            stream_id=held.stream_id,
            grant_id=held.grant_id,
            position=held.position,
            consumed=_consumed(held.consumed),
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
    )


def _progress(streams: Iterable[StreamProgress]) -> list[Any]:
    return [
        pb.StreamProgress(
            stream_id=one.stream_id,
            grant_id=one.grant_id,
            position=one.position,
            final=one.final,
            size=one.size,
            lag=one.lag,
            delivered_end=one.delivered_end,
            consumed=_consumed(one.consumed),
            in_doubt=_in_doubt(one.in_doubt),
            read_error=one.read_error or None,
            poison=one.poison,
            beyond_head=one.beyond_head,
        )
        for one in streams
    ]


def decode_to_leader(wire: Any) -> ToLeader:
    """Return a message for a leader; raises `MalformedMessage`."""
    kind = wire.WhichOneof("message")
    if kind is None:
        raise MalformedMessage("a message to the leader: it is empty, or of a kind this version does not know")
    message: ToLeader = _TO_LEADER[kind](getattr(wire, kind))
    return message


def _read_leader_wanted(wire: Any) -> LeaderWanted:
    if not 0 < wire.weight <= MAX_WEIGHT:
        raise MalformedMessage(f"weight {wire.weight}: a weight is above 0 and at most {MAX_WEIGHT:g}")
    _check_number("reclaim", len(wire.reclaim), MAX_STREAMS)
    return LeaderWanted(
        borrower_id=_id("borrower_id", wire.borrower_id),
        subscription=_text("subscription", wire.subscription),
        group_id=_natural("group_id", wire.group_id) if wire.HasField("group_id") else None,
        weight=wire.weight,
        session=_id("session", wire.session) if wire.HasField("session") else None,
        leaving=wire.leaving,
        reclaim=tuple(
            HeldGrant(**_naturals(held, "stream_id", "grant_id", "position"), consumed=_read_consumed(held))
            for held in wire.reclaim
        ),
        starting_position=_id("starting_position", wire.starting_position),
        predecessor=_id("predecessor", wire.predecessor) if wire.HasField("predecessor") else None,
        session_epoch=_natural("session_epoch", wire.session_epoch),
        borrower_number=_natural("borrower_number", wire.borrower_number),
    )


def _read_ping(wire: Any) -> Ping:
    _check_number("borrower_ids", len(wire.borrower_ids), MAX_BORROWERS)
    return Ping(tuple(_id("borrower_id", one) for one in wire.borrower_ids), _time("sent_at", wire.sent_at))


def _read_update_progress(wire: Any) -> UpdateProgress:
    return UpdateProgress(*_borrower_and_term(wire), _read_progress(wire.streams))


def _read_revoke_finished(wire: Any) -> RevokeFinished:
    return RevokeFinished(**_read_stream_fields(wire))


def _read_disconnect(wire: Any) -> Disconnect:
    reason = _text("reason", wire.reason, may_be_empty=True)
    return Disconnect(*_borrower_and_term(wire), _read_progress(wire.streams), reason)


def _read_progress(streams: Sequence[Any]) -> tuple[StreamProgress, ...]:
    _check_number("streams", len(streams), MAX_STREAMS)
    return tuple(
        StreamProgress(
            **_naturals(one, "stream_id", "grant_id", "position", "size", "delivered_end", "poison"),
            final=one.final,
            lag=_natural("lag", one.lag) if one.HasField("lag") else None,
            consumed=_read_consumed(one),
            in_doubt=_read_in_doubt(one),
            read_error=_text("read_error", one.read_error, MAX_READ_ERROR_CHARS, may_be_empty=True),
            beyond_head=one.beyond_head,
        )
        for one in streams
    )


_TO_LEADER: dict[str, Callable[[Any], ToLeader]] = {
    "leader_wanted": _read_leader_wanted,
    "ping": _read_ping,
    "update_progress": _read_update_progress,
    "revoke_finished": _read_revoke_finished,
    "disconnect": _read_disconnect,
}


# --- to the borrower ------------------------------------------------------------------------------------------------


def encode_to_borrower(message: ToBorrower) -> Any:
    """Return a `sublet.v1.ToBorrower`."""
    match message:
        case LeaderConnectResponse(borrower_id, term, group_id, address):
            response = pb.LeaderConnectResponse(borrower_id=borrower_id, term=term, group_id=group_id, address=address)
            return pb.ToBorrower(leader_connect_response=response)
        case PingResponse():
            return pb.ToBorrower(ping_response=_ping_response(message))
        case Grant():
            return pb.ToBorrower(grant=_grant(message))
        case Revoke():
            return pb.ToBorrower(revoke=pb.Revoke(**_stream_fields(message)))
        case Revoked(reason=reason):
            return pb.ToBorrower(revoked=pb.Revoked(**_stream_fields(message), reason=_REVOKED_REASONS[reason]))
        case ProgressSaved():
            return pb.ToBorrower(progress_saved=_progress_saved(message))
        case Invalidate(borrower_id, term, reason, detail):
            end = pb.Invalidate(borrower_id=borrower_id, term=term, reason=_END_REASONS[reason], detail=detail)
            return pb.ToBorrower(invalidate=end)
        case _:
            assert_never(message)


def _ping_response(message: PingResponse) -> Any:
    return pb.PingResponse(
        borrower_id=message.borrower_id,
        term=message.term,
        sent_at=message.sent_at,
        valid_for_s=message.valid_for_s,
        epochs=(
            pb.GroupFrontier(
                space=one.space,
                space_id=one.space_id,
                consumed=_frontier(one.consumed),
                lower=_frontier(one.lower),
            )
            for one in message.epochs
        ),
        without=(pb.StreamGrant(stream_id=stream, grant_id=grant) for stream, grant in message.without),
    )


def _progress_saved(message: ProgressSaved) -> Any:
    return pb.ProgressSaved(
        **_stream_fields(message),
        position=message.position,
        consumed=_consumed(message.consumed),
        in_doubt=_in_doubt(message.in_doubt),
    )


def _grant(message: Grant) -> Any:
    return pb.Grant(
        **_stream_fields(message),
        position=message.position,
        generation_id=message.generation_id,
        hash_from=message.hash_from,
        hash_last=message.hash_to - 1,
        filter=message.filter,
        end_offset=message.end_offset,
        consumed=_consumed(message.consumed),
        in_doubt=_in_doubt(message.in_doubt),
        grant_key=message.grant_key.reveal(),
    )


def decode_to_borrower(wire: Any) -> ToBorrower:
    """Return a message for a borrower; raises `MalformedMessage`."""
    kind = wire.WhichOneof("message")
    if kind is None:
        raise MalformedMessage("a message to the borrower: it is empty, or of a kind this version does not know")
    message: ToBorrower = _TO_BORROWER[kind](getattr(wire, kind))
    return message


def _read_connect_response(wire: Any) -> LeaderConnectResponse:
    group_id, address = _natural("group_id", wire.group_id), _id("address", wire.address, may_be_empty=True)
    return LeaderConnectResponse(*_borrower_and_term(wire), group_id, address)


def _read_ping_response(wire: Any) -> PingResponse:
    _check_number("epochs", len(wire.epochs), MAX_SPACES)
    epochs = tuple(
        GroupFrontier(
            _text("space", one.space),
            _natural("space_id", one.space_id),
            _read_frontier(one.consumed),
            _read_frontier(one.lower),
        )
        for one in wire.epochs
    )
    times = _time("sent_at", wire.sent_at), _time("valid_for_s", wire.valid_for_s)
    _check_number("without", len(wire.without), MAX_STREAMS)
    without = tuple((_natural("stream_id", one.stream_id), _natural("grant_id", one.grant_id)) for one in wire.without)
    return PingResponse(*_borrower_and_term(wire), *times, epochs, without)


def _read_grant(wire: Any) -> Grant:
    if wire.hash_from > wire.hash_last:
        raise MalformedMessage(f"hash range {wire.hash_from} to {wire.hash_last}: it ends before it begins")
    if len(wire.grant_key) != GrantKey.BYTES:
        raise MalformedMessage(f"grant_key: {len(wire.grant_key)} bytes, and it has {GrantKey.BYTES}")
    return Grant(
        **_read_stream_fields(wire),
        **_naturals(wire, "position", "generation_id"),
        hash_from=wire.hash_from,
        hash_to=wire.hash_last + 1,
        filter=_text("filter", wire.filter),
        end_offset=_natural("end_offset", wire.end_offset) if wire.HasField("end_offset") else None,
        consumed=_read_consumed(wire),
        in_doubt=_read_in_doubt(wire),
        grant_key=GrantKey(wire.grant_key),
    )


def _read_revoke(wire: Any) -> Revoke:
    return Revoke(**_read_stream_fields(wire))


def _read_revoked(wire: Any) -> Revoked:
    return Revoked(**_read_stream_fields(wire), reason=_known("reason", wire.reason, _REVOKED_REASONS_BACK))


def _read_progress_saved(wire: Any) -> ProgressSaved:
    position = _natural("position", wire.position)
    consumed, in_doubt = _read_consumed(wire), _read_in_doubt(wire)
    return ProgressSaved(**_read_stream_fields(wire), position=position, consumed=consumed, in_doubt=in_doubt)


def _read_invalidate(wire: Any) -> Invalidate:
    reason = _known("reason", wire.reason, _END_REASONS_BACK)
    return Invalidate(*_borrower_and_term(wire), reason, _text("detail", wire.detail, may_be_empty=True))


_TO_BORROWER: dict[str, Callable[[Any], ToBorrower]] = {
    "leader_connect_response": _read_connect_response,
    "ping_response": _read_ping_response,
    "grant": _read_grant,
    "revoke": _read_revoke,
    "revoked": _read_revoked,
    "progress_saved": _read_progress_saved,
    "invalidate": _read_invalidate,
}


# --- fields ---------------------------------------------------------------------------------------------------------


def _stream_fields(message: RevokeFinished | Grant | Revoke | Revoked | ProgressSaved) -> dict[str, Any]:
    return {
        "borrower_id": message.borrower_id,
        "term": message.term,
        "stream_id": message.stream_id,
        "grant_id": message.grant_id,
    }


def _read_stream_fields(wire: Any) -> dict[str, Any]:
    return {"borrower_id": _id("borrower_id", wire.borrower_id), **_naturals(wire, "term", "stream_id", "grant_id")}


def _borrower_and_term(wire: Any) -> tuple[str, int]:
    return _id("borrower_id", wire.borrower_id), _natural("term", wire.term)


def _consumed(consumed: ConsumedFrontier | None) -> Any:
    if consumed is None:
        return None
    lower = None if consumed.lower is None else _frontier(consumed.lower)
    return pb.ConsumedFrontier(upto=consumed.upto, lower=lower)


def _frontier(lower: LowerFrontier) -> Any:
    return pb.Frontier(least=(pb.Epoch(dimensions=epoch) for epoch in lower.least))


def _read_consumed(wire: Any) -> ConsumedFrontier | None:
    if not wire.HasField("consumed"):
        return None
    consumed = wire.consumed
    lower = _read_frontier(consumed.lower) if consumed.HasField("lower") else None
    return ConsumedFrontier(_natural("upto", consumed.upto), lower)


def _in_doubt(doubt: InDoubtRange | None) -> Any:
    if doubt is None:
        return None
    return pb.InDoubt(
        grant_id=doubt.grant_id,
        start=doubt.start,
        end=doubt.end,
        hold_s=doubt.hold_s,
        consumed=_consumed(doubt.consumed),
    )


def _read_in_doubt(wire: Any) -> InDoubtRange | None:
    if not wire.HasField("in_doubt"):
        return None
    doubt = wire.in_doubt
    if doubt.end < doubt.start:
        raise MalformedMessage(f"in doubt is [{doubt.start}, {doubt.end}): it ends before it begins")
    numbers = _naturals(doubt, "grant_id", "start", "end")
    return InDoubtRange(**numbers, hold_s=_time("hold_s", doubt.hold_s), consumed=_read_consumed(doubt))


def _read_frontier(wire: Any) -> LowerFrontier:
    _check_number("least", len(wire.least), MAX_ANTICHAIN)
    epochs = [tuple(epoch.dimensions) for epoch in wire.least]
    sizes = {len(epoch) for epoch in epochs}
    if len(sizes) > 1 or not all(1 <= size <= MAX_DIMENSIONS for size in sizes):
        raise MalformedMessage(
            f"a frontier of epochs of {sorted(sizes)} dimensions: all have as many, 1 to {MAX_DIMENSIONS}"
        )
    return LowerFrontier(tuple(sorted(set(epochs))))


def _id(name: str, text: str, *, may_be_empty: bool = False) -> str:
    return _text(name, text, MAX_ID, may_be_empty=may_be_empty)


def _text(name: str, text: str, limit: int = MAX_TEXT, *, may_be_empty: bool = False) -> str:
    """Postgres, where these end up, takes any character but NUL."""
    if not text and not may_be_empty:
        raise MalformedMessage(f"{name}: it is missing")
    if len(text) > limit:
        raise MalformedMessage(f"{name} {text[:40]!r}...: {len(text)} characters, and the limit is {limit}")
    if "\0" in text:
        raise MalformedMessage(f"{name} {text[:40]!r}: the character NUL is not allowed")
    return text


def _naturals(wire: Any, *names: str) -> dict[str, Any]:
    return {name: _natural(name, getattr(wire, name)) for name in names}


def _natural(name: str, value: int) -> int:
    if value < 0:
        raise MalformedMessage(f"{name} {value}: it is never negative")
    return value


def _time(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise MalformedMessage(f"{name} {value}: a time is a finite number of seconds")
    return value


def _check_number(name: str, number: int, limit: int) -> None:
    if number > limit:
        raise MalformedMessage(f"{name}: {number} entries, and the limit is {limit}; send several messages")


def _known(name: str, value: int, reasons: dict[Any, Reason]) -> Reason:
    if value not in reasons:
        raise MalformedMessage(f"{name} {value}: this version does not know it")
    return reasons[value]
