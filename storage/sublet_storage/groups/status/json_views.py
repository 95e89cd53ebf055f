"""Groups as JSON objects, for the command line's `--json`, a node's HTTP port, watchers and logs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from msgspec.structs import asdict

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import StartingPosition
from sublet_storage.groups.model.options import DEFAULTS, GroupOptions
from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.groups.status.overview_model import GroupOverview, StoredGroup


def options_to_json(options: GroupOptions) -> dict[str, Any]:
    """Return a group's options."""
    return {"starting_position": str(options.starting_position), **options.to_row()}


def _stored_options_to_json(group: StoredGroup) -> dict[str, Any]:
    """Return a group's options; as they are stored, if an operator has written some that cannot be."""
    try:
        return options_to_json(group.options)
    except UsageError:
        stored = {**DEFAULTS.to_row(), **json.loads(group.options_json)}
        return {"starting_position": group.starting_position, **stored}


def summary_to_json(overview: GroupOverview) -> dict[str, Any]:
    """Return a group without its single streams."""
    group = overview.group
    return {
        "subscription": group.subscription,
        "group_id": group.group_id,
        "kind": group.kind,
        "name": group.name,
        "filter": group.filter,
        **_stored_options_to_json(group),
        "created_at": None if group.created_at is None else group.created_at.isoformat(),
        "paused": group.desired_state.pause_reason,
        "weights": dict(group.desired_state.weights),
        "state": group_state(overview),
        "leader": leader_to_json(overview),
        "streams_by_status": overview.statuses,
        "lag": overview.lag,
        "known_lag": overview.known_lag,
        "unknown_lag_streams": overview.unknown_lag_count,
        "unreadable_streams": overview.counts.unreadable_count,
    }


def standby_to_json(overview: GroupOverview, connected: Iterable[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the borrowers connected to the group's leader that hold nothing; None: it has not answered."""
    holding = {member.borrower_id for member in overview.members}
    return None if connected is None else [each for each in connected if each["borrower_id"] not in holding]


def details_to_json(overview: GroupOverview, connected: Iterable[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return a group with all that was requested. `connected`: see `standby_to_json`."""
    streams = [asdict(stream) for stream in overview.streams]
    for stream in streams:
        del stream["group_id"]
    return {
        **summary_to_json(overview),
        "members": [asdict(member) for member in overview.members],
        "standby_members": standby_to_json(overview, connected),
        "reserved_for_sessions": [asdict(reserved) for reserved in overview.reserved_sessions],
        "epochs": [{**asdict(epochs), "moved_at": epochs.moved_at.isoformat()} for epochs in overview.epochs],
        "streams": streams,
        "forced_moves": [history_to_json(record) for record in overview.forced.records],
        "forced_move_count": overview.forced.total,
    }


def group_state(overview: GroupOverview) -> str:
    """Return the group's state in a word or two."""
    if overview.group.desired_state.pause_reason is not None:
        return "paused"
    has_held_streams = overview.statuses.get("held", 0) > 0
    if not overview.has_leader:  # which only consumers miss
        return "no_leader" if has_held_streams else "no_consumers"
    if overview.counts.unreadable_count:
        return "unreadable"
    return "consuming" if has_held_streams else "no_members"


def leader_to_json(overview: GroupOverview) -> dict[str, Any] | None:
    """Return the present leader, or the last one, as JSON."""
    leader = overview.leader
    if leader is None:
        return None
    return {
        "node": leader.node,
        "address": leader.address,
        "term": leader.term,
        "alive": overview.has_leader,
        "lease_remaining_s": round(leader.remaining_s, 3),
    }


def history_to_json(record: HistoryRecord) -> dict[str, Any]:
    """Return a line of history; a line of the group itself has no stream."""
    return {
        "at": str(StartingPosition.at_time(record.at_us)),
        "event": record.event,
        "reason": record.reason,
        "stream_id": record.stream_id or None,
        "grant_id": record.grant_id or None,
        "borrower_id": record.borrower_id,
        "agent": record.agent,
        "session": record.session,
        "position": record.position if record.stream_id else None,
        "redelivery_end": record.redelivery_end,
        "forced": record.is_forced if record.stream_id else None,
        "term": record.term,
    }
