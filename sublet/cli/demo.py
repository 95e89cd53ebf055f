"""`sublet demo`: see it run."""

from __future__ import annotations

import typer

from protocol.errors import Unavailable
from sublet.cli.command import Cli, run


def add_to(app: typer.Typer) -> None:
    """Register the command; its options are the demo's own."""
    app.command(
        "demo",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
        help="See groups share work, move it and lose nothing, on a Postgres and a Spark of their own.",
    )(demo)


def demo(context: typer.Context) -> None:
    """Hand everything over to `sublet.demo`."""
    cli = Cli(None, None, "--json" in context.args, "--debug" in context.args)
    raise typer.Exit(run(cli, lambda: _main(context.args)))


def _main(arguments: list[str]) -> int:
    try:
        from sublet.demo import main
    except ModuleNotFoundError as missing:
        raise Unavailable(f"the demo needs the package {missing.name}. Run: pip install 'sublet[demo]'") from None
    return int(main(arguments) or 0)
