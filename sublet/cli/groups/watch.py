"""`sublet groups watch`: the events of a group, as they happen."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sublet.cli.base.command import NODE_TIMEOUT_S, CliCommandContext, Nodes, defer_signals
from sublet.cli.base.output import escape_control_characters
from sublet.cli.base.text_conversion import GroupName
from sublet.cli.groups.names import candidate_subscriptions, resolve_subscription
from sublet_protocol.domain.errors import NotFound, Unavailable
from sublet_protocol.domain.subscriptions import Subscription

if TYPE_CHECKING:
    from sublet_borrower.node_client.group_event_watcher import (
        FindLeaderResponse,
        GroupEventsUnavailable,
        GroupEventWatcher,
    )

POLL_INTERVAL_S = 2.0
"""Between two reads of the node list, and between two leader queries."""


def watch(cli: CliCommandContext, subscription: GroupName, nodes: Nodes = None) -> int:
    """Show what happens in a group from now on, whichever node leads it.

    A line, or with --json an object, for each consumer that joins, leaves or is evicted, each stream that is granted,
    released, taken by force or finished, and each change of the leader. What happened before is in `groups history`.
    Reads only: no group is made and no consumer disturbed. A reader that is too slow loses events, and their number is
    shown. Ctrl-C ends it, with exit code 0.

    Examples:

    \b
      sublet groups watch '$share/billing/orders/#'
      sublet groups watch '$share/billing/orders/#' --json | jq 'select(.forced)'
      sublet groups watch '$share/billing/orders/#' --node 10.0.0.5:7411
    """
    try:
        if nodes:
            _watch_any(cli, candidate_subscriptions(subscription), nodes)
        else:
            _watch(cli, resolve_subscription(cli, subscription), None)
    except KeyboardInterrupt as interrupt:
        if getattr(interrupt, "number", signal.SIGINT) != signal.SIGINT:
            raise
    return 0


def _watch_any(cli: CliCommandContext, subscriptions: Sequence[Subscription], nodes: list[str]) -> None:
    """Watch the first of the groups that exists, through the nodes."""
    *others, last = subscriptions
    for each in others:
        try:
            return _watch(cli, each, nodes)
        except GroupNeverExisted:
            pass
    return _watch(cli, last, nodes)


def _watch(cli: CliCommandContext, subscription: Subscription, nodes: list[str] | None) -> None:
    from sublet_borrower.node_client.group_event_watcher import GroupEventWatcher

    with _open_node_finder(cli, subscription, nodes) as find, GroupEventWatcher(str(subscription)) as watching:
        _EventPrinter(cli, subscription, watching, find).run()


class GroupNeverExisted(NotFound):
    """Raised if the group never existed, unlike one that was deleted while it was watched."""


class _EventPrinter:
    """Prints the events of a watched group."""

    def __init__(
        self,
        cli: CliCommandContext,
        subscription: Subscription,
        watching: GroupEventWatcher,
        find: Callable[[], Sequence[str]],
    ) -> None:
        self._cli, self._subscription, self._watching, self._find = cli, subscription, watching, find
        self._give_up_at = time.monotonic() + NODE_TIMEOUT_S
        self._answered_at_all = False
        self._leader: tuple[str | None, int | None] | None = None
        self._errors: dict[str, str] = {}
        self._last_error = ""
        self._is_refused = False

    def run(self) -> None:
        """Print events until a signal comes. Raise `NotFound` if the group is gone, `Unavailable` if no node
        answers."""
        from sublet_borrower.node_client.group_event_watcher import (
            FindLeaderResponse,
            GroupEventsDropped,
            GroupEventsUnavailable,
            WatchedGroupEvent,
        )

        poll_at = 0.0
        while True:
            if time.monotonic() >= poll_at:
                self._query_leader()
                poll_at = time.monotonic() + POLL_INTERVAL_S
            match self._watching.next_event(max(poll_at - time.monotonic(), 0.0)):
                case WatchedGroupEvent(event):
                    self._cli.write_lines([_format_event(event)]) if not self._cli.json else self._cli.print_json(event)
                case GroupEventsDropped(count):
                    self._print_gap(count)
                case FindLeaderResponse() as answer:
                    self._handle_leader(answer)
                case GroupEventsUnavailable() as silent:
                    self._print_unreachable(silent)
            self._cli.wait_for_reader_to_leave()

    def _query_leader(self) -> None:
        self._watching.set_nodes(self._find())
        self._watching.query_leader()
        if not self._answered_at_all and time.monotonic() > self._give_up_at:
            last_error = f" {self._last_error}." if self._last_error and (self._cli.json or self._is_refused) else ""
            hint = " Start one with `sublet leader`, or name one that is there with --node."
            raise Unavailable(
                f"no node has said who leads {self._subscription} within {NODE_TIMEOUT_S:g} s.{last_error}"
                f"{'' if self._is_refused else hint}"
            )

    def _handle_leader(self, answer: FindLeaderResponse) -> None:
        was_there, self._answered_at_all = self._answered_at_all, True
        if answer.group_id is None:
            raise _group_gone_error(self._subscription, was_there)
        leader = (answer.node, answer.term)
        if leader == self._leader or not (answer.is_led_here or answer.node is None):
            return
        previous_leader, self._leader = self._leader, leader
        text = "nobody leads it at present" if answer.node is None else f"node {answer.node} leads it"
        self._cli.print_info(f"Watching {self._subscription}: {text}." if previous_leader is None else f"Now {text}.")

    def _print_gap(self, count: int) -> None:
        if self._cli.json:
            self._cli.print_json({"event": "gap", "subscription": str(self._subscription), "lost": count})
        history = f"`sublet groups history {shlex.quote(str(self._subscription))}`"
        self._cli.print_info(f"{count} events were lost; {history} has all that is durable.")

    def _print_unreachable(self, silent: GroupEventsUnavailable) -> None:
        """Print that a node does not answer; for programs, and where it refuses, only with the error
        that follows, if no node answers."""
        reason = silent.reason.removeprefix(f"{silent.address}: ")
        self._is_refused, problem = silent.is_refusal, "refuses" if silent.is_refusal else "does not answer"
        self._last_error = f"Node {silent.address} {problem}: {reason.rstrip('.')}"
        if not self._answered_at_all and (self._cli.json or silent.is_refusal):
            return
        if silent.is_refusal and self._last_error == self._errors.get(silent.address):  # it is refused at each query
            return
        self._errors[silent.address] = self._last_error
        self._cli.print_info(
            f"{self._last_error}. What it sent meanwhile, `sublet groups history` has as far as it is durable."
        )


@contextmanager
def _open_node_finder(
    cli: CliCommandContext, subscription: Subscription, nodes: list[str] | None
) -> Iterator[Callable[[], Sequence[str]]]:
    """Provide a function that returns the nodes: the named ones, or those of the database. Raise at once what can
    never work."""
    if nodes:
        from sublet_borrower.consumer.arguments import check_node

        cli.check_single_source()
        for node in nodes:
            check_node(node)
        yield lambda: nodes
        return
    with cli.open_database() as database:
        listed = _NodeLister(cli, database.url)
        listed.check(subscription)
        yield listed


class _NodeLister:
    """Returns the live nodes of the database, or the last known ones if it does not answer."""

    def __init__(self, cli: CliCommandContext, url: str) -> None:
        self._cli, self._url = cli, url
        self._last: Sequence[str] = ()

    def check(self, subscription: Subscription) -> None:
        """Raise `NotFound` if there is no such group, `Unavailable` if there is no node."""
        from sublet_storage.db.connect import connect
        from sublet_storage.groups.coordinator import group_lifecycle
        from sublet_storage.node_directory import list_live_nodes

        with connect(self._url, application_name="sublet cli") as connection:
            if group_lifecycle.find_live(connection, subscription) is None:
                raise _group_gone_error(subscription, was_there=False)
            if not list_live_nodes(connection):
                raise Unavailable("No leader node is listed in the database: start one with `sublet leader`.")

    def __call__(self) -> Sequence[str]:
        import psycopg

        from sublet_storage.db.connect import connect
        from sublet_storage.node_directory import list_live_nodes

        try:
            with (
                defer_signals(),
                connect(self._url, application_name="sublet cli", receive_timeout_s=POLL_INTERVAL_S) as connection,
            ):
                self._last = [node.address for node in list_live_nodes(connection)]
        except (Unavailable, psycopg.OperationalError) as error:
            self._cli.print_info(f"The nodes known so far are watched: {error}")
        return self._last


def _group_gone_error(subscription: Subscription, was_there: bool) -> NotFound:
    """Return the error for a group that does not exist, or no longer exists."""
    from sublet_storage.groups.model.group_errors import group_not_found_error

    if was_there:
        return NotFound(f"group {str(subscription)!r} was deleted while it was watched.")
    return GroupNeverExisted(str(group_not_found_error(subscription)))


def _format_event(event: dict[str, Any]) -> str:
    """Return an event for people. Characters that could move a cursor are escaped."""
    name, session, reason = (str(event.get(field) or "") for field in ("event", "session", "reason"))
    actor = session or str(event.get("agent") or event.get("node"))
    parts = [str(event.get("at")), f"{name:<13}"]
    if "stream_id" in event:
        parts.append(f"stream {event['stream_id']} at {event.get('position')}")
    if event.get("redelivery_end", 0) > event.get("position", 0):
        parts.append(f"[{event['position']}, {event['redelivery_end']}) may be seen again")
    return escape_control_characters("  ".join([*parts, actor, reason]))
