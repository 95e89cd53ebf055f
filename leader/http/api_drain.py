"""`/api/v1/node/drain`: a node is to lead nothing any more, or may again."""

from __future__ import annotations

from leader.http import told as of
from leader.http.response import Response, as_json
from leader.http.told import Told
from protocol.errors import Conflict, NotFound
from storage.connect import connect
from storage.node_orders import set_draining
from storage.nodes import list_nodes, live_nodes


class NodeActions:
    """What may be done to nodes."""

    def __init__(self, url: str) -> None:
        self._url = url

    def drain(self, told: Told) -> Response:
        """As `sublet nodes drain`, without waiting: {"node", "draining", "force"}."""
        of.only(told, "node", "draining", "force")
        name, draining, force = of.text(told, "node"), of.truth(told, "draining", True), of.truth(told, "force")
        with connect(self._url, application_name="sublet http") as connection:
            found = next((e for e in list_nodes(connection) if e.node.name == name and e.remaining_s > 0), None)
            if found is None:
                raise NotFound(f"no node {name!r:.80} is there.")
            if draining and not force and all(each.name == name for each in live_nodes(connection)):
                raise Conflict(f"no other node is there to take over from {name}: start one first, or send force.")
            changed = set_draining(connection, found.node, draining) and found.draining is not draining
        return as_json({"node": name, "draining": draining, "changed": changed})
