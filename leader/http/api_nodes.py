"""`/api/v1/node`, which needs no database, and `/api/v1/nodes`: this node, and all of them."""

from __future__ import annotations

from dataclasses import asdict

from leader.http.facts import Facts
from leader.http.reading import Reading
from leader.http.request import Request
from leader.http.response import Response, as_json
from storage import nodes


class NodesApi:
    """The functions behind the paths. `actions`: whether who has the token may act here."""

    def __init__(self, facts: Facts, reading: Reading, actions: bool) -> None:
        self._facts, self._reading, self._actions = facts, reading, actions

    def node(self, request: Request) -> Response:
        """What this node knows of itself."""
        facts, health = self._facts, self._facts.health()
        return as_json(
            {
                "name": facts.ref.name,
                "address": facts.ref.address,
                "incarnation": facts.ref.incarnation,
                "version": facts.version,
                "actions": self._actions,
                "state": health.worst.state,
                "why": health.worst.why,
                "ready": health.ready,
                "checks": [asdict(check) for check in health.checks],
                "leaderships": facts.standings(),
                "agents": facts.agents(),
                "held_polls": facts.sessions.held_polls,
                "groups_without_leader": facts.vitals.unled,
            }
        )

    def nodes(self, request: Request) -> Response:
        """The directory, with what each leads."""
        with self._reading.connection() as connection:
            entries, led = nodes.list_nodes(connection), nodes.led_groups(connection)
        return as_json({"nodes": [nodes.as_json(entry, led) for entry in entries]})
