"""What changes a group, and telling the nodes of it: one way for the command line and for a node's HTTP port.

History says which user of the database gave the order: over HTTP that is the node's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator.postgres import PostgresGroups
from sublet_storage.groups.model.desired_state import Order
from sublet_storage.groups.model.group_errors import no_such_group
from sublet_storage.groups.model.records import Group, GroupOptions
from sublet_storage.notify.changes import group_change
from sublet_storage.notify.publisher import tell_now


def declare(url: str, wanted: Subscription, options: GroupOptions) -> tuple[Group, bool]:
    """Create a group; it, and whether it is new. Raises `Conflict` where it is there with other options."""
    with _store(url) as store:
        existed = store.live_group(wanted) is not None
        group = store.declare_group(wanted, options)
    tell_now(url, [group_change(str(wanted), group.group_id)])
    return group, not existed


def delete(url: str, wanted: Subscription) -> int:
    """Delete a group with its progress; its id. Raises `NotFound`."""
    with _store(url) as store:
        deleted = store.delete_group(wanted, store.user())
    if deleted is None:
        raise no_such_group(wanted)
    tell_now(url, [group_change(str(wanted), deleted, deleted=True)])
    return deleted


def instruct(url: str, wanted: Subscription, order: Order) -> tuple[Group, bool]:
    """Give a live group an order; the group, and whether that was new. Raises `NotFound`."""
    with _store(url) as store:
        before, group = store.live_group(wanted), store.instruct(wanted, order, store.user())
    if group is None or before is None:
        raise no_such_group(wanted)
    changed = group.revision != before.revision
    if changed:
        tell_now(url, [group_change(str(wanted), group.group_id, revision=group.revision)])
    return group, changed


@contextmanager
def _store(url: str) -> Iterator[PostgresGroups]:
    store = PostgresGroups(url)
    try:
        yield store
    finally:
        store.close()
