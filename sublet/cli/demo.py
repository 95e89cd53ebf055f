"""`sublet demo`: see it run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protocol.errors import Unavailable
from sublet.cli.command import Cli, Debug, Json, run


def add_to(app: typer.Typer) -> None:
    """Register the command. It brings its own database, so the common options for that are not its."""
    app.command("demo")(demo)


def demo(
    keep: Annotated[
        Path | None, typer.Option(file_okay=False, help="Directory for its records, which then stay there.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """See groups share work, move it and lose nothing, on a Postgres and a Spark of their own.

    Takes a minute or two, and kills a consumer and a leader in the middle of it. Needs `pip install 'sublet[demo]'`
    and Java.
    """
    raise typer.Exit(run(Cli(None, None, json, debug), lambda: _main(json, keep)))


def _main(json: bool, keep: Path | None) -> int:
    try:
        from sublet.demo import main

        return main(json, None if keep is None else str(keep))
    except ModuleNotFoundError as missing:
        raise Unavailable(f"the demo needs the package {missing.name}. Run: pip install 'sublet[demo]'") from None
