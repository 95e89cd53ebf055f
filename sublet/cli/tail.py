"""`sublet tail`: look at messages without taking part in a group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.words import Filter
from sublet.cli import values
from sublet.cli.command import Cli, Nodes, held_back, register
from sublet.cli.printer import Printer

if TYPE_CHECKING:
    import pyarrow as pa

    from borrower.feed_reader import Where
    from storage.tail import Tail

FIRST_WAIT_S = 0.005
LONGEST_WAIT_S = 0.2
"""Between two looks for news: the wait grows while nothing comes."""


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    register(app, "tail")(tail)


def tail(
    cli: Cli,
    filter: Annotated[
        str, typer.Argument(metavar="FILTER", help="Which topics: + is one level, # the rest. Quote it.")
    ],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="earliest, latest, a time (2026-01-31T12:00, UTC unless it says otherwise), how long ago (15m, 2h), "
            "or an offset in every stream.",
        ),
    ] = "latest",
    follow: Annotated[
        bool, typer.Option(help="Go on with what is published from now on, or end where the log ends.")
    ] = True,
    max_messages: Annotated[str | None, typer.Option("--max", metavar="N", help="End after N messages.")] = None,
    nodes: Nodes = None,
) -> None:
    """Show messages whose topics match a filter.

    Reads only: no group is made or moved, and no leader needed. Messages of one key come in their order; different
    keys are shown stream by stream. Each line is topic, key and value.

    Examples:

    \b
      sublet tail '#'
      sublet tail 'orders/+/created' --from earliest --no-follow --json
      sublet tail 'orders/#' --from 15m --max 10
      sublet tail 'orders/#' --node 10.0.0.5:7411
    """
    begin, wanted = values.begin(start), Filter.parse(filter)
    printer = Printer(cli, None if max_messages is None else values.whole("--max", max_messages))
    if nodes:
        _through_nodes(cli, nodes, wanted, begin, follow, printer)
    else:
        _from_database(cli, wanted, begin, follow, printer)


def _through_nodes(cli: Cli, nodes: list[str], wanted: Filter, begin: Where, follow: bool, printer: Printer) -> None:
    with cli.feed(nodes) as feed:
        read = feed.follow if follow else feed.history
        with read(wanted, begin, on_gone=lambda gone: cli.say(f"Skipped: {gone}")) as pages:
            while not printer.full and (page := next(pages, None)) is not None:
                printer.show(page)


def _from_database(cli: Cli, wanted: Filter, begin: str | int | datetime, follow: bool, printer: Printer) -> None:
    from storage.tail import Tail

    wait_s = 0.0
    with cli.connection() as connection:
        with held_back():
            reading = Tail(connection, wanted, begin, on_gone=lambda gone: cli.say(f"Skipped: {gone}"))
        while not printer.full:
            before = printer.count
            for page in _pages(reading):
                printer.show(page)
                if printer.full or (not follow and reading.caught_up):
                    break
            if not follow and reading.caught_up:
                return
            wait_s = 0.0 if printer.count > before else min(wait_s * 1.5 + FIRST_WAIT_S, LONGEST_WAIT_S)
            time.sleep(0.0 if printer.full else wait_s)


def _pages(reading: Tail) -> Iterator[pa.Table]:
    """What is there now; signals wait for each read to be over."""
    pages = reading.pages()
    while True:
        with held_back():
            page = next(pages, None)
        if page is None:
            return
        yield page
