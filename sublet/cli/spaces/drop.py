"""`sublet spaces drop`: drops a space and its messages, also remote payloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from sublet.cli.base.command import CliCommandContext
from sublet.cli.spaces.apply_change import Name
from sublet_protocol.domain.errors import Conflict, UsageError

if TYPE_CHECKING:
    from sublet_storage.spaces.drop_check import SpaceDropImpact
    from sublet_storage.spaces.routing import Space


def drop(
    cli: CliCommandContext,
    name: Name,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be lost, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Lose nothing: what it holds is consumed, and stays until its retention takes it. Refused where the "
            "space has no retention.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also while it holds messages, which are lost, or groups or producers use it."),
    ] = False,
) -> None:
    """Drop a space, with all that it holds or --keep it for its groups.

    Its topics go on in the next less specific space, `default` at last, in new streams: groups follow by themselves,
    and publishers that are not bound to this space; those that are (space=...), with epochs say, are refused from then
    on. With --keep nothing is lost.

    Otherwise what it held ends as by retention, at once: a group that had not consumed it all, be it by one message,
    loses the rest, counted where it was created with --on-data-loss skip. Else its streams are blocked until they are
    reset, and the new streams that follow them wait. Leader nodes delete the tables, and their payloads
    outside of Postgres after the usual grace. --dry-run and the question say which group loses how much.

    Examples:

    \b
      sublet spaces drop orders --keep
      sublet spaces drop orders --force --dry-run
    """
    from sublet_storage.db.connect import connect
    from sublet_storage.notify import catch_up_reads
    from sublet_storage.notify.publisher import publish_once
    from sublet_storage.spaces.drop_check import check_unused, read_usage
    from sublet_storage.spaces.space_changes import check_droppable, drop_space, find_fallback_spaces
    from sublet_storage.spaces.space_queries import find_space_in, list_spaces

    with cli.open_database() as database, connect(database.url, application_name="sublet cli") as connection:
        check_droppable(name)
        spaces = list_spaces(connection)
        space = find_space_in(name, spaces)
        usage, fallback_spaces = read_usage(connection, space), find_fallback_spaces(spaces, space)
        if keep:
            _check_keep(space, force)
        elif not (force or dry_run):
            check_unused(connection, space)
        lines = [
            f"The space {name}: {line}." for line in (*usage.describe(), *([] if keep else usage.describe_losses()))
        ]
        if not (dry_run or yes):
            question = f"Drop the space {name} {'and keep' if keep else 'with'} {usage.messages} messages?"
            cli.confirm("\n".join([*lines, question]), "Nothing was dropped.")
        elif lines and not cli.json:
            cli.print_info("\n".join(lines))
        if not dry_run:
            check = None if force or keep else check_unused
            drop_space(connection, name, check, purge=not keep, space_id=space.space_id)
            publish_once(database.url, catch_up_reads.read_spaces(connection))
    _answer(cli, space, usage, fallback_spaces, dry_run, force, keep)


def _check_keep(space: Space, force: bool) -> None:
    if force:
        raise UsageError("--keep and --force: the one loses nothing, the other all. Leave one of them out.")
    if space.retention_s is None:
        raise Conflict(
            f"space {space.name!r} has no retention: what it holds would stay for ever. Give it one first, such as "
            f"`sublet spaces alter {space.name} --retention 7d`, within which its groups consume it."
        )


def _answer(
    cli: CliCommandContext,
    space: Space,
    usage: SpaceDropImpact,
    fallback_spaces: list[Space],
    dry_run: bool,
    force: bool,
    keep: bool,
) -> None:
    names = [fallback.name for fallback in fallback_spaces]
    if cli.json:
        summary: dict[str, Any] = {
            "space_id": space.space_id,
            "name": space.name,
            "dropped": not dry_run,
            "retained": keep,
        }
        cli.print_json({**summary, **msgspec.to_builtins(usage), "fallback_spaces": names})
        return
    if dry_run and not (force or keep) and usage.describe():
        cli.print_info(
            f"It would be refused: {space.name} is in use. With --keep nothing is lost; --force ends what it holds."
        )
        return
    would = "would be" if dry_run else "is"
    cli.print_info(
        f"The space {space.name} {would} dropped. Its topics {'would ' * dry_run}go on in {', '.join(names)}."
    )
