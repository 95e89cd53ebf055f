"""This node and all nodes as JSON, and draining one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from sublet_leader.http import body_fields
from sublet_leader.http.body_fields import JsonBody
from sublet_leader.http.probes_and_metrics import check_to_json
from sublet_leader.http.responses import json_response
from sublet_leader.observe.http_database_pool import HttpDatabasePool
from sublet_leader.observe.node_view import NodeView
from sublet_storage import node_directory
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin.node_desired_state import set_draining


class NodesApi:
    """The functions behind the paths. `actions`: whether callers with the token may act here."""

    def __init__(self, facts: NodeView, reading: HttpDatabasePool, actions: bool) -> None:
        self._facts, self._reading, self._actions = facts, reading, actions

    def describe_node(self, request: Request) -> Response:
        """Return this node's own state."""
        facts, health = self._facts, self._facts.health()
        return json_response(
            {
                "name": facts.ref.name,
                "address": facts.ref.address,
                "incarnation": facts.ref.incarnation,
                "version": facts.version,
                "actions": self._actions,
                "state": health.worst_check.state,
                "detail": health.worst_check.detail,
                "ready": health.is_ready,
                "checks": [check_to_json(check) for check in health.checks],
                "leaderships": facts.leadership_counts(),
                "agents": facts.agent_count(),
                "held_polls": facts.sessions.held_polls,
                "groups_without_leader": facts.health_signals.leaderless_group_count,
            }
        )

    def list_nodes(self, request: Request) -> Response:
        """Return the registered nodes, and the groups that each leads."""
        with self._reading.connection() as connection:
            entries, led = node_directory.list_nodes(connection), node_directory.count_led_groups(connection)
        return json_response({"nodes": [node_directory.node_to_json(entry, led) for entry in entries]})


class NodeActionsApi:
    """The actions on nodes."""

    def __init__(self, url: str) -> None:
        self._url = url

    def drain(self, body: JsonBody) -> Response:
        """Drain a node as `sublet nodes drain` does, without waiting: {"node", "draining", "force"}."""
        body_fields.reject_unknown_fields(body, "node", "draining", "force")
        name, draining, force = (
            body_fields.read_text(body, "node"),
            body_fields.read_bool(body, "draining", True),
            body_fields.read_bool(body, "force"),
        )
        with connect(self._url, application_name="sublet http") as connection:
            node = node_directory.find_live(connection, name)
            if draining and not force:
                node_directory.check_successor(connection, name)
            changed = set_draining(connection, node.node, draining) and node.is_draining is not draining
        return json_response({"node": name, "draining": draining, "changed": changed})
