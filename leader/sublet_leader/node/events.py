"""Events, requests and outcomes of the node machine, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from sublet_leader import election as el
from sublet_leader.group import events as group_events
from sublet_leader.group.watch_events import GroupWatchEvent
from sublet_leader.node.group_event_publisher import WatcherLeaderQueryReply
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import ToBorrower, ToLeader
from sublet_protocol.pubsub.counters import NodeSideCounters
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.records import (
    Group,
    GroupWriteResult,
    GroupWrites,
    LeaderLivenessLock,
    Leadership,
    Lending,
    StartingPosition,
)

# --- requests to the database, executed in order --------------------------------------------------------------------


class FindOrCreateGroup(Struct, frozen=True):
    """Open the group of that subscription, created if it is a share's first subscriber.

    With `group_id`: that group, if it is not deleted; none is created. `principal`: for which it is created; None:
    unknown.
    """

    subscription: Subscription
    starting_position: StartingPosition
    group_id: int | None = None
    principal: str | None = None


class ClaimLeadership(Struct, frozen=True):
    """Try to lead; `attempt_started` is returned with the answer. `lock_key`: what this node declares; None: its lock
    is not held. `rival`: the present leader, succeeded before its lease has run out if its lock is free."""

    leadership_id: int
    attempt_started: float
    lock_key: int | None = None
    rival: LeaderLivenessLock | None = None


class RenewLeaderships(Struct, frozen=True):
    """All leases of this node in one statement. `lock_key`: as of a claim."""

    terms: Mapping[int, int]
    attempt_started: float
    lock_key: int | None = None


class ReleaseLeaderships(Struct, frozen=True):
    """Expire these leases."""

    terms: Mapping[int, int]


class LoadGroup(Struct, frozen=True):
    """The rows of a group just claimed. `previous_leader_until`: until then the previous leader may still act
    as the leader."""

    group: Group
    term: int
    previous_leader_until: float = float("-inf")


class CommitWrites(Struct, frozen=True):
    """Changes of many groups, in one transaction."""

    batch: tuple[GroupWrites, ...]


class LookUpLeader(Struct, frozen=True):
    """Read the group of that subscription and its leader. Changes nothing."""

    subscription: Subscription


class ReadSessionEpoch(Struct, frozen=True):
    """Read the epoch that was drawn last for a session's name in a group. A name without an owner is the principal's
    from then on; None: the caller is unknown."""

    subscription: Subscription
    session: str
    principal: str | None = None


DatabaseRequest = (
    FindOrCreateGroup
    | ClaimLeadership
    | RenewLeaderships
    | ReleaseLeaderships
    | LoadGroup
    | CommitWrites
    | LookUpLeader
    | ReadSessionEpoch
)


# --- in -------------------------------------------------------------------------------------------------------------


class NodeStarted(Struct, frozen=True):
    """The node has started: campaign for the maintenance of the database."""


class AgentMessageReceived(Struct, frozen=True):
    """A message of the agent with that id. `principal`: to which the agent belongs; None: unknown."""

    agent: str
    message: ToLeader
    principal: str | None = None

    @property
    def caller(self) -> str:
        """Return for whom it counts: its principal, or where nobody knows, its agent."""
        return self.principal or self.agent


class AgentLongPollChanged(Struct, frozen=True):
    """No poll of that agent is held: its last one was broken, or no next one has come; or, `is_held`, it polls
    again."""

    agent: str
    is_held: bool


class AgentsExpired(Struct, frozen=True):
    """The subscriber ids of these agents have ended: they were silent, or broke a rule."""

    agents: frozenset[str]


class GroupFoundOrCreated(Struct, frozen=True):
    """Answer to `FindOrCreateGroup`: the group; or None with the reason, `is_final` if a retry cannot help.
    `is_limited`: its principal has reached its limit of created groups for now."""

    request: FindOrCreateGroup
    group: Group | None
    error: str = ""
    is_final: bool = False
    is_limited: bool = False


class LeadershipClaimCompleted(Struct, frozen=True):
    """Answer to `ClaimLeadership`: the row as it is; None if the database did not answer.

    `jitter_s`: a small random delay before the next attempt, so that the losers of a race do not race again.
    """

    request: ClaimLeadership
    leadership: Leadership | None
    jitter_s: float = 0.0

    def to_election_event(self) -> el.Event:
        """Return it as an event of the election."""
        request = self.request
        return el.ClaimCompleted(request.leadership_id, request.attempt_started, self.leadership, self.jitter_s)


class LeadershipRenewalCompleted(Struct, frozen=True):
    """Answer to `RenewLeaderships`: the ids that are still led; None if the database did not answer."""

    request: RenewLeaderships
    renewed: frozenset[int] | None

    def to_election_event(self) -> el.Event:
        """Return it as an event of the election."""
        return el.RenewCompleted(self.request.attempt_started, self.renewed)


class LeadershipReleaseCompleted(Struct, frozen=True):
    """Answer to `ReleaseLeaderships`; None if the database did not answer."""

    request: ReleaseLeaderships
    released: frozenset[int] | None

    def to_election_event(self) -> el.Event:
        """Return it as an event of the election."""
        return el.ReleaseCompleted(self.request.terms, self.released is not None)


class GroupLoadCompleted(Struct, frozen=True):
    """Answer to `LoadGroup`: None if the term is over, the group is `is_deleted`, or the database did not answer.
    `group` is as it is now, with its desired state."""

    request: LoadGroup
    rows: tuple[Lending, ...] | None
    is_deleted: bool = False
    group: Group | None = None


class WritesCommitted(Struct, frozen=True):
    """Answer to `CommitWrites`."""

    request: CommitWrites
    results: tuple[GroupWriteResult, ...]


class WritesCommitFailed(Struct, frozen=True):
    """Answer to `CommitWrites`: it failed. `is_outcome_unknown`: it may have been committed all the same."""

    request: CommitWrites
    is_outcome_unknown: bool


class LeaderLookupCompleted(Struct, frozen=True):
    """Answer to `LookUpLeader`: the group and its leadership, None if there is none; not `is_answered`: unknown."""

    request: LookUpLeader
    group: Group | None = None
    leadership: Leadership | None = None
    is_answered: bool = True


class SessionEpochRead(Struct, frozen=True):
    """Answer to `ReadSessionEpoch`; None if the database did not answer. `denied`: why the caller may not use the
    name."""

    request: ReadSessionEpoch
    last: int | None
    denied: str | None = None


class WatcherLeaderQueryReceived(Struct, frozen=True):
    """A watcher of that subscription queries its leader. `caller`: for whom it counts."""

    subscriber_id: str
    subscription: Subscription
    caller: str


class GroupLeaderEvent(Struct, frozen=True):
    """An event of the leader of a group that may be led here."""

    group_id: int
    event: group_events.Event


class StreamsChanged(Struct, frozen=True):
    """Streams were opened or closed; unverified. `is_epochs_only`: only epochs were completed; `group_id`: only the
    desired state of that group has changed."""

    is_epochs_only: bool = False
    group_id: int | None = None


class NodeDesiredStateRead(Struct, frozen=True):
    """The node's desired state, repeated: lead nothing, or no longer under those terms {group: term}."""

    is_draining: bool
    step_down: Mapping[int, int]


class ShutdownRequested(Struct, frozen=True):
    """Hand over what is led and stop; wait no longer than `deadline` for pending writes."""

    deadline: float


DatabaseAnswer = (
    GroupFoundOrCreated
    | LeadershipClaimCompleted
    | LeadershipRenewalCompleted
    | LeadershipReleaseCompleted
    | GroupLoadCompleted
    | WritesCommitted
    | WritesCommitFailed
    | LeaderLookupCompleted
    | SessionEpochRead
)


NodeEvent = (
    NodeStarted
    | AgentMessageReceived
    | AgentLongPollChanged
    | AgentsExpired
    | WatcherLeaderQueryReceived
    | GroupLeaderEvent
    | StreamsChanged
    | NodeDesiredStateRead
    | ShutdownRequested
    | el.LockEvent
    | Tick
    | DatabaseAnswer
)


# --- out ------------------------------------------------------------------------------------------------------------


class NodeOutcome(Struct, frozen=True):
    """The result of one event. `sends` are (agent, message) and may go at once. `is_stopped`: the process may end.

    `invariant_violations`: invariants that a group's leader found broken; it is over, the other groups continue.
    `history`: events that have happened, for watchers; `leader_locations`: the answers to leader queries.
    """

    requests: tuple[DatabaseRequest, ...] = ()
    sends: tuple[tuple[str, ToBorrower], ...] = ()
    wake_at: float = float("inf")
    is_stopped: bool = False
    invariant_violations: tuple[str, ...] = ()
    history: tuple[GroupWatchEvent, ...] = ()
    leader_locations: tuple[WatcherLeaderQueryReply, ...] = ()


class NodeOutcomeBuilder(Struct):
    """The parts of an outcome while an event is handled."""

    requests: list[DatabaseRequest] = field(default_factory=list)
    sends: list[tuple[str, ToBorrower]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    history: list[GroupWatchEvent] = field(default_factory=list)
    answers: list[WatcherLeaderQueryReply] = field(default_factory=list)

    def build(self, wake_at: float, is_stopped: bool) -> NodeOutcome:
        """Return the outcome."""
        return NodeOutcome(
            tuple(self.requests),
            tuple(self.sends),
            wake_at,
            is_stopped,
            tuple(self.violations),
            tuple(self.history),
            tuple(self.answers),
        )


class NodeSnapshot(Struct, frozen=True):
    """The state of a node. `agents` are connected, and `held_polls` of them wait at this instant. `notifications`: what
    was pushed, missed, healed and read again (`NotificationSubscriber.counters`), `heads`: {stream: head} as far as
    pushes and catch-ups have shown; both empty where nothing is pushed. `leaks`: what connections still store in
    vain."""

    agents: int
    held_polls: int
    pubsub: NodeSideCounters
    leaks: tuple[str, ...]
    notifications: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=dict)
