"""`sublet spaces`: parts of the topic tree with their own shards, retention and rollover."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from sublet.cli import space_alter, space_drop, values
from sublet.cli.command import Cli, group, made
from sublet.cli.space_change import Compression, Name, answer, as_json, changed, outside
from sublet.cli.space_payloads import Payloads, TierAfter

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
    cli: Cli,
    name: Name,
    filter: Filter,
    shards: Shards = "16",
    retention: Retention = None,
    rollover: Rollover = None,
    compression: Annotated[Compression, typer.Option(help="How messages are stored.")] = Compression.NONE,
    payloads: Payloads = None,
    tier_after: TierAfter = None,
) -> None:
    """Give the topics that match a filter a space of their own.

    A topic belongs to the most specific space that matches it, the others to the space `default`. Creating the same
    space again changes nothing.

    Example:

    \b
      sublet spaces create orders 'orders/#' --shards 32 --retention 7d --compression zstd
    """
    from storage.spaces import create_space

    create = partial(
        create_space,
        name=name,
        filter=filter,
        shards=values.whole("--shards", shards),
        retention_s=None if retention is None else values.seconds(retention),
        rollover_s=None if rollover is None else values.seconds(rollover),
        compression=compression,
        payloads=payloads,
        tier_after_s=None if tier_after is None else values.seconds(tier_after),
    )
    space = changed(cli, create)
    answer(cli, space, f"The space {space.name} holds {space.filter} in {space.shards} streams.{outside(space)}")


def list_(cli: Cli) -> None:
    """List the spaces and what they are set to.

    Example:

    \b
      sublet spaces list
    """
    from storage.catalogue import list_spaces
    from storage.outbox import waiting

    with cli.connection() as connection:
        spaces, outbox = list_spaces(connection), waiting(connection)
    if outbox.messages:
        messages, oldest_s = outbox.messages, outbox.oldest_s
        cli.say(f"{messages} published by SQL wait for a leader node to move them, the oldest for {oldest_s:.1f} s.")
    if outbox.refused:
        cli.say(f"{outbox.refused} published by SQL could not be moved: see `reason` in the table outbox_refused.")
    if cli.json:
        cli.emit({"spaces": [as_json(space) for space in spaces], "outbox": asdict(outbox)})
        return
    rows = [
        (s.name, s.filter, s.shards, _duration(s.retention_s), _duration(s.rollover_s), s.compression, s.payloads)
        for s in spaces
    ]
    cli.table(("SPACE", "FILTER", "SHARDS>", "RETENTION>", "ROLLOVER>", "COMPRESSION", "PAYLOADS"), rows)


def reshard(
    cli: Cli, name: Name, shards: Annotated[str, typer.Argument(metavar="SHARDS", help="The new number of streams.")]
) -> None:
    """Give a space another number of streams.

    The old streams are closed and new ones opened; publishers and consumers follow by themselves, and the order of
    each key is kept.

    Example:

    \b
      sublet spaces reshard default 64
    """
    from storage.spaces import reshard as change

    space = changed(cli, partial(change, name=name, shards=values.whole("SHARDS", shards)))
    answer(cli, space, f"The space {space.name} has {space.shards} streams.")


def _duration(seconds: int | None) -> str | None:
    return None if seconds is None else f"{seconds} s"


_SPACES = {
    "create": made(create),
    "list": made(list_),
    "alter": made(space_alter.alter),
    "retention": made(space_alter.retention),
    "rollover": made(space_alter.rollover),
    "reshard": made(reshard),
    "drop": made(space_drop.drop),
}
COMMANDS = {"spaces": group("Spaces: parts of the topic tree with streams of their own.", _SPACES)}
