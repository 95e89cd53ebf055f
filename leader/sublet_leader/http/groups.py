"""`/api/v1/groups` and `/api/v1/group`: groups from the database, on any node."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from sublet_leader.http import query_fields
from sublet_leader.http.auth import get_caller
from sublet_leader.http.responses import json_response
from sublet_leader.observe.http_database_pool import HttpDatabasePool
from sublet_leader.observe.lag_history import LagHistory
from sublet_leader.observe.node_view import NodeView
from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate.gate import Caller
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.coordinator.history_queries import read_behind
from sublet_storage.groups.status.group_pages import GroupListPage, GroupSort, list_group_page
from sublet_storage.groups.status.json_views import details_to_json, history_to_json, summary_to_json
from sublet_storage.groups.status.overview import describe_group

MAX_GROUPS, MAX_RECORDS = 500, 1000


class GroupsApi:
    """The functions behind the paths."""

    def __init__(self, node_view: NodeView, pool: HttpDatabasePool, lag_history: LagHistory) -> None:
        self._node_view, self._pool, self._lag_history = node_view, pool, lag_history

    def list_groups(self, request: Request) -> Response:
        """Return a page of groups with their lag history."""
        limit, offset = (
            query_fields.read_integer(request, "limit", 50, MAX_GROUPS),
            query_fields.read_integer(request, "offset", 0, 10**9),
        )
        sort = GroupSort(query_fields.read_choice(request, "sort", GroupSort.NAME, tuple(GroupSort)))
        descending = query_fields.read_choice(request, "order", "asc", ("asc", "desc")) == "desc"
        caller, search = get_caller(request), query_fields.read_text(request, "search", "")[:200]
        page = GroupListPage((), 0)
        if caller.may_somewhere(Right.WATCH):
            is_visible = _make_visibility_filter(caller)
            with self._pool.connection(caller.principal) as connection:
                page = list_group_page(connection, search, sort, descending, limit, offset, is_visible)
        times, lags = self._lag_history.read(overview.group.group_id for overview in page.groups)
        return json_response(
            {
                "total": page.total,
                "offset": offset,
                "limit": limit,
                "groups": [summary_to_json(overview) for overview in page.groups],
                "sampled_at": times,
                "lag_history": lags,
            }
        )

    def describe_group(self, request: Request) -> Response:
        """Return one group with its streams, and with its standby members if it is led here. Raise `NotFound`."""
        subscription = _read_watched(request)
        with self._pool.connection(get_caller(request).principal) as connection:
            overview = describe_group(connection, subscription)
        group_id = overview.group.group_id
        times, lags = self._lag_history.read((group_id,))
        leader = self._node_view.leaders().get(group_id)
        connected = None if leader is None else [member.to_public_dict for member in leader.members]
        fields = {"sampled_at": times, "lag_history": lags[group_id], "led_here": leader is not None}
        return json_response({**details_to_json(overview, connected), **fields})

    def list_history(self, request: Request) -> Response:
        """Return the history of a group after the record `after`, the `next` of an earlier answer, oldest first. Raise
        `NotFound`."""
        subscription = _read_watched(request)
        after, limit = (
            query_fields.read_text(request, "after", ""),
            query_fields.read_integer(request, "limit", 100, MAX_RECORDS),
        )
        with self._pool.connection(get_caller(request).principal) as connection:
            group = group_lifecycle.get_live(connection, subscription)
            page = read_behind(connection, group.group_id, after or None, limit)
        records = [{"number": number, **history_to_json(record)} for number, record in page.lines]
        return json_response(
            {"subscription": str(subscription), "group_id": group.group_id, "history": records, "next": page.next}
        )


def _read_watched(request: Request) -> Subscription:
    """Return the requested group. Raise `UsageError`; `PermissionDenied`, whether or not it exists."""
    subscription = Subscription.parse(query_fields.read_text(request, "subscription"))
    get_caller(request).check(Right.WATCH, subscription.filter, subscription.group)
    return subscription


def _make_visibility_filter(caller: Caller) -> Callable[[str, TopicFilter], bool] | None:
    """Return a filter of the groups that the caller may watch; None: all."""
    if caller.may(Right.WATCH):
        return None
    return lambda name, filter: caller.may(Right.WATCH, filter, name)
