"""`sublet groups list` and `describe`, from the database; only standby members come from a leader."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sublet.cli.base.command import CliCommandContext, command, command_group
from sublet.cli.base.text_conversion import GroupName, format_ranges, format_seconds, format_utc
from sublet.cli.groups import control, create_delete, history, progress_transfer, reset, watch, why
from sublet.cli.groups.names import resolve_subscription
from sublet_protocol.domain.epoch_frontiers import format_frontier, lower_frontier_from_json

if TYPE_CHECKING:
    from sublet_storage.groups.model.desired_state import GroupDesiredState
    from sublet_storage.groups.status.overview_model import GroupFrontierRow, GroupOverview, StreamView


LEADER_S: Final = 2.0
"""Time limit for the answer of a group's leader."""


def list_(cli: CliCommandContext) -> None:
    """List the groups: their leaders, streams and lag.

    Example:

    \b
      sublet groups list
    """
    from sublet_storage.groups.status import json_views
    from sublet_storage.groups.status.overview import list_groups

    with cli.open_connection() as connection:
        groups = list_groups(connection)
    if cli.json:
        cli.print_json({"groups": [json_views.summary_to_json(overview) for overview in groups]})
        return
    rows = ((*_make_row(overview), _format_state(overview)) for overview in groups)
    cli.print_table(("GROUP", "LEADER", "STREAMS>", "HELD>", "LAG>", "STATE"), rows)
    if not groups:
        cli.print_info(
            "There are no groups yet: a $share group comes with its first consumer, or by `sublet groups create`."
        )


def describe(
    cli: CliCommandContext,
    subscription: GroupName,
    all_: Annotated[bool, typer.Option("--all", help="Finished streams as well; --json always has them.")] = False,
) -> None:
    """Show a group: its leader, members, streams and lag.

    Each stream is shown with its owner and position. Lag counts messages between the group's position and the stream's
    end, other topics' included. It is unknown, shown as ?, where a stream is blocked or its messages are gone. What
    retention took of the group's, and what it skipped as it could not be decoded, is counted as lost. Members that hold
    no stream stand by; only their leader knows them, and is queried. A blocked stream is not granted, for the reason
    shown: see docs/guarantees.md. A stream is unreadable while its owner cannot read what comes next, for the reason
    shown. A free stream may be reserved for the return of a named session that has left. Finished streams, which have
    nothing more for the group, are counted, and shown with --all. Where a stream was taken from its owner by force
    within the last day, the offsets are shown that may have been seen twice; of many such moves the 20 newest are
    shown, and their number.

    Examples:

    \b
      sublet groups describe '$share/billing/orders/#'
      sublet groups describe '$share/billing/orders/#' --all
    """
    from sublet_storage.groups.model.records import LendingStatus
    from sublet_storage.groups.status import json_views
    from sublet_storage.groups.status.overview import describe_group as read_group

    resolved_subscription = resolve_subscription(cli, subscription)
    with cli.open_connection() as connection:
        overview = read_group(connection, resolved_subscription)
    connected = _list_connected_members(overview)
    if cli.json:
        cli.print_json(json_views.details_to_json(overview, connected))
        return
    cli.print_lines(_format_overview(overview, json_views.standby_to_json(overview, connected)))
    cli.print_table(
        ("STREAM>", "SPACE", "STATUS", "POSITION>", "HEAD>", "LAG>", "AGE>", "END", "OWNER"),
        [
            (
                stream.stream_id,
                stream.space,
                stream.status,
                stream.position,
                stream.head,
                "?" if stream.lag is None else stream.lag,
                format_seconds(stream.age_s),
                stream.head_state,
                _format_owner(stream),
            )
            for stream in overview.streams
            if all_ or stream.status != LendingStatus.FINISHED
        ],
    )
    finished = 0 if all_ else overview.statuses.get(LendingStatus.FINISHED, 0)
    if finished:
        cli.print_info(
            f"Finished streams, which have nothing more for the group, left out: {finished}. --all shows them."
        )
    if overview.forced.records:
        cli.write_lines(["", "Moves by force within the last day, and the offsets that may have been seen twice:", ""])
        cli.print_table(
            ("AT", "STREAM>", "FROM>", "UNTIL>", "OWNER", "REASON"),
            [
                (
                    format_utc(record.at_us),
                    record.stream_id,
                    record.position,
                    record.redelivery_end,
                    record.session or record.agent,
                    record.reason,
                )
                for record in overview.forced.records
            ],
        )
    if overview.forced.is_truncated:
        cli.print_info(
            f"{len(overview.forced.records)} newest of {overview.forced.total} forced moves: "
            f"`sublet groups history {shlex.quote(str(resolved_subscription))} --limit M` shows more, among all that "
            "happened."
        )


def _make_row(overview: GroupOverview) -> tuple[object, ...]:
    leader = overview.leader.node if overview.leader and overview.has_leader else None
    held_count, streams = overview.statuses.get("held", 0), sum(overview.statuses.values())
    return overview.group.subscription, leader, streams, held_count, _format_lag(overview)


def _list_connected_members(overview: GroupOverview) -> tuple[dict[str, Any], ...] | None:
    """Return all members, which only their leader has; None if there is no leader, or it does not answer."""
    if overview.leader is None or not overview.has_leader:
        return None
    from sublet_borrower.node_client.group_event_watcher import list_connected_members

    return list_connected_members(overview.group.subscription, overview.leader.address, LEADER_S)


def _format_overview(overview: GroupOverview, standby: list[dict[str, Any]] | None) -> list[str]:
    leader, members = overview.leader, overview.members
    led = f"{leader.node} at {leader.address}, term {leader.term}" if leader and overview.has_leader else "none"
    if leader and not overview.has_leader:
        led += f" (last was {leader.node}, term {leader.term})"
    lines = [
        f"group    {overview.group.subscription} (id {overview.group.group_id}), {_format_state(overview)}",
        f"leader   {led}",
        f"options  {_format_options(overview)}",
        *_format_desired_state(overview.group.desired_state),
        f"lag      {_format_lag(overview)}",
        *_format_lost(overview),
        f"members  {len(members) or 'none'} holding streams{_format_standby(overview, standby)}",
    ]
    for member in members:
        name = f"{member.session} " if member.session else ""
        lines.append(f"  {name}{member.agent}: {len(member.streams)} streams")
    lines += [f"  {_format_member(each)}: stands by" for each in standby or ()]
    for reserved in overview.reserved_sessions:
        remaining = format_seconds(reserved.remaining_s)
        lines.append(f"reserved for {reserved.session}, {remaining} more: {len(reserved.streams)} streams")
    lines += [f"epochs   {_format_epochs(frontier)}" for frontier in overview.epochs]
    for stream in overview.streams:
        if stream.status == "blocked":
            lines.append(f"blocked  stream {stream.stream_id}: {stream.blocked_reason or 'no reason is recorded'}")
        if stream.unreadable_reason is not None:
            duration = format_seconds(stream.unreadable_s)
            lines.append(f"unreadable stream {stream.stream_id}, for {duration}: {stream.unreadable_reason}")
    return [*lines, ""]


def _format_standby(overview: GroupOverview, standby: list[dict[str, Any]] | None) -> str:
    if standby is None:
        return "; who stands by is not known: its leader does not answer" if overview.has_leader else ""
    return f", {len(standby)} standing by" if standby else ""


def _format_member(member: dict[str, Any]) -> str:
    return f"{member['session']} {member['agent']}" if member["session"] else str(member["agent"])


def _format_options(overview: GroupOverview) -> str:
    options = overview.group.options
    waits = f"streams are reserved {options.session_expiry_s:g} s for a named session"
    descriptions = [
        f"starting position {options.starting_position}",
        f"on data loss {options.on_data_loss}",
        f"strategy {options.strategy}",
    ]
    if options.on_poison != "block":
        descriptions.append(f"on poison {options.on_poison}")
    if options.holds_retention:
        descriptions.append("holds retention back")
    if options.atomic:
        descriptions.append("atomic")
    return ", ".join([*descriptions, waits] if options.session_expiry_s else descriptions)


def _format_state(overview: GroupOverview) -> str:
    """Return the group's state for people."""
    from sublet_storage.groups.status.json_views import group_state

    return group_state(overview).replace("_", " ")


def _format_desired_state(desired_state: GroupDesiredState) -> list[str]:
    """Return the lines of the desired state, empty if nothing is set."""
    reason = desired_state.pause_reason
    paused = [] if reason is None else [f"paused   {reason or 'no reason is recorded'}"]
    weights = ", ".join(f"{session} {weight:g}" for session, weight in desired_state.weights)
    return [*paused, *([f"weights  {weights}"] if weights else [])]


def _format_lost(overview: GroupOverview) -> list[str]:
    """Return the line of lost messages, empty if there are none."""
    lost_counts = {
        stream.stream_id: stream.lost_message_count for stream in overview.streams if stream.lost_message_count
    }
    text = f"messages, which are gone or could not be decoded, of streams {format_ranges(lost_counts)}"
    return [f"lost     {sum(lost_counts.values())} {text}"] if lost_counts else []


def _format_epochs(frontier: GroupFrontierRow) -> str:
    consumed, completed = lower_frontier_from_json(frontier.consumed), lower_frontier_from_json(frontier.completed)
    if completed is None:
        return f"space {frontier.space} has none"
    consumed_text = "none" if consumed is None else f"all before {format_frontier(consumed)}"
    return f"space {frontier.space}: {consumed_text} consumed, all before {format_frontier(completed)} completed"


def _format_owner(stream: StreamView) -> str | None:
    if stream.reserved_s is not None:
        return f"(reserved for {stream.session})"
    return stream.session or stream.agent


def _format_lag(overview: GroupOverview) -> str:
    if overview.unknown_lag_count:
        return f"{overview.known_lag} and unknown on {overview.unknown_lag_count} streams"
    return str(overview.known_lag)


_GROUPS = {
    "list": command(list_),
    "describe": command(describe),
    "why": command(why.why),
    "create": command(create_delete.create),
    "delete": command(create_delete.delete),
    "pause": command(control.pause),
    "resume": command(control.resume),
    "weight": command(control.weight),
    "reset": command(reset.reset),
    "export": command(progress_transfer.export),
    "import": command(progress_transfer.import_),
    "clone": command(progress_transfer.clone),
    "history": command(history.history),
    "watch": command(watch.watch),
}
COMMANDS = {"groups": command_group("Groups: who consumes what, and how far behind.", _GROUPS)}
