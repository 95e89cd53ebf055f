"""Giving a live group an order, and telling the nodes of it: one way for the command line and for a node's page."""

from __future__ import annotations

from protocol.words import Subscription
from storage.groups.model import Group
from storage.groups.orders import Order
from storage.groups.postgres import PostgresGroups
from storage.groups.refusals import no_such_group
from storage.notify.model import group_change
from storage.notify.teller import tell_now


def instruct(url: str, wanted: Subscription, order: Order) -> tuple[Group, bool]:
    """Give a group an order, and tell nodes of it; the group, and whether that was new. Raises `NotFound`."""
    store = PostgresGroups(url)
    try:
        before, group = store.live_group(wanted), store.instruct(wanted, order)
    finally:
        store.close()
    if group is None or before is None:
        raise no_such_group(wanted)
    changed = group.revision != before.revision
    if changed:
        tell_now(url, [group_change(str(wanted), group.group_id, revision=group.revision)])
    return group, changed
