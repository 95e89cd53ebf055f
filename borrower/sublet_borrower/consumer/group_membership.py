"""A member of a consumer group, as used by a session and by a micro-batch planner.

It opens the transport, runs the agent, keeps the assignment, learns of new messages, and leaves the group. It has no
reference to its owner, so that the network's thread, which refers to it, keeps no session alive.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Generic, Protocol, TypeVar

from sublet_borrower.agent.agent_loop import AgentLoop
from sublet_borrower.agent.session_event_queue import SessionEventQueue
from sublet_borrower.consumer.database_or_node_access import DatabaseOrNodeAccess
from sublet_borrower.fetch.stream_fetcher import GrantedStreamReader
from sublet_borrower.machine.events import AssignmentUpdate, ProgressReported
from sublet_borrower.new_data.head_poll_scheduler import HeadPushed, HeadSubscriptionId
from sublet_borrower.new_data.monitor import MonitoredStreams, NewDataMonitor
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.util.session_fork_guard import SessionForkGuard
from sublet_protocol.domain.errors import SubscriptionEnded
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import BorrowerEndReason

ReportProgress = Callable[[ProgressReported], None]


class MemberAssignment(MonitoredStreams, Protocol):
    """The streams that the member holds. `apply_update` is called on the agent's thread."""

    def apply_update(self, update: AssignmentUpdate) -> None: ...


A = TypeVar("A", bound=MemberAssignment)


def _fetch_heads(reader: GrantedStreamReader, assignment: object, stream_ids: Iterable[int]) -> list[tuple[int, int]]:
    return reader.fetch_heads(stream_ids)


class GroupMembership(Generic[A]):
    """One subscription, which begins with `join` and ends with `close`.

    `make_assignment` is called with the function that reports progress to the leader. `open_transport` is called with a
    stack, which closes what it has opened. `fetch_heads(reader, assignment, stream_ids)` reads where streams end. Where
    there is a `name` and it is stable, the member that took it last fences those before it.

    `session_epoch`: which of the processes of that name it is; 0: the name, if any, is only shown to operators.
    `handle`: of the agent's subscription. `is_given_up`: its user did not poll in time; it may join again.
    """

    def __init__(
        self,
        subscription: str,
        make_assignment: Callable[[ReportProgress], A],
        open_transport: Callable[[contextlib.ExitStack], DatabaseOrNodeAccess],
        settings: BorrowerSettings,
        *,
        name: str | None,
        is_name_stable: bool = True,
        weight: float,
        starting_position: str,
        fetch_heads: Callable[[GrantedStreamReader, A, Iterable[int]], list[tuple[int, int]]] = _fetch_heads,
    ) -> None:
        group = Subscription.parse(subscription)
        self.subscription = str(group)
        self.settings = settings
        self.owner = SessionForkGuard()
        self.assignment = make_assignment(self._report_progress)
        self.events = SessionEventQueue(self.assignment.apply_update)
        self.group_id: int | None = None
        self.handle = 0
        self.is_leaving = self.is_closed = self.is_given_up = False
        self._head_subscriptions: dict[int, HeadSubscriptionId] = {}
        with contextlib.ExitStack() as opened:
            transport = open_transport(opened)
            transport.reader.warm_up(group.filter)
            self.reader, self.url = transport.reader, transport.url
            self.agent = AgentLoop(transport.discover_nodes, settings, transport.url)
            opened.callback(self.agent.close)
            is_newest = name is not None and is_name_stable
            self.session_epoch = transport.next_session_epoch(group, name or "") if is_newest else 0
            if transport.subscribe_heads is not None:
                feed = transport.subscribe_heads(self._on_heads, self._on_listening)
                opened.callback(feed.stop)
                self.events.listener = feed.listener
            self.monitor = NewDataMonitor(
                self.assignment,
                partial(fetch_heads, self.reader, self.assignment),
                self._subscribe_head,
                self._unsubscribe_head,
            )
            self._subscribe = partial(
                self.agent.subscribe,
                self.subscription,
                self.events,
                weight=weight,
                session=name,
                start=starting_position,
                session_epoch=self.session_epoch,
            )
            self.resources = opened.pop_all()

    def join(self) -> None:
        """Join the group, or join it again after the member was given up."""
        self.is_given_up = self.is_leaving = False
        self._head_subscriptions.clear()
        self.handle = self._subscribe()
        if self.is_leaving:  # another thread left meanwhile, by the handle of before
            self.agent.unsubscribe(self.handle)

    def receive(self, wait_s: float = 0.0) -> None:
        """Act on the events that have arrived; where there are none, wait for one, for at most `wait_s`. Raise
        `SubscriptionEnded`.
        """
        for event in self.events.take(wait_s):
            if isinstance(event, HeadPushed):
                self.monitor.on_head_pushed(event)
        self.note_group()
        end = self.events.end
        if end is not None and end.handle == self.handle and not (self.is_closed or self.is_given_up):
            self.is_closed = True
            if end.reason is not BorrowerEndReason.DONE:
                raise SubscriptionEnded(self.subscription, end.reason.value, end.detail)

    def note_group(self) -> None:
        """Note the id of the group as long as the agent has it, which drops it with the subscription."""
        self.group_id = self.agent.group_id(self.handle) or self.group_id

    def granting_group_id(self) -> int:
        """Return the id of the group that has granted a stream to this member."""
        assert self.group_id is not None, "a leader that grants a stream has named the group"
        return self.group_id

    def may_start_call(self, stream_id: int, grant_id: int) -> bool:
        """Return whether a user call on this stream may begin now."""
        return self.agent.may_start_call(self.handle, stream_id, grant_id)

    def may_continue(self, stream_id: int, grant_id: int) -> bool:
        """Return whether another user call may begin now on messages that were given out."""
        return self.agent.may_continue(self.handle, stream_id, grant_id)

    def check_owner(self) -> None:
        """Raise `UsageError` in a forked child."""
        self.owner.check(self.subscription)

    def give_up(self, reason: str) -> None:
        """Leave the group since the user does not poll; on the network's thread."""
        handle, self.is_given_up = self.handle, True  # its user may join again from here on, under another handle
        self.agent.give_up(handle, reason)

    def leave(self) -> None:
        """Begin to hand over every stream. From any thread."""
        if not (self.is_leaving or self.is_closed or self.is_given_up):
            self.is_leaving = True
            self.agent.unsubscribe(self.handle)

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the group, wait until the last progress is durable, and close what was opened. `timeout_s`: how long to
        wait; None: the unsubscribe timeout and a lease. Not in a forked child."""
        longest_s = self.settings.unsubscribe_timeout_s + self.settings.disconnect_timeout_s + 1.0
        deadline = time.monotonic() + (longest_s if timeout_s is None else timeout_s)
        self.leave()
        while not (self.is_closed or self.is_given_up) and time.monotonic() < deadline:
            with contextlib.suppress(SubscriptionEnded):
                self.receive(0.1)
        self.is_closed = True
        self.resources.close()

    def _report_progress(self, progress: ProgressReported) -> None:
        self.check_owner()
        self.agent.report_progress(self.handle, progress)

    def _subscribe_head(self, subscription: HeadSubscriptionId) -> None:
        self._head_subscriptions[subscription.stream_id] = subscription
        self.agent.subscribe_head(self.handle, subscription)
        if self.agent.has_direct_heads:
            self._confirm_push(subscription)

    def _unsubscribe_head(self, subscription: HeadSubscriptionId) -> None:
        if self._head_subscriptions.get(subscription.stream_id) == subscription:
            del self._head_subscriptions[subscription.stream_id]
        self.agent.unsubscribe_head(self.handle, subscription)

    def _on_heads(self, heads: Mapping[int, int]) -> None:
        """Take what publishers sent to the direct listener, on the thread that listens, as if a node had pushed it."""
        for stream_id, head in heads.items():
            if (subscription := self._head_subscriptions.get(stream_id)) is not None:
                self.events.put(HeadPushed(subscription, head))

    def _on_listening(self, is_listening: bool) -> None:
        """Take heads from the direct listener alone, or from nodes again."""
        self.agent.set_direct_heads(is_listening)
        for subscription in tuple(self._head_subscriptions.values()) if is_listening else ():
            self._confirm_push(subscription)

    def _confirm_push(self, subscription: HeadSubscriptionId) -> None:
        """Let the monitor know that the stream's heads are pushed, as a node does by its answer."""
        self.events.put(HeadPushed(subscription, 0))
