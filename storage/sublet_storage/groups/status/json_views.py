"""Groups as the objects that programs are shown: by the command line's `--json` and by a node's HTTP port alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from sublet_protocol.domain.subscriptions import Start
from sublet_storage.groups.model.options import GroupOptions
from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.groups.status.overview import Overview


def options_as_json(options: GroupOptions) -> dict[str, Any]:
    """A group's options."""
    return {"start": str(options.start), **options.to_store()}


def summary(overview: Overview) -> dict[str, Any]:
    """A group without its single streams."""
    group = overview.group
    return {
        "subscription": group.subscription,
        "group_id": group.group_id,
        "kind": group.kind,
        "name": group.name,
        "filter": group.filter,
        **options_as_json(group.options),
        "created_at": group.created_at.isoformat(),
        "paused": group.orders.paused,
        "weights": dict(group.orders.weights),
        "state": state(overview),
        "leader": leader(overview),
        "streams_by_status": overview.statuses,
        "lag": overview.lag,
        "known_lag": overview.known_lag,
        "streams_of_unknown_lag": overview.unknown,
        "stuck_streams": overview.counts.stuck,
    }


def standby(overview: Overview, connected: Iterable[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Of those who are connected to the group's leader, the members that hold nothing; None: it has not said who is."""
    holding = {member.borrower_id for member in overview.members}
    return None if connected is None else [each for each in connected if each["borrower_id"] not in holding]


def details(overview: Overview, connected: Iterable[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A group with all that was asked for. `connected`: see `standby`."""
    lines = [asdict(line) for line in overview.streams]
    for line in lines:
        del line["group_id"]
    return {
        **summary(overview),
        "members": [asdict(member) for member in overview.members],
        "standby_members": standby(overview, connected),
        "kept_for_sessions": [asdict(kept) for kept in overview.kept],
        "epochs": [{**asdict(line), "moved_at": line.moved_at.isoformat()} for line in overview.epochs],
        "streams": lines,
        "forced_moves": [history_line(line) for line in overview.forced.lines],
        "forced_total": overview.forced.total,
    }


def state(overview: Overview) -> str:
    """How the group is, in a word or two."""
    if overview.group.orders.paused is not None:
        return "paused"
    held = overview.statuses.get("held", 0) > 0
    if not overview.led:  # which only consumers miss
        return "no leader" if held else "no consumers"
    if overview.counts.stuck:
        return "stuck"
    return "consuming" if held else "no member"


def leader(overview: Overview) -> dict[str, Any] | None:
    """Who leads, or led last."""
    found = overview.leader
    if found is None:
        return None
    return {
        "node": found.node,
        "address": found.address,
        "term": found.term,
        "alive": overview.led,
        "lease_remaining_s": round(found.remaining_s, 3),
    }


def history_line(line: HistoryRecord) -> dict[str, Any]:
    """A line of history; what is of the group as a whole has no stream."""
    return {
        "at": str(Start.at(line.at_us)),
        "event": line.event,
        "reason": line.reason,
        "stream_id": line.stream_id or None,
        "grant_id": line.grant_id or None,
        "borrower_id": line.borrower_id,
        "agent": line.agent,
        "session": line.session,
        "position": line.position if line.stream_id else None,
        "until": line.until,
        "forced": line.forced,
        "term": line.term,
    }
