"""`sublet groups history`: the past events of a group's streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext
from sublet.cli.base.text_conversion import GroupName
from sublet.cli.groups.names import resolve_subscription
from sublet_protocol.domain.subscriptions import Subscription

if TYPE_CHECKING:
    import psycopg

    from sublet_storage.groups.coordinator.history_queries import HistoricalGroupState
    from sublet_storage.groups.model.records import Group, HistoryRecord


def history(
    cli: CliCommandContext,
    subscription: GroupName,
    stream: Annotated[str | None, typer.Option(metavar="N", help="Of this stream only.")] = None,
    limit: Annotated[str, typer.Option(metavar="N", help="At most this many lines, the newest.")] = "50",
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
    from sublet_storage.groups.coordinator import group_lifecycle
    from sublet_storage.groups.coordinator.history_queries import read_group_at, read_history
    from sublet_storage.groups.status.json_views import history_to_json

    resolved_subscription = resolve_subscription(cli, subscription)
    stream_id = None if stream is None else text_conversion.parse_int("--stream", stream)
    max_records = text_conversion.parse_int("--limit", limit, minimum=1)
    at_us = None if at is None else round(text_conversion.parse_time("--at", at).timestamp() * 1_000_000)
    with cli.open_connection() as connection:
        group = group_lifecycle.get_live(connection, resolved_subscription)
        if stream_id is not None and not read_history(connection, group.group_id, stream_id, 1).total:
            _check_there(connection, resolved_subscription, stream_id)
        if at_us is not None:
            _show_then(cli, group, at_us, read_group_at(connection, group.group_id, at_us, stream_id))
            return
        page = read_history(connection, group.group_id, stream_id, max_records)
    if cli.json:
        summary = {"subscription": str(resolved_subscription), "group_id": group.group_id}
        cli.print_json(
            {
                **summary,
                "history": [history_to_json(record) for record in page.records],
                "total": page.total,
            }
        )
        return
    if not page.records:
        cli.print_info("Nothing has happened to it that is still known.")
        return
    cli.print_table(
        ("AT", "EVENT", "STREAM>", "POSITION>", "TWICE", "OWNER", "REASON"),
        [
            (
                text_conversion.format_utc(record.at_us),
                record.event,
                record.stream_id or None,
                record.position if record.stream_id else None,
                _format_redelivery(record),
                record.session or record.agent,
                record.reason,
            )
            for record in page.records
        ],
    )
    if page.is_truncated:
        cli.print_info(f"{len(page.records)} newest of {page.total} lines: --limit {page.total} shows more.")


def _check_there(connection: psycopg.Connection[Any], subscription: Subscription, stream_id: int) -> None:
    """Raise `NotFound` unless the group has the stream, which may exist without a history."""
    from sublet_storage.groups.model.group_errors import stream_not_found_error
    from sublet_storage.groups.status.overview import describe_group

    if stream_id not in (stream.stream_id for stream in describe_group(connection, subscription).streams):
        raise stream_not_found_error(subscription, stream_id)


def _show_then(cli: CliCommandContext, group: Group, at_us: int, snapshot: HistoricalGroupState) -> None:
    """Print each stream's owner at that time, with its history record, and the leader."""
    from sublet_storage.groups.coordinator.history_queries import has_owner
    from sublet_storage.groups.status.json_views import history_to_json

    if cli.json:
        summary = {
            "subscription": str(group.subscription),
            "group_id": group.group_id,
            "at": text_conversion.format_utc(at_us),
        }
        streams = [{**history_to_json(record), "owned": has_owner(record)} for record in snapshot.streams]
        cli.print_json(
            {
                **summary,
                "leader": None if snapshot.leader is None else history_to_json(snapshot.leader),
                "streams": streams,
            }
        )
        return
    cli.print_info(
        f"At {text_conversion.format_utc(at_us)}: "
        f"{snapshot.leader.reason if snapshot.leader else 'no leader is known of that time'}."
    )
    if not snapshot.streams:
        cli.print_info(
            "Nothing is known of its streams: none had been granted yet, or history of that time was forgotten since."
        )
        return
    cli.print_table(
        ("STREAM>", "OWNER", "GRANT>", "POSITION>", "BY", "AT", "REASON"),
        [
            (
                record.stream_id,
                (record.session or record.agent) if has_owner(record) else None,
                record.grant_id if has_owner(record) else None,
                record.position,
                record.event,
                text_conversion.format_utc(record.at_us),
                record.reason,
            )
            for record in snapshot.streams
        ],
    )


def _format_redelivery(record: HistoryRecord) -> str | None:
    if record.redelivery_end is None:
        return None
    return f"[{record.position}, {record.redelivery_end})" if record.redelivery_end > record.position else "nothing"
