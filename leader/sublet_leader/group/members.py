"""The borrowers of one group, and the `revoked` assignments that they have not confirmed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec import Struct, field

from sublet_leader.group.stream_table import StreamAssignment


class Member(Struct):
    """A connected borrower. `is_leaving`: accepts no new streams. `is_disconnecting`: has sent final progress, its rows
    are being written. `session_epoch`: orders the processes of its session name; 0: the name is only for display.
    `borrower_number`: counts the borrowers of its agent. `last_ping_sent_at`: by its own clock, when it sent its last
    ping. `validity_extended_at`: when this leader or one before last let it begin calls for longer. `taken`: (stream,
    grant id) of what was taken from it by force and it has not confirmed: these are excepted. `leave_reason`: why it
    leaves, where its session did not request it. `lock_valid_s`: for how long its agent begins calls after it last saw
    its own lock held; 0: it has none."""

    borrower_id: str
    agent: str
    weight: float
    session: str | None
    last_message_at: float
    is_leaving: bool = False
    is_disconnecting: bool = False
    session_epoch: int = 0
    borrower_number: int = 0
    last_ping_sent_at: float | None = None
    validity_extended_at: float = float("-inf")
    leave_reason: str = ""
    lock_valid_s: float = 0.0
    streams: set[int] = field(default_factory=set)
    taken: set[tuple[int, int]] = field(default_factory=set)

    @property
    def to_public_dict(self) -> dict[str, str | None]:
        """Return the member as watchers see it."""
        return {"borrower_id": self.borrower_id, "agent": self.agent, "session": self.session}

    @property
    def is_eligible(self) -> bool:
        """Return whether it accepts streams."""
        return not (self.is_leaving or self.is_disconnecting)


class Members:
    """The borrowers by id. Borrowers that left cleanly, were replaced or were evicted are remembered for a while: they
    are not admitted again, and repeated disconnects of the first are answered `done`."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._departed: dict[str, float] = {}
        self._replaced: dict[str, float] = {}
        self._by_session: dict[str, str] = {}
        self._weights: dict[str, float] = {}
        self.unconfirmed: dict[tuple[int, int], StreamAssignment] = {}
        """Assignments in status `revoked`, by (stream, grant id)."""
        self.unannounced: dict[str, None] = {}
        """Borrowers that have not received the group's present frontiers, those that have waited longest first."""

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, borrower_id: str) -> Member | None:
        """Return the borrower if it is connected."""
        return self._members.get(borrower_id)

    def find_by_session(self, session: str) -> Member | None:
        """Return the newest borrower with this session name, if it is connected."""
        return self._members.get(self._by_session.get(session, ""))

    def older_than(self, session: str, epoch: int) -> list[Member]:
        """Return the borrowers of older processes of that name: those with an epoch below this one."""
        return [m for m in self._members.values() if m.session == session and 0 < m.session_epoch < epoch]

    def add(self, member: Member) -> None:
        """Add a borrower that has connected."""
        self._members[member.borrower_id] = member
        if member.session is not None and member.session_epoch:
            self._by_session[member.session] = member.borrower_id

    def remove(self, borrower_id: str) -> None:
        """Remove the borrower and its unconfirmed assignments."""
        member = self._members.pop(borrower_id, None)
        self.unannounced.pop(borrower_id, None)
        if member is not None and member.session is not None and self._by_session.get(member.session) == borrower_id:
            del self._by_session[member.session]
        for key in [k for k, f in self.unconfirmed.items() if f.borrower_id == borrower_id]:
            del self.unconfirmed[key]

    def mark_unannounced(self) -> None:
        """Record that the frontiers have moved: all that have sent a ping are to receive them."""
        for member in self._members.values():
            if member.last_ping_sent_at is not None:
                self.unannounced.setdefault(member.borrower_id)

    def list_unannounced(self, limit: int) -> list[Member]:
        """Return so many of those that have not received them, at most."""
        return [self._members[borrower_id] for borrower_id in islice(self.unannounced, limit)]

    def mark_left(self, borrower_id: str, now: float) -> None:
        """Remove the borrower, and remember that it left cleanly."""
        self.remove(borrower_id)
        self._departed[borrower_id] = now

    def mark_replaced(self, borrower_id: str, now: float) -> None:
        """Remove the borrower, and remember that it was replaced or evicted."""
        self.remove(borrower_id)
        self._replaced[borrower_id] = now

    def has_left(self, borrower_id: str) -> bool:
        """Return whether the borrower left cleanly a short while ago."""
        return borrower_id in self._departed

    def is_former(self, borrower_id: str) -> bool:
        """Return whether the borrower left, was replaced or evicted a short while ago."""
        return borrower_id in self._departed or borrower_id in self._replaced

    def expire_former(self, cutoff: float) -> None:
        """Remove former borrowers that went before that time."""
        self._departed = {b: at for b, at in self._departed.items() if at >= cutoff}
        self._replaced = {b: at for b, at in self._replaced.items() if at >= cutoff}

    def weights(self) -> dict[str, float]:
        """Return {borrower: weight} of the members that take part in the allocation."""
        return {
            m.borrower_id: self._weights.get(m.session or "", m.weight) for m in self._members.values() if m.is_eligible
        }

    def set_weights(self, weights: Iterable[tuple[str, float]]) -> None:
        """Set the weights of these session names; all others have the weight that they request."""
        self._weights = dict(weights)
