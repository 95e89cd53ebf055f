"""Actions on groups over HTTP: create, delete, pause, resume, weight, reset, step down.

The functions take the body; `RequestGuard` has checked the caller's right.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from msgspec.structs import asdict
from starlette.responses import Response

from sublet_leader.allocation.strategy_registry import load_strategy
from sublet_leader.http import body_fields
from sublet_leader.http.body_fields import JsonBody
from sublet_leader.http.responses import json_response
from sublet_protocol.domain.errors import Conflict, UsageError
from sublet_protocol.domain.subscriptions import StartingPosition
from sublet_protocol.gate.gate import AccessGate
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin import admin, reset_transaction
from sublet_storage.groups.admin import live_reset as live_reset
from sublet_storage.groups.admin.node_desired_state import LedGroupRef, request_step_down
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.model.desired_state import GroupCommand, OverrideSessionWeight, PauseGroup, ResumeGroup
from sublet_storage.groups.model.options import GroupOptions, OnDataLoss, OnPoison
from sublet_storage.groups.status.json_views import options_to_json
from sublet_storage.groups.status.overview import describe_group
from sublet_storage.node_directory import check_successor

_E = TypeVar("_E", bound=StrEnum)

MAX_WAIT_S = 5.0
"""For members to hand over before a reset: a request must have its answer in time."""


_OPTIONS = (
    "starting_position",
    "on_data_loss",
    "strategy",
    "session_expiry_s",
    "atomic",
    "on_poison",
    "holds_retention",
)


class GroupActionsApi:
    """The functions behind the paths below `/api/v1/group/`. Their errors become HTTP statuses."""

    def __init__(self, url: str, gate: AccessGate) -> None:
        self._url, self._gate = url, gate

    def create(self, body: JsonBody) -> Response:
        """Create a group as `sublet groups create` does: {"subscription"} and options, named as in the answer."""
        body_fields.reject_unknown_fields(body, "subscription", *_OPTIONS)
        subscription, strategy = body_fields.read_subscription(body), body_fields.read_text(body, "strategy", "even")
        load_strategy(strategy)
        start, expiry_s = (
            StartingPosition.parse(body_fields.read_text(body, "starting_position", "latest")),
            body_fields.read_number(body, "session_expiry_s", 0),
        )
        on_data_loss, on_poison = (
            _parse_choice(body, "on_data_loss", OnDataLoss.FAIL),
            _parse_choice(body, "on_poison", OnPoison.BLOCK),
        )
        holds = body_fields.read_bool(body, "holds_retention")
        options = GroupOptions(
            start, on_data_loss, strategy, expiry_s, body_fields.read_bool(body, "atomic"), on_poison, holds
        )
        group, is_new = admin.create_group(self._url, subscription, options, self._gate.get_caller().principal)
        fields = {"subscription": str(subscription), "group_id": group.group_id, "created": is_new}
        return json_response({**fields, **options_to_json(group.options)})

    def delete(self, body: JsonBody) -> Response:
        """Delete a group as `sublet groups delete` does: {"subscription"}."""
        body_fields.reject_unknown_fields(body, "subscription")
        subscription = body_fields.read_subscription(body)
        deleted = admin.delete_group(self._url, subscription)
        return json_response({"subscription": str(subscription), "group_id": deleted, "deleted": True})

    def pause(self, body: JsonBody) -> Response:
        """Pause a group as `sublet groups pause` does: {"subscription", "reason"}."""
        body_fields.reject_unknown_fields(body, "subscription", "reason")
        return self._send_command(body, PauseGroup(body_fields.read_text(body, "reason", "")))

    def resume(self, body: JsonBody) -> Response:
        """Resume a group as `sublet groups resume` does: {"subscription"}."""
        body_fields.reject_unknown_fields(body, "subscription")
        return self._send_command(body, ResumeGroup())

    def weight(self, body: JsonBody) -> Response:
        """Set a weight as `sublet groups weight` does: {"subscription", "session", "weight"}; null: the session's
        own."""
        body_fields.reject_unknown_fields(body, "subscription", "session", "weight")
        if "weight" not in body:
            raise UsageError("the body must have 'weight', a number, or null for the session's own.")
        weight = None if body["weight"] is None else body_fields.read_number(body, "weight")
        return self._send_command(body, OverrideSessionWeight(body_fields.read_text(body, "session"), weight))

    def reset(self, body: JsonBody) -> Response:
        """Reset a group as `sublet groups reset` does: {"subscription", "to", "streams", "dry_run", "force"}."""
        body_fields.reject_unknown_fields(body, "subscription", "to", "streams", "dry_run", "force")
        subscription, target, streams = (
            body_fields.read_subscription(body),
            body_fields.read_reset_target(body),
            body_fields.read_stream_ids(body),
        )
        force, dry_run = body_fields.read_bool(body, "force"), body_fields.read_bool(body, "dry_run")
        with connect(self._url, application_name="sublet http") as connection:
            group = group_lifecycle.get_live(connection, subscription)
            moves = reset_transaction.plan_reset(connection, group, target, streams)
            if not dry_run:
                moves = live_reset.reset_live_group(
                    self._url, connection, group, target, streams, force=force, drain_timeout_s=MAX_WAIT_S
                )
        fields = {
            "subscription": str(subscription),
            "group_id": group.group_id,
            "target": str(target),
            "done": not dry_run,
        }
        return json_response({**fields, "streams": [asdict(move) for move in moves]})

    def step_down(self, body: JsonBody) -> Response:
        """Move the group's leader to another node: {"subscription", "force"}."""
        body_fields.reject_unknown_fields(body, "subscription", "force")
        subscription = body_fields.read_subscription(body)
        with connect(self._url, application_name="sublet http") as connection:
            overview = describe_group(connection, subscription)
            leader = overview.leader
            if leader is None or not overview.has_leader:
                raise Conflict(f"nobody leads {subscription}: there is nobody to step down.")
            if not body_fields.read_bool(body, "force"):
                check_successor(connection, leader.node)
            request_step_down(connection, [LedGroupRef(overview.group.group_id, leader.term, str(subscription))])
        return json_response(
            {"subscription": str(subscription), "group_id": overview.group.group_id, "term": leader.term}
        )

    def _send_command(self, body: JsonBody, command: GroupCommand) -> Response:
        subscription = body_fields.read_subscription(body)
        group, changed = admin.send_command(self._url, subscription, command)
        fields = {"subscription": str(subscription), "group_id": group.group_id, "changed": changed}
        return json_response(
            {**fields, "paused": group.desired_state.pause_reason, "weights": dict(group.desired_state.weights)}
        )


def _parse_choice(body: JsonBody, name: str, default: _E) -> _E:
    text = body_fields.read_text(body, name, default)
    try:
        return type(default)(text)
    except ValueError:
        raise UsageError(f"{name!r} is {text!r:.40}: it is one of {', '.join(type(default))}.") from None
