"""`sublet spaces alter` and `rollover`: changes to an existing space."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext
from sublet.cli.spaces import payload_location_options as location_options
from sublet.cli.spaces.apply_change import (
    Name,
    StoredCompression,
    apply_change,
    format_payload_location,
    format_retention,
    print_space,
)
from sublet.cli.spaces.payload_location_options import (
    NoPayloadLocation,
    NoTierAfter,
    PayloadLocation,
    Restore,
    TierAfter,
)
from sublet_protocol.domain.errors import UsageError

if TYPE_CHECKING:
    import psycopg

    from sublet_storage.spaces.routing import Space

NONE = "none"


def alter(
    cli: CliCommandContext,
    name: Name,
    retention: Annotated[
        str | None, typer.Option(metavar="DURATION|none", help="Keep messages for so long; none: for ever.")
    ] = None,
    rollover: Annotated[
        str | None,
        typer.Option(metavar="DURATION|none", help="Begin new streams so often; none: a quarter of the retention."),
    ] = None,
    compression: Annotated[StoredCompression | None, typer.Option(help="How messages are stored from now on.")] = None,
    filter: Annotated[
        str | None, typer.Option(metavar="FILTER", help="Which topics it has from now on, in new streams. Quote it.")
    ] = None,
    payload_location: PayloadLocation = None,
    no_payload_location: NoPayloadLocation = False,
    restore: Restore = False,
    tier_after: TierAfter = None,
    no_tier_after: NoTierAfter = False,
) -> None:
    """Change settings of a space.

    What is not given stays, and messages that are stored stay where they are. Retention takes whole generations of
    streams, one each `rollover`; a shorter one takes what is older with the next look of a node. Another number of
    streams: `sublet spaces reshard`.

    Examples:

    \b
      sublet spaces alter orders --retention 14d --compression zstd
      sublet spaces alter orders --rollover none
      sublet spaces alter orders --payload-location file:///mnt/shared/sublet --tier-after 1d
      sublet spaces alter orders --no-payload-location --restore-payloads
    """
    from sublet_storage.spaces.space_changes import alter_space

    changes: dict[str, Any] = {
        **({} if retention is None else {"retention_s": _parse_seconds(retention)}),
        **({} if rollover is None else {"rollover_s": _parse_seconds(rollover)}),
        **({} if compression is None else {"compression": compression.value}),
        **({} if filter is None else {"filter": filter}),
        **location_options.payload_changes(payload_location, no_payload_location, restore, tier_after, no_tier_after),
    }
    if not changes:
        raise UsageError(
            f"space {name!r}: nothing to change. Give --retention, --rollover, --compression, --filter, "
            "--payload-location or "
            "--no-payload-location (with --restore-payloads), --tier-after or --no-tier-after; for another number "
            "of streams there is "
            "`sublet spaces reshard`."
        )
    space = apply_change(cli, partial(alter_space, name=name, **changes))
    if restore:
        location_options.restore_all(cli, space.space_id)
    text = (
        f"The space {space.name} holds {space.filter}, kept {format_retention(space)}, with compression "
        f"{space.compression}."
    )
    print_space(
        cli,
        space,
        text + format_payload_location(space),
        warning=location_options.warn_missing_directory(cli, space, payload_location),
    )


def rollover(cli: CliCommandContext, name: Name) -> None:
    """Begin new streams in a space, now.

    The old ones are closed. Publishers and consumers follow by themselves, and the order of each key is kept. With
    a retention nodes do it by themselves; do it yourself so that what is stored by now can end before what comes.

    Example:

    \b
      sublet spaces rollover orders
    """
    from sublet_storage.spaces.space_changes import rollover as roll
    from sublet_storage.spaces.space_queries import find_space

    rolled: list[int] = []

    def change(connection: psycopg.Connection[Any]) -> Space:
        rolled.append(roll(connection, name))
        return find_space(connection, name)

    space = apply_change(cli, change)
    text = f"The space {space.name} has {space.shards} new streams, of generation {rolled[0]}."
    print_space(cli, space, text, generation_id=rolled[0])


def _parse_seconds(text: str) -> int | None:
    return None if text == NONE else text_conversion.parse_seconds(text)
