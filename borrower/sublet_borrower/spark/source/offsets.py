"""Offsets in a query's checkpoint: the ranges of a micro-batch, as JSON.

    {"group_id": 3, "session": "billing-1", "streams": {"17": {"from": 700, "grant_id": 12, "to": 710}},
     "subscription": "$share/billing/orders/#"}

A batch's offset has its ranges, and nothing of other streams: how far those are is in the group's rows. Only what
earlier batches have done and the group may not have yet is there besides, as "done", in the same form as "streams". In
an atomic group a range also has "upto" and "least", its consumed frontier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sublet_borrower.planner.planned_ranges import PlannedRange
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import InvalidSetting

Offset = dict[str, Any]

EMPTY_OFFSET: Offset = {}
"""The offset of a query that has started nothing."""


def encode_offset(
    ranges: Iterable[PlannedRange], done: Iterable[PlannedRange] = (), *, group_id: int, session: str, subscription: str
) -> Offset:
    """Return the offset of these ranges, and what was `done` before. Spark compares offsets as text, so the keys are in
    order."""
    done_field = {"done": parts} if (parts := _encode_ranges(done)) else {}
    return {
        **done_field,
        "group_id": group_id,
        "session": session,
        "streams": _encode_ranges(ranges),
        "subscription": subscription,
    }


def is_sublet_offset(offset: Any) -> bool:
    """Return whether this source has written it, for a batch that is not empty."""
    return isinstance(offset, dict) and offset.keys() - {"done"} == {"group_id", "session", "streams", "subscription"}


def check_offset_version(offset: Any) -> None:
    """Raise `InvalidSetting` for an offset of this source in an unknown form, such as that of a newer release."""
    if isinstance(offset, dict) and {"session", "streams"} <= offset.keys() and not is_sublet_offset(offset):
        raise InvalidSetting(
            f"the checkpoint says {str(offset)[:200]}, in a form that this version of sublet does not know. Use the "
            "version that the query uses."
        )


def check_owner(offset: Offset, session: str, subscription: str) -> None:
    """Raise `InvalidSetting` if the checkpoint is that of another session, or of another subscription."""
    if offset and (offset.get("session"), offset.get("subscription")) != (session, subscription):
        raise InvalidSetting(
            f"the checkpoint belongs to session {offset.get('session')!r} of {offset.get('subscription')}, and this is "
            f"session {session!r} of {subscription}: what was in doubt there is reserved for that one. Give the query "
            "its sessionName and subscription again. Or give it a new checkpointLocation and a new place for its "
            "output, as batches count from 0 again then and a sink passes over numbers that it has: it goes on where "
            "its group is."
        )


def decode_ranges(offset: Mapping[str, Any]) -> list[PlannedRange]:
    """Return the ranges of an offset. Raise `InvalidSetting` for what this source has not written."""
    return _decode_field(offset, "streams") if offset else []


def decode_done_ranges(offset: Mapping[str, Any]) -> list[PlannedRange]:
    """Return the ranges that earlier batches have done, which the group may not have. Raise as `decode_ranges` does."""
    return _decode_field(offset, "done") if "done" in offset else []


def _decode_field(offset: Mapping[str, Any], key: str) -> list[PlannedRange]:
    try:
        return [_decode_range(int(stream_id), part) for stream_id, part in offset[key].items()]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidSetting(
            f"the checkpoint says {str(offset)[:200]}, which is not of sublet: it belongs to another query. Give this "
            "one a checkpointLocation of its own."
        ) from None


def _encode_ranges(ranges: Iterable[PlannedRange]) -> dict[str, Any]:
    return {
        str(planned.stream_id): _encode_range(planned)
        for planned in sorted(ranges, key=lambda planned: planned.stream_id)
    }


def _encode_range(planned: PlannedRange) -> dict[str, Any]:
    part: dict[str, Any] = {"from": planned.start, "grant_id": planned.grant_id, "to": planned.end}
    return dict(
        sorted((part | (planned.consumed_frontier.to_json() if planned.consumed_frontier is not None else {})).items())
    )


def _decode_range(stream_id: int, part: Mapping[str, Any]) -> PlannedRange:
    consumed = ConsumedFrontier.from_json(part) if "upto" in part else None
    return PlannedRange(stream_id, int(part["grant_id"]), int(part["from"]), int(part["to"]), consumed)
