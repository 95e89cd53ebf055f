"""`sublet consume`: consumes messages as a member of a group, and prints them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext, Nodes, command, handle_signals
from sublet.cli.groups.names import parse_typed, resolve_subscription
from sublet.cli.messages.message_printer import MessagePrinter
from sublet_protocol.domain.errors import ProtocolMismatch, Unavailable
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION

if TYPE_CHECKING:
    from sublet_borrower.consumer.session import Session
    from sublet_borrower.streams.batch import Batch
    from sublet_storage.node_directory import NodeEntry

POLL_INTERVAL_S = 0.5
"""Duration of one poll for a batch."""
LEADER_TIMEOUT_S = 3.0
"""How long a consumer waits for a leader before a hint is printed, and for a node to answer whether there is one."""


def consume(
    cli: CliCommandContext,
    subscription: Annotated[
        str, typer.Argument(metavar="SUBSCRIPTION", help="$share/GROUP/FILTER or $queue/GROUP/FILTER. Quote it.")
    ],
    max_messages: Annotated[
        str | None, typer.Option("--max-messages", metavar="N", help="End after N messages.")
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
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
    idle_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="End when no message has come for so long: 10s, 5m.")
    ] = None,
) -> int:
    """Consume messages as a member of a group, and print them.

    The group's streams are shared among its members; progress is durable and moves on after a message was written to
    stdout. What a killed consumer printed last may be printed again by another: at least once. Ctrl-C hands the streams
    over and ends. A leader must run somewhere: `sublet leader`. With --node all goes through the nodes, which name each
    other by the addresses of their --listen.

    Examples:

    \b
      sublet consume '$share/billing/orders/#'
      sublet consume '$share/billing/orders/#' --from earliest --max-messages 100 --json
      sublet consume '$queue/mail/outgoing/+' --idle-timeout 10s > mails.txt
      sublet consume '$share/billing/orders/#' --node 10.0.0.5:7411 --node 10.0.0.6:7411
    """
    from sublet_borrower.consumer.session import Session

    begin = StartingPosition.parse(start, "--from")
    resolved_subscription = parse_typed(subscription) if nodes else resolve_subscription(cli, subscription, or_new=True)
    printer = MessagePrinter(
        cli, None if max_messages is None else text_conversion.parse_int("--max-messages", max_messages)
    )
    idle_timeout_s = None if idle_timeout is None else text_conversion.parse_fractional_seconds(idle_timeout)
    with (
        _open_transport(cli, resolved_subscription, nodes) as transport,
        Session(
            str(resolved_subscription), **transport.arguments, name=name, starting_position=str(begin), auto_ack=False
        ) as session,
        _drain_on_signals(session) as signals,
    ):
        for batch in _poll_batches(cli, session, printer, idle_timeout_s, transport):
            written = printer.print_batch(batch.table, batch.grant_id)
            batch.ack(None if written == len(batch) else _find_next_offset(batch, written))
            if printer.is_full:
                break
    cli.print_info(f"{printer.count} messages consumed.")
    return 128 + signals[0] if signals else 0


def _find_next_offset(batch: Batch, written: int) -> int:
    """Return the offset after the last message written."""
    return int(batch.table.column("offset")[written - 1].as_py()) + 1 if written else batch.first


def _poll_batches(
    cli: CliCommandContext, session: Session, printer: MessagePrinter, idle_timeout: float | None, transport: _Transport
) -> Iterator[Batch]:
    """Yield batches until the session is drained, the printer is full, or none has come for `idle_timeout`."""
    began = received = time.monotonic()
    has_joined = has_reported = False
    while not (session.is_closed or printer.is_full):
        batch = session.poll(POLL_INTERVAL_S if idle_timeout is None else min(POLL_INTERVAL_S, idle_timeout))
        if batch is not None:
            yield batch
            received = time.monotonic()
        cli.wait_for_reader_to_leave()
        has_joined = has_joined or batch is not None or bool(session.assignment())
        if not has_joined and not has_reported and time.monotonic() - began > LEADER_TIMEOUT_S:
            has_reported = _print_hint(cli, transport)
        if idle_timeout is not None and time.monotonic() - received >= idle_timeout:
            if not has_joined and (lacking := transport.lacking()) is not None:
                raise Unavailable(f"{session.subscription}: nothing was granted for {idle_timeout:g} s. {lacking}")
            return


def _print_hint(cli: CliCommandContext, transport: _Transport) -> bool:
    """Print why nothing is granted; return False if the database, which may restart, does not answer now."""
    from psycopg import OperationalError

    try:
        lacking = transport.lacking()
    except (Unavailable, OperationalError):
        return False
    cli.print_info(f"{_WAITING}{transport.besides}" if lacking is None else f"Waiting. {lacking}")
    return True


_WAITING = "Waiting for streams: a leader is being chosen, or others hold them all."


class _Transport(Struct, frozen=True):
    """The transport of a session: its arguments, `lacking` (a sentence for people if no node could lead, else None),
    and other reasons to wait."""

    arguments: dict[str, Any]
    lacking: Callable[[], str | None]
    besides: str = ""


@contextmanager
def _open_transport(
    cli: CliCommandContext, subscription: Subscription, nodes: list[str] | None
) -> Iterator[_Transport]:
    """Provide the transport: nodes or the database. Raise at once what can never work."""
    if nodes:
        cli.check_single_source()
        through = {"nodes": nodes, "transport": "nodes"}
        yield _Transport(
            through, lambda: _explain_silence(nodes), " Or the leader's own address cannot be reached from here."
        )
        return
    with cli.open_database() as database:
        _check(database.url, subscription)
        yield _Transport({"url": database.url}, lambda: _explain_waiting(database.url, subscription))


def _explain_waiting(url: str, subscription: Subscription) -> str | None:
    """Return the reason, from the database, why nothing is granted; None if there is none."""
    from psycopg.errors import InsufficientPrivilege

    from sublet_storage.db.connect import connect
    from sublet_storage.groups.coordinator import group_lifecycle

    if not _list_live_nodes(url):
        return "No leader node is listed in the database: start one with `sublet leader`."
    with suppress(InsufficientPrivilege), connect(url, application_name="sublet consume") as connection:
        group = group_lifecycle.find_live(connection, subscription)
        if group is None:
            return (
                "No node has created the group yet: their logs have the reason. `sublet groups create "
                f"{shlex.quote(str(subscription))}` creates it as well, with the --from that it shall begin at."
            )
        if group.desired_state.pause_reason is None:
            return None
        reason = f" ({group.desired_state.pause_reason})" if group.desired_state.pause_reason else ""
        command = f"sublet groups resume {shlex.quote(str(subscription))}"
        return f"The group is paused{reason}: `{command}` has its streams granted again."
    return None


def _explain_silence(nodes: list[str]) -> str | None:
    """Return why no node can grant; None if one of the nodes answers."""
    from sublet_borrower.fetch.node_reader import NodeMessageReader

    reader = NodeMessageReader(nodes, 1, LEADER_TIMEOUT_S)
    try:
        reader.warm_up()
    except Unavailable as error:
        return f"No node can grant: {error}"
    finally:
        reader.close()
    return None


def _check(url: str, subscription: Subscription) -> None:
    """Raise at once what can never work: `UndeclaredQueue`, `ProtocolMismatch`. Without the right to read groups the
    first is left to a node."""
    from psycopg.errors import InsufficientPrivilege

    from sublet_storage.db.connect import connect
    from sublet_storage.groups.coordinator import group_lifecycle
    from sublet_storage.groups.model.group_errors import undeclared_queue_error

    with suppress(InsufficientPrivilege), connect(url, application_name="sublet consume") as connection:
        if subscription.kind == "queue" and group_lifecycle.find_live(connection, subscription) is None:
            raise undeclared_queue_error(subscription)
    versions = {entry.protocol_version for entry in _list_live_nodes(url)}
    if versions and PROTOCOL_VERSION not in versions:
        node_versions = ", ".join(map(str, sorted(versions)))
        raise ProtocolMismatch(
            f"protocol version {PROTOCOL_VERSION}: this consumer speaks it, and the leader nodes speak "
            f"{node_versions}. "
            "Bring both to the same release of sublet."
        )


def _list_live_nodes(url: str) -> list[NodeEntry]:
    from sublet_storage.db.connect import connect
    from sublet_storage.node_directory import list_nodes

    with connect(url, application_name="sublet consume") as connection:
        return [entry for entry in list_nodes(connection) if entry.remaining_s > 0]


@contextmanager
def _drain_on_signals(session: Session) -> Iterator[list[int]]:
    """Drain the session on Ctrl-C and SIGTERM; a second one aborts. Yields the list of received signals."""
    signals: list[int] = []

    def drain(number: int, frame: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        session.drain()

    with handle_signals(drain):
        yield signals


COMMANDS = {"consume": command(consume)}
