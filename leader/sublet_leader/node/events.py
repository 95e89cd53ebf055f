"""What happens to a node, what it wants from the database, what it sends: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sublet_leader import election as el
from sublet_leader.group.history import Happened
from sublet_leader.node.group_watch import Whereabouts
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.messages import ToBorrower, ToLeader
from sublet_protocol.pubsub.counters import PublisherCounters
from sublet_storage.groups.model.records import Claim, Group, GroupResult, GroupWrites, Lending, Start

# --- requests to the database, executed in order --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """The group of that subscription, created if it is a share's first subscriber.

    With `group_id`: that group, if it is not deleted; none is created.
    """

    subscription: Subscription
    start: Start
    group_id: int | None = None


@dataclass(frozen=True, slots=True)
class ClaimLeadership:
    """Try to lead; `attempt_started` goes back with the answer."""

    leadership_id: int
    attempt_started: float


@dataclass(frozen=True, slots=True)
class RenewLeaderships:
    """All leases of this node in one statement."""

    terms: Mapping[int, int]
    attempt_started: float


@dataclass(frozen=True, slots=True)
class ReleaseLeaderships:
    """Expire these leases."""

    terms: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Load:
    """The rows of a group just claimed."""

    group: Group
    term: int


@dataclass(frozen=True, slots=True)
class Commit:
    """What many groups want written, in one transaction."""

    batch: tuple[GroupWrites, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Is there a group of that subscription, and who leads it? Changes nothing."""

    subscription: Subscription


Request = Open | ClaimLeadership | RenewLeaderships | ReleaseLeaderships | Load | Commit | Look


# --- in -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The node's life begins: stand for the maintenance of the database."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message from the agent that calls itself that."""

    agent: str
    message: ToLeader


@dataclass(frozen=True, slots=True)
class Opened:
    """Answer to `Open`: the group; or None with the reason, `final` if asking again cannot help."""

    request: Open
    group: Group | None
    problem: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class Claimed:
    """Answer to `ClaimLeadership`: the row as it is; None if the database did not answer.

    `jitter_s`: a small random delay before the next attempt, so that the losers of a race do not race again.
    """

    request: ClaimLeadership
    claim: Claim | None
    jitter_s: float = 0.0

    def heard(self) -> el.Event:
        """What the election hears of it."""
        asked = self.request
        return el.ClaimAnswered(asked.leadership_id, asked.attempt_started, self.claim, self.jitter_s)


@dataclass(frozen=True, slots=True)
class Renewed:
    """Answer to `RenewLeaderships`: the ids that are still ours; None if the database did not answer."""

    request: RenewLeaderships
    renewed: frozenset[int] | None

    def heard(self) -> el.Event:
        """What the election hears of it."""
        return el.RenewAnswered(self.request.attempt_started, self.renewed)


@dataclass(frozen=True, slots=True)
class Released:
    """Answer to `ReleaseLeaderships`; None if the database did not answer."""

    request: ReleaseLeaderships
    released: frozenset[int] | None

    def heard(self) -> el.Event:
        """What the election hears of it."""
        return el.ReleaseAnswered(self.request.terms, self.released is not None)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Answer to `Load`: None if the term is over, the group is `deleted`, or the database did not answer. `group` is as
    it is now, with what is ordered."""

    request: Load
    rows: tuple[Lending, ...] | None
    deleted: bool = False
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """Answer to `Commit`."""

    request: Commit
    results: tuple[GroupResult, ...]


@dataclass(frozen=True, slots=True)
class NotWritten:
    """Answer to `Commit`: it failed. `unknown`: it may have been committed all the same."""

    request: Commit
    unknown: bool


@dataclass(frozen=True, slots=True)
class Looked:
    """Answer to `Look`: the group and its leadership, as far as there are any; not `answered`: nobody knows."""

    request: Look
    group: Group | None = None
    claim: Claim | None = None
    answered: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody who watches that subscription wants to know who leads it."""

    subscriber_id: str
    subscription: Subscription


@dataclass(frozen=True, slots=True)
class RevokeWanted:
    """Take these streams of a group led here back, by force at the revoke deadline."""

    group_id: int
    stream_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StreamsChanged:
    """Somebody says that streams were opened or closed; `epochs`: that nothing but epochs were completed; `group_id`:
    that nothing but the orders of that group have changed."""

    epochs: bool = False
    group_id: int | None = None


@dataclass(frozen=True, slots=True)
class Ordered:
    """What an operator wants now, said again and again: lead nothing, or no longer under those terms {group: term}."""

    draining: bool
    step_down: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Hand over what is led and stop; wait no longer than `by` for what is being written."""

    by: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


DatabaseAnswer = Opened | Claimed | Renewed | Released | Loaded | Written | NotWritten | Looked


NodeEvent = Begin | Heard | Asked | RevokeWanted | StreamsChanged | Ordered | Shutdown | Tick | DatabaseAnswer


# --- out ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """`sends` are (agent, message) and may go at once. `stopped`: nothing is left to do, the process may end.

    `stories`: rules of our own that a group's leader found broken; it is over, the other groups go on. `happened`: what
    is true by now, for those who watch; `answers`: who leads, for those who asked.
    """

    requests: tuple[Request, ...] = ()
    sends: tuple[tuple[str, ToBorrower], ...] = ()
    wake_at: float | None = None
    stopped: bool = False
    stories: tuple[str, ...] = ()
    happened: tuple[Happened, ...] = ()
    answers: tuple[Whereabouts, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeState:
    """`agents` are connected, and `held_polls` of them wait at this instant. `news`: what was heard by push, missed,
    healed and read again (`Ears.counters`), `heads`: {stream: head} as far as news and catch-ups have told; both empty
    where nothing is pushed. `leaks`: what the session remembers in vain."""

    agents: int
    held_polls: int
    session: PublisherCounters
    leaks: tuple[str, ...]
    news: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=dict)
