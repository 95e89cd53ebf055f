"""`sublet groups history`: what happened to a group's streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base import values
from sublet.cli.base.command import Cli
from sublet.cli.base.values import GroupName
from sublet.cli.groups.names import named
from sublet_protocol.domain.subscriptions import Subscription

if TYPE_CHECKING:
    import psycopg

    from sublet_storage.groups.model.history import Then
    from sublet_storage.groups.model.records import Group, HistoryRecord


def history(
    cli: Cli,
    subscription: GroupName,
    stream: Annotated[str | None, typer.Option(metavar="N", help="Of this stream only.")] = None,
    limit: Annotated[str, typer.Option(metavar="N", help="The newest so many lines; more are told of.")] = "50",
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Who had each stream then, with its time zone: 2026-01-31T12:00:00Z."),
    ] = None,
) -> None:
    """Show what happened to a group's streams, and why.

    A line each for who led, who got which stream, who had to give it back, and how that ended. The newest is the last.
    Where a stream was taken by force, TWICE is the range of offsets that may have been seen twice: in [from, to), to is
    the first offset that is not in doubt. With --at it is shown who had each stream at that time, and who led.

    Examples:

    \b
      sublet groups history '$share/billing/orders/#'
      sublet groups history '$share/billing/orders/#' --stream 3 --limit 10 --json
      sublet groups history '$share/billing/orders/#' --stream 3 --at 2026-01-31T12:00:00Z
    """
    from sublet_storage.groups.coordinator import lifecycle
    from sublet_storage.groups.model.history import read_history, read_then
    from sublet_storage.groups.status.json_views import history_line

    wanted = named(cli, subscription)
    stream_id = None if stream is None else values.whole("--stream", stream)
    most = values.whole("--limit", limit, least=1)
    then_us = None if at is None else round(values.moment("--at", at).timestamp() * 1_000_000)
    with cli.connection() as connection:
        group = lifecycle.live(connection, wanted)
        if stream_id is not None and not read_history(connection, group.group_id, stream_id, 1).total:
            _check_there(connection, wanted, stream_id)
        if then_us is not None:
            _show_then(cli, group, then_us, read_then(connection, group.group_id, then_us, stream_id))
            return
        found = read_history(connection, group.group_id, stream_id, most)
    if cli.json:
        told = {"subscription": str(wanted), "group_id": group.group_id}
        cli.emit({**told, "history": [history_line(line) for line in found.lines], "total": found.total})
        return
    if not found.lines:
        cli.say("Nothing has happened to it that is still known.")
        return
    cli.table(
        ("AT", "EVENT", "STREAM>", "POSITION>", "TWICE", "OWNER", "REASON"),
        [
            (
                values.utc(line.at_us),
                line.event,
                line.stream_id or None,
                line.position if line.stream_id else None,
                _twice(line),
                line.session or line.agent,
                line.reason,
            )
            for line in found.lines
        ],
    )
    if found.cut:
        cli.say(f"{len(found.lines)} newest of {found.total} lines: --limit {found.total} shows more.")


def _check_there(connection: psycopg.Connection[Any], wanted: Subscription, stream_id: int) -> None:
    """A stream may be there that nothing has happened to yet."""
    from sublet_storage.groups.model.group_errors import no_such_stream
    from sublet_storage.groups.status.overview import describe

    if stream_id not in (line.stream_id for line in describe(connection, wanted).streams):
        raise no_such_stream(wanted, stream_id)


def _show_then(cli: Cli, group: Group, then_us: int, then: Then) -> None:
    """Who had what, and since or until which line of history."""
    from sublet_storage.groups.model.history import owned
    from sublet_storage.groups.status.json_views import history_line

    if cli.json:
        told = {"subscription": str(group.subscription), "group_id": group.group_id, "at": values.utc(then_us)}
        streams = [{**history_line(line), "owned": owned(line)} for line in then.streams]
        cli.emit({**told, "leader": None if then.leader is None else history_line(then.leader), "streams": streams})
        return
    cli.say(f"At {values.utc(then_us)}: {then.leader.reason if then.leader else 'no leader is known of that time'}.")
    if not then.streams:
        cli.say("Nothing is known of its streams: none had been lent yet, or history of that time was forgotten since.")
        return
    cli.table(
        ("STREAM>", "OWNER", "GRANT>", "POSITION>", "BY", "AT", "REASON"),
        [
            (
                line.stream_id,
                (line.session or line.agent) if owned(line) else None,
                line.grant_id if owned(line) else None,
                line.position,
                line.event,
                values.utc(line.at_us),
                line.reason,
            )
            for line in then.streams
        ],
    )


def _twice(line: HistoryRecord) -> str | None:
    if line.until is None:
        return None
    return f"[{line.position}, {line.until})" if line.until > line.position else "nothing"
