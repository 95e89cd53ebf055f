"""`sublet demo`: runs the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sublet.cli.base.command import CliCommandContext, Debug, Json, run_command, standalone_command
from sublet_protocol.domain.errors import Unavailable


def demo(
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory for its records and logs, new or empty; they stay there."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """See consumers share work, die, and lose nothing.

    Starts a Postgres, two leader nodes and a Spark application of its own, publishes 336 776 flights, lets four Spark
    tasks share them, and kills one of the tasks and the leading node in the middle of it. A checker then compares what
    was consumed with the source: exit code 1 if anything was lost, or delivered twice without a forced move that
    explains it. Takes a minute or two. Needs `pip install 'sublet[demo]'` and Java.

    Examples:

    \b
      sublet demo
      sublet demo --json --keep ./records
    """
    raise typer.Exit(run_command(CliCommandContext(None, None, json, debug), lambda: _run(json, keep)))


def _run(json: bool, keep: Path | None) -> int:
    try:
        from sublet.demo import main

        return main(json, None if keep is None else str(keep))
    except ModuleNotFoundError as missing:
        raise Unavailable(f"the demo needs the package {missing.name}. Run: pip install 'sublet[demo]'") from None


COMMANDS = {"demo": standalone_command(demo)}  # it brings its own database, so it has no database options
