"""The command `sublet` with all its subcommands."""

from __future__ import annotations

from importlib import import_module
from json import dumps
from typing import Annotated, Any

import typer

from sublet._version import __version__
from sublet.cli.base.command import EXIT_CODES
from sublet.cli.base.lazy_commands import lazy_group_class

_HELP = """Durable shared subscriptions for Spark, on nothing but Postgres.

Begin with a leader, some messages and a consumer; without a database given, they share an embedded Postgres in
./.sublet:

\b
  sublet leader &
  seq 1000 | sublet publish orders/eu
  sublet consume '$share/billing/orders/#' --from earliest
  sublet groups describe '$share/billing/orders/#'

`sublet COMMAND --help` says more of each.
"""

_MODULES = {
    "leader": "server.leader",
    "migrate": "server.migrate",
    "publish": "messages.publish",
    "consume": "messages.consume",
    "tail": "messages.tail",
    "roles": "server.roles",
    "doctor": "server.doctor",
    "demo": "server.demo",
    "groups": "groups.describe",
    "spaces": "spaces.spaces",
    "nodes": "nodes.list_nodes",
    "access": "access.rules",
}
"""The module of each command; it is loaded when the command is used."""


def _load_command(name: str) -> Any:
    return import_module(f"sublet.cli.{_MODULES[name]}").COMMANDS[name](name)


app = typer.Typer(
    cls=lazy_group_class(dict.fromkeys(_MODULES, _load_command)),
    help=_HELP,
    epilog=EXIT_CODES,
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _handle_options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and end.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Show it in JSON; of a command it is an option behind it.")
    ] = False,
) -> None:
    """Handle the options before the command; the text of the help is `_HELP`."""
    if version:
        typer.echo(dumps({"version": __version__}) if json else f"sublet {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command.")
    if json:
        context.fail(f"--json belongs behind the command: sublet {context.invoked_subcommand} ... --json")
