"""`sublet publish`: publishes messages from a file or a pipe."""

from __future__ import annotations

import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct, field

from sublet.cli.base.command import CliCommandContext, Nodes, command, handle_signals
from sublet_protocol.domain.errors import DatabaseUnreachable, SubletError, Unavailable, UsageError
from sublet_protocol.domain.topics import check_topic

if TYPE_CHECKING:
    from rich.progress import Progress

    from sublet_borrower.node_client.feed_client import Feed
    from sublet_storage.producer import BatchDelivery, Publisher

INTERRUPTED_FLUSH_TIMEOUT_S = 1.0
"""Time limit for pending messages after a second Ctrl-C."""


class InputFormat(StrEnum):
    """The format of the input."""

    LINES = "lines"
    NDJSON = "ndjson"


class InputInterrupted(Exception):
    """Raised when a signal came while waiting for input."""


def publish(
    cli: CliCommandContext,
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="Where to, such as orders/eu. NDJSON records may name their own."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, readable=True, help="Read this file instead of stdin."
        ),
    ] = None,
    layout: Annotated[
        InputFormat,
        typer.Option(
            "--format",
            help='lines: each is a value. ndjson: each is {"value":…, "key":…, "topic":…, "headers":…, "timestamp":…}.',
        ),
    ] = InputFormat.LINES,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key of messages that bring none. Messages of one key keep their order."),
    ] = None,
    nodes: Nodes = None,
) -> int:
    """Publish messages: one per line of stdin or of a file.

    A message is durable before it is counted. Ctrl-C stops reading; what was read by then is still published.

    Examples:

    \b
      seq 1000 | sublet publish orders/eu
      sublet publish orders/eu --file orders.ndjson --format ndjson
      echo '{"key": "c7", "value": {"id": 1}}' | sublet publish orders/eu --format ndjson
      sublet publish orders/eu --node 10.0.0.5:7411 --file orders.txt
      sublet tail 'orders/#' --json | sublet publish --format ndjson --database-url postgresql://other/db
    """
    from sublet.cli.messages.input_records import read_columns
    from sublet_storage.producer.publisher import MAX_MESSAGE_BYTES

    if topic is not None:
        check_topic(topic)  # of an empty input nothing would
    if file is None and sys.stdin is None:
        raise UsageError("stdin is closed, and messages are read from it. Send them through a pipe, or give --file.")
    interruption = InputSignalHandler()
    with _open_publisher(cli, nodes) as make, _open_input(file) as source, handle_signals(interruption):
        if file is None and sys.stdin.isatty():
            cli.print_info("Reading lines from the terminal. Ctrl-D ends.")
        held_key = None if key is None else key.encode(errors="surrogateescape")
        read = interruption.wrap_read(source, "stdin" if file is None else str(file))
        columns = read_columns(read, layout, topic, held_key, MAX_MESSAGE_BYTES)
        publisher = make()
        tally = PublishProgress()
        problem = _pump(cli, columns, publisher, tally, interruption, _read_size(file))
        problem = _finish(publisher, tally, interruption) or problem
    tally.print_report(cli, interruption.number)
    if problem is not None:
        raise problem
    return 0 if interruption.number is None else 128 + interruption.number


class PublishProgress(Struct):
    """Number of messages that were accepted, of those that are durable, and of those that are certainly not stored."""

    accepted: int = 0
    durable: int = 0
    refused: int = 0
    began: float = field(default_factory=time.monotonic)
    _pending: deque[tuple[int, BatchDelivery]] = field(default_factory=deque)

    def add(self, count: int, delivery: BatchDelivery) -> None:
        """Add messages that are being published."""
        self.accepted += count
        self._pending.append((count, delivery))
        self.count_durable()

    def count_durable(self) -> None:
        """Count the messages whose delivery has completed."""
        while self._pending and self._pending[0][1].is_done:
            count, delivery = self._pending.popleft()
            stored, error = delivery.stored_count, delivery.error
            self.durable += stored
            is_refused = isinstance(error, SubletError) and not isinstance(error, Unavailable | UsageError)
            if is_refused or isinstance(error, DatabaseUnreachable):
                self.refused += count - stored

    def print_report(self, cli: CliCommandContext, interrupted_by: int | None) -> None:
        """Print the result."""
        elapsed = time.monotonic() - self.began
        if cli.json:
            answer = {"read": self.accepted, "durable": self.durable, "elapsed_s": round(elapsed, 3)}
            cli.print_json({**answer, "interrupted": interrupted_by is not None})
            return
        stopped_text = "Stopped when asked to. " if interrupted_by is not None else ""
        missing_text = f" {self.refused} are not stored." if self.refused else ""
        if unknown := self.accepted - self.durable - self.refused:
            missing_text += f" {unknown} are not known to be: they may be there or not."
        rate = f", {self.durable / elapsed:,.0f} a second" if elapsed > 0 else ""
        cli.print_info(f"{stopped_text}{self.durable} messages are durable ({elapsed:.1f} s{rate}).{missing_text}")


class InputSignalHandler:
    """Handles Ctrl-C and SIGTERM: at once while waiting for input, else when the next read begins; a second one
    aborts."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
        if self._waiting:
            raise InputInterrupted

    def wrap_read(self, source: FileIO, name: str) -> Callable[[int], bytes]:
        """Return `source.read`, which waits where nothing is there yet, also of a non-blocking descriptor, and raises
        `InputInterrupted` once a signal has come: half a line is no message, and no end of input. What cannot be read
        is a `SubletError` with this name of the input."""

        def read_guarded(size: int) -> bytes:
            try:
                self._waiting = True
                if self.number is not None:
                    raise InputInterrupted
                while (data := source.read(size)) is None:
                    select.select([source], [], [])
                return data
            except OSError as error:
                raise SubletError(
                    f"{name} cannot be read any further: {error.strerror}. The complete lines before that are "
                    "published; publish the rest once it can be read."
                ) from error
            finally:
                self._waiting = False

        return read_guarded


@contextmanager
def _open_publisher(cli: CliCommandContext, nodes: list[str] | None) -> Iterator[Callable[[], Publisher | Feed]]:
    """Provide a factory of publishers: with access to the database, or through nodes."""
    from sublet_storage.db.connect import connect
    from sublet_storage.doctor.checks import find_read_only
    from sublet_storage.producer import Publisher

    if nodes:
        yield partial(cli.open_feed, nodes)
        return
    with cli.open_database() as database:
        with connect(database.url, application_name="sublet cli") as connection:
            # A publisher would wait until the database takes writes, as after a failover.
            if (finding := find_read_only(connection)) is not None:
                raise DatabaseUnreachable(f"nothing can be stored: {finding.detail}. {finding.hint}")
        yield partial(Publisher, database.url)


@contextmanager
def _open_input(file: Path | None) -> Iterator[FileIO]:
    """Provide the input, unbuffered: a read returns what there is, so that a slow pipe's messages are published as they
    come."""
    if file is not None:
        with file.open("rb", buffering=0) as source:
            yield source
    else:
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as source:
            yield source


def _read_size(file: Path | None) -> int | None:
    return None if file is None else file.stat().st_size


def _pump(
    cli: CliCommandContext,
    columns: Iterator[dict[str, Any]],
    publisher: Publisher | Feed,
    tally: PublishProgress,
    interruption: InputSignalHandler,
    size: int | None,
) -> Exception | None:
    """Publish until the input ends; return the error that ended it early, else None."""
    try:
        with _show_progress(cli, size) as show:
            for each in columns:
                tally.add(len(each["value"]), publisher.publish_batch(each))
                show(tally, sum(len(value or b"") + 1 for value in each["value"]))
    except SubletError as problem:
        return problem
    except InputInterrupted:
        return None
    except KeyboardInterrupt as interrupt:
        _abort(publisher, interruption, interrupt)
    return None


def _finish(publisher: Publisher | Feed, tally: PublishProgress, interruption: InputSignalHandler) -> Exception | None:
    try:
        publisher.close()
    except KeyboardInterrupt as interrupt:
        _abort(publisher, interruption, interrupt)
    except SubletError as problem:
        return problem
    finally:
        tally.count_durable()
    return None


def _abort(publisher: Publisher | Feed, interruption: InputSignalHandler, interrupt: KeyboardInterrupt) -> None:
    interruption.number = interruption.number or getattr(interrupt, "number", signal.SIGINT)
    with suppress(Exception):
        publisher.close(INTERRUPTED_FLUSH_TIMEOUT_S)


@contextmanager
def _show_progress(cli: CliCommandContext, size: int | None) -> Iterator[Callable[[PublishProgress, int], None]]:
    """Provide a function that shows progress: a bar on a terminal that does not show the input itself, else nothing."""
    if not cli.stderr_console.is_terminal or (size is None and sys.stdin.isatty()):
        yield lambda tally, read_bytes: None
        return
    bar = _make_bar(cli)
    task = bar.add_task("publishing", total=size, durable=0)
    with bar:
        yield lambda tally, read_bytes: bar.update(task, advance=read_bytes, durable=tally.durable)


def _make_bar(cli: CliCommandContext) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    durable_column = TextColumn("{task.fields[durable]:,} durable")
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        durable_column,
        TimeElapsedColumn(),
        console=cli.stderr_console,
        transient=True,
    )


COMMANDS = {"publish": command(publish)}
