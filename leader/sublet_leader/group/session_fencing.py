"""Session fencing: of two processes with one session name the newer wins.

It gets what the older one held. The session's epoch decides which of them is the newer. A leader remembers the newest
epoch that it has admitted, also when that process has left. Its successor reads epochs from the members and from the
rows, and continues to reject older processes where there are any.
"""

from __future__ import annotations

from collections.abc import Callable

from sublet_leader.group.assignment_manager import AssignmentManager
from sublet_leader.group.members import Members
from sublet_leader.group.stream_table import StreamTable
from sublet_leader.settings import LeaderSettings
from sublet_protocol.messages.borrower_leader import LeaderWanted
from sublet_storage.groups.model.records import Group, LendingStatus

MAX_REMEMBERED = 10_000
"""Maximum number of names whose newest epoch is remembered; beyond it, the one admitted the longest time ago is
dropped."""


class SessionFencing:
    """Checks each borrower before it is admitted. `end(agent, borrower, term, name)` ends one that is fenced."""

    def __init__(
        self,
        group: Group,
        streams: StreamTable,
        members: Members,
        assignments: AssignmentManager,
        settings: LeaderSettings,
        end: Callable[[str, str, int, str], None],
    ) -> None:
        self._streams, self._members, self._assignments, self._end = streams, members, assignments, end
        self._admitted_epochs: dict[str, int] = {}
        # Long enough for the newer process to be granted what is taken from the older.
        self._reserve_s = max(group.options.session_expiry_s, settings.eviction_timeout_s)

    def admit(self, agent: str, request: LeaderWanted, term: int, now: float) -> bool:
        """Return whether the borrower may join; if a newer process has its session name, end it. Evicts older processes
        of the name."""
        if request.session is None or not request.session_epoch:
            return True
        newest = self._find_newest_epoch(request.session)
        if request.session_epoch < newest:
            self._end(agent, request.borrower_id, 0, request.session)
            return False
        if request.session_epoch > newest:
            self._fence(request.session, request.session_epoch, term, now)
        self._remember(request.session, request.session_epoch)
        return True

    def _remember(self, session: str, epoch: int) -> None:
        self._admitted_epochs.pop(session, None)
        self._admitted_epochs[session] = epoch
        if len(self._admitted_epochs) > MAX_REMEMBERED:
            del self._admitted_epochs[next(iter(self._admitted_epochs))]

    def _find_newest_epoch(self, session: str) -> int:
        """Return the highest known epoch of the name; 0 if there is none."""
        member = self._members.find_by_session(session)
        epochs = [entry.lending.session_epoch or 0 for entry in self._streams.streams_of_session(session)]
        return max([self._admitted_epochs.get(session, 0), member.session_epoch if member else 0, *epochs])

    def _fence(self, session: str, epoch: int, term: int, now: float) -> None:
        reason = "fenced by a newer process of its session"
        for entry in self._streams.streams_of_session(session):
            row = entry.lending
            if row.status is LendingStatus.HELD and 0 < (row.session_epoch or 0) < epoch:
                self._assignments.force_release(entry, reason, now, self._reserve_s)
        for older in self._members.older_than(session, epoch):
            self._assignments.evict(older, reason, now, self._reserve_s)
            self._end(older.agent, older.borrower_id, term, session)
