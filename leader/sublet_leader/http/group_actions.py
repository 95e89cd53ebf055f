"""What may be done to groups over HTTP: created, deleted, paused, resumed, weighed, reset, led by another node.

The functions take the body; `Admin` lets nobody here who has no token.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TypeVar

from sublet_leader.allocation.strategies import find_strategy
from sublet_leader.http import body_fields as of
from sublet_leader.http.body_fields import Told
from sublet_leader.http.responses import Response, as_json
from sublet_protocol.domain.errors import Conflict, UsageError
from sublet_protocol.domain.subscriptions import Start
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin import admin, reset_plan
from sublet_storage.groups.admin import reset as live_reset
from sublet_storage.groups.admin.node_desired_state import LedGroup, step_down
from sublet_storage.groups.coordinator import lifecycle
from sublet_storage.groups.model.desired_state import Order, Pause, Resume, Weigh
from sublet_storage.groups.model.options import GroupOptions, OnPoison, WhenGone
from sublet_storage.groups.status.json_views import options_as_json
from sublet_storage.groups.status.overview import describe
from sublet_storage.nodes import live_nodes

_E = TypeVar("_E", bound=StrEnum)

LONGEST_WAIT_S = 5.0
"""For members to hand over before a reset: a request must have its answer in time."""


_OPTIONS = ("start", "when_gone", "strategy", "session_expiry_s", "atomic", "on_poison", "holds_retention")


class GroupActions:
    """The functions behind the paths below `/api/v1/group/`. What they raise becomes a status."""

    def __init__(self, url: str) -> None:
        self._url = url

    def create(self, told: Told) -> Response:
        """As `sublet groups create`: {"subscription"} and options, named as in the answer."""
        of.only(told, "subscription", *_OPTIONS)
        wanted, strategy = of.subscription(told), of.text(told, "strategy", "even")
        find_strategy(strategy)
        start, expiry_s = Start.parse(of.text(told, "start", "latest")), of.number(told, "session_expiry_s", 0)
        when_gone, on_poison = _one_of(told, "when_gone", WhenGone.FAIL), _one_of(told, "on_poison", OnPoison.BLOCK)
        holds = of.truth(told, "holds_retention")
        options = GroupOptions(start, when_gone, strategy, expiry_s, of.truth(told, "atomic"), on_poison, holds)
        group, is_new = admin.declare(self._url, wanted, options)
        named = {"subscription": str(wanted), "group_id": group.group_id, "created": is_new}
        return as_json({**named, **options_as_json(group.options)})

    def delete(self, told: Told) -> Response:
        """As `sublet groups delete`: {"subscription"}."""
        of.only(told, "subscription")
        wanted = of.subscription(told)
        deleted = admin.delete(self._url, wanted)
        return as_json({"subscription": str(wanted), "group_id": deleted, "deleted": True})

    def pause(self, told: Told) -> Response:
        """As `sublet groups pause`: {"subscription", "reason"}."""
        of.only(told, "subscription", "reason")
        return self._instruct(told, Pause(of.text(told, "reason", "")))

    def resume(self, told: Told) -> Response:
        """As `sublet groups resume`: {"subscription"}."""
        of.only(told, "subscription")
        return self._instruct(told, Resume())

    def weight(self, told: Told) -> Response:
        """As `sublet groups weight`: {"subscription", "session", "weight"}; null: its own."""
        of.only(told, "subscription", "session", "weight")
        if "weight" not in told:
            raise UsageError("the body must have 'weight', a number, or null for the session's own.")
        weight = None if told["weight"] is None else of.number(told, "weight")
        return self._instruct(told, Weigh(of.text(told, "session"), weight))

    def reset(self, told: Told) -> Response:
        """As `sublet groups reset`: {"subscription", "to", "streams", "dry_run", "force"}."""
        of.only(told, "subscription", "to", "streams", "dry_run", "force")
        wanted, target, streams = of.subscription(told), of.target(told), of.streams(told)
        force, dry_run = of.truth(told, "force"), of.truth(told, "dry_run")
        with connect(self._url, application_name="sublet http") as connection:
            group = lifecycle.live(connection, wanted)
            moves = reset_plan.plan(connection, group, target, streams)
            if not dry_run:
                moves = live_reset.reset(
                    self._url, connection, group, target, streams, force=force, patience_s=LONGEST_WAIT_S
                )
        named = {"subscription": str(wanted), "group_id": group.group_id, "target": str(target), "done": not dry_run}
        return as_json({**named, "streams": [asdict(move) for move in moves]})

    def step_down(self, told: Told) -> Response:
        """Its leader is to move to another node, if there is one: {"subscription"}."""
        of.only(told, "subscription")
        wanted = of.subscription(told)
        with connect(self._url, application_name="sublet http") as connection:
            overview = describe(connection, wanted)
            leader = overview.leader
            if leader is None or not overview.led:
                raise Conflict(f"nobody leads {wanted}: there is nobody to step down.")
            if len(live_nodes(connection)) < 2:
                raise Conflict(f"node {leader.node} is the only one that can lead {wanted}: start another one first.")
            step_down(connection, [LedGroup(overview.group.group_id, leader.term, str(wanted))])
        return as_json({"subscription": str(wanted), "group_id": overview.group.group_id, "term": leader.term})

    def _instruct(self, told: Told, order: Order) -> Response:
        wanted = of.subscription(told)
        group, changed = admin.instruct(self._url, wanted, order)
        named = {"subscription": str(wanted), "group_id": group.group_id, "changed": changed}
        return as_json({**named, "paused": group.orders.paused, "weights": dict(group.orders.weights)})


def _one_of(told: Told, name: str, default: _E) -> _E:
    found = of.text(told, name, default)
    try:
        return type(default)(found)
    except ValueError:
        raise UsageError(f"{name!r} is {found!r:.40}: it is one of {', '.join(type(default))}.") from None
