"""`sublet tail`: prints messages without taking part in a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext, Nodes, command, defer_signals
from sublet.cli.messages.message_printer import EpochPrinter, MessagePrinter
from sublet_protocol.domain.errors import PayloadUnavailable, UsageError
from sublet_protocol.domain.topics import TopicFilter

if TYPE_CHECKING:
    from sublet_borrower.node_client.feed_reader import FeedStart

T = TypeVar("T")

FIRST_WAIT_S = 0.005
MAX_WAIT_S = 0.2
NODE_WAIT_S = 0.5
"""Longest wait for a page of a node, until it is looked whether the output is read."""
STREAM_WAIT_S = 1.0
"""Wait before payloads are read again that were unavailable."""


def tail(
    cli: CliCommandContext,
    filter: Annotated[
        str, typer.Argument(metavar="FILTER", help="Which topics: + is one level, # the rest. Quote it.")
    ],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="earliest, latest, a time (2026-01-31T12:00, UTC unless it says otherwise), how long ago (15m, 2h), "
            "or an offset in every stream. With --epochs: latest, active (what is not completed too) or earliest.",
        ),
    ] = "latest",
    follow: Annotated[
        bool, typer.Option(help="Go on with what is published from now on, or end where the log ends.")
    ] = True,
    max_messages: Annotated[
        str | None, typer.Option("--max-messages", metavar="N", help="End after N messages.")
    ] = None,
    epochs: Annotated[
        bool,
        typer.Option(
            "--epochs", help="In whole epochs: first a snapshot of the frontiers, then each epoch whole or not at all."
        ),
    ] = False,
    nodes: Nodes = None,
) -> None:
    """Show messages whose topics match a filter.

    Reads only: no group is made or moved, and no leader needed. Messages of one key come in their order; different
    keys are shown stream by stream. Each line is topic, key and value. With --epochs there are lines about the
    frontiers too: "snapshot" once, and "completed" whenever the lower one has moved.

    Examples:

    \b
      sublet tail '#'
      sublet tail 'orders/+/created' --from earliest --no-follow --json
      sublet tail 'orders/#' --from 15m --max-messages 10
      sublet tail 'flights/#' --epochs --from active --json
      sublet tail 'orders/#' --node 10.0.0.5:7411
    """
    topic_filter = TopicFilter.parse(filter)
    printer = MessagePrinter(
        cli, None if max_messages is None else text_conversion.parse_int("--max-messages", max_messages)
    )
    if epochs:
        _print_complete_epochs(cli, nodes, topic_filter, start, follow, printer)
        return
    begin = text_conversion.parse_starting_position(start)
    if nodes:
        _print_from_nodes(cli, nodes, topic_filter, begin, follow, printer)
    else:
        _print_from_database(cli, topic_filter, begin, follow, printer)


def _print_from_nodes(
    cli: CliCommandContext,
    nodes: list[str],
    topic_filter: TopicFilter,
    begin: FeedStart,
    follow: bool,
    printer: MessagePrinter,
) -> None:
    with cli.open_feed(nodes) as feed:
        read = feed.follow if follow else feed.history
        with read(topic_filter, begin, on_data_loss=lambda gone: cli.print_info(f"Skipped: {gone}")) as pages:
            while not (printer.is_full or pages.is_finished):
                if (page := pages.read(NODE_WAIT_S)) is not None:
                    printer.print_batch(page)
                cli.wait_for_reader_to_leave()


def _print_from_database(
    cli: CliCommandContext,
    topic_filter: TopicFilter,
    begin: str | int | datetime,
    follow: bool,
    printer: MessagePrinter,
) -> None:
    from sublet_storage.readers.tail import Tail

    waiting = _PollWaiter(cli)
    with cli.open_connection() as connection:
        with defer_signals():
            reading = Tail(
                connection, topic_filter, begin, on_data_loss=lambda gone: cli.print_info(f"Skipped: {gone}")
            )
        while not printer.is_full:
            previous_count = printer.count
            with waiting.wait_for_payloads():
                for page in _read_with_deferred_signals(reading.pages()):
                    printer.print_batch(page)
                    if printer.is_full or (not follow and reading.is_caught_up):
                        break
            if not follow and reading.is_caught_up:
                return
            waiting.pause(printer.count > previous_count or printer.is_full)


def _print_complete_epochs(
    cli: CliCommandContext,
    nodes: list[str] | None,
    topic_filter: TopicFilter,
    start: str,
    follow: bool,
    printer: MessagePrinter,
) -> None:
    from sublet_storage.readers.complete_epoch_tail import EpochTailReader

    if nodes:
        raise UsageError(
            "--epochs and --node: nodes do not serve epochs yet. Name the database, or leave --epochs out."
        )
    waiting, shown = _PollWaiter(cli), EpochPrinter(cli, printer)
    with cli.open_connection() as connection:
        with defer_signals():
            reading = EpochTailReader(
                connection, topic_filter, start, on_data_loss=lambda gone: cli.print_info(f"Skipped: {gone}")
            )
        while True:
            previous_count, complete = shown.count, False
            with waiting.wait_for_payloads():
                for message in _read_with_deferred_signals(reading.read_available(connection)):
                    if not shown.print_item(message):
                        return
                complete = True
            if complete and not follow:
                return
            waiting.pause(shown.count > previous_count)


class _PollWaiter:
    """Waits between two polls for messages, longer while there are none."""

    def __init__(self, cli: CliCommandContext) -> None:
        self._cli, self._wait_s, self._is_reported = cli, 0.0, False

    @contextmanager
    def wait_for_payloads(self) -> Iterator[None]:
        """Print once that the payload location is unavailable, then wait."""
        try:
            yield
            self._is_reported = False
        except PayloadUnavailable as error:
            if not self._is_reported:
                self._cli.print_info(f"Waiting: {error}")
            self._is_reported = True
            self._cli.wait_for_reader_to_leave(STREAM_WAIT_S)

    def pause(self, has_changed: bool) -> None:
        """Wait before the next poll; not at all after messages."""
        self._wait_s = 0.0 if has_changed else min(self._wait_s * 1.5 + FIRST_WAIT_S, MAX_WAIT_S)
        self._cli.wait_for_reader_to_leave(self._wait_s)


def _read_with_deferred_signals(items: Iterator[T]) -> Iterator[T]:
    """Yield the items; signals wait until each read is over."""
    while True:
        with defer_signals():
            each = next(items, None)
        if each is None:
            return
        yield each


COMMANDS = {"tail": command(tail)}
