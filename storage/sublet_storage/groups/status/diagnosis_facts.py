"""Facts about a group and its streams for `diagnosis`, and the names of its answers."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from sublet_storage.groups.status.overview_model import StreamView


class StallReason(StrEnum):
    """The reason why a stream stands still, or that it does not; the values are the names in JSON."""

    FINISHED = "finished"  # it is closed, and consumed to its end
    BLOCKED = "blocked"  # no consumer can go on from its position, until an operator decides
    GONE = "gone"  # retention, or the end of its space, has taken what it would be given next
    PAUSED = "paused"  # an operator has paused the group
    NO_NODE = "no_node"  # the group has no leader, and no node is there that could lead it
    NO_LEADER = "no_leader"  # the group has no leader, though consumers have streams of it
    NO_MEMBER = "no_member"  # the group has no leader, because no consumer requests it
    MEMBERS_SILENT = "members_silent"  # the group has a leader, and no consumer has a stream of it
    UNREADABLE = "unreadable"  # it is held, and what comes next cannot be read
    WAITING_FOR_EPOCHS = "waiting_for_epochs"  # publishers have not completed the epochs that come next
    REVOKED = "revoked"  # it is being taken back
    CAUGHT_UP = "caught_up"  # there is nothing to consume
    STALLED = "stalled"  # it is held, and it does not move
    CONSUMING = "consuming"  # it is held, and it moves
    RESERVED = "reserved"  # what a session has in doubt waits for that session
    WAITING_FOR_PARENTS = "waiting_for_parents"  # the streams that it came from are consumed first
    RESERVED_FOR_SESSION = "reserved_for_session"  # it is reserved for the return of a session that has left
    FORMER_HOLDER = "former_holder"  # its former holder may not have stopped, and is waited for
    GRANT_PENDING = "grant_pending"  # it is free, and the leader grants it next


class AwaitedEpochs(Struct, frozen=True):
    """The epochs that an atomic group waits for in a space: the least that are not completed, and the producers that
    hold them."""

    space: str
    least: str
    producers: tuple[str, ...]


class ParentStream(Struct, frozen=True):
    """A stream that is consumed first, with the group's position in it."""

    stream_id: int
    status: str
    position: int
    head: int


class GroupDiagnosisFacts(Struct, frozen=True):
    """The facts of a group. `held`: how many of its streams are granted; `nodes`: how many nodes could lead it;
    `draining`: the others."""

    subscription: str
    paused: str | None
    leader: str | None
    last_leader: str | None
    nodes: int
    draining: tuple[str, ...]
    held: int
    may_skip_lost_data: bool
    is_atomic: bool


class StreamDiagnosisFacts(StreamView, frozen=True, kw_only=True):
    """The facts of a stream. `idle_s`: since when its row was not written. `taken_s`: since when it is taken from a
    holder that may not have stopped. `parents`: the nearest ancestors that are not finished. `dropped_space`: the name
    of its space, if that was dropped."""

    idle_s: float | None = None
    taken_s: float | None = None
    revoke_reason: str | None = None
    parents: tuple[ParentStream, ...] = ()
    waits_for: AwaitedEpochs | None = None
    dropped_space: str | None = None

    @property
    def is_gone(self) -> bool:
        """Return whether retention has taken its messages."""
        return self.head_state == "gone"

    @property
    def owner(self) -> str | None:
        """Return its owner, or the one that is waited for: the session, or else the agent."""
        return self.session or self.agent

    @property
    def stalled_s(self) -> float:
        """Return for how long there was something to consume and no progress was reported."""
        return min(self.age_s or 0.0, self.idle_s or 0.0)
