"""`sublet consume`: take part in a group from the command line."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base import values
from sublet.cli.base.command import Cli, Nodes, made
from sublet.cli.groups.names import as_typed, named
from sublet.cli.messages.message_printer import Printer
from sublet_protocol.domain.errors import ProtocolMismatch, Unavailable
from sublet_protocol.domain.subscriptions import Start, Subscription
from sublet_protocol.messages.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from sublet_borrower.consumer.session import Session
    from sublet_borrower.streams.batch import Batch
    from sublet_storage.nodes import NodeEntry

LOOK_S = 0.5
"""How long one wait for a batch lasts."""
PATIENCE_S = 3.0
"""After which somebody who has no leader is told how to get one; and how long a node is waited for to see that."""


def consume(
    cli: Cli,
    subscription: Annotated[
        str, typer.Argument(metavar="SUBSCRIPTION", help="$share/GROUP/FILTER or $queue/GROUP/FILTER. Quote it.")
    ],
    max_messages: Annotated[str | None, typer.Option("--max", metavar="N", help="End after N messages.")] = None,
    start: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Where the group begins if this consumer is its first: latest (with what comes), earliest (with all "
            "that is stored), a time such as 2026-11-21T10:00:00Z, or offset:N of each stream.",
        ),
    ] = "latest",
    nodes: Nodes = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A stable name. Of two consumers of the group under one name the one started last stays and gets the "
            "other's streams; the other ends as fenced, with exit code 4. What the group keeps for a name (groups "
            "create --session-expiry) waits for its return.",
        ),
    ] = None,
    idle_exit: Annotated[
        str | None, typer.Option(metavar="DURATION", help="End when no message has come for so long: 10s, 5m.")
    ] = None,
) -> int:
    """Consume messages as a member of a group, and print them.

    The group's streams are shared among its members; progress is durable and moves on after a message was written to
    stdout. What a killed consumer printed last may be printed again by another: at least once. Ctrl-C hands the
    streams over and ends. A leader must run somewhere: `sublet leader`. With --node all goes through the nodes, which
    name each other by the addresses that they were told to serve on.

    Examples:

    \b
      sublet consume '$share/billing/orders/#'
      sublet consume '$share/billing/orders/#' --start earliest --max 100 --json
      sublet consume '$queue/mail/outgoing/+' --idle-exit 10s > mails.txt
      sublet consume '$share/billing/orders/#' --node 10.0.0.5:7411 --node 10.0.0.6:7411
    """
    from sublet_borrower.consumer.session import Session

    begin = Start.parse(start)
    wanted = as_typed(subscription) if nodes else named(cli, subscription, or_new=True)
    printer = Printer(cli, None if max_messages is None else values.whole("--max", max_messages))
    patience_s = None if idle_exit is None else values.fine_seconds(idle_exit)
    with (
        _way(cli, wanted, nodes) as way,
        Session(str(wanted), **way.arguments, name=name, start=str(begin), auto_ack=False) as session,
        _drained_by_signals(session) as asked,
    ):
        for batch in _batches(cli, session, printer, patience_s, way):
            written = printer.show(batch.table, batch.grant_id)
            batch.ack(None if written == len(batch) else _after(batch, written))
            if printer.full:
                break
    cli.say(f"{printer.count} messages consumed.")
    return 128 + asked[0] if asked else 0


def _after(batch: Batch, written: int) -> int:
    """The offset after the last message written."""
    return int(batch.table.column("offset")[written - 1].as_py()) + 1 if written else batch.first


def _batches(cli: Cli, session: Session, printer: Printer, idle_exit: float | None, way: _Way) -> Iterator[Batch]:
    """Batches until the session is drained, the printer is full, or nothing has come for too long."""
    began = heard = time.monotonic()
    joined = told = False
    while not (session.closed or printer.full):
        batch = session.next_batch(LOOK_S if idle_exit is None else min(LOOK_S, idle_exit))
        if batch is not None:
            yield batch
            heard = time.monotonic()
        joined = joined or batch is not None or bool(session.held())
        if not joined and not told and time.monotonic() - began > PATIENCE_S:
            told = True
            lacking = way.lacking()
            cli.say(f"{_WAITING}{way.besides}" if lacking is None else f"Waiting. {lacking}")
        if idle_exit is not None and time.monotonic() - heard >= idle_exit:
            if not joined and (lacking := way.lacking()) is not None:
                raise Unavailable(f"{session.subscription}: nobody has lent anything for {idle_exit:g} s. {lacking}")
            return


_WAITING = "Waiting for streams: a leader is being chosen, or others hold them all."


@dataclass(frozen=True, slots=True)
class _Way:
    """How a session reaches its messages and leaders: its arguments for that, whether there is a node that could lead
    (if not, the sentence that says so), and why else it may wait."""

    arguments: dict[str, Any]
    lacking: Callable[[], str | None]
    besides: str = ""


@contextmanager
def _way(cli: Cli, subscription: Subscription, nodes: list[str] | None) -> Iterator[_Way]:
    """Through nodes or by the database. What would never work is said at once."""
    if nodes:
        cli.check_way()
        through = {"nodes": nodes, "through_nodes": True}
        yield _Way(through, lambda: _silence(nodes), " Or the leader's own address cannot be reached from here.")
        return
    with cli.database() as database:
        _check(database.url, subscription)
        yield _Way({"url": database.url}, lambda: _lacking(database.url, subscription))


def _lacking(url: str, subscription: Subscription) -> str | None:
    """What the database says of why nothing is lent."""
    from sublet_storage.db.connect import connect
    from sublet_storage.groups.coordinator import lifecycle

    if not _live(url):
        return "No leader node is listed in the database: start one with `sublet leader`."
    with connect(url, application_name="sublet consume") as connection:
        group = lifecycle.find_live(connection, subscription)
    if group is None or group.orders.paused is None:
        return None
    why = f" ({group.orders.paused})" if group.orders.paused else ""
    return f"The group is paused{why}: `sublet groups resume '{subscription}'` has its streams lent again."


def _silence(nodes: list[str]) -> str | None:
    """None if one of the nodes answers."""
    from sublet_borrower.fetch.nodes import NodeReader

    reader = NodeReader(nodes, 1, PATIENCE_S)
    try:
        reader.prepare()
    except Unavailable as error:
        return f"Nobody can lend: {error}"
    finally:
        reader.close()
    return None


def _check(url: str, subscription: Subscription) -> None:
    """What would never work is said at once. Raises `UndeclaredQueue`, `ProtocolMismatch`."""
    from sublet_storage.db.connect import connect
    from sublet_storage.groups.coordinator import lifecycle
    from sublet_storage.groups.model.group_errors import undeclared

    with connect(url, application_name="sublet consume") as connection:
        if subscription.kind == "queue" and lifecycle.find_live(connection, subscription) is None:
            raise undeclared(subscription)
    versions = {entry.protocol_version for entry in _live(url)}
    if versions and PROTOCOL_VERSION not in versions:
        found = ", ".join(map(str, sorted(versions)))
        raise ProtocolMismatch(
            f"protocol version {PROTOCOL_VERSION}: this consumer speaks it, and the leader nodes speak {found}. "
            "Bring both to the same release of sublet."
        )


def _live(url: str) -> list[NodeEntry]:
    from sublet_storage.db.connect import connect
    from sublet_storage.nodes import list_nodes

    with connect(url, application_name="sublet consume") as connection:
        return [entry for entry in list_nodes(connection) if entry.remaining_s > 0]


@contextmanager
def _drained_by_signals(session: Session) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM let the session hand over and end; a second one breaks off. Yields which came."""
    asked: list[int] = []

    def drain(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        session.drain()

    before = {number: signal.signal(number, drain) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


COMMANDS = {"consume": made(consume)}
