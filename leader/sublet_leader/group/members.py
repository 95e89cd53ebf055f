"""The borrowers of one group, and the `revoked` assignments that they have not confirmed yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sublet_leader.group.stream_table import StreamAssignment


@dataclass(slots=True)
class Member:
    """A connected borrower. `is_leaving`: accepts nothing new. `is_disconnecting`: has sent final progress, its rows
    are being written. `session_epoch`: which of the processes under its session's name it is; 0: the name is only for
    people. `borrower_number`: counts the borrowers of its agent. `last_ping_sent_at`: by its own clock, when it sent
    its last ping. `promised_at`: when it was last promised, by this leader or one before, that its streams stay its
    own. `taken`: (stream, grant id) of what was taken from it by force and it has not confirmed: these it is not
    promised. `leave_reason`: why it leaves, where that was not requested by its session."""

    borrower_id: str
    agent: str
    weight: float
    session: str | None
    last_heard_at: float
    is_leaving: bool = False
    is_disconnecting: bool = False
    session_epoch: int = 0
    borrower_number: int = 0
    last_ping_sent_at: float | None = None
    promised_at: float = float("-inf")
    leave_reason: str = ""
    streams: set[int] = field(default_factory=set)
    taken: set[tuple[int, int]] = field(default_factory=set)

    @property
    def to_public_dict(self) -> dict[str, str | None]:
        """Return what watchers see of it."""
        return {"borrower_id": self.borrower_id, "agent": self.agent, "session": self.session}

    @property
    def is_eligible(self) -> bool:
        """Whether it accepts streams."""
        return not (self.is_leaving or self.is_disconnecting)


class Members:
    """Borrowers by id, with those that a short while ago left cleanly, whose repeated goodbyes are answered `done`, or
    were replaced by a successor or evicted: none of them comes back."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._departed: dict[str, float] = {}
        self._replaced: dict[str, float] = {}
        self._named: dict[str, str] = {}
        self._weights: dict[str, float] = {}
        self.unconfirmed: dict[tuple[int, int], StreamAssignment] = {}
        """Assignments in status `revoked`, by (stream, grant id)."""

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, borrower_id: str) -> Member | None:
        """Return the borrower if it is connected."""
        return self._members.get(borrower_id)

    def find_by_session(self, session: str) -> Member | None:
        """Return the newest borrower of the process that bears this stable name, if it is connected."""
        return self._members.get(self._named.get(session, ""))

    def older_than(self, session: str, before: int) -> list[Member]:
        """Return the borrowers of older processes of that name: those with an epoch below this one."""
        return [m for m in self._members.values() if m.session == session and 0 < m.session_epoch < before]

    def add(self, member: Member) -> None:
        """A borrower has connected."""
        self._members[member.borrower_id] = member
        if member.session is not None and member.session_epoch:
            self._named[member.session] = member.borrower_id

    def remove(self, borrower_id: str) -> None:
        """Forget the borrower, and that its end was to be answered."""
        member = self._members.pop(borrower_id, None)
        if member is not None and member.session is not None and self._named.get(member.session) == borrower_id:
            del self._named[member.session]
        for key in [k for k, f in self.unconfirmed.items() if f.borrower_id == borrower_id]:
            del self.unconfirmed[key]

    def mark_left(self, borrower_id: str, now: float) -> None:
        """Forget it, but remember that it left in peace."""
        self.remove(borrower_id)
        self._departed[borrower_id] = now

    def mark_replaced(self, borrower_id: str, now: float) -> None:
        """Forget it, but remember that it is to have a successor."""
        self.remove(borrower_id)
        self._replaced[borrower_id] = now

    def has_left(self, borrower_id: str) -> bool:
        """True for one that left in peace lately."""
        return borrower_id in self._departed

    def is_former(self, borrower_id: str) -> bool:
        """True for one that left, was replaced or evicted lately."""
        return borrower_id in self._departed or borrower_id in self._replaced

    def expire_former(self, before: float) -> None:
        """Drop the memory of those that went earlier than that."""
        self._departed = {b: at for b, at in self._departed.items() if at >= before}
        self._replaced = {b: at for b, at in self._replaced.items() if at >= before}

    def weights(self) -> dict[str, float]:
        """Return who takes part in the allocation, and with how much."""
        return {
            m.borrower_id: self._weights.get(m.session or "", m.weight) for m in self._members.values() if m.is_eligible
        }

    def set_weights(self, weights: Iterable[tuple[str, float]]) -> None:
        """Give sessions of these names these weights, and all others those that they request."""
        self._weights = dict(weights)
