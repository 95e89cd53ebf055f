"""`sublet migrate`: creates the tables of a database, or brings them up to date."""

from __future__ import annotations

from typing import Annotated

import typer

from sublet.cli.base.command import CliCommandContext, command
from sublet_protocol.domain.errors import UsageError


def migrate(
    cli: CliCommandContext,
    to: Annotated[
        str | None, typer.Option("--to", metavar="VERSION", help="To this version of the schema. Default: the newest.")
    ] = None,
    back: Annotated[
        bool,
        typer.Option(
            "--downgrade", help="Go back to an older one, given by --to, with the newer release's program: nodes first."
        ),
    ] = False,
    roles: Annotated[
        bool,
        typer.Option("--roles", help="Create the roles of database users too, and grant them their rights."),
    ] = False,
) -> None:
    """Create a database's tables, or bring them up to date.

    An embedded database does that by itself. Nothing is lost, and running it again changes nothing. Programs may be at
    work meanwhile, unless it refuses: migrate first, then replace them one by one (docs/deploy.md).

    Example:

    \b
      sublet migrate --database-url postgresql://me@db/app
      sublet migrate --roles
      sublet migrate --to 0101 --downgrade
    """
    if back and to is None:
        raise UsageError("--downgrade: it has to be said how far. Give the version, --to VERSION.")
    old_version, new_version, schema = bring_up_to_date(cli, to, back, roles)
    if cli.json:
        cli.print_json({"schema": schema, "from": old_version, "to": new_version})
    elif old_version == new_version:
        cli.print_info(f"The schema {schema} is at version {new_version} already.")
    else:
        cli.print_info(f"The schema {schema} is at version {new_version} (before: {old_version or 'no tables'}).")


def bring_up_to_date(
    cli: CliCommandContext, to: str | None = None, back: bool = False, roles: bool = False
) -> tuple[str | None, str | None, str]:
    """Return (version before, version now, schema). A given database is not checked first: it may be empty."""
    from sublet_storage.bootstrap.migrate import current_version, downgrade, make_roles
    from sublet_storage.bootstrap.migrate import migrate as upgrade
    from sublet_storage.db.connect import resolve_schema_name
    from sublet_storage.db.database_url import resolve_database_url

    def change(url: str) -> tuple[str | None, str | None, str]:
        old_version = current_version(url)
        (downgrade if back else upgrade)(url, to=to)
        if roles:
            make_roles(url)
        return old_version, current_version(url), resolve_schema_name()

    configured_url = cli.database_url if cli.data_dir is not None else resolve_database_url(cli.database_url)
    if configured_url and cli.data_dir is None:
        return change(configured_url)
    with cli.open_database(migrate_embedded=False) as database:
        return change(database.url)


COMMANDS = {"migrate": command(migrate)}
