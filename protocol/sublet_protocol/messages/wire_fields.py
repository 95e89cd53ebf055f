"""Encodes and decodes the fields that several messages of borrowers and leaders have."""

from __future__ import annotations

from typing import Any, TypeVar

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier, format_frontier
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.limits import MAX_ANTICHAIN, MAX_DIMENSIONS, MAX_EXPLANATION_CHARACTERS, MAX_HOLD_S
from sublet_protocol.messages.borrower_leader import Grant, ProgressSaved, Revoke, Revoked, RevokeFinished
from sublet_protocol.messages.field_checks import (
    MalformedMessage,
    check_entries,
    check_id,
    check_natural,
    check_naturals,
    check_range,
)
from sublet_protocol.v1 import sublet_pb2 as pb

Reason = TypeVar("Reason")


def encode_stream_fields(message: RevokeFinished | Grant | Revoke | Revoked | ProgressSaved) -> dict[str, Any]:
    """Return the fields of a message about one stream."""
    return {
        "borrower_id": message.borrower_id,
        "term": message.term,
        "stream_id": message.stream_id,
        "grant_id": message.grant_id,
    }


def decode_stream_fields(wire: Any) -> dict[str, Any]:
    """Return the fields of a message about one stream by name."""
    return {
        "borrower_id": check_id("borrower_id", wire.borrower_id),
        **check_naturals(wire, "term", "stream_id", "grant_id"),
    }


def decode_borrower_and_term(wire: Any) -> tuple[str, int]:
    """Return the fields that begin a message about a borrower."""
    return check_id("borrower_id", wire.borrower_id), check_natural("term", wire.term)


def encode_consumed(consumed: ConsumedFrontier | None) -> Any:
    """Return a `sublet.v1.ConsumedFrontier`."""
    if consumed is None:
        return None
    lower = None if consumed.lower is None else encode_frontier(consumed.lower)
    return pb.ConsumedFrontier(upto=consumed.upto, lower=lower)


def encode_frontier(lower: LowerFrontier) -> Any:
    """Return a `sublet.v1.Frontier`."""
    return pb.Frontier(least=(pb.Epoch(dimensions=epoch) for epoch in lower.least))


def decode_consumed(wire: Any) -> ConsumedFrontier | None:
    """Return the consumed frontier of a message; None if it has none."""
    if not wire.HasField("consumed"):
        return None
    consumed = wire.consumed
    lower = decode_frontier(consumed.lower) if consumed.HasField("lower") else None
    return ConsumedFrontier(check_natural("upto", consumed.upto), lower)


def encode_in_doubt(doubt: InDoubtRange | None) -> Any:
    """Return a `sublet.v1.InDoubt`."""
    if doubt is None:
        return None
    return pb.InDoubt(
        grant_id=doubt.grant_id,
        start=doubt.start,
        end=doubt.end,
        hold_s=doubt.hold_s,
        consumed=encode_consumed(doubt.consumed),
    )


def decode_in_doubt(wire: Any) -> InDoubtRange | None:
    """Return the range in doubt of a message; None if it has none."""
    if not wire.HasField("in_doubt"):
        return None
    doubt = wire.in_doubt
    if doubt.end < doubt.start:
        raise MalformedMessage(f"in doubt is [{doubt.start}, {doubt.end}): it ends before it begins")
    numbers = check_naturals(doubt, "grant_id", "start", "end")
    return InDoubtRange(
        **numbers, hold_s=check_range("hold_s", doubt.hold_s, 0.0, MAX_HOLD_S), consumed=decode_consumed(doubt)
    )


def decode_frontier(wire: Any) -> LowerFrontier:
    """Return a frontier, which has an epoch, and whose epochs all have as many dimensions.

    That none is at or before another is checked where that takes no time, with up to 2 dimensions: a frontier of 1 then
    has one epoch. With more, whoever reads what is stored takes the least.
    """
    check_entries("least", wire.least, MAX_ANTICHAIN)
    epochs = {tuple(epoch.dimensions) for epoch in wire.least}
    sizes = {len(epoch) for epoch in epochs}
    if len(sizes) != 1 or not all(1 <= size <= MAX_DIMENSIONS for size in sizes):
        raise MalformedMessage(
            f"a frontier of epochs of {sorted(sizes)} dimensions: it has epochs, all of as many, 1 to {MAX_DIMENSIONS}"
        )
    frontier = LowerFrontier(tuple(sorted(epochs)))
    if max(sizes) <= 2 and frontier != LowerFrontier.from_epochs(epochs):
        raise MalformedMessage(
            f"a frontier of epochs, {format_frontier(frontier)}: none of them is at or before another. Send the least."
        )
    return frontier


def truncate_explanation(explanation: str) -> str:
    """Return a text for people no longer than its receiver takes it."""
    return explanation[:MAX_EXPLANATION_CHARACTERS]


def decode_reason(name: str, value: int, reasons: dict[Any, Reason]) -> Reason:
    """Return the reason of that number."""
    if value not in reasons:
        raise MalformedMessage(f"{name} {value}: this version does not know it")
    return reasons[value]
