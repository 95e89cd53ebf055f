"""This node and all nodes as JSON, and draining one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from sublet_leader.http import body_fields
from sublet_leader.http.auth import get_caller
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

    def __init__(self, node_view: NodeView, pool: HttpDatabasePool, actions: bool) -> None:
        self._node_view, self._pool, self._actions = node_view, pool, actions

    def describe_node(self, request: Request) -> Response:
        """Return this node's own state."""
        node_view, health = self._node_view, self._node_view.health()
        return json_response(
            {
                "name": node_view.ref.name,
                "address": node_view.ref.address,
                "incarnation": node_view.ref.incarnation,
                "version": node_view.version,
                "actions": self._actions,
                "state": health.worst_check.state,
                "detail": health.worst_check.detail,
                "ready": health.is_ready,
                "checks": [check_to_json(check) for check in health.checks],
                "leaderships": node_view.leadership_counts(),
                "agents": node_view.agent_count(),
                "held_polls": node_view.sessions.held_polls,
                "groups_without_leader": node_view.health_signals.leaderless_group_count,
            }
        )

    def list_nodes(self, request: Request) -> Response:
        """Return the registered nodes, and the groups that each leads."""
        with self._pool.connection(get_caller(request).principal) as connection:
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
            set_draining(connection, node.node, draining)
        return json_response({"node": name, "draining": draining, "changed": node.is_draining is not draining})
