"""All commands together."""

from __future__ import annotations

from typing import Annotated

import typer

from sublet._version import __version__
from sublet.cli import consume, demo, groups, leader, publish, spaces, tail
from sublet.cli.command import EXIT_CODES

_HELP = """Durable shared subscriptions for Spark, on nothing but Postgres.

Begin with a leader, some messages and a consumer; without a database given, they share an embedded Postgres in
./.sublet:

\b
  sublet leader &
  seq 1000 | sublet publish orders/eu
  sublet consume '$share/billing/orders/#' --start earliest
  sublet groups describe '$share/billing/orders/#'

`sublet COMMAND --help` says more of each.
"""

app = typer.Typer(
    help=_HELP,
    epilog=EXIT_CODES,
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and end.", callback=lambda wanted: _show_version(wanted), is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the command; the text of the help is `_HELP`."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sublet {__version__}")
        raise typer.Exit


for module in (leader, publish, consume, tail, groups, spaces, demo):
    module.add_to(app)
