"""`/api/v1/groups` and `/api/v1/group`: groups as the database has them, on any node, led by it or not."""

from __future__ import annotations

from sublet_leader.http.responses import Request, Response, as_json
from sublet_leader.observe.connection_pool import Reading
from sublet_leader.observe.lag_history import Curves
from sublet_leader.observe.node_view import Facts
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator import lifecycle
from sublet_storage.groups.model.history import read_behind
from sublet_storage.groups.status.group_pages import Sort, page_of_groups
from sublet_storage.groups.status.json_views import details, history_line, summary
from sublet_storage.groups.status.overview import describe

MOST_GROUPS, MOST_LINES = 500, 1000


class GroupsApi:
    """The functions behind the paths."""

    def __init__(self, facts: Facts, reading: Reading, curves: Curves) -> None:
        self._facts, self._reading, self._curves = facts, reading, curves

    def groups(self, request: Request) -> Response:
        """A page of groups, with how far behind each was."""
        limit, offset = request.whole("limit", 50, MOST_GROUPS), request.whole("offset", 0, 10**9)
        sort = Sort(request.choice("sort", Sort.NAME, tuple(Sort)))
        descending = request.choice("order", "asc", ("asc", "desc")) == "desc"
        with self._reading.connection() as connection:
            page = page_of_groups(connection, request.text("search", "")[:200], sort, descending, limit, offset)
        times, curves = self._curves.of(overview.group.group_id for overview in page.groups)
        return as_json(
            {
                "total": page.total,
                "offset": offset,
                "limit": limit,
                "groups": [summary(overview) for overview in page.groups],
                "sampled_at": times,
                "curves": curves,
            }
        )

    def group(self, request: Request) -> Response:
        """One group with its streams, and with its standby members if it is led here. Raises `NotFound`."""
        wanted = Subscription.parse(request.text("subscription"))
        with self._reading.connection() as connection:
            overview = describe(connection, wanted)
        group_id = overview.group.group_id
        times, curves = self._curves.of((group_id,))
        leader = self._facts.leaders().get(group_id)
        connected = None if leader is None else [member.told for member in leader.members]
        told = {"sampled_at": times, "curve": curves[group_id], "led_here": leader is not None}
        return as_json({**details(overview, connected), **told})

    def history(self, request: Request) -> Response:
        """What happened to a group since the answer whose `next` is `after`, oldest first. Raises `NotFound`."""
        wanted = Subscription.parse(request.text("subscription"))
        after, limit = request.text("after", ""), request.whole("limit", 100, MOST_LINES)
        with self._reading.connection() as connection:
            group = lifecycle.live(connection, wanted)
            found = read_behind(connection, group.group_id, after or None, limit)
        told = [{"number": number, **history_line(line)} for number, line in found.lines]
        return as_json({"subscription": str(wanted), "group_id": group.group_id, "history": told, "next": found.next})
