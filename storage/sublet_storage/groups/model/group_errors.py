"""Errors that both implementations of the group store raise."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING

from msgspec import Struct

from sublet_protocol.domain.errors import (
    Conflict,
    NotFound,
    PermissionDenied,
    SessionRowLocked,
    StaleTerm,
    TooManyGroups,
    UndeclaredQueue,
)
from sublet_protocol.domain.limits import MAX_GROUPS_PER_MINUTE, MAX_SESSION_NAMES_OF_PRINCIPAL
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription

if TYPE_CHECKING:
    from sublet_storage.groups.model.records import Group, GroupOptions, GroupWrites


def undeclared_queue_error(subscription: Subscription) -> UndeclaredQueue:
    """Return the error for a queue that was not declared."""
    return UndeclaredQueue(
        f"{subscription}: a queue keeps messages for consumers that are yet to come, so it is declared before it is"
        f" used. Run: sublet groups create {quote(str(subscription))}"
    )


def group_not_found_error(subscription: Subscription) -> NotFound:
    """Return the error for a group that does not exist, or not any more."""
    return NotFound(
        f"group {str(subscription)!r}: there is no such group. `sublet groups list` shows those there are; "
        "a $share group comes into being with its first consumer."
    )


def too_many_groups_error(principal: str) -> TooManyGroups:
    """Return the error for one group more than a principal may have made in a minute."""
    return TooManyGroups(
        f"{principal} has had {MAX_GROUPS_PER_MINUTE} groups made in a minute, which is the limit. Try again later."
    )


def anothers_session_error(subscription: Subscription, session: str) -> PermissionDenied:
    """Return the error for a session's name that is another principal's."""
    command = f"sublet access release-session {quote(str(subscription))} {quote(session)}"
    return PermissionDenied(
        f"session {session!r} of {subscription} is another principal's. Choose another name, or have this one "
        f"released: `{command}`."
    )


def session_name_locked_error(subscription: Subscription, session: str) -> SessionRowLocked:
    """Return the error for a session's name whose row another transaction has locked."""
    return SessionRowLocked(
        f"session {session!r} of {subscription}: an open transaction keeps the name locked, as one does that has "
        "drawn an epoch for it. Try again when it has ended: pg_stat_activity shows it."
    )


def too_many_session_names_error(session: str, principal: str) -> PermissionDenied:
    """Return the error for one name of a session more than a principal may have."""
    return PermissionDenied(
        f"session {session!r}: {principal} has {MAX_SESSION_NAMES_OF_PRINCIPAL} names of sessions, which is the limit. "
        "Use one of them again, as a session that comes back does, or have some released: `sublet access "
        "release-session`."
    )


def stream_not_found_error(subscription: Subscription, stream_id: int) -> NotFound:
    """Return the error for a stream that the group does not have."""
    return NotFound(
        f"stream {stream_id} is none of {subscription}, or retention has taken it. "
        f"`sublet groups describe {quote(str(subscription))}` lists its streams."
    )


class RowLockHolder(Struct, frozen=True):
    """An open transaction, as pg_stat_activity shows it: `since_us` only to users that may see it."""

    pid: int
    user: str | None
    application: str | None
    since_us: int | None

    def __str__(self) -> str:
        application = f", application {self.application!r}" if self.application else ""
        since = f", since {StartingPosition.at_time(self.since_us)}" if self.since_us is not None else ""
        return f"process {self.pid} of the server (database user {self.user}{application}{since})"


def row_locked_error(subscription: Subscription, subject: str, locker: RowLockHolder | None) -> Conflict:
    """Return the error for rows that are locked: those of `subject`."""
    by = f": {locker}" if locker else ", a user's with `advance` say"
    end = f", or end it: select pg_terminate_backend({locker.pid})" if locker else ": pg_stat_activity shows it"
    return Conflict(
        f"{subscription}: {subject} a row that an open transaction keeps locked{by}. Nothing is changed. Try again "
        f"when it has ended{end}."
    )


def check_same_group(group: Group, group_id: int | None) -> None:
    """Raise `Conflict` if another group was meant: the one of this id, if not None."""
    if group_id not in (None, group.group_id):
        raise Conflict(
            f"{group.subscription}: the group that was meant (id {group_id}) is gone, and another has its name by now "
            f"(id {group.group_id}). Nothing was changed. Look at this one first: `sublet groups describe "
            f"{quote(str(group.subscription))}`."
        )


def check_same_options(group: Group, options: GroupOptions) -> Group:
    """Return the group, if it was created with these options; raises `Conflict`, which names what differs, if with
    others."""
    stored_options, requested_options = _format_options(group.options), _format_options(options)
    if stored_options != requested_options:
        differing = "; ".join(
            f"its {name} is {stored_options[name]}, not {requested_options[name]}"
            for name in stored_options
            if stored_options[name] != requested_options[name]
        )
        raise Conflict(
            f"{group.subscription} exists as group {group.group_id} with other options: {differing}."
            " Use it as it is, or lose the progress made: "
            f"`sublet groups delete {quote(str(group.subscription))}`, and create it again."
        )
    return group


def _format_options(options: GroupOptions) -> dict[str, str]:
    """Return the options by the names that the command line gives them."""
    return {
        "starting position": str(options.starting_position),
        "policy when messages are gone": options.on_data_loss.value,
        "policy at a block that cannot be decoded": options.on_poison.value,
        "hold on retention": "on" if options.holds_retention else "off",
        "strategy": options.strategy,
        "session expiry": f"{float(options.session_expiry_s)} s",
        "delivery": "atomic, in whole epochs" if options.atomic else "message by message",
    }


def stale_term_error(group_id: int, term: int) -> StaleTerm:
    """Return the error for a read under a term that is over."""
    return StaleTerm(f"group {group_id}: term {term} is over. Step down; claim again to lead under a new term.")


def check_batch(batch: Sequence[GroupWrites]) -> None:
    """Raise `ValueError` where a group occurs twice in a batch, or a stream twice in a group: our own broken rule."""
    groups = [writes.group_id for writes in batch]
    if len(set(groups)) < len(groups):
        raise ValueError(f"a group occurs twice in one batch: {sorted(groups)}")
    for writes in batch:
        streams = [change.stream_id for change in writes.changes]
        if len(set(streams)) < len(streams):
            raise ValueError(f"group {writes.group_id}: two changes of one stream in one batch: {writes.changes}")
