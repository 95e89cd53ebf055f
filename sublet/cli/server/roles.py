"""`sublet roles`: shows the roles of database users and who is a member, or prints the SQL that makes them."""

from __future__ import annotations

from typing import Annotated

import typer

from sublet.cli.base.command import CliCommandContext, command


def roles(
    cli: CliCommandContext,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the statements that make them and grant their rights.")
    ] = False,
) -> None:
    """Show the roles of database users, and who is a member of which.

    A member of sublet_publish, sublet_append, sublet_consume, sublet_operate or sublet_node may do what it takes to
    publish by SQL, to publish with the library or Spark, to consume, to operate, to run a node; see docs/roles.md.
    What --sql prints is to be read, and run by a superuser of the database. It may be run again.

    Example:

    \b
      sublet roles
      sublet roles --sql > roles.sql
      psql -f roles.sql && psql -c 'grant sublet_consume to reports'
    """
    from sublet_storage.db.connect import resolve_schema_name
    from sublet_storage.db.roles import build_role_statements, list_members

    with cli.open_connection() as connection:
        if sql:
            statements = build_role_statements(connection, resolve_schema_name())
            if cli.json:
                cli.print_json({"statements": statements})
            else:
                cli.write_lines(statements)
            return
        members = list_members(connection)
    if cli.json:
        cli.print_json(
            {"roles": [{"role": role, "exists": users is not None, "members": users or []} for role, users in members]}
        )
    else:
        shown = [(role, "-" if users is None else ", ".join(users) or "nobody") for role, users in members]
        cli.print_table(("ROLE", "MEMBERS"), shown)


COMMANDS = {"roles": command(roles)}
