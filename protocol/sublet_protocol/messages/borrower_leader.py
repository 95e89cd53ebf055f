"""The messages between borrowers and leaders, as frozen values without behaviour.

Every message has the borrower's id and, once known, the leader's term; messages about streams have stream and grant id.
A message under a past identity is ignored, or answered with a message that reports that. The names are those of the
durable shared subscription design that this protocol follows (`docs/protocol.md`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.in_doubt_range import InDoubtRange

PROTOCOL_VERSION = 6
"""Carried by every poll and command batch; a peer of another version is refused with both numbers."""


class BorrowerEndReason(StrEnum):
    """The reasons why a borrower is over. After a final reason its agent does not make another."""

    RETRY = "retry"  # something was inconsistent: start again under a new id
    DELETED = "deleted"  # the group does not exist any more
    FENCED = "fenced"  # a newer session of the same name took over
    DENIED = "denied"  # the leader will never accept this subscription
    DONE = "done"  # the disconnect is durable

    @property
    def is_final(self) -> bool:
        """Return whether the agent must not recreate the borrower."""
        return self is not BorrowerEndReason.RETRY


class GrantEndOutcome(StrEnum):
    """The outcomes of a grant for its borrower."""

    SAVED = "saved"  # its final progress is durable
    FINISHED = "finished"  # the stream is closed and wholly consumed
    LOST = "lost"  # the grant is over without final progress of the borrower


class HeldGrant(Struct, frozen=True):
    """A stream that a borrower held when its leader was lost, and requests the next leader to confirm."""

    stream_id: int
    grant_id: int
    position: int
    consumed: ConsumedFrontier | None = None


class StreamProgress(Struct, frozen=True):
    """The next offset to deliver of one stream. `final`: the last report under this grant.

    `size`: bytes consumed under this grant so far. `lag`: messages that were left when the reader last looked; None: it
    has not looked yet. `delivered_end`: in a final report, [position, delivered_end) was delivered and is given up, and
    may be delivered again; 0: nothing. `consumed`: in an atomic group, what is consumed in entire epochs. `in_doubt`:
    what is planned; it may be started when `ProgressSaved` confirms that it is durable. `read_error`: why the next
    messages cannot be read at present, for people; empty: they can be, as far as is known. `poison`: in a final report,
    the next messages up to before that offset cannot be decoded, and `read_error` is why; 0: no such block.
    `beyond_head`: in a final report, the stream was found to end before what was read of it, and `read_error` says
    where.
    """

    stream_id: int
    grant_id: int
    position: int
    final: bool = False
    size: int = 0
    lag: int | None = None
    delivered_end: int = 0
    consumed: ConsumedFrontier | None = None
    in_doubt: InDoubtRange | None = None
    read_error: str = ""
    poison: int = 0
    beyond_head: bool = False


# --- to the leader --------------------------------------------------------------------------------------------------


class LeaderWanted(Struct, frozen=True):
    """The request to any node for the group's leader; repeated until one answers.

    `group_id` is None on the very first connect; afterwards an id that no longer exists is answered `deleted`. `weight`
    is how much this consumer can take, relative to others. `leaving`: hand over what `reclaim` names, accept nothing
    new. `predecessor` is the invalidated borrower that this one replaces: it never had what `reclaim` does not name.
    `starting_position` applies only if this very message creates the group. `session_epoch` comes with a `session`
    name: of two processes under one name the one with the higher epoch stays. `borrower_number` counts the borrowers of
    its agent: what a later one has reclaimed no longer belongs to an earlier one, however late that one's message
    comes. `more`: the same follows again, with more to `reclaim`, and counts once the last has come. `lock_valid_s`:
    its agent holds a lock of its own in the database, and begins no user call later than that after it last saw that it
    does; 0: it has none.
    """

    borrower_id: str
    subscription: str
    group_id: int | None = None
    weight: float = 1.0
    session: str | None = None
    leaving: bool = False
    reclaim: tuple[HeldGrant, ...] = ()
    starting_position: str = "latest"
    predecessor: str | None = None
    session_epoch: int = 0
    borrower_number: int = 0
    more: bool = False
    lock_valid_s: float = 0.0


class Ping(Struct, frozen=True):
    """The command for all of an agent's borrowers on a node; `sent_at` comes back in the answer."""

    borrower_ids: tuple[str, ...]
    sent_at: float


class UpdateProgress(Struct, frozen=True):
    """Progress of many streams; the first one under a grant is also the receipt of the grant."""

    borrower_id: str
    term: int
    streams: tuple[StreamProgress, ...]


class RevokeFinished(Struct, frozen=True):
    """The report that the borrower has dropped the stream, or never held it under this grant."""

    borrower_id: str
    term: int
    stream_id: int
    grant_id: int


class Disconnect(Struct, frozen=True):
    """The report that the borrower leaves, with its streams' exact next offsets. Answered by `Invalidate(done)` once
    durable. `reason`: where its session did not request it. `more`: the same follows again, with more `streams`, and
    counts once the last has come.
    """

    borrower_id: str
    term: int
    streams: tuple[StreamProgress, ...]
    reason: str = ""
    more: bool = False


ToLeader = LeaderWanted | Ping | UpdateProgress | RevokeFinished | Disconnect


# --- to the borrower ------------------------------------------------------------------------------------------------


class LeaderConnectResponse(Struct, frozen=True):
    """The answer that this node leads the group under `term`; or, with an `address`, that node does (and term is 0)."""

    borrower_id: str
    term: int
    group_id: int
    address: str = ""


class PingResponse(Struct, frozen=True):
    """The leader's answer to a ping: the borrower was within its lease; `sent_at` is the ping's.

    `valid_for_s`: how long after the ping was sent no other borrower gets what this one holds, with or without a
    leader. `epochs`: the progress of an atomic group. When that moves on, the answer to the last ping is sent again.
    `without`: (stream, grant id) of what is taken from the borrower by force: the answer does not cover these.
    """

    borrower_id: str
    term: int
    sent_at: float
    valid_for_s: float
    epochs: tuple[GroupFrontier, ...] = ()
    without: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """The command to consume this stream from `position` under `grant_id`. `end_offset`: the stream is closed and ends
    there.

    With `consumed` the group is atomic: the stream is consumed in whole epochs, from there. `in_doubt`: what an earlier
    process of the same session planned and did not acknowledge. `grant_key`: what proves the grant to the functions of
    the database.
    """

    borrower_id: str
    term: int
    stream_id: int
    grant_id: int
    position: int
    generation_id: int
    hash_from: int
    hash_to: int
    filter: str
    end_offset: int | None = None
    consumed: ConsumedFrontier | None = None
    in_doubt: InDoubtRange | None = None
    grant_key: GrantSecret = field(kw_only=True)


class Revoke(Struct, frozen=True):
    """The command to stop consuming this stream and report its final progress."""

    borrower_id: str
    term: int
    stream_id: int
    grant_id: int


class Revoked(Struct, frozen=True):
    """The message that the grant is over and the leader expects no more reports: drop the stream."""

    borrower_id: str
    term: int
    stream_id: int
    grant_id: int
    reason: GrantEndOutcome


class ProgressSaved(Struct, frozen=True):
    """The receipt that this progress is durable, with what is in doubt."""

    borrower_id: str
    term: int
    stream_id: int
    grant_id: int
    position: int
    consumed: ConsumedFrontier | None = None
    in_doubt: InDoubtRange | None = None


class Invalidate(Struct, frozen=True):
    """The message that this borrower is over; `detail` is for people."""

    borrower_id: str
    term: int
    reason: BorrowerEndReason
    detail: str = ""


ToBorrower = LeaderConnectResponse | PingResponse | Grant | Revoke | Revoked | ProgressSaved | Invalidate
