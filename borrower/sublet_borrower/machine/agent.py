"""The machine of a process's borrowers: routes messages, makes successors, chooses nodes.

Borrowers are not identified by their subscription: after a quick unsubscribe and subscribe one may be leaving while
another connects, to the same leader, for the same group. The caller's `handle` names one subscription
from its beginning to its end.

An agent with a database of its own holds a lock there. Its borrowers declare that, and it begins their user calls only
for a moment after it last saw that lock held: leaders grant their streams to others soon after the lock is free. When
the lock is lost, or acquired, every borrower is replaced: what the former ones held counts again once a leader has
written the reclaim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TypeGuard

from msgspec import Struct, field

from sublet_borrower.machine.borrower import Borrower, InheritedState, SubscriptionRequest
from sublet_borrower.machine.events import (
    AssignmentUpdate,
    BorrowerEnded,
    BorrowerOutcome,
    Event,
    LeaderMessageReceived,
    LeaveRequested,
    NodeLost,
    ProgressReported,
)
from sublet_borrower.machine.transitions import BorrowerStatus
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.limits import MAX_BORROWERS
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    Invalidate,
    LeaderConnectResponse,
    Ping,
    ToBorrower,
    ToLeader,
)
from sublet_protocol.tick import Tick
from sublet_storage.db.liveness_lock import LivenessLockLost, LockEvent, OwnLivenessLockAcquired, PeerLocksChecked

SUSPECT_S = 10.0
"""How long a node that failed to answer is tried only after the others."""


class JoinGroup(Struct, frozen=True):
    """The command to begin a subscription under a handle not used before."""

    handle: int
    subscription: str
    weight: float = 1.0
    session: str | None = None
    starting_position: str = "latest"
    session_epoch: int = 0


class CloseSubscription(Struct, frozen=True):
    """The command to hand every stream over and end; `SubscriptionClosed` follows. `reason`: where the session did not
    request it.
    """

    handle: int
    reason: str = ""


class NodeMessageReceived(Struct, frozen=True):
    """A message from the node at that address."""

    node: str
    message: ToBorrower


class NodesDiscovered(Struct, frozen=True):
    """The addresses of all live nodes, as far as is known."""

    nodes: tuple[str, ...]


class SessionProgressReported(Struct, frozen=True):
    """The session's progress on a stream of one of its subscriptions."""

    handle: int
    progress: ProgressReported


class AgentLockUnavailable(Struct, frozen=True):
    """The agent has no lock, and will not have it soon: subscriptions do not wait for it."""


AgentEvent = (
    JoinGroup
    | CloseSubscription
    | NodeMessageReceived
    | NodeLost
    | NodesDiscovered
    | SessionProgressReported
    | LockEvent
    | AgentLockUnavailable
    | Tick
)


class SessionAssignmentUpdate(Struct, frozen=True):
    """An update for the session that owns the handle."""

    handle: int
    update: AssignmentUpdate


class SubscriptionClosed(Struct, frozen=True):
    """The update that the subscription is over and no borrower will be made for it again."""

    handle: int
    reason: BorrowerEndReason
    detail: str


class AgentOutcome(Struct, frozen=True):
    """Actions of the agent: `sends` are (node address, message) in order; `needs_discovery`: look the live nodes up
    again.
    """

    sends: tuple[tuple[str, ToLeader], ...] = ()
    updates: tuple[SessionAssignmentUpdate | SubscriptionClosed, ...] = ()
    needs_discovery: bool = False
    wake_at: float | None = None


class _OutcomeBuilder(Struct):
    sends: list[tuple[str, ToLeader]] = field(default_factory=list)
    pings: dict[str, list[str]] = field(default_factory=dict)
    updates: list[SessionAssignmentUpdate | SubscriptionClosed] = field(default_factory=list)
    needs_discovery: bool = False


class Agent:
    """The pure machine of an agent; `agent_id` is unique for this incarnation of the process and prefixes every
    borrower's id. `awaits_lock`: the first subscriptions wait until its lock is acquired, or `AgentLockUnavailable`.
    """

    def __init__(self, agent_id: str, settings: BorrowerSettings, *, awaits_lock: bool = False) -> None:
        self.agent_id, self.settings = agent_id, settings
        self.borrowers: dict[int, Borrower] = {}
        self._handles: dict[str, int] = {}
        self._wake: dict[int, float] = {}
        self._nodes: tuple[str, ...] = ()
        self._failed_at: dict[str, float] = {}
        self._queried_nodes: dict[str, str] = {}
        self._asked_nodes: dict[str, set[str]] = {}
        self._borrower_count = 0
        self._waiting: dict[int, SubscriptionRequest] | None = {} if awaits_lock else None
        self._holds_lock = False
        self._lock_seen_at = float("-inf")
        self._out = _OutcomeBuilder()

    def decide(self, event: AgentEvent, now: float) -> AgentOutcome:
        """Apply one event, and return the outcome."""
        self._out = _OutcomeBuilder()
        match event:
            case JoinGroup():
                e = event
                request = SubscriptionRequest(e.subscription, e.weight, e.session, e.starting_position, e.session_epoch)
                self._open(event.handle, request, now)
            case CloseSubscription():
                self._close(event, now)
            case NodeMessageReceived():
                self._receive(event.node, event.message, now)
            case NodeLost():
                self._suspect(event.node, now)
                self._pass_all(event, now)
            case NodesDiscovered():
                self._set_nodes(event.nodes, now)
            case SessionProgressReported():
                self._pass(event.handle, event.progress, now)
            case OwnLivenessLockAcquired() | LivenessLockLost() | PeerLocksChecked() | AgentLockUnavailable():
                self._take_lock_event(event, now)
            case Tick():
                due = [h for h, at in self._wake.items() if at <= now]
                for handle in due:
                    self._pass(handle, Tick(), now)
        return self._outcome(now)

    def group_id(self, handle: int) -> int | None:
        """Return the group of this subscription, once a leader has named it."""
        borrower = self.borrowers.get(handle)
        return borrower.group_id if borrower is not None else None

    def leader_node(self, handle: int) -> str | None:
        """Return the address of the node whose leader grants to this subscription; None while it looks for one."""
        borrower = self.borrowers.get(handle)
        return borrower.node if borrower is not None and borrower.status is BorrowerStatus.CONNECTED else None

    def may_start_call(self, handle: int, stream_id: int, grant_id: int, now: float) -> bool:
        """Return whether a user call on this stream may begin now; see `Borrower.may_start_call`."""
        borrower = self.borrowers.get(handle)
        return self._has_lock(borrower, now) and borrower.may_start_call(stream_id, grant_id, now)

    def may_continue(self, handle: int, stream_id: int, grant_id: int, now: float) -> bool:
        """Return whether another user call may begin on messages given out already; see `Borrower.may_continue`."""
        borrower = self.borrowers.get(handle)
        return self._has_lock(borrower, now) and borrower.may_continue(stream_id, grant_id, now)

    def _has_lock(self, borrower: Borrower | None, now: float) -> TypeGuard[Borrower]:
        """Return whether there is that borrower, and its agent has just seen its lock held if it declared one."""
        return borrower is not None and (not borrower.holds_lock or now < self._lock_valid_until)

    @property
    def _lock_valid_until(self) -> float:
        return self._lock_seen_at + self.settings.lock_valid_s

    # --- the lock -----------------------------------------------------------------------------------------------------

    def _take_lock_event(self, event: LockEvent | AgentLockUnavailable, now: float) -> None:
        match event:
            case OwnLivenessLockAcquired():
                self._holds_lock = True
                self._replace_all("its agent has its lock now", now)
                self._make_waiting(now)
            case LivenessLockLost():
                for borrower in self.borrowers.values():
                    borrower.streams.limit(self._lock_valid_until)
                self._holds_lock = False
                self._replace_all("its agent has lost its lock", now)
            case PeerLocksChecked():
                self._lock_seen_at = event.sent_at if self._holds_lock else self._lock_seen_at
            case AgentLockUnavailable():
                self._make_waiting(now)

    def _make_waiting(self, now: float) -> None:
        """Make the borrowers that have waited for the lock."""
        waiting, self._waiting = self._waiting or {}, None
        for handle, request in waiting.items():
            self._make(handle, request, None, now)

    def _replace_all(self, reason: str, now: float) -> None:
        for handle, borrower in tuple(self.borrowers.items()):
            over = Invalidate(borrower.borrower_id, 0, BorrowerEndReason.RETRY, reason)
            self._pass(handle, LeaderMessageReceived("", over), now)

    def _open(self, handle: int, request: SubscriptionRequest, now: float) -> None:
        if self._waiting is None:
            self._make(handle, request, None, now)
        else:
            self._waiting[handle] = request
            self._out.needs_discovery = True

    def _close(self, event: CloseSubscription, now: float) -> None:
        if self._waiting is not None and self._waiting.pop(event.handle, None) is not None:
            self._out.updates.append(SubscriptionClosed(event.handle, BorrowerEndReason.DONE, "left before it began"))
        else:
            self._pass(event.handle, LeaveRequested(event.reason), now)

    def _outcome(self, now: float) -> AgentOutcome:
        for node, ids in self._out.pings.items():
            parts = (tuple(ids[start : start + MAX_BORROWERS]) for start in range(0, len(ids), MAX_BORROWERS))
            self._out.sends.extend((node, Ping(part, now)) for part in parts)
        wake_at = min(self._wake.values(), default=None)
        return AgentOutcome(tuple(self._out.sends), tuple(self._out.updates), self._out.needs_discovery, wake_at)

    def _receive(self, node: str, message: ToBorrower, now: float) -> None:
        handle = self._handles.get(message.borrower_id)
        self._queried_nodes.pop(message.borrower_id, None)
        if handle is None:
            return
        self._pass(handle, LeaderMessageReceived(node, message), now)
        if isinstance(message, LeaderConnectResponse) and self._failed_lately(message.address, now):
            borrower = self.borrowers.get(handle)
            if borrower is not None and borrower.status is BorrowerStatus.CONNECTING:
                # That leader may be dead, and the node that names it its successor before it could answer.
                self._pass(handle, NodeLost(message.address), now)

    def _make(self, handle: int, request: SubscriptionRequest, inheritance: InheritedState | None, now: float) -> None:
        self._borrower_count += 1
        borrower = Borrower(
            f"{self.agent_id}/{self._borrower_count}",
            request,
            self.settings,
            inheritance,
            self._borrower_count,
            self._holds_lock,
        )
        self.borrowers[handle] = borrower
        self._handles[borrower.borrower_id] = handle
        self._carry_out(handle, borrower, borrower.start(now), now)

    def _pass_all(self, event: Event, now: float) -> None:
        for handle in tuple(self.borrowers):
            self._pass(handle, event, now)

    def _pass(self, handle: int, event: Event, now: float) -> None:
        borrower = self.borrowers.get(handle)
        if borrower is not None:
            self._carry_out(handle, borrower, borrower.decide(event, now), now)

    def _carry_out(self, handle: int, borrower: Borrower, outcome: BorrowerOutcome, now: float) -> None:
        chosen: str | None = None
        for send in outcome.sends:
            if send.node is None and isinstance(send.message, Disconnect):
                for node in sorted(self._asked_nodes.get(borrower.borrower_id, ())):  # any may be granting, no other
                    self._route(node, send.message)
                continue
            if send.node is None:
                chosen = chosen or self._choose(borrower, now)  # all parts of a message go to one node
            self._route(send.node or chosen, send.message)
        self._out.updates.extend(SessionAssignmentUpdate(handle, update) for update in outcome.updates)
        if outcome.wake_at is None:
            self._wake.pop(handle, None)
        else:
            self._wake[handle] = outcome.wake_at
        if outcome.ended is not None:
            self._succeed(handle, borrower, outcome.ended, now)

    def _succeed(self, handle: int, borrower: Borrower, ended: BorrowerEnded, now: float) -> None:
        """Replace a borrower that ended in doubt; after a final reason make none."""
        del self.borrowers[handle], self._handles[borrower.borrower_id]
        self._queried_nodes.pop(borrower.borrower_id, None)
        self._asked_nodes.pop(borrower.borrower_id, None)
        self._wake.pop(handle, None)
        if ended.reason.is_final:
            self._out.updates.append(SubscriptionClosed(handle, ended.reason, ended.detail))
        else:
            self._make(handle, borrower.request, borrower.successor_state(), now)

    def _route(self, address: str | None, message: ToLeader) -> None:
        if address is None:
            self._out.needs_discovery = True
        elif isinstance(message, Ping):
            self._out.pings.setdefault(address, []).extend(message.borrower_ids)
        else:
            self._out.sends.append((address, message))

    def _set_nodes(self, nodes: Iterable[str], now: float) -> None:
        """Set the live nodes. If one is new, have all borrowers that wait for a node try again."""
        previous_nodes, self._nodes = self._nodes, tuple(sorted(set(nodes)))
        self._failed_at = {node: at for node, at in self._failed_at.items() if node in self._nodes}
        if not set(self._nodes) <= set(previous_nodes):
            for handle in tuple(self.borrowers):
                self._pass(handle, NodeLost(""), now)

    def _choose(self, borrower: Borrower, now: float) -> str | None:
        """Return the node to query for the leader, None if no node is known. One that was queried and has not answered
        at all is not the first choice again: a broken connection is reported once, and messages sent into it later are
        lost silently.
        """
        silent = self._queried_nodes.get(borrower.borrower_id)
        if silent is not None:
            self._suspect(silent, now)
        address = self._preferred(borrower.request.subscription, now)
        if address is not None:
            self._queried_nodes[borrower.borrower_id] = address
            self._asked_nodes.setdefault(borrower.borrower_id, set()).add(address)
        return address

    def _suspect(self, node: str, now: float) -> None:
        self._failed_at[node] = now
        self._out.needs_discovery = True

    def _failed_lately(self, node: str, now: float) -> bool:
        return self._failed_at.get(node, float("-inf")) > now - SUSPECT_S

    def _preferred(self, subscription: str, now: float) -> str | None:
        """Return the first node by rendezvous hashing, so that all agents query the same; those that failed lately come
        last, the longest ago first, so that all are tried in turn.
        """
        if not self._nodes:
            return None

        def rank(node: str) -> tuple[float, bytes]:
            failed_at = self._failed_at[node] if self._failed_lately(node, now) else float("-inf")
            mixed = f"{node} {subscription}".encode(errors="surrogatepass")
            return (-failed_at, hashlib.blake2b(mixed, digest_size=8).digest())

        return max(self._nodes, key=rank)
