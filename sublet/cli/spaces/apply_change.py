"""Changes a space, notifies nodes, and prints the result, for the commands that do so."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base.command import CliCommandContext

if TYPE_CHECKING:
    import psycopg

    from sublet_storage.spaces.routing import Space


class StoredCompression(StrEnum):
    """The compression of stored messages."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


Name = Annotated[str, typer.Argument(metavar="NAME", help="The space's name, such as orders.")]


def apply_change(cli: CliCommandContext, change: Callable[[psycopg.Connection[Any]], Space]) -> Space:
    """Apply the change, and notify the leader nodes; those that miss the notification poll."""
    from sublet_storage.db.connect import connect
    from sublet_storage.notify import catch_up_reads
    from sublet_storage.notify.publisher import publish_once

    with cli.open_database() as database, connect(database.url, application_name="sublet cli") as connection:
        space = change(connection)
        publish_once(database.url, catch_up_reads.read_spaces(connection))
    return space


def print_space(cli: CliCommandContext, space: Space, text: str, **more: Any) -> None:
    """Print the space, with the fields of `more`."""
    if cli.json:
        cli.print_json({**space_to_json(space), **more})
    else:
        cli.print_info(text)


def format_retention(space: Space) -> str:
    """Return the retention of a space as text."""
    return "for ever" if space.retention_s is None else f"for {space.retention_s} s"


def format_payload_location(space: Space) -> str:
    """Return the sentence about a space's payload location, empty if it has none."""
    if space.payload_location is None:
        return ""
    older = "" if space.tier_after_s is None else f", and what is older than {space.tier_after_s} s of open ones"
    return f" Payloads of closed streams{older} go to {space.payload_location}."


def space_to_json(space: Space) -> dict[str, Any]:
    """Return a space as commands show it."""
    return {
        "space_id": space.space_id,
        "name": space.name,
        "filter": space.filter.text,
        "shards": space.shards,
        "retention_s": space.retention_s,
        "rollover_s": space.rollover_s,
        "compression": space.compression,
        "payload_location": space.payload_location,
        "tier_after_s": space.tier_after_s,
    }
