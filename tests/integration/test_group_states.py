"""How a group is, in a word or two: the list, the description and the page say the same of it."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.model.desired_state import PauseGroup
from sublet_storage.groups.model.records import RecordHistory, ReleaseStream
from sublet_storage.groups.status import json_views
from sublet_storage.groups.status.group_pages import list_group_page
from sublet_storage.groups.status.overview import describe_group, list_groups
from tests.integration.lending_kit import NODE, SUBSCRIPTION, a_world, open_streams
from tests.integration.log_kit import Connection

OTHER = Subscription.parse("$share/other/#")


@pytest.mark.conforms("A2")
def test_how_long_a_stream_has_been_unreadable(database: str, conn: Connection) -> None:
    """Since it was found so after it could be read last, not since its grant."""
    stream, other = open_streams(conn)[:2]
    with a_world(database, conn) as led:
        led.lead()
        grant, of_other = led.lend(stream).grant_id, led.lend(other).grant_id
        conn.execute("update lending_history set at = at - interval '1 hour'")
        led.write(RecordHistory(other, of_other, "unreadable", "damaged"))
        for event in ("unreadable", "readable", "unreadable", "unreadable"):
            conn.execute("update lending_history set at = at - interval '1 hour'")
            led.write(RecordHistory(stream, grant, event, "damaged"))
        lines = {each.stream_id: each.unreadable_s or 0.0 for each in describe_group(conn, SUBSCRIPTION).streams}
        assert [round(lines[each] / 3600) for each in (stream, other)] == [1, 4]


def test_a_free_stream_is_reserved_for_a_time(database: str, conn: Connection) -> None:
    """One in doubt has a time of its own, which `groups why` names."""
    with a_world(database, conn) as led:
        led.lead()
        is_timed: dict[str, bool] = {}
        for status in ("free", "reserved"):
            conn.execute("update lending set status = %s, held_until = now() + interval '1 h'", (status,))
            streams = describe_group(conn, SUBSCRIPTION).streams
            is_timed |= {each.status: each.reserved_s is not None for each in streams if each.status != "new"}
        assert is_timed == {"free": True, "reserved": False}


@pytest.mark.conforms("A2")
def test_the_states_of_a_group(database: str, conn: Connection) -> None:
    first, second = open_streams(conn)[:2]

    def state() -> str:
        overviews = (*list_groups(conn), *list_group_page(conn).groups)
        reported = [json_views.summary_to_json(each) for each in overviews if each.group.name == SUBSCRIPTION.group]
        reported.append(json_views.summary_to_json(describe_group(conn, SUBSCRIPTION)))
        assert reported == [reported[0] | {"leader": each["leader"]} for each in reported]
        return f"{reported[0]['state']}, {reported[0]['unreadable_streams']} unreadable"

    with a_world(database, conn) as led:
        led.store.open_group(OTHER)
        assert state() == "no_consumers, 0 unreadable", "nobody has ever come"
        led.lead()
        assert state() == "no_members, 0 unreadable"
        grants = {each: led.lend(each).grant_id for each in (first, second)}
        assert state() == "consuming, 0 unreadable"
        for each in (first, second):
            led.write(RecordHistory(each, grants[each], "unreadable", "damaged"))
        assert state() == "unreadable, 2 unreadable"
        led.write(RecordHistory(first, grants[first], "readable", "it can be read again"))
        assert state() == "unreadable, 1 unreadable"
        assert json_views.group_state(describe_group(conn, OTHER)) == "no_consumers"
        assert describe_group(conn, OTHER).counts.unreadable_count == 0
        assert [each.counts.unreadable_count for each in list_groups(conn)] == [1, 0]
        led.store.release(NODE, {led.group: led.term})
        assert state() == "no_leader, 1 unreadable", "its consumers wait for one"
        led.lead()
        for each in (first, second):
            led.write(ReleaseStream(each, grants[each], 0, "left"))
        led.store.release(NODE, {led.group: led.term})
        assert state() == "no_consumers, 0 unreadable", "all have left"
        led.store.apply_command(SUBSCRIPTION, PauseGroup("why"))
        assert state() == "paused, 0 unreadable"
