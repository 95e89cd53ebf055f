"""`sublet spaces create`, `list` and `reshard`, and the command table of `sublet spaces`."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext, command, command_group
from sublet.cli.spaces import alter, drop
from sublet.cli.spaces.apply_change import (
    Name,
    StoredCompression,
    apply_change,
    format_payload_location,
    print_space,
    space_to_json,
)
from sublet.cli.spaces.payload_location_options import PayloadLocation, TierAfter, warn_missing_directory

if TYPE_CHECKING:
    from sublet_storage.spaces.drop_check import RetainedDroppedSpace

Filter = Annotated[str, typer.Argument(metavar="FILTER", help="Which topics: + is one level, # the rest. Quote it.")]
Shards = Annotated[
    str,
    typer.Option(metavar="N", help="How many streams: at most so many consumers of a group can share the work."),
]
Retention = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Keep messages for so long, 7d say. Default: for ever."),
]
Rollover = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="Begin new streams so often: what is kept ends in such steps. Default: a quarter of --retention.",
    ),
]


def create(
    cli: CliCommandContext,
    name: Name,
    filter: Filter,
    shards: Shards = "16",
    retention: Retention = None,
    rollover: Rollover = None,
    compression: Annotated[StoredCompression, typer.Option(help="How messages are stored.")] = StoredCompression.NONE,
    payload_location: PayloadLocation = None,
    tier_after: TierAfter = None,
) -> None:
    """Give the topics that match a filter a space of their own.

    A topic belongs to the most specific space that matches it, the others to the space `default`. Creating the same
    space again changes nothing.

    Example:

    \b
      sublet spaces create orders 'orders/#' --shards 32 --retention 7d --compression zstd
    """
    from sublet_storage.spaces.space_changes import create_space

    create = partial(
        create_space,
        name=name,
        filter=filter,
        shards=text_conversion.parse_int("--shards", shards),
        retention_s=None if retention is None else text_conversion.parse_seconds(retention),
        rollover_s=None if rollover is None else text_conversion.parse_seconds(rollover),
        compression=compression,
        payload_location=payload_location,
        tier_after_s=None if tier_after is None else text_conversion.parse_seconds(tier_after),
    )
    space = apply_change(cli, create)
    text = f"The space {space.name} holds {space.filter} in {space.shards} streams.{format_payload_location(space)}"
    print_space(cli, space, text, warning=warn_missing_directory(cli, space, payload_location))


def list_(cli: CliCommandContext) -> None:
    """List the spaces and what they are set to.

    Behind them, those that were dropped and hold messages still: what is left, and until when.

    Example:

    \b
      sublet spaces list
    """
    from sublet_storage.producer.outbox_mover import read_backlog
    from sublet_storage.spaces.drop_check import list_dropped_spaces
    from sublet_storage.spaces.space_queries import list_spaces

    with cli.open_connection() as connection:
        spaces, outbox, dropped = list_spaces(connection), read_backlog(connection), list_dropped_spaces(connection)
    if outbox.messages:
        messages, oldest_age_s = outbox.messages, outbox.oldest_age_s
        cli.print_info(
            f"{messages} published by SQL wait for a leader node to move them, the oldest for {oldest_age_s:.1f} s."
        )
    if outbox.rejected:
        cli.print_info(
            f"{outbox.rejected} published by SQL could not be moved: see `reason` in the table outbox_rejected."
        )
    if cli.json:
        live = [{**space_to_json(space), "state": "live"} for space in spaces]
        cli.print_json(
            {
                "spaces": live,
                "dropped": [_dropped_to_json(each) for each in dropped],
                "outbox": asdict(outbox),
            }
        )
        return
    rows = [
        (s.name, s.filter, s.shards, *map(text_conversion.format_seconds, (s.retention_s, s.rollover_s)), s.compression,
         s.payload_location, text_conversion.format_seconds(s.tier_after_s))
        for s in spaces
    ]  # fmt: skip
    settings = ("SHARDS>", "RETENTION>", "ROLLOVER>", "COMPRESSION", "PAYLOADS", "TIER-AFTER>")
    cli.print_table(("SPACE", "FILTER", *settings), rows)
    if dropped:
        cli.print_lines([""])
        dropped_rows = [
            (each.space.name, "dropped", each.space.filter, each.messages, _format_until(each)) for each in dropped
        ]
        cli.print_table(("SPACE", "STATE", "FILTER", "MESSAGES>", "UNTIL"), dropped_rows)


def _dropped_to_json(dropped: RetainedDroppedSpace) -> dict[str, Any]:
    fields = {"dropped_at": _format_time(dropped.dropped_at), "messages": dropped.messages}
    return {
        **space_to_json(dropped.space),
        "state": "dropped",
        **fields,
        "until": dropped.retained_until and _format_time(dropped.retained_until),
    }


def _format_until(dropped: RetainedDroppedSpace) -> str:
    return "for ever" if dropped.retained_until is None else _format_time(dropped.retained_until)


def _format_time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def reshard(
    cli: CliCommandContext,
    name: Name,
    shards: Annotated[str, typer.Argument(metavar="SHARDS", help="The new number of streams.")],
) -> None:
    """Give a space another number of streams.

    The old streams are closed and new ones opened; publishers and consumers follow by themselves, and the order of
    each key is kept.

    Example:

    \b
      sublet spaces reshard default 64
    """
    from sublet_storage.spaces.space_changes import reshard as change

    space = apply_change(cli, partial(change, name=name, shards=text_conversion.parse_int("SHARDS", shards)))
    print_space(cli, space, f"The space {space.name} has {space.shards} streams.")


_SPACES = {
    "create": command(create),
    "list": command(list_),
    "alter": command(alter.alter),
    "rollover": command(alter.rollover),
    "reshard": command(reshard),
    "drop": command(drop.drop),
}
COMMANDS = {"spaces": command_group("Spaces: parts of the topic tree with streams of their own.", _SPACES)}
