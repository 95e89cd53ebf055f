"""Events and outcomes of a group's leader, as frozen values."""

from __future__ import annotations

from msgspec import Struct

from sublet_protocol.messages.borrower_leader import ToBorrower, ToLeader
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.records import GroupWriteResult, GroupWrites, HistoryRecord, LendingChange


class BorrowerMessageReceived(Struct, frozen=True):
    """A borrower's message, from the agent that sent it."""

    agent: str
    message: ToLeader


class WritesCommitted(Struct, frozen=True):
    """The answer to changes of this group that were written in one transaction."""

    result: GroupWriteResult


class WritesNotCommitted(Struct, frozen=True):
    """The transaction certainly did not commit: these writes are still to be done."""

    writes: GroupWrites


class ForcedRevokeRequested(Struct, frozen=True):
    """An operator, a drain or a reset takes these streams back by the deadline, with or without final progress."""

    stream_ids: tuple[int, ...]
    reason: str


class MemberRightRevoked(Struct, frozen=True):
    """A member has lost the right to be one."""

    borrower_id: str
    reason: str


class AgentProcessesEnded(Struct, frozen=True):
    """The processes of these agents have ended, as far as their locks show, on that timeline of the database (None: not
    known)."""

    agents: frozenset[str]
    timeline: int | None = None


class StreamsChanged(Struct, frozen=True):
    """Streams were opened or closed, epochs completed, or the desired state changed; unverified."""


Event = (
    BorrowerMessageReceived
    | WritesCommitted
    | WritesNotCommitted
    | ForcedRevokeRequested
    | MemberRightRevoked
    | AgentProcessesEnded
    | StreamsChanged
    | Tick
)


class GroupOutcome(Struct, frozen=True):
    """The result of one event. `changes` and `needs_stream_sync` are to be committed under the term; `sends` are
    (agent, message) and may go at once.

    `stop_reason`: why this leader is over ("idle", "stale_term"); the node drops it, and releases the claim if it still
    has it. `invariant_violations`: for operators. `history`: events for watchers that are in no commit: members that
    join or leave.
    """

    changes: tuple[LendingChange, ...] = ()
    needs_stream_sync: bool = False
    sends: tuple[tuple[str, ToBorrower], ...] = ()
    wake_at: float | None = None
    stop_reason: str | None = None
    invariant_violations: tuple[str, ...] = ()
    history: tuple[HistoryRecord, ...] = ()
