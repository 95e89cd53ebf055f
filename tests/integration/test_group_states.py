"""How a group is, in a word or two: the list, the description and the page say the same of it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.model.desired_state import Pause
from sublet_storage.groups.model.records import Mark, Release
from sublet_storage.groups.status import json_views
from sublet_storage.groups.status.group_pages import page_of_groups
from sublet_storage.groups.status.overview import describe, list_groups
from tests.integration.lending_kit import NODE, SUBSCRIPTION, a_world, open_streams

OTHER = Subscription.parse("$share/other/#")


@pytest.mark.conforms("A2")
def test_a_group_lacks_a_leader_only_where_somebody_consumes_and_is_stuck_where_one_cannot_read_on(
    database: str, conn: psycopg.Connection[Any]
) -> None:
    first, second = open_streams(conn)[:2]

    def state() -> str:
        overviews = (*list_groups(conn), *page_of_groups(conn).groups)
        told = [json_views.summary(each) for each in overviews if each.group.name == SUBSCRIPTION.group]
        told.append(json_views.summary(describe(conn, SUBSCRIPTION)))
        assert told == [told[0] | {"leader": each["leader"]} for each in told]
        return f"{told[0]['state']}, {told[0]['stuck_streams']} stuck"

    with a_world(database, conn) as led:
        led.store.open_group(OTHER)
        assert state() == "no consumers, 0 stuck", "nobody has ever come"
        led.lead()
        assert state() == "no member, 0 stuck"
        grants = {each: led.lend(each).grant_id for each in (first, second)}
        assert state() == "consuming, 0 stuck"
        for each in (first, second):
            led.write(Mark(each, grants[each], "unreadable", "damaged"))
        assert state() == "stuck, 2 stuck"
        led.write(Mark(first, grants[first], "readable", "it can be read again"))
        assert state() == "stuck, 1 stuck"
        assert json_views.state(describe(conn, OTHER)) == "no consumers"
        assert describe(conn, OTHER).counts.stuck == 0
        assert [each.counts.stuck for each in list_groups(conn)] == [1, 0]
        led.store.release(NODE, {led.group: led.term})
        assert state() == "no leader, 1 stuck", "its consumers wait for one"
        led.lead()
        for each in (first, second):
            led.write(Release(each, grants[each], 0, "left"))
        led.store.release(NODE, {led.group: led.term})
        assert state() == "no consumers, 0 stuck", "all have left"
        led.store.instruct(SUBSCRIPTION, Pause("why"))
        assert state() == "paused, 0 stuck"
