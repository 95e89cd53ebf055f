"""The notifications that wait for a turn of the loop, and what of them is passed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sublet_leader.node import notification_hub
from sublet_leader.node.notification_hub import ChangedGroups, PendingNotifications
from sublet_protocol.messages.field_checks import MAX_INT64
from sublet_storage.notify.changes import EPOCHS, GROUP, SPACE, STREAM, ObjectChange


@pytest.mark.conforms("X4")
def test_streams_without_subscribers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait already, and those with subscribers, are added beyond that."""
    monkeypatch.setattr(notification_hub, "MAX_HEADS", 2)
    pending = PendingNotifications()
    keys = ("1", "2", "3", "2", "4", "x")
    added = [pending.add_head(ObjectChange(STREAM, key, version), {4}) for version, key in enumerate(keys)]
    assert not pending.add_head(ObjectChange(STREAM, "1", 9, is_deleted=True), {4})
    assert added == [True, False, False, False, False, False], "the loop is woken by the first"
    taken = [pending.take_head() for _ in range(4)]
    assert taken == [((1, 0), True), ((2, 3), True), ((4, 4), False), (None, False)]


@pytest.mark.parametrize(
    ("group_id", "revision", "is_passed_on"),
    [
        (0, 1, True),
        (MAX_INT64, 1, True),
        (-1, 1, False),
        (MAX_INT64 + 1, 1, False),
        (7, 0, False),
        ("7", 1, False),
        (7, "1", False),
    ],
)
def test_a_group_is_to_look_at_its_desired_state(group_id: Any, revision: object, is_passed_on: bool) -> None:
    pending = PendingNotifications()
    change = ObjectChange(GROUP, "$share/g/#", 1, data={"group_id": group_id, "revision": revision})
    assert pending.add_group_change(change) is is_passed_on
    assert pending.take_group_changes() == ChangedGroups(frozenset({group_id} if is_passed_on else ()))


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("count", "then", "taken"),
    [
        (2, None, ChangedGroups(frozenset({0, 1}))),
        (3, None, ChangedGroups(is_of_spaces=True)),
        (1, EPOCHS, ChangedGroups(frozenset({0}), is_of_epochs=True)),
        (1, SPACE, ChangedGroups(is_of_spaces=True)),
    ],
)
def test_what_groups_look_at_is_merged(
    count: int, then: str | None, taken: ChangedGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notification_hub, "MAX_GROUPS", 2)
    pending = PendingNotifications()
    data: list[Mapping[str, object]] = [{"group_id": number, "revision": 1} for number in range(count)]
    changes = [ObjectChange(GROUP, str(n), 1, data=each) for n, each in enumerate(data)]
    woken = [pending.add_group_change(change) for change in changes]
    if then is not None:
        woken.append(pending.add_group_change(ObjectChange(then, "k", 1, data={"group_id": 1, "revision": 1})))
    assert woken == [True, *[False] * (len(woken) - 1)]
    assert [pending.take_group_changes(), pending.take_group_changes()] == [taken, ChangedGroups()]
