"""`GroupStore`, the interface of the group tables, implemented by `postgres_store` and, for tests, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.model.desired_state import GroupCommand
from sublet_storage.groups.model.options import DEFAULTS
from sublet_storage.groups.model.records import (
    Group,
    GroupOptions,
    GroupWriteResult,
    GroupWrites,
    HistoryRecord,
    LeaderLivenessLock,
    Leadership,
    Lending,
    StartingPosition,
)
from sublet_storage.node_directory import NodeIncarnation


class GroupStore(Protocol):
    """The interface of the group tables; every method is one transaction. Times are the database's, leases in seconds.

    Raises `sublet_protocol.domain.errors.DatabaseUnreachable` when it is certain that nothing was written, and
    `sublet_protocol.domain.errors.UnknownOutcome` when the connection died during the commit.
    """

    def open_group(
        self,
        subscription: Subscription,
        start: StartingPosition = StartingPosition.LATEST,
        principal: str | None = None,
    ) -> Group:
        """Return the live group of that subscription; created now if there is none, with a lending row for every stream
        it may match, each position resolved in the same statement. `$queue` groups are never created here: raises
        `UndeclaredQueue`. Raise `TooManyGroups` if `principal` has created too many within a minute."""

    def declare_group(
        self, subscription: Subscription, options: GroupOptions = DEFAULTS, principal: str | None = None
    ) -> Group:
        """Create a group of either kind; a repeated call is a no-op, and raises `Conflict` with other options. For one
        `principal` as `open_group`."""

    def find_group(self, group_id: int) -> Group | None:
        """Return the group of that id, None once it is deleted or if it never was."""

    def find_live_group(self, subscription: Subscription) -> Group | None:
        """Return the group of that subscription, None where there is none; looking creates nothing."""

    def delete_group(self, subscription: Subscription, user: str = "", group_id: int | None = None) -> int | None:
        """Mark the live group deleted, drop its rows and end its leader's lease; return its id, or None if there is
        none.

        Each grant that ends by it is an event `delete` of the group's history, in the same transaction, with
        `user`, who gave the command. Raise `Conflict` if another transaction holds one of its rows locked, and if it
        is another than `group_id`, the id that it must have.
        """

    def apply_command(self, subscription: Subscription, command: GroupCommand, user: str = "") -> Group | None:
        """Change the live group's desired state; return the group as it then is, None where there is none.

        Its leader gets it with its next stream sync. Unless it is in force already, it is an event `command` of the
        history, with `user`, who gave the command.
        """

    def read_leaderships(self, leadership_ids: Sequence[int]) -> dict[int, Leadership]:
        """Return the leaderships, read without a lock; ids never claimed are absent."""

    def claim(
        self,
        leadership_id: int,
        node: NodeIncarnation,
        lease_s: float,
        lock_key: int | None = None,
        rival: LeaderLivenessLock | None = None,
    ) -> Leadership:
        """Insert the row, or take it over if the lease has run out, with term = greatest(term + 1, now in
        microseconds).

        It is also taken over if the leader is the `rival`, has declared its lock, and that is free at this moment: then
        `previous_leader_s` of the row lasts to the end of its lease. `lock_key`: what this node declares.

        Returns the row as it then is: ours if `claim.node.incarnation` is ours, else the winner's. A claim of a row
        that this very incarnation holds unexpired changes nothing and returns it. The first claim of a group, and one
        that takes it from another incarnation, are an event `takeover` of its history, in the same transaction.
        """

    def renew(
        self, node: NodeIncarnation, terms: Mapping[int, int], lease_s: float, lock_key: int | None = None
    ) -> frozenset[int]:
        """Extend the leases of {leadership_id: term} that are this incarnation's, at that term and unexpired, and
        declare its lock, or with None that it has none. Return their ids."""

    def release(self, node: NodeIncarnation, terms: Mapping[int, int]) -> frozenset[int]:
        """Expire (never delete) those rows that are still this incarnation's at that term; return their ids."""

    def load(self, group_id: int, term: int) -> tuple[Lending, ...]:
        """Return all unfinished rows of the group, after claiming it. Raise `StaleTerm` if the term is over."""

    def commit(self, batch: Sequence[GroupWrites]) -> tuple[GroupWriteResult, ...]:
        """Write many groups in one transaction of array statements; return the results in the order of the batch.

        All changes are judged by the rows as they were before the batch: a child whose parent this very batch finishes
        is granted in the next. Stream syncs come after the changes. A group whose part the server refuses (a lock not
        to be had in time) is answered BUSY throughout, without a stream sync; the others are written without it. Raise
        `ValueError` where a group occurs twice, or a stream twice in a group.
        """

    def read_last_session_epoch(self, subscription: Subscription, session: str) -> int:
        """Return the highest epoch that a process of a session of that name in that group may have: none above it was
        drawn. 0: none was."""

    def bind_session(self, subscription: Subscription, session: str, principal: str) -> None:
        """Bind a session's name in that group to the principal, if it is unbound. A name for which no epoch was drawn
        stays unbound. Raise `PermissionDenied` if it is another principal's, or the principal has too many."""

    def history(self, group_id: int) -> tuple[HistoryRecord, ...]:
        """Return what happened to the group's lendings, oldest first."""
