"""Events of the borrower machine and its outcomes, as frozen values."""

from __future__ import annotations

from msgspec import Struct

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Grant,
    GrantEndOutcome,
    ToBorrower,
    ToLeader,
)
from sublet_protocol.tick import Tick

# --- in -------------------------------------------------------------------------------------------------------------


class LeaderMessageReceived(Struct, frozen=True):
    """A message of a leader, or of a node with the leader's address, came in from `node`."""

    node: str
    message: ToBorrower


class NodeLost(Struct, frozen=True):
    """The event that the connection to this node is dead."""

    node: str


class ProgressReported(Struct, frozen=True):
    """The session's progress on a stream up to `position`. `is_final`: it will not touch the stream under this grant
    again.

    `size` and `lag`, as in `StreamProgress`, are for the leader's view of the load; `delivered_end` is the end of what
    is given up, `consumed` what is consumed in entire epochs, `in_doubt` what is planned (None: unchanged),
    `read_error` why it cannot be read on at present, `poison`, in a final report, the offset before which it cannot be
    decoded, `is_beyond_head`, in a final report, that the stream was found to end before what was read of it.
    """

    stream_id: int
    grant_id: int
    position: int
    is_final: bool = False
    size: int = 0
    lag: int | None = None
    delivered_end: int = 0
    consumed: ConsumedFrontier | None = None
    in_doubt: InDoubtRange | None = None
    read_error: str = ""
    poison: int = 0
    is_beyond_head: bool = False


class LeaveRequested(Struct, frozen=True):
    """The request to stop every stream, wait for their last progress and hand all over. `reason`: where the session did
    not request it.
    """

    reason: str = ""


Event = LeaderMessageReceived | NodeLost | ProgressReported | LeaveRequested | Tick


# --- out ------------------------------------------------------------------------------------------------------------


class Send(Struct, frozen=True):
    """The action to deliver to the node at that address; None: to the node that the agent prefers for this
    subscription.
    """

    node: str | None
    message: ToLeader


class StreamGranted(Struct, frozen=True):
    """The update to begin to consume this stream from the grant's position."""

    grant: Grant


class RevokeStarted(Struct, frozen=True):
    """The update to begin no new batch of this stream, and to report its final progress when the running one has
    ended.
    """

    stream_id: int
    grant_id: int


class StreamRemoved(Struct, frozen=True):
    """The update that the stream is no longer granted under this grant. After `LOST`, work still running may be done
    twice.
    """

    stream_id: int
    grant_id: int
    reason: GrantEndOutcome


class SavedProgress(Struct, frozen=True):
    """Durable progress up to `position`, with what is in doubt; `consumed` in a group that is atomic."""

    stream_id: int
    grant_id: int
    position: int
    in_doubt: InDoubtRange | None = None
    consumed: ConsumedFrontier | None = None


class GroupFrontiersAdvanced(Struct, frozen=True):
    """The progress of an atomic group, in each space."""

    frontiers: tuple[GroupFrontier, ...]


AssignmentUpdate = StreamGranted | RevokeStarted | StreamRemoved | SavedProgress | GroupFrontiersAdvanced


class BorrowerEnded(Struct, frozen=True):
    """The update that the borrower is destroyed. After `RETRY` the agent makes a successor that requests to keep its
    grants."""

    reason: BorrowerEndReason
    detail: str


class BorrowerOutcome(Struct, frozen=True):
    """Messages and updates, in order. `wake_at`: call again with a `Tick` no later than this."""

    sends: tuple[Send, ...] = ()
    updates: tuple[AssignmentUpdate, ...] = ()
    ended: BorrowerEnded | None = None
    wake_at: float | None = None
