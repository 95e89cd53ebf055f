"""Changes groups and notifies nodes, for the command line and a node's HTTP port.

The history has the database user of each command: over HTTP that is the node's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator.postgres_store import STATEMENT_TIMEOUT_S, PostgresGroupStore
from sublet_storage.groups.model.desired_state import GroupCommand
from sublet_storage.groups.model.group_errors import group_not_found_error
from sublet_storage.groups.model.records import Group, GroupOptions
from sublet_storage.notify.changes import group_change
from sublet_storage.notify.publisher import publish_once


def create_group(
    url: str,
    subscription: Subscription,
    options: GroupOptions,
    principal: str | None = None,
    statement_timeout_s: float = STATEMENT_TIMEOUT_S,
) -> tuple[Group, bool]:
    """Create a group; return it, and whether it is new. Raise `Conflict` if it exists with other options, and
    `TooManyGroups` if `principal` has created too many within a minute. `statement_timeout_s`: its rows, one for each
    stream, are made by one statement."""
    with _open_store(url, statement_timeout_s) as store:
        existed = store.find_live_group(subscription) is not None
        group = store.declare_group(subscription, options, principal)
    publish_once(url, [group_change(str(subscription), group.group_id)])
    return group, not existed


def delete_group(
    url: str,
    subscription: Subscription,
    statement_timeout_s: float = STATEMENT_TIMEOUT_S,
    group_id: int | None = None,
) -> int:
    """Delete a group with its progress; return its id. Raise `NotFound`, and `Conflict` if it is another than
    `group_id`. `statement_timeout_s`: its rows are deleted by one statement, too."""
    with _open_store(url, statement_timeout_s) as store:
        deleted = store.delete_group(subscription, store.user(), group_id)
    if deleted is None:
        raise group_not_found_error(subscription)
    publish_once(url, [group_change(str(subscription), deleted, deleted=True)])
    return deleted


def send_command(url: str, subscription: Subscription, command: GroupCommand) -> tuple[Group, bool]:
    """Change the desired state of a live group; return the group, and whether the change was new. Raise `NotFound`."""
    with _open_store(url) as store:
        former_group, group = (
            store.find_live_group(subscription),
            store.apply_command(subscription, command, store.user()),
        )
    if group is None or former_group is None:
        raise group_not_found_error(subscription)
    is_changed = group.revision != former_group.revision
    if is_changed:
        publish_once(url, [group_change(str(subscription), group.group_id, revision=group.revision)])
    return group, is_changed


@contextmanager
def _open_store(url: str, statement_timeout_s: float = STATEMENT_TIMEOUT_S) -> Iterator[PostgresGroupStore]:
    store = PostgresGroupStore(url, statement_timeout_s=statement_timeout_s)
    try:
        yield store
    finally:
        store.close()
