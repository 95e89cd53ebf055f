"""`sublet groups`: what the database knows of groups. Of a leader nothing is asked but who stands by."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sublet.cli.base.command import Cli, group, made
from sublet.cli.base.values import GroupName, ranges, utc
from sublet.cli.groups import clone, control, history, lifecycle, reset, watch, why
from sublet.cli.groups.names import named
from sublet_protocol.domain.epochs import lower_of_json, shown

if TYPE_CHECKING:
    from sublet_storage.groups.model.desired_state import Orders
    from sublet_storage.groups.status.overview import EpochsLine, Overview, StreamLine


LEADER_S: Final = 2.0
"""How long a group's leader is waited for."""


def list_(cli: Cli) -> None:
    """List the groups: their leaders, streams and lag.

    Example:

    \b
      sublet groups list
    """
    from sublet_storage.groups.status import json_views
    from sublet_storage.groups.status.overview import list_groups

    with cli.connection() as connection:
        found = list_groups(connection)
    if cli.json:
        cli.emit({"groups": [json_views.summary(overview) for overview in found]})
        return
    rows = ((*_row(overview), json_views.state(overview)) for overview in found)
    cli.table(("GROUP", "LEADER", "STREAMS>", "HELD>", "LAG>", "STATE"), rows)
    if not found:
        cli.say("There are no groups yet: a $share group comes with its first consumer, or by `sublet groups create`.")


def describe(
    cli: Cli,
    subscription: GroupName,
    all_: Annotated[bool, typer.Option("--all", help="Finished streams as well; --json always has them.")] = False,
) -> None:
    """Show a group: its leader, members, streams and lag.

    Each stream is shown with its owner and position. Lag counts messages between the group's position and the stream's
    end, other topics' included. It is unknown, shown as ?, where a stream is blocked or its messages are gone. What
    retention took of the group's, and what it skipped as it could not be decoded, is counted as lost. Members that hold
    no stream stand by; only their leader knows them, and is asked. A blocked stream is lent to nobody, for the reason
    shown: see docs/guarantees.md. One is stuck while its owner cannot read what comes next, for the reason shown. A
    free stream may be kept for the return of a named session that has left. Finished streams, which have nothing more
    for the group, are counted, and shown with --all.
    Where a stream was taken from its owner by force within the last day, the offsets are shown that may have been seen
    twice; of many such moves the 20 newest are shown, and their number is told.

    Examples:

    \b
      sublet groups describe '$share/billing/orders/#'
      sublet groups describe '$share/billing/orders/#' --all
    """
    from sublet_storage.groups.model.records import LendingStatus
    from sublet_storage.groups.status import json_views
    from sublet_storage.groups.status.overview import describe as look

    wanted = named(cli, subscription)
    with cli.connection() as connection:
        overview = look(connection, wanted)
    connected = _connected(overview)
    if cli.json:
        cli.emit(json_views.details(overview, connected))
        return
    cli.tell(_prose(overview, json_views.standby(overview, connected)))
    cli.table(
        ("STREAM>", "SPACE", "STATUS", "POSITION>", "HEAD>", "LAG>", "AGE>", "END", "OWNER"),
        [
            (
                line.stream_id,
                line.space,
                line.status,
                line.position,
                line.head,
                "?" if line.lag is None else line.lag,
                _seconds(line.age_s),
                line.head_state,
                _owner(line),
            )
            for line in overview.streams
            if all_ or line.status != LendingStatus.FINISHED
        ],
    )
    finished = 0 if all_ else overview.statuses.get(LendingStatus.FINISHED, 0)
    if finished:
        cli.say(f"Finished streams, which have nothing more for the group, left out: {finished}. --all shows them.")
    if overview.forced.lines:
        cli.write(["", "Moves by force within the last day, and the offsets that may have been seen twice:", ""])
        cli.table(
            ("AT", "STREAM>", "FROM>", "UNTIL>", "OWNER", "REASON"),
            [
                (utc(line.at_us), line.stream_id, line.position, line.until, line.session or line.agent, line.reason)
                for line in overview.forced.lines
            ],
        )
    if overview.forced.cut:
        cli.say(
            f"{len(overview.forced.lines)} newest of {overview.forced.total} forced moves: "
            f"`sublet groups history {shlex.quote(str(wanted))} --limit M` shows more, among all that happened."
        )


def _row(overview: Overview) -> tuple[object, ...]:
    leader = overview.leader.node if overview.leader and overview.led else None
    held, streams = overview.statuses.get("held", 0), sum(overview.statuses.values())
    return overview.group.subscription, leader, streams, held, _lag(overview)


def _connected(overview: Overview) -> tuple[dict[str, Any], ...] | None:
    """All members, of whom only their leader knows; None: there is none, or it does not say so."""
    if overview.leader is None or not overview.led:
        return None
    from sublet_borrower.remote.group_watcher import connected

    return connected(overview.group.subscription, overview.leader.address, LEADER_S)


def _prose(overview: Overview, standby: list[dict[str, Any]] | None) -> list[str]:
    from sublet_storage.groups.status import json_views

    leader, members = overview.leader, overview.members
    led = f"{leader.node} at {leader.address}, term {leader.term}" if leader and overview.led else "none"
    if leader and not overview.led:
        led += f" (last was {leader.node}, term {leader.term})"
    lines = [
        f"group    {overview.group.subscription} (id {overview.group.group_id}), {json_views.state(overview)}",
        f"leader   {led}",
        f"options  {_options(overview)}",
        *_orders(overview.group.orders),
        f"lag      {_lag(overview)}",
        *_lost(overview),
        f"members  {len(members) or 'none'} holding streams{_standing_by(overview, standby)}",
    ]
    for member in members:
        name = f"{member.session} " if member.session else ""
        lines.append(f"  {name}{member.agent}: {len(member.streams)} streams")
    lines += [f"  {_named(each)}: stands by" for each in standby or ()]
    for kept in overview.kept:
        lines.append(f"kept     for {kept.session}, {_seconds(kept.seconds_left)} more: {len(kept.streams)} streams")
    lines += [f"epochs   {_epochs(line)}" for line in overview.epochs]
    for line in overview.streams:
        if line.status == "blocked":
            lines.append(f"blocked  stream {line.stream_id}: {line.blocked_because or 'no reason is recorded'}")
        if line.unreadable_because is not None:
            lines.append(
                f"stuck    stream {line.stream_id}, for {_seconds(line.unreadable_s)}: {line.unreadable_because}"
            )
    return [*lines, ""]


def _standing_by(overview: Overview, standby: list[dict[str, Any]] | None) -> str:
    if standby is None:
        return "; who stands by is not known: its leader does not answer" if overview.led else ""
    return f", {len(standby)} standing by" if standby else ""


def _named(member: dict[str, Any]) -> str:
    return f"{member['session']} {member['agent']}" if member["session"] else str(member["agent"])


def _options(overview: Overview) -> str:
    options = overview.group.options
    waits = f"streams are kept {options.session_expiry_s:g} s for a named session"
    told = [f"start {options.start}", f"when gone {options.when_gone}", f"strategy {options.strategy}"]
    if options.on_poison != "block":
        told.append(f"on poison {options.on_poison}")
    if options.holds_retention:
        told.append("holds retention back")
    if options.atomic:
        told.append("atomic")
    return ", ".join([*told, waits] if options.session_expiry_s else told)


def _orders(orders: Orders) -> list[str]:
    """What is ordered, if anything is."""
    paused = [] if orders.paused is None else [f"paused   {orders.paused or 'no reason is recorded'}"]
    weights = ", ".join(f"{session} {weight:g}" for session, weight in orders.weights)
    return [*paused, *([f"weights  {weights}"] if weights else [])]


def _lost(overview: Overview) -> list[str]:
    """What it has not been given and will not be, if anything is."""
    lost = {line.stream_id: line.lost_messages for line in overview.streams if line.lost_messages}
    of = f"messages, which are gone or could not be decoded, of streams {ranges(lost)}"
    return [f"lost     {sum(lost.values())} {of}"] if lost else []


def _epochs(line: EpochsLine) -> str:
    consumed, completed = lower_of_json(line.consumed), lower_of_json(line.completed)
    if completed is None:
        return f"space {line.space} has none"
    before = "none" if consumed is None else f"all before {shown(consumed)}"
    return f"space {line.space}: {before} consumed, all before {shown(completed)} completed"


def _owner(line: StreamLine) -> str | None:
    if line.kept_s is not None:
        return f"(kept for {line.session})"
    return line.session or line.agent


def _lag(overview: Overview) -> str:
    if overview.unknown:
        return f"{overview.known_lag} and unknown on {overview.unknown} streams"
    return str(overview.known_lag)


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.0f} s"


_GROUPS = {
    "list": made(list_),
    "describe": made(describe),
    "why": made(why.why),
    "create": made(lifecycle.create),
    "delete": made(lifecycle.delete),
    "pause": made(control.pause),
    "resume": made(control.resume),
    "weight": made(control.weight),
    "reset": made(reset.reset),
    "export": made(clone.export),
    "import": made(clone.import_),
    "clone": made(clone.clone),
    "history": made(history.history),
    "watch": made(watch.watch),
}
COMMANDS = {"groups": group("Groups: who consumes what, and how far behind.", _GROUPS)}
